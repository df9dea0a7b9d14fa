"""The phantom GPU: a device that runs a real PyTorch program and has no memory.

A `PhantomTensor` owns a storage on the meta device and says that it lives on the device `phantom:0`, which is torch's
PrivateUse1 backend under a name of ours. So the real dispatcher picks the kernels that an accelerator would get, the
real autograd engine builds and walks the real graph, and nothing is computed.

`PhantomMode` is the dispatch mode below autograd that answers every operator: it finds the shapes of the results with
torch's own meta kernels, keeps the answers (a model repeats itself layer after layer), and tells an observer what
happened. What is not a matter of shapes is answered in `phantom_ops.py`.

Note [Known values]
    Token ids, masks, positions and everything computed from them alone are small, and programs branch on them
    (`mask.all()`, `position_ids.max()`). A PhantomTensor therefore may carry the real values of such a tensor in
    `known`, a CPU tensor, as long as it stays below KNOWN_VALUES_LIMIT elements (KNOWN_INTEGERS_LIMIT where it holds
    no floating point numbers). Every operator whose tensor inputs
    are all known is computed for real as well. Known tensors of one storage share one CPU storage, so in-place
    operators and views stay right; an in-place write of unknown values makes the whole CPU storage unknown.

Only this module, phantom_ops.py and capture.py touch global PyTorch state.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from metapeak.tracer.errors import TraceError

DEVICE_NAME = "phantom"
KNOWN_VALUES_LIMIT = 1 << 23
# Integers and booleans decide sizes: one_hot of 8,192 tokens x 8 choices x 128 experts has 2**23 elements.
KNOWN_INTEGERS_LIMIT = 1 << 24
_META = torch.device("meta")
_prim_device = torch.ops.prim.device.default


class _DeviceModule:
    """`torch.phantom`: what generic code asks of an accelerator's module."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device: object) -> None:
        pass

    def synchronize(self, device: object = None) -> None:
        pass

    def is_bf16_supported(self) -> bool:
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass


class _DeviceGuard(torch._C._acc.DeviceGuard):
    """The device guard of a backend written in Python, see Note [Errors in backward]."""

    def type_(self):
        try:
            _raise_pending()
        except BaseException as error:
            _pending_errors.append(error)
        return torch._C._autograd.DeviceType.PrivateUse1


# Note [Errors in backward]
#     When Python raises inside backward (an operator that is refused, Ctrl-C), the engine unwinds with the error still
#     pending in the interpreter, and its stream guard asks the device guard for its type. A Python method cannot be
#     called successfully with an error pending, and the guard's destructor must not throw: the process would abort. So
#     `type_` first takes the pending error (any call through ctypes.pythonapi raises it) and keeps it. What backward
#     raises then is an empty SystemError; `take_pending_error` has the real one.
_raise_pending = ctypes.pythonapi.PyErr_Occurred
_raise_pending.restype = None
_raise_pending.argtypes = []
_pending_errors: list[BaseException] = []


def take_pending_error() -> BaseException | None:
    """The error that the last failed backward really died of, once; None when there is none."""
    error = _pending_errors[0] if _pending_errors else None
    _pending_errors.clear()
    return error


def _register_device() -> torch.device:
    if torch._C._get_privateuse1_backend_name() != DEVICE_NAME:
        _setup_privateuseone_for_python_backend(DEVICE_NAME, _DeviceModule(), device_guard=_DeviceGuard())
    return torch.device(DEVICE_NAME, 0)


DEVICE = _register_device()


# Operators that CUDA runs as one kernel although they have a composite definition: without a kernel of the backend's
# own, the dispatcher would decompose them above us and their temporaries would be counted. `PhantomMode` answers before
# these are reached. Source: native_functions.yaml, dispatch entries with CompositeImplicitAutograd beside CUDA; a test
# compares this list with the file that torch ships.
WHOLE_ON_CUDA = ("silu_backward", "mish_backward", "_fused_rms_norm")
# Operators that autograd sees whole and that CUDA makes of several others, each of which allocates: they are run as
# their composite kernel, so that the parts are recorded with their own lifetimes. Source: native_functions.yaml,
# CompositeExplicitAutograd; others of that kind allocate nothing but their result.
COMPOSITE_ON_CUDA = ("_safe_softmax", "binary_cross_entropy_with_logits")
_library = torch.library.Library("aten", "IMPL")


