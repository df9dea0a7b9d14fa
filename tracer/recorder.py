"""The recorder: writes down what happens on the phantom GPU, as a StepGraph.

It observes every operator (PhantomMode), every death of a storage (a weak reference on it, so a death is seen
when it happens, not inferred from the last use), which module is running (forward hooks), and which forward operation
a backward operation belongs to (autograd's sequence numbers).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from metapeak.tracer.autocast import autocast_as_on_cuda
from metapeak.tracer.blocks import block_names
from metapeak.tracer.collection import uncollected
from metapeak.tracer.core_attention import SUFFIX, around_core_attention
from metapeak.tracer.dispatch import PhantomMode
from metapeak.tracer.graph import LOAD, MARK, RESIZE, SavedTensors, StepGraph, Symbol, Value
from metapeak.tracer.liveness import Category, Phase
from metapeak.tracer.phantom import HostCopy, PhantomTensor, Stream, local_tensor, other_stream
from metapeak.tracer.randomness import same_random_numbers
from metapeak.tracer.saved_tensors import SaveLog
from metapeak.tracer.sharding_roles import roles_of_collectives

_ALIVE = -1
_current_autograd_node = torch._C._current_autograd_node
_next_sequence_number = torch._C._autograd._get_sequence_nr
_OURS = os.path.dirname(os.path.dirname(__file__))
_NOT_USER_CODE = (
    os.path.dirname(torch.__file__) + os.sep,
    *(os.path.join(_OURS, package) + os.sep for package in ("tracer", "strategies", "reports")),
    "<",
)


def _row_of(tensor: torch.Tensor | None) -> int | None:
    """The row of a tensor's storage, or None for a tensor that is not on the phantom GPU or was never seen."""
    return tensor.untyped_storage().__dict__.get("row") if type(tensor) is PhantomTensor else None


class _StorageRef(weakref.ref):
    """A weak reference that knows which row of the storage columns it watches."""

    __slots__ = ("row",)


