"""Run one training step on the phantom GPU and record it: move the model and its batch, train, hand over the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch._dynamo  # see Note [Imports inside a step]

from metapeak.tracer import (  # noqa: F401  (they register their operators)
    attention,
    collectives,
    composites,
    phantom_ops,
)
from metapeak.tracer.dispatch import unrecorded
from metapeak.tracer.engine import MakeEngine
from metapeak.tracer.errors import InputError, MetapeakError, TraceError
from metapeak.tracer.graph import StepGraph
from metapeak.tracer.liveness import Category
from metapeak.tracer.phantom import PhantomTensor, local_tensor, phantom_from_cpu, phantom_from_meta, take_pending_error
from metapeak.tracer.recorder import Recorder
from metapeak.tracer.sharding_roles import is_sharded
from metapeak.tracer.training_loop import TrainingLoop

# Note [Imports inside a step]
#     Importing torch._dynamo runs torch.fx.wrap, whose frame refers to itself. Frames hold the frames that called them,
#     so where that import comes first inside a recorded step (a decomposition asks for it), every tensor in the
#     variables of its callers lives until garbage is collected: 11.9 GB for 7.3 in a chunked loss. Models of
#     transformers import it while they are built; here it is imported for all others.

# -- moving a model and its batch --------------------------------------------------------------------------------------


def move_to_phantom(module: torch.nn.Module) -> None:
    """Replace every parameter and buffer of a module on meta by a phantom one, in place; tied ones stay tied.

    What `module.to("cuda")` does, without the copy. Parameters keep requires_grad.
    """
    moved: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            meta = tensor if tensor.device.type == "meta" else tensor.to("meta")
            known = tensor.detach() if tensor.device.type == "cpu" and tensor.numel() <= 4096 else None
            phantom = phantom_from_meta(meta, known=known)
            if isinstance(tensor, torch.nn.Parameter):
                phantom.requires_grad_(tensor.requires_grad)
                phantom._is_param = True  # what isinstance(tensor, torch.nn.Parameter) looks at
            moved[id(tensor)] = phantom
            kept.append(tensor)
        return moved[id(tensor)]

    kept: list[torch.Tensor] = []  # so that an id is not used twice
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = move(tensor)


def batch_to_phantom(batch: Any) -> Any:
    """The batch with its CPU tensors moved to the phantom GPU."""
    if isinstance(batch, torch.Tensor):
        return phantom_from_cpu(batch) if batch.device.type == "cpu" else phantom_from_meta(batch)
    if isinstance(batch, Mapping):
        return {name: batch_to_phantom(value) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(batch_to_phantom(value) for value in batch)
    return batch


def default_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """`model(**batch).loss`: the other outputs die here, as in the Hugging Face Trainer.

    A batch that is a tuple or a tensor is passed by position; a model may return the loss itself, a scalar.
    Raises InputError when there is no loss to be found.
    """
    return loss_of(model, run_model(model, batch))


def run_model(model: torch.nn.Module, batch: Any) -> Any:
    """What the model returns for the batch: a mapping by name, a tuple or a tensor by position."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (list, tuple)) else model(batch)


def loss_of(model: torch.nn.Module, output: Any) -> torch.Tensor:
    """The loss in what a model returned. Raises InputError when there is none."""
    loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if loss is None and isinstance(output, (Mapping, list, tuple)) and len(output):
        loss = output.get("loss") if isinstance(output, Mapping) else output[0]
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        raise InputError(
            f"{type(model).__name__} returned no loss for this batch (it returned {type(output).__name__}). "
            "Return (module, batch, loss function) from a function of yours: `file.py:function`."
        )
    return loss


