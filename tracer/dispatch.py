"""The dispatch mode of the phantom GPU: answers every operator of the program that runs inside it.

It sits below autograd. Shapes of results come from torch's own meta kernels or from earlier answers (answers.py); what
is not a matter of shapes is answered by handlers (phantom_ops.py); an observer is told of everything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from metapeak.tracer.answers import (
    Scan,
    Uncacheable,
    contains,
    flatten_phantoms,
    flatten_tensors,
    follow,
    in_positions,
    map_tensors,
    recipe_for,
    scan_all,
    scan_arguments,
    scan_keywords,
    written_arguments,
)
from metapeak.tracer.errors import TraceError
from metapeak.tracer.host import HostMemory
from metapeak.tracer.phantom import (
    COMPOSITE_ON_CUDA,
    DEVICE,
    PhantomTensor,
    kernel_is_running,
    phantom_from_meta,
    run_meta_kernel,
    small_enough_to_know,
    wrap_meta,
)

_META = torch.device("meta")
_prim_device = torch.ops.prim.device.default


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
            return _META if kernel_is_running() else DEVICE
        kwargs = kwargs or {}
        if HostMemory.active is not None:
            outputs = HostMemory.active.answer(self, func, types, args, kwargs)
            if outputs is not NotImplemented:
                return outputs
        for kind in types:
            if kind not in _PLAIN_TYPES:
                return NotImplemented
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = _Operator(func)

        key, scan = [func], Scan()
        try:
            scan_arguments(args, key, scan)
            if kwargs:
                scan_keywords(kwargs, key, scan)
            cacheable = operator.cacheable
        except Uncacheable:
            cacheable = False
            scan = scan_all(args, kwargs)
        if scan.host_copy is not None and func not in _TAKES_HOST_COPIES:
            scan.host_copy.refuse()
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
                outputs = follow(recipe, args, kwargs)
            else:
                outputs = self._run(func, args, kwargs)
                recipe = recipe_for(outputs, args, kwargs)
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
        return map_tensors(results, wrap_meta)

    def _observe(self, func, args, kwargs, outputs):
        if type(outputs) is PhantomTensor:
            self.observer.record(func, args, kwargs, [outputs])
        elif isinstance(outputs, (list, tuple)):
            self.observer.record(func, args, kwargs, in_positions(outputs))
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
                for written in written_arguments(func, args, kwargs):
                    if type(written) is PhantomTensor:
                        self.forget(written)
            return
        if torch.Tag.nondeterministic_seeded in func.tags or func.overloadpacket in _UNDEFINED_VALUES:
            return
        flat: list[PhantomTensor] = []
        flatten_phantoms(outputs, flat)
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

        cpu_args, cpu_kwargs = map_tensors(args, to_cpu), map_tensors(kwargs, to_cpu)
        if contains(cpu_args, missing) or contains(cpu_kwargs, missing):
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
        flatten_tensors(results, flat_results)
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

        return map_tensors(args, adopt), map_tensors(kwargs, adopt)


class _Nobody:
    """An observer that looks away."""

    def record(self, func, args, kwargs, outputs) -> None:
        pass

    def location(self) -> tuple[int, str]:
        return 0, ""


def unrecorded() -> PhantomMode:
    """Operators on the phantom GPU outside a recording: what a program does before its first step."""
    return PhantomMode(_Nobody())


def _one_for_all(tensor: PhantomTensor) -> bool:
    """Whether one known element stands for many: written into, it would change them all."""
    known = tensor.known
    return known is not None and known.untyped_storage().nbytes() < tensor.untyped_storage().nbytes()


_PLAIN_TYPES = {torch.Tensor, PhantomTensor, torch.nn.Parameter, torch.nn.Buffer}
_aten = torch.ops.aten
_COMPOSITE = {getattr(_aten, name).default for name in COMPOSITE_ON_CUDA}
_TAKES_HOST_COPIES = {_aten._to_copy.default, _aten.detach.default}
_UNDEFINED_VALUES = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
_TAKES_CPU_TENSORS = {
    _aten.copy_, _aten._to_copy, _aten.index, _aten.index_put_, _aten.index_put, _aten._index_put_impl_,
    _aten._foreach_add_, _aten._foreach_lerp_, _aten._foreach_mul_, _aten._fused_adamw_, _aten._fused_adam_,
}  # fmt: skip
