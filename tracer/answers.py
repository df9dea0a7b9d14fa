"""Operator calls by the shapes of their arguments: keys that find earlier answers, and recipes that make them again.

A model repeats itself layer after layer, so most calls were answered before. A key holds what a meta kernel looks at:
shapes, strides, dtypes and plain values, no tensor.
"""

from __future__ import annotations

import torch

from metapeak.tracer.phantom import DEVICE_NAME, HostCopy, PhantomTensor

_META = torch.device("meta")


class Uncacheable(Exception):
    """An argument that cannot be part of a key."""


class Scan:
    """Counts of the tensors among an operator's arguments."""

    __slots__ = ("foreign", "host_copy", "known", "on_phantom", "phantom")

    def __init__(self):
        self.phantom = self.known = self.foreign = 0
        self.on_phantom = False
        self.host_copy = None


def scan_arguments(items, key, scan):
    append = key.append
    for item in items:
        kind = type(item)
        if kind is PhantomTensor:
            scan.phantom += 1
            if item.known is not None:
                scan.known += 1
            append(item.shape)
            append(item.stride())
            append(item.dtype)
        elif kind is int or kind is float or kind is bool:
            append(kind)
            append(item)
        elif item is None:
            append(None)
        elif kind is list or kind is tuple:
            append(len(item))
            scan_arguments(item, key, scan)
        elif isinstance(item, torch.Tensor):
            scan.foreign += 1
            if type(item) is HostCopy:
                scan.host_copy = item
            append(item.shape)
            append(item.dtype)
            append(item.device)
        elif kind is torch.device:
            if item.type == DEVICE_NAME:
                scan.on_phantom = True
            append(item)
        elif kind in _HASHABLE:
            append(item)
        else:
            raise Uncacheable


def scan_keywords(kwargs, key, scan):
    for name, item in kwargs.items():
        key.append(name)
        scan_arguments((item,), key, scan)


def scan_all(args, kwargs):
    scan = Scan()
    for item in torch.utils._pytree.tree_leaves((args, kwargs)):
        if isinstance(item, (torch.Tensor, torch.device)):
            scan_arguments((item,), [], scan)
    return scan


_HASHABLE = {str, torch.dtype, torch.layout, torch.memory_format, type(Ellipsis)}


# -- tensors among arguments and results -------------------------------------------------------------------------------


def map_tensors(value, function):
    """`value` with every tensor in its lists, tuples and dictionaries replaced."""
    if isinstance(value, torch.Tensor):
        return function(value)
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([map_tensors(item, function) for item in value])
    if kind is dict:
        return {name: map_tensors(item, function) for name, item in value.items()}
    if isinstance(value, tuple):  # a named tuple such as torch.return_types.topk
        return tuple(map_tensors(item, function) for item in value)
    return value


def contains(value, sentinel) -> bool:
    if value is sentinel:
        return True
    if isinstance(value, (list, tuple)):
        return any(contains(item, sentinel) for item in value)
    return isinstance(value, dict) and any(contains(item, sentinel) for item in value.values())


def in_positions(outputs):
    """The results in their places: a phantom tensor, or None for what is none; a single list is its items."""
    if len(outputs) == 1 and isinstance(outputs[0], (list, tuple)):
        outputs = outputs[0]
    return [output if type(output) is PhantomTensor else None for output in outputs]


def flatten_phantoms(value, into):
    if type(value) is PhantomTensor:
        into.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            flatten_phantoms(item, into)


def flatten_tensors(value, into):
    if isinstance(value, torch.Tensor):
        into.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            flatten_tensors(item, into)


def written_arguments(func, args, kwargs):
    """The arguments that the schema says are written."""
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            flatten_tensors(value, written)
    return written


# -- recipes: how to make an operator's outputs again for arguments of the same shapes --------------------------------
# A recipe is a tuple (shape, stride, dtype) of a new tensor, a _Same (that flat tensor argument), a list of recipes
# with the container type in front, or a constant to return (None, a number).


# Plain functions on purpose: a closure that calls itself is a reference cycle, which would keep the arguments alive.


class _Same:
    __slots__ = ("position",)

    def __init__(self, position: int):
        self.position = position


def recipe_for(outputs, args, kwargs):
    """The recipe, or None when an output aliases an argument without being it, or is no plain dense tensor."""
    inputs: list[torch.Tensor] = []
    flatten_tensors(args, inputs)
    flatten_tensors(tuple(kwargs.values()), inputs)
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    try:
        return (_recipe_of(outputs, inputs, storages),)
    except Uncacheable:
        return None


def _recipe_of(output, inputs, storages):
    if type(output) is PhantomTensor:
        for position, tensor in enumerate(inputs):
            if tensor is output:
                return _Same(position)
        storage = output.untyped_storage()
        if storage._cdata in storages or output.dtype.is_complex:
            raise Uncacheable
        storages.add(storage._cdata)
        shape, stride = output.shape, output.stride()
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride)) if output.numel() else 0
        if output.storage_offset() or storage.nbytes() != extent * output.itemsize:
            raise Uncacheable
        return (tuple(shape), stride, output.dtype)
    if isinstance(output, (list, tuple)):
        kind = list if isinstance(output, list) else tuple
        return [kind, *[_recipe_of(item, inputs, storages) for item in output]]
    if output is None or type(output) in (int, float, bool):
        return output
    raise Uncacheable


def follow(recipe, args, kwargs):
    with torch._C._DisableTorchDispatch():
        return _make(recipe[0], args, kwargs)


def _make(step, args, kwargs):
    kind = type(step)
    if kind is tuple:
        return PhantomTensor(torch.empty_strided(step[0], step[1], dtype=step[2], device=_META))
    if kind is list:
        return step[0]([_make(item, args, kwargs) for item in step[1:]])
    if kind is _Same:
        inputs: list[torch.Tensor] = []
        flatten_tensors(args, inputs)
        flatten_tensors(tuple(kwargs.values()), inputs)
        return inputs[step.position]
    return step