class Recorder:
    """Builds a StepGraph from what PhantomMode tells it.

    Use: `load` every tensor that exists before the step, then `with recorder.recording():` run phases inside
    `with recorder.phase(...)`, `close()`, then `finish()`. `outermost` is the code that runs the step: source lines are
    looked for inside it.
    """

    def __init__(self, root: torch.nn.Module, *, decouple_saves: bool = False, outermost: CodeType | None = None):
        self.graph = StepGraph(saved=SavedTensors() if decouple_saves else None)
        self._saves = SaveLog(self) if decouple_saves else None
        self._tick = 0
        self._outermost = outermost
        self._open_calls: list[int] = []
        self._core_attentions: dict[int, int] = {}
        self.mode = PhantomMode(self)
        self._root = root
        self._op_index: dict[Any, int] = {}
        self._dtype_index: dict[torch.dtype, int] = {}
        self._source_index: dict[tuple[Any, int], int] = {}
        self._is_user_code: dict[Any, bool] = {}
        self._module_index: dict[int, int] = {}
        self._module_stack: list[int] = []
        self._refs: list[_StorageRef | None] = []
        self._died_callback = self._died
        self._phase, self._iteration = Phase.LOAD, 0
        self._forward_of: dict[int, int] = {}  # autograd sequence number -> forward operation
        self._last_sequence = 0
        self._interrupted = False
        self._symbols: dict[Any, Symbol] = {}
        self._marked: dict[int, Category] = {}
        self._strangers: list[int] = []
        self._streams: dict[Stream, int] = {}
        self._recompute_ends: list[tuple[int, int]] = []
        self._index_modules()

    def tick(self) -> int:
        """The number of the event that happens now."""
        self._tick += 1
        return self._tick

    def value_of(self, tensor: PhantomTensor) -> int:
        """The row of the tensor's value, made now for one that nobody registered."""
        value, row = tensor.produced, tensor.untyped_storage().__dict__.get("row")
        # The storage may have been changed under the tensor: `parameter.data = ...`, as module.to(dtype) does.
        if value is None or row is None or self.graph.value_storage[value] != row:
            return self._first_seen(tensor)
        return value

    # -- set-up ----------------------------------------------------------------------------------------------------

    def _index_modules(self) -> None:
        names, classes = self.graph.module_names, self.graph.module_classes
        for name, module in self._root.named_modules():
            self._module_index[id(module)] = len(names)
            names.append(name)
            classes.append(type(module).__name__)
        self.graph.block_names = block_names(self._root)

    def load(self, tensor: PhantomTensor, name: str, category: Category, module: torch.nn.Module | None = None) -> int:
        """Register a tensor that exists before the step: its row. Tied tensors and views of one storage count once."""
        node = self._append_node(LOAD, (), {}, self._module_index.get(id(module), 0), -1)
        self.graph.load_names[node] = name
        row = self._append_value(node, 0, tensor)
        self._marked.setdefault(row, category)
        return row

    # -- while recording -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Everything that runs inside is recorded. Backward runs on this thread, as the phantom GPU needs."""
        self._last_sequence = _next_sequence_number()
        pre = register_module_forward_pre_hook(self._enter_module)
        inputs = self._watch_inputs()
        post = register_module_forward_hook(self._leave_module, always_call=True)
        try:
            with (
                uncollected(),
                same_random_numbers(),
                self._interruptible(),
                self._attention_watched(),
                autocast_as_on_cuda(self._note_cast),
                self._resizes_watched(),
                self.mode,
                torch.autograd.set_multithreading_enabled(False),
            ):
                yield
        finally:
            for hook in (pre, post, *inputs):
                hook.remove()

    def _attention_watched(self):
        return around_core_attention(self._watch_attention) if self._saves is not None else contextlib.nullcontext()

    @contextlib.contextmanager
    def _resizes_watched(self) -> Iterator[None]:
        """FSDP2 frees and refills gathered parameters by resizing their storage, which no operator shows."""
        original = torch.UntypedStorage.resize_

        def resize(storage, size):
            before = storage.nbytes()
            result = original(storage, size)
            self._resized(storage, before)
            return result

        torch.UntypedStorage.resize_ = resize
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original

    def _resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """What a storage held dies and what it holds now is born: rows of their own on one storage."""
        row = storage.__dict__.get("row")
        if row is None or storage.nbytes() == before:
            return
        graph = self.graph
        if before:
            self._died(self._refs[row])
        if storage.nbytes():
            node = self._append_node(RESIZE, (), {}, *self._where())
            value = len(graph.value_node)
            new = self._append_storage(node, value, storage)
            first = graph.storage_value[row]
            graph.value_node.append(node)
            graph.value_output.append(0)
            graph.value_storage.append(new)
            for column in (graph.value_dtype, graph.value_shape, graph.value_stride, graph.value_offset):
                column.append(column[first])
            if row in self._marked:
                self._marked[new] = self._marked[row]
            graph.owner[new] = graph.owner[row]

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let Ctrl-C end the recording at the next operation.

        Raised wherever the interpreter happens to be, it would be lost in the callback of a dying storage.
        """
        default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if not default or threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number, frame):
            self._interrupted = True

        signal.signal(signal.SIGINT, note)
        try:
            yield
            if self._interrupted:
                raise KeyboardInterrupt
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @contextlib.contextmanager
    def phase(self, phase: Phase, iteration: int) -> Iterator[None]:
        self._phase, self._iteration = phase, iteration
        self._module_stack.clear()
        if self._saves is not None and phase is Phase.FORWARD:
            with self._saves.hooks():
                yield
        else:
            yield

    def mark(self, tensor: torch.Tensor | None, category: Category, parameter: torch.Tensor | None) -> int | None:
        """Say what the storage of a tensor is for, from its birth on, and which parameter it serves (None: no one).

        Returns its row, None for a tensor that was never seen.
        """
        row = _row_of(local_tensor(tensor))
        if row is not None:
            self._marked.setdefault(row, category)
            served = _row_of(local_tensor(parameter))
            if served is not None:
                self.graph.owner[row] = self.graph.owner[served]
        return row

    def mark_instant(self, name: str) -> int:
        """Append an operation that does nothing: its index. What is freed after it is not taken for freed before."""
        return self._append_node(MARK + name, (), {}, 0, -1)

    def mark_unsharded(self, tensor: torch.Tensor | None, category: Category, parameter: torch.Tensor | None) -> None:
        """`mark` of a whole parameter or gradient of which the rank keeps a part."""
        self.mark(tensor, category, parameter)
        row = _row_of(tensor)
        if row is not None:
            self.graph.unsharded.add(row)

    def location(self) -> tuple[int, str]:
        """(index of the next operation, module running) for messages."""
        return self.graph.num_ops, self.graph.module_names[self._where()[0]]

    def record(self, func, args, kwargs, outputs) -> None:
        """Append one operation; called by PhantomMode."""
        if self._interrupted:
            raise KeyboardInterrupt
        module, source, forward = self._where()
        recorded_args = self._recorded(args)
        recorded_kwargs = {name: self._recorded(value) for name, value in kwargs.items()} if kwargs else kwargs
        node = self._append_node(func, recorded_args, recorded_kwargs, module, source, forward)
        for position, output in enumerate(outputs):
            if output is not None:
                self._append_value(node, position, output)
        if self._phase is Phase.FORWARD or self._module_stack:
            sequence = _next_sequence_number()
            for number in range(self._last_sequence, sequence):
                self._forward_of[number] = node
            self._last_sequence = sequence

    def _append_node(self, func, args, kwargs, module: int, source: int, forward: int = -1) -> int:
        graph = self.graph
        index = self._op_index.get(func)
        if index is None:
            index = self._op_index[func] = len(graph.op_names)
            graph.op_names.append(str(func))
        node = len(graph.op)
        graph.op.append(index)
        graph.args.append(args)
        graph.kwargs.append(kwargs)
        graph.phase.append(self._phase)
        graph.iteration.append(self._iteration)
        graph.module.append(module)
        graph.source.append(source)
        graph.recompute.append(self._phase is Phase.BACKWARD and bool(self._module_stack))
        if graph.saved is not None:
            graph.saved.op_tick.append(self.tick())
            graph.saved.backward_of.append(forward)
        return node

    def _append_value(self, node: int, position: int, tensor: PhantomTensor) -> int:
        graph = self.graph
        value = len(graph.value_node)
        storage = tensor.untyped_storage()
        row = storage.__dict__.get("row")
        if row is None:
            row = self._append_storage(node, value, storage)
        elif graph.nbytes[row] == 0 and storage.nbytes():
            # An `out=` argument that came empty: the operator allocates it now.
            graph.nbytes[row], graph.birth[row], graph.storage_value[row] = storage.nbytes(), node, value
        self._append_view(
            node, position, row, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        )
        tensor.produced = value
        return row

    def _append_storage(self, node: int, value: int, storage: torch.UntypedStorage) -> int:
        graph = self.graph
        row = storage.row = len(graph.birth)
        reference = _StorageRef(storage, self._died_callback)
        reference.row = row
        self._refs.append(reference)
        graph.birth.append(node)
        graph.death.append(_ALIVE)
        if graph.saved is not None:
            graph.saved.eager_death_tick.append(_ALIVE)
        graph.nbytes.append(storage.nbytes())
        graph.category.append(_ALIVE)
        graph.owner.append(graph.module[node])
        graph.storage_value.append(value)
        stream = other_stream()
        graph.stream.append(0 if stream is None else self._streams.setdefault(stream, len(self._streams) + 1))
        return row

    def _append_view(self, node: int, position: int, row: int, dtype: torch.dtype, shape, stride, offset) -> None:
        graph = self.graph
        dtype_index = self._dtype_index.get(dtype)
        if dtype_index is None:
            dtype_index = self._dtype_index[dtype] = len(graph.dtype_names)
            graph.dtype_names.append(str(dtype).removeprefix("torch."))
        graph.value_node.append(node)
        graph.value_output.append(position)
        graph.value_storage.append(row)
        graph.value_dtype.append(dtype_index)
        graph.value_shape.append(shape)
        graph.value_stride.append(stride)
        graph.value_offset.append(offset)

    def _died(self, reference: _StorageRef) -> None:
        self.graph.death[reference.row] = len(self.graph.op)
        self._refs[reference.row] = None
        if self._saves is not None:
            self.graph.saved.eager_death_tick[reference.row] = self.tick()

    # -- where an operation comes from ------------------------------------------------------------------------------

    def _enter_module(self, module, args) -> None:
        index = known = self._module_index.get(id(module))
        if index is None:  # made during the step: belongs to whoever runs it
            index = self._module_stack[-1] if self._module_stack else 0
        self._module_stack.append(index)
        if self._saves is not None and self._phase is Phase.FORWARD:
            self._open_call(-1 if known is None else known)

    def _open_call(self, module: int) -> None:
        saved = self.graph.saved
        self._open_calls.append(len(saved.call_module))
        saved.call_module.append(module)
        saved.call_ops.append([self.graph.num_ops, -1])
        saved.call_saves.append([len(saved.value), -1])
        saved.call_ticks.append([self.tick(), -1])
        saved.call_inputs.append(())
        saved.call_keywords.append(())

    def _close_call(self) -> None:
        saved, call = self.graph.saved, self._open_calls.pop()
        saved.call_ops[call][1] = self.graph.num_ops
        saved.call_saves[call][1] = len(saved.value)
        saved.call_ticks[call][1] = self.tick()

    def _note_inputs(self, args, kwargs) -> None:
        positional, keywords = self._rows_in(args), self._rows_in(kwargs)
        self.graph.saved.call_inputs[self._open_calls[-1]] = tuple(sorted(positional | keywords))
        self.graph.saved.call_keywords[self._open_calls[-1]] = tuple(sorted(keywords))

    def _watch_attention(self, function: Callable) -> Callable:
        """The attention function of a module, its calls noted as those of a module `core_attention` inside it."""

        def attend(module, *args, **kwargs):
            if self._phase is not Phase.FORWARD or id(module) not in self._module_index:
                return function(module, *args, **kwargs)
            self._open_call(self._core_attention_of(self._module_index[id(module)]))
            self._note_inputs(args, kwargs)
            try:
                return function(module, *args, **kwargs)
            finally:
                self._close_call()

        return attend

    def _core_attention_of(self, module: int) -> int:
        names = self.graph.module_names
        if module not in self._core_attentions:
            self._core_attentions[module] = len(names)
            names.append(names[module] + SUFFIX)
            self.graph.module_classes.append("core attention")
        return self._core_attentions[module]

    def _watch_inputs(self) -> list:
        """Hooks on every module that note the storages of all its inputs, read or not: a checkpoint holds them."""
        if self._saves is None:
            return []

        def note(module, args, kwargs):
            if self._open_calls:
                self._note_inputs(args, kwargs)

        return [module.register_forward_pre_hook(note, with_kwargs=True) for module in self._root.modules()]

    def _rows_in(self, arguments) -> set[int]:
        tensors = [leaf for leaf in tree_leaves(arguments) if type(leaf) is PhantomTensor]
        return {self.graph.value_storage[self.value_of(tensor)] for tensor in tensors}

    def _note_cast(self, cast: torch.Tensor, reused: bool) -> None:
        """A weight's cast went into autocast's cache in forward, or was found there."""
        if self._saves is None or self._phase is not Phase.FORWARD:
            return
        saved, row = self.graph.saved, self.graph.value_storage[self.value_of(cast)]
        if reused:
            saved.cast_reuses.append([row, self.graph.num_ops, self.tick()])
        else:
            saved.casts.append(row)

    def note_loss(self, loss: torch.Tensor) -> None:
        """Remember which forward the next autograd graph is of."""
        if self._saves is not None and type(loss) is PhantomTensor:
            self.graph.saved.losses.append(self.graph.value_storage[self.value_of(loss)])

    def note_graph_end(self) -> None:
        """The autograd graph of the last loss that was noted is gone."""
        if self._saves is not None and len(self.graph.saved.graph_ends) < len(self.graph.saved.losses):
            self.graph.saved.graph_ends.append([self.graph.num_ops, self.tick()])

    def _leave_module(self, module, args, output) -> None:
        if self._module_stack:
            self._module_stack.pop()
        if self._open_calls:
            self._close_call()

    def _where(self) -> tuple[int, int, int]:
        """(module, source line, forward operation or -1) of the operation that is running."""
        if self._module_stack:
            return self._module_stack[-1], self._user_line(), -1
        if self._phase is Phase.BACKWARD:
            node = _current_autograd_node()
            if node is not None:
                forward = self._forward_of.get(node._sequence_nr(), -1)
                if forward >= 0:
                    return self.graph.module[forward], self.graph.source[forward], forward
            return 0, -1, -1
        return 0, self._user_line(), -1

    def _user_line(self) -> int:
        """The innermost line that is neither torch's nor ours."""
        frame = sys._getframe(3)
        is_user_code = self._is_user_code
        while frame is not None:
            code = frame.f_code
            if code is self._outermost:  # beyond are our callers
                return -1
            known = is_user_code.get(code)
            if known is None:
                known = is_user_code[code] = not code.co_filename.startswith(_NOT_USER_CODE)
            if known:
                key = (code, frame.f_lineno)
                index = self._source_index.get(key)
                if index is None:
                    index = self._source_index[key] = len(self.graph.source_names)
                    self.graph.source_names.append(f"{_short_path(code.co_filename)}:{frame.f_lineno}")
                return index
            frame = frame.f_back
        return -1

    # -- arguments -------------------------------------------------------------------------------------------------

    def _recorded(self, argument):
        kind = type(argument)
        if kind is PhantomTensor:
            return Value(self.value_of(argument))
        if kind is int or kind is float or kind is bool or kind is str or argument is None:
            return argument
        if kind is list or kind is tuple:
            return kind([self._recorded(item) for item in argument])
        if isinstance(argument, torch.Tensor):  # on the CPU: not the GPU's memory
            known = argument.dim() == 0 and type(argument) is not HostCopy
            return argument.item() if known else Symbol("cpu")
        return self._symbol(argument)

    def _symbol(self, argument) -> Symbol:
        symbol = self._symbols.get(argument)
        if symbol is None:
            text = "..." if argument is Ellipsis else str(argument)
            symbol = self._symbols[argument] = Symbol(text)
        return symbol

    def _first_seen(self, tensor: PhantomTensor) -> int:
        """A tensor on the device that nobody registered and no recorded operator made (a plain attribute)."""
        row = tensor.untyped_storage().__dict__.get("row")
        node = self._append_node(LOAD, (), {}, self._where()[0], -1)
        self._append_value(node, 0, tensor)
        if row is None:
            self._strangers.append(tensor.untyped_storage().row)
        elif getattr(tensor, "_is_param", False):
            self._marked.setdefault(row, Category.PARAMETER)
        return tensor.produced

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """What is alive now outlives the step; deaths from here on are not the program's."""
        for row, reference in enumerate(self._refs):
            if reference is not None:
                self.graph.death[row] = self.graph.num_ops + 1
        self._refs.clear()  # without its reference a storage reports no death
        if self._saves is not None:
            saved, end = self.graph.saved, self.tick()
            saved.eager_death_tick = [end if tick == _ALIVE else tick for tick in saved.eager_death_tick]
            saved.eager_death = list(self.graph.death)
            self._saves.close()
            _hold_what_is_saved(self.graph)

    def finish(self) -> StepGraph:
        """The finished graph, categories settled."""
        graph = self.graph
        forward_end = _ends_of(graph, Phase.FORWARD)
        recompute_end = _ends_of_recompute(graph)
        marked = dict.fromkeys(self._strangers, Category.BUFFER) | roles_of_collectives(graph) | self._marked
        for row, birth in enumerate(graph.birth):
            graph.category[row] = marked.get(row, _category_of(graph, row, birth, forward_end, recompute_end))
        return graph