def _never_reached(*args, **kwargs):
    raise TraceError("a tensor of the phantom GPU was used outside the traced step")


for _name in WHOLE_ON_CUDA:
    _library.impl(_name, _never_reached, "PrivateUse1")


class _Kernel:
    """Whether a meta kernel is running: then phantom tensors say that they are on meta."""

    running = False


class PhantomTensor(torch.Tensor):
    """A tensor on the phantom GPU. `known` holds its real values when they are small and derived from known ones."""

    known: torch.Tensor | None = None
    # The row of the recorder's value columns that this tensor is; None until an operator touches it.
    produced: int | None = None
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, elem: torch.Tensor, requires_grad: bool = False, known: torch.Tensor | None = None):
        self = torch.Tensor._make_subclass(
            cls, elem, requires_grad, dispatch_device=True, device_for_backend_keys=DEVICE
        )
        if known is not None:
            self.known = known
        return self

    @property
    def device(self) -> torch.device:
        return _META if _Kernel.running else DEVICE

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is _prim_device:
            return _META if _Kernel.running else DEVICE
        raise TraceError("a tensor of the phantom GPU was used outside the traced step", op=str(func))

    def tolist(self) -> list:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False):
        return self.cpu().numpy(force=force)

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"PhantomTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def phantom_from_meta(tensor: torch.Tensor, known: torch.Tensor | None = None) -> PhantomTensor:
    """A phantom tensor on the same storage as `tensor` (a meta tensor), so tied tensors stay tied."""
    with torch._C._DisableTorchDispatch():
        return PhantomTensor(tensor.detach(), known=known)


