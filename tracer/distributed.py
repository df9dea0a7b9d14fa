"""A process group in which one rank of any world runs alone: collectives have shapes and do nothing.

torch ships such a backend for tests (`fake`): every rank believes that the others take part. The phantom GPU needs no
more, because a collective's memory is that of its buffers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import _disable_current_modes

from metapeak.tracer.errors import InputError
from metapeak.tracer.phantom import DEVICE_NAME, address_of


@contextlib.contextmanager
def one_rank_of(world_size: int, rank: int) -> Iterator[None]:
    """Inside, this process is `rank` of `world_size`. Raises InputError in a process that has a process group."""
    if dist.is_initialized():
        raise InputError("metapeak cannot trace a distributed job inside a process that has a process group already.")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch puts the rank in front of every line
    # What DTensor remembers of an operator holds the local sizes of the rank that asked (views of uneven shards), and
    # meshes of one shape are equal whoever's rank it is.
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with _shapes_propagated_unseen(), _equal_elements_propagated_once(), _storages_with_addresses():
            yield
    finally:
        _meshes.clear()
        dist.destroy_process_group()
        sys.excepthook = hook


@contextlib.contextmanager
def _shapes_propagated_unseen() -> Iterator[None]:
    """DTensor finds the shapes of a result by running the operator on fake tensors, which nobody shall record."""
    original = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(self, schema):
        with _disable_current_modes():
            return original(self, schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = unseen
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = original


@contextlib.contextmanager
def _equal_elements_propagated_once() -> Iterator[None]:
    """DTensor takes a time that grows with the square of the list to place the results of `_foreach_add_` and the like.

    What it says of one element depends on that element alone: the same is asked for one of each kind. Where elements
    have to be redistributed, torch is asked for all of them.
    """
    original = ShardingPropagator.propagate_op_sharding_non_cached

    def once(self, schema):
        short = (
            _one_of_each_element(schema) if schema.op.name().startswith(("aten::_foreach_", "aten::_fused_")) else None
        )
        if short is None:
            return original(self, schema)
        shortened, kind_of = short
        sharding = original(self, shortened)
        specs = sharding.output_spec
        if sharding.needs_redistribute or not (specs is None or isinstance(specs, tuple)):
            return original(self, schema)
        return OutputSharding(None if specs is None else tuple(specs[kind] for kind in kind_of))

    ShardingPropagator.propagate_op_sharding_non_cached = once
    try:
        yield
    finally:
        ShardingPropagator.propagate_op_sharding_non_cached = original


def _one_of_each_element(schema: OpSchema) -> tuple[OpSchema, list[int]] | None:
    """(the schema with lists of one element of each kind, the kind of every element), None for one without repeats."""
    lists = [argument for argument in schema.args_schema if isinstance(argument, (list, tuple)) and argument]
    count = len(lists[0]) if lists else 0
    if any(len(elements) != count for elements in lists):
        return None
    kinds: dict[tuple, int] = {}
    first: list[int] = []
    kind_of = []
    for index in range(count):
        elements = (elements[index] for elements in lists)
        key = tuple(element if isinstance(element, DTensorSpec) else None for element in elements)
        if key not in kinds:
            kinds[key] = len(kinds)
            first.append(index)
        kind_of.append(kinds[key])
    if len(first) == count:
        return None

    def shortened(value):
        if isinstance(value, (list, tuple)) and len(value) == count:
            return type(value)(value[index] for index in first)
        return value

    arguments = tuple(shortened(argument) for argument in schema.args_schema)
    keywords = {name: shortened(value) for name, value in schema.kwargs_schema.items()}
    return OpSchema(schema.op, arguments, keywords, schema.schema_info), kind_of


@contextlib.contextmanager
def _storages_with_addresses() -> Iterator[None]:
    """FSDP1 asks a storage for its address to know whether it has memory and whether two tensors share it.

    On the phantom GPU all would say 0: resharding after a unit that backward never reached would be left out.
    """
    original = torch.UntypedStorage.data_ptr

    def data_ptr(storage):
        return address_of(storage) if storage.device.type == "meta" else original(storage)

    torch.UntypedStorage.data_ptr = data_ptr
    try:
        yield
    finally:
        torch.UntypedStorage.data_ptr = original


_meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}


def mesh_of(sizes: dict[str, int]) -> DeviceMesh:
    """The mesh of the phantom GPUs with these named axes, slowest first: the same one while a process group lasts."""
    key = tuple(sizes.items())
    if key not in _meshes:
        _meshes[key] = init_device_mesh(DEVICE_NAME, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return _meshes[key]