def record_training_step(
    model: torch.nn.Module,
    batch: Any,
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None,
    *,
    compute_loss: Callable[[torch.nn.Module, Any], torch.Tensor] = default_loss,
    distribute: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
    make_engine: MakeEngine | None = None,
    iterations: int = 2,
    loop: TrainingLoop | None = None,
    decouple_saves: bool = False,
    progress: Callable[[str], None] = lambda what: None,
) -> tuple[StepGraph, dict[str, int]]:
    """Record `iterations` steps: loss, backward, optimizer.step(), zero_grad(set_to_none=True).

    Arguments: a model on meta (it is moved to the phantom GPU in place), a batch of CPU tensors, a function from the
    trainable parameters to an optimizer (None: no optimizer step), the loss function, what shards the module once it
    is on the device and returns what trains (`fully_shard`, DistributedDataParallel; it runs before the recording), the
    engine that trains in place of the loop if there is one, the loop (None: a plain one).
    Returns the graph and the assumptions that answering the program needed, with how often each was used.
    Raises TraceError with op, module and reason when the program cannot run on a device without values.
    """
    loop = loop or TrainingLoop()
    move_to_phantom(model)
    if distribute is not None:
        model = distributed(model, distribute)
    batches = [batch_to_phantom(batch) for _ in range(loop.grad_accum)]
    with contextlib.ExitStack() as held:
        engine = None
        if make_engine is not None:
            count = len(loop.batches_of_engine(batches))
            with _refusals("The engine cannot train this model"), unrecorded():
                engine = held.enter_context(make_engine(model, make_optimizer, count))
        run = type(loop).run if engine is None else type(loop).run_engine
        recorder = Recorder(model, decouple_saves=decouple_saves, outermost=run.__code__)
        load_step(recorder, model, batches if loop.grad_accum > 1 else batches[0])
        if engine is not None:
            engine.load(recorder)
        with step_errors(recorder), recorder.recording():
            if engine is None:
                loop.run(recorder, model, batches, make_optimizer, compute_loss, iterations, progress)
            else:
                loop.run_engine(recorder, engine, batches, compute_loss, iterations, progress)
    return recorder.finish(), dict(recorder.mode.assumptions)


@contextlib.contextmanager
def step_errors(recorder: Recorder) -> Iterator[None]:
    """What goes wrong inside is raised as TraceError with op, module and reason; errors of ours stay what they are."""
    try:
        yield
    except BaseException as raised:
        error = take_pending_error() or raised
        if isinstance(error, MetapeakError) or not isinstance(error, Exception):  # Ctrl-C stays what it is
            raise error from None
        op, (op_index, module) = None, recorder.location()
        if recorder.mode.failed is not None and recorder.mode.failed[0] is error:
            _, op, op_index, module = recorder.mode.failed
        raise TraceError(f"{type(error).__name__}: {error}", op=op, module=module, op_index=op_index) from error


def distributed(model: torch.nn.Module, distribute: Callable[[torch.nn.Module], torch.nn.Module]) -> torch.nn.Module:
    """What trains, sharded. Raises InputError with torch's own reason where it refuses this model."""
    with _refusals("PyTorch cannot shard this model"), unrecorded():
        return distribute(model)


@contextlib.contextmanager
def _refusals(sentence: str) -> Iterator[None]:
    """A library's own refusals become InputErrors that begin with the sentence."""
    try:
        yield
    except (ValueError, RuntimeError, NotImplementedError, AssertionError) as error:
        if isinstance(error, MetapeakError):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"{sentence}: {type(error).__name__}: {reason}") from error


def forget_recording(model: torch.nn.Module) -> None:
    """Take off a model on the phantom GPU what an earlier recorder wrote on its storages, so that it can run again."""
    for tensor in (*model.parameters(), *model.buffers()):
        local = local_tensor(tensor)
        local.untyped_storage().__dict__.pop("row", None)
        local.produced = None


def load_step(recorder: Recorder, model: torch.nn.Module, batch: Any) -> None:
    """Register everything that exists before the step: parameters, buffers and the batch."""
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        for key, parameter in module._parameters.items():
            if parameter is not None:
                row = recorder.load(local_tensor(parameter), prefix + key, Category.PARAMETER, module)
                if not is_sharded(parameter):
                    recorder.graph.whole.add(row)
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        for key, buffer in module._buffers.items():
            if buffer is not None:
                # Layers with packed weights name the buffers that hold them.
                is_weight = key in getattr(module, "weight_storage", ())
                recorder.load(buffer, prefix + key, Category.PARAMETER if is_weight else Category.BUFFER, module)
    for name, value in named_tensors(batch):
        recorder.load(value, name, Category.INPUT)


def named_tensors(value: Any, name: str = "batch") -> Iterator[tuple[str, PhantomTensor]]:
    if isinstance(value, PhantomTensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from named_tensors(item, f"{name}.{index}")