def small_enough_to_know(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= (KNOWN_VALUES_LIMIT if tensor.dtype.is_floating_point else KNOWN_INTEGERS_LIMIT)


def phantom_from_cpu(tensor: torch.Tensor) -> PhantomTensor:
    """A phantom tensor with the shape, dtype and (if small enough) the values of a CPU tensor."""
    known = tensor.detach() if small_enough_to_know(tensor) else None
    return PhantomTensor(torch.empty_like(tensor, device=_META), known=known)


def run_meta_kernel(func, args, kwargs):
    """Results of `func` as plain meta tensors; views and in-place results alias the arguments' storages."""
    with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
        torch._C._set_meta_in_tls_dispatch_include(True)
        _Kernel.running = True
        try:
            return func(*args, **kwargs)
        finally:
            _Kernel.running = False


class _Operator:
    """What PhantomMode needs to know of an operator overload, looked up once."""

    __slots__ = ("cacheable", "composite", "handler", "is_view", "mutates", "updates_lists")

    def __init__(self, func):
        tags = func.tags
        self.handler: Callable | None = HANDLERS.get(func) or HANDLERS.get(func.overloadpacket)
        self.composite: bool = func in _COMPOSITE
        self.is_view: bool = func.is_view
        self.mutates: bool = func._schema.is_mutable
        # _foreach_add_ and the like write hundreds of tensors in place and return nothing: no shape can change.
        self.updates_lists: bool = (
            self.mutates
            and not func._schema.returns
            and func.overloadpacket.__name__.startswith(("_foreach_", "_fused_"))
        )
        changes_shape_in_place = torch.Tag.inplace_view in tags
        # `out=` tensors may be resized, which no recipe does again.
        resizes = changes_shape_in_place or func._overloadname.endswith("out")
        self.cacheable = not (self.is_view or resizes or torch.Tag.dynamic_output_shape in tags)


# Operators that shapes alone do not answer: filled by phantom_ops.py. A handler gets (mode, func, args, kwargs) and
# returns the results, or NotImplemented to let the meta kernel answer.
HANDLERS: dict[object, Callable] = {}


def handles(*funcs):
    """Register the decorated function as the answer to these overloads (or all overloads of a packet)."""

    def register(handler):
        for func in funcs:
            if func in HANDLERS:
                raise ValueError(f"{func} has two handlers")
            HANDLERS[func] = handler
        return handler

    return register


class _Uncacheable(Exception):
    """An argument that cannot be part of a key."""


class PhantomMode(TorchDispatchMode):
    """Answers every operator of the program that runs inside it.

    `observer.record(func, args, kwargs, outputs)` is called after each operator on phantom tensors, with `outputs` a
    list of its results in order: phantom tensors, None for others. `observer.location()` gives (op_index, module) for
    messages.
    """

    def __init__(self, observer):
        super().__init__()
        self.observer = observer
        self.assumptions: dict[str, int] = {}
        # (error, op, op_index, module) of the last kernel that raised, for a message if nobody handles the error.
        self.failed: tuple[Exception, str, int, str] | None = None
        self._operators: dict[object, _Operator] = {}
        self._answers: dict[object, list] = {}
        self._unknown_storages: dict[int, object] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled inside; the guard would cost more than the dispatch itself

    def __enter__(self):
        # torch.tensor(data, device=...) then builds on the CPU and moves, through this mode.
        self._lifted_before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *exception):
        torch._C._set_only_lift_cpu_tensors(self._lifted_before)
        return super().__exit__(*exception)

    @contextlib.contextmanager
    def _again(self):
        """Inside a handler the mode is off; here it is on for the parts of an operator."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def assume(self, sentence: str) -> None:
        """Count a use of an assumption that the report has to print."""
        self.assumptions[sentence] = self.assumptions.get(sentence, 0) + 1

    def refuse(self, error: type[TraceError], func, reason: str) -> None:
        op_index, module = self.observer.location()
        raise error(reason, op=str(func), module=module, op_index=op_index)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _prim_device:
            return _META if _Kernel.running else DEVICE
        for kind in types:
            if kind not in _PLAIN_TYPES:
                return NotImplemented
        kwargs = kwargs or {}
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = _Operator(func)

        key, scan = [func], _Scan()
        try:
            _scan(args, key, scan)
            if kwargs:
                _scan_kwargs(kwargs, key, scan)
            cacheable = operator.cacheable
        except _Uncacheable:
            cacheable = False
            scan = _full_scan(args, kwargs)
        if not scan.phantom and not scan.on_phantom:
            return func(*args, **kwargs)
        if scan.foreign:
            args, kwargs = self._adopt(func, args, kwargs)

        if operator.composite:
            with self._again():
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)

        if operator.handler is not None:
            outputs = operator.handler(self, func, args, kwargs)
            if outputs is not NotImplemented:
                self._observe(func, args, kwargs, outputs)
                return outputs

        if operator.updates_lists:
            outputs = None
        elif cacheable:
            key = tuple(key)
            recipe = self._answers.get(key)
            if recipe is not None:
                outputs = _follow(recipe, args, kwargs)
            else:
                outputs = self._run(func, args, kwargs)
                recipe = _recipe(outputs, args, kwargs)
                if recipe is not None:
                    self._answers[key] = recipe
        else:
            outputs = self._run(func, args, kwargs)

        if scan.known or (scan.on_phantom and not scan.phantom):
            self._know(func, operator, args, kwargs, outputs, scan)
        self._observe(func, args, kwargs, outputs)
        return outputs

    def _run(self, func, args, kwargs):
        """Results of the meta kernel as phantom tensors."""
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _META}
        try:
            results = run_meta_kernel(func, args, kwargs)
        except Exception as error:
            self.failed = (error, str(func), *self.observer.location())
            raise
        return _map_tensors(results, _wrap)

    def _observe(self, func, args, kwargs, outputs):
        if type(outputs) is PhantomTensor:
            self.observer.record(func, args, kwargs, [outputs])
        elif isinstance(outputs, (list, tuple)):
            self.observer.record(func, args, kwargs, _positions(outputs))
        else:
            self.observer.record(func, args, kwargs, [])

    # -- known values, see Note [Known values] --------------------------------------------------------------------

    def values(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real values of a tensor on the CPU, or None when they are not known."""
        if type(tensor) is not PhantomTensor:
            return tensor if tensor.device.type == "cpu" else None
        known = tensor.known
        if known is not None and self._unknown_storages and known.untyped_storage()._cdata in self._unknown_storages:
            return None
        return known

    def forget(self, tensor: PhantomTensor) -> None:
        """Values were written that are not known: forget them for every view of the storage."""
        if tensor.known is not None:
            storage = tensor.known.untyped_storage()
            self._unknown_storages[storage._cdata] = storage  # held, so that the address is not used again

    def _know(self, func, operator, args, kwargs, outputs, scan):
        all_known = scan.known == scan.phantom and not scan.foreign
        if scan.known and not all_known:
            if operator.mutates:
                for written in _written(func, args, kwargs):
                    if type(written) is PhantomTensor:
                        self.forget(written)
            return
        if torch.Tag.nondeterministic_seeded in func.tags or func.overloadpacket in _UNDEFINED_VALUES:
            return
        flat: list[PhantomTensor] = []
        _flatten_phantoms(outputs, flat)
        # A view of known values costs nothing, however many elements it repeats.
        if not (operator.is_view or all(small_enough_to_know(output) for output in flat)) or (
            operator.mutates and any(_one_for_all(output) for output in flat)
        ):
            if operator.mutates:
                for output in flat:
                    self.forget(output)
            return
        missing = object()

        def to_cpu(tensor):
            values = self.values(tensor)
            return missing if values is None else values

        cpu_args, cpu_kwargs = _map_tensors(args, to_cpu), _map_tensors(kwargs, to_cpu)
        if _contains(cpu_args, missing) or _contains(cpu_kwargs, missing):
            return
        if "device" in cpu_kwargs:
            cpu_kwargs["device"] = torch.device("cpu")
        try:
            results = func(*cpu_args, **cpu_kwargs)
        except (RuntimeError, NotImplementedError, IndexError):
            # No CPU kernel for this dtype, or values outside an index range: not known. A later read is refused.
            if operator.mutates:
                for output in flat:
                    self.forget(output)
            return
        flat_results: list[torch.Tensor] = []
        _flatten_tensors(results, flat_results)
        for output, values in zip(flat, flat_results):
            if output.known is None or output.known is not values:
                output.known = values

    def _adopt(self, func, args, kwargs):
        """Let plain meta tensors and CPU scalars that meet phantom tensors pass as CUDA would, refuse the rest."""

        def adopt(tensor):
            if type(tensor) is PhantomTensor:
                return tensor
            if tensor.device.type == "meta":
                return phantom_from_meta(tensor)
            if tensor.dim() == 0 or func.overloadpacket in _TAKES_CPU_TENSORS:
                return tensor
            self.refuse(
                TraceError,
                func,
                f"expected all tensors on the GPU, found one of shape {tuple(tensor.shape)} on {tensor.device}",
            )

        return _map_tensors(args, adopt), _map_tensors(kwargs, adopt)