def _hold_what_is_saved(graph: StepGraph) -> None:
    """Put the plain step together: a storage lives as long as Python, a save or a backward operation holds it."""
    saved = graph.saved
    for value, released in zip(saved.value, saved.released):
        row = graph.value_storage[value]
        graph.death[row] = max(graph.death[row], released)
    for save, death, _ in saved.ghosts:
        row = graph.value_storage[saved.value[save]]
        graph.death[row] = max(graph.death[row], death)


def _category_of(graph: StepGraph, row: int, birth: int, forward_end: list[int], recompute_end: list[int]) -> Category:
    """Activations outlive the forward (or the recompute) that made them; everything else is temporary."""
    if graph.phase[birth] == Phase.FORWARD:
        saved = graph.death[row] > forward_end[birth]
    elif graph.recompute[birth]:
        saved = graph.death[row] > recompute_end[birth]
    else:
        saved = False
    return Category.ACTIVATION if saved else Category.TEMPORARY


def _ends_of(graph: StepGraph, phase: Phase) -> list[int]:
    """For each operation, the index after the last operation of its run of `phase` (0 where it is in none)."""
    return _run_ends([kind == phase for kind in graph.phase])


def _ends_of_recompute(graph: StepGraph) -> list[int]:
    return _run_ends(graph.recompute)


def _run_ends(inside: list[bool]) -> list[int]:
    ends = [0] * len(inside)
    end = len(inside)
    for index in range(len(inside) - 1, -1, -1):
        if not inside[index]:
            end = index
        else:
            ends[index] = end
    return ends


def _short_path(path: str) -> str:
    """A path from its package on: `transformers/models/llama/modeling_llama.py`; elsewhere just as it is."""
    for root in sorted(sys.path, key=len, reverse=True):
        if root and path.startswith(root.rstrip(os.sep) + os.sep):
            return path[len(root.rstrip(os.sep)) + 1 :]
    return path