_PLAIN_TYPES = {torch.Tensor, PhantomTensor, torch.nn.Parameter, torch.nn.Buffer}
_aten = torch.ops.aten
_COMPOSITE = {getattr(_aten, name).default for name in COMPOSITE_ON_CUDA}
_UNDEFINED_VALUES = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
_TAKES_CPU_TENSORS = {
    _aten.copy_, _aten._to_copy, _aten.index, _aten.index_put_, _aten.index_put, _aten._index_put_impl_,
    _aten._foreach_add_, _aten._foreach_lerp_, _aten._foreach_mul_, _aten._fused_adamw_, _aten._fused_adam_,
}  # fmt: skip


class _Scan:
    """Counts of the tensors among an operator's arguments."""

    __slots__ = ("foreign", "known", "on_phantom", "phantom")

    def __init__(self):
        self.phantom = self.known = self.foreign = 0
        self.on_phantom = False


def _scan(items, key, scan):
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
            _scan(item, key, scan)
        elif isinstance(item, torch.Tensor):
            scan.foreign += 1
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
            raise _Uncacheable


def _scan_kwargs(kwargs, key, scan):
    for name, item in kwargs.items():
        key.append(name)
        _scan((item,), key, scan)


def _full_scan(args, kwargs):
    scan = _Scan()
    for item in torch.utils._pytree.tree_leaves((args, kwargs)):
        if isinstance(item, (torch.Tensor, torch.device)):
            _scan((item,), [], scan)
    return scan


_HASHABLE = {str, torch.dtype, torch.layout, torch.memory_format, type(Ellipsis)}


def _map_tensors(value, function):
    """`value` with every tensor in its lists, tuples and dictionaries replaced."""
    if isinstance(value, torch.Tensor):
        return function(value)
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([_map_tensors(item, function) for item in value])
    if kind is dict:
        return {name: _map_tensors(item, function) for name, item in value.items()}
    if isinstance(value, tuple):  # a named tuple such as torch.return_types.topk
        return tuple(_map_tensors(item, function) for item in value)
    return value


def _wrap(tensor):
    return PhantomTensor(tensor) if type(tensor) is torch.Tensor and tensor.device.type == "meta" else tensor


def _one_for_all(tensor: PhantomTensor) -> bool:
    """Whether one known element stands for many: written into, it would change them all."""
    known = tensor.known
    return known is not None and known.untyped_storage().nbytes() < tensor.untyped_storage().nbytes()


def _contains(value, sentinel) -> bool:
    if value is sentinel:
        return True
    if isinstance(value, (list, tuple)):
        return any(_contains(item, sentinel) for item in value)
    return isinstance(value, dict) and any(_contains(item, sentinel) for item in value.values())


def _positions(outputs):
    """The results in their places: a phantom tensor, or None for what is none; a single list is its items."""
    if len(outputs) == 1 and isinstance(outputs[0], (list, tuple)):
        outputs = outputs[0]
    return [output if type(output) is PhantomTensor else None for output in outputs]


def _flatten_phantoms(value, into):
    if type(value) is PhantomTensor:
        into.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _flatten_phantoms(item, into)


def _flatten_tensors(value, into):
    if isinstance(value, torch.Tensor):
        into.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _flatten_tensors(item, into)


def _written(func, args, kwargs):
    """The arguments that the schema says are written."""
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            _flatten_tensors(value, written)
    return written


# -- recipes: how to make an operator's outputs again for arguments of the same shapes --------------------------------
# A recipe is a tuple (shape, stride, dtype) of a new tensor, a _Same (that flat tensor argument), a list of recipes
# with the container type in front, or a constant to return (None, a number).


# Plain functions on purpose: a closure that calls itself is a reference cycle, which would keep the arguments alive.


class _Same:
    __slots__ = ("position",)

    def __init__(self, position: int):
        self.position = position


def _recipe(outputs, args, kwargs):
    """The recipe, or None when an output aliases an argument without being it, or is no plain dense tensor."""
    inputs: list[torch.Tensor] = []
    _flatten_tensors(args, inputs)
    _flatten_tensors(tuple(kwargs.values()), inputs)
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    try:
        return (_recipe_of(outputs, inputs, storages),)
    except _Uncacheable:
        return None


def _recipe_of(output, inputs, storages):
    if type(output) is PhantomTensor:
        for position, tensor in enumerate(inputs):
            if tensor is output:
                return _Same(position)
        storage = output.untyped_storage()
        if storage._cdata in storages or output.dtype.is_complex:
            raise _Uncacheable
        storages.add(storage._cdata)
        shape, stride = output.shape, output.stride()
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride)) if output.numel() else 0
        if output.storage_offset() or storage.nbytes() != extent * output.itemsize:
            raise _Uncacheable
        return (tuple(shape), stride, output.dtype)
    if isinstance(output, (list, tuple)):
        kind = list if isinstance(output, list) else tuple
        return [kind, *[_recipe_of(item, inputs, storages) for item in output]]
    if output is None or type(output) in (int, float, bool):
        return output
    raise _Uncacheable


def _follow(recipe, args, kwargs):
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
        _flatten_tensors(args, inputs)
        _flatten_tensors(tuple(kwargs.values()), inputs)
        return inputs[step.position]
    return step
