"""The training loop as a value: what a script does around `loss.backward()` and `optimizer.step()`.

Everything in it is PyTorch's own: autocast, GradScaler, clip_grad_norm_, hooks; and accelerate's conversion of outputs.

Note [Where autocast ends]
    The region decides how long cast weights are kept (autocast.py, Note [Weight casts]) and in which dtype the loss is
    computed. "forward": around `model.forward`, whose 16-bit outputs are converted to float32 after it, as accelerate
    (Accelerator.prepare_model) and Lightning Fabric do; Hugging Face models compute their loss inside, others (litgpt)
    after it. "loss": around the forward and the loss, without a conversion, as PyTorch's examples write it.

Note [Gradient accumulation]
    `(loss / N).backward()` N times, then one optimizer step. The batches of a step lie on the GPU together, as the
    Hugging Face Trainer loads them (Trainer.get_batch_samples). The first backward creates gradients, the second adds
    to them, and every later one finds what the second found: so two of the N are traced, and N batches counted.
    `accumulate_in_float32`: gradients in 16 bits are added to a float32 buffer and freed as they come; the buffers are
    made once and stay. So Megatron (DistributedDataParallel, param.main_grad) and DeepSpeed (BF16_Optimizer) do.
    Where ranks share the gradients, all backwards but the last may go without the reduction (`sync_each_batch` False):
    accelerate's `no_sync`, which is `set_requires_gradient_sync(False)` for FSDP2. FSDP then keeps whole gradients: the
    first backward creates them, those between add to them, the last adds and reduces. So three of the N are traced.
    Sources: transformers 5.24 trainer.py (_run_epoch), accelerate 1.15 accelerator.py (no_sync).

Note [Optimizer in backward]
    One optimizer a parameter, stepped by a hook as soon as the gradient is there, which is then freed; there is no
    optimizer phase. Source: torchtune/training/memory.py, register_optim_in_bwd_hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from metapeak.tracer.engine import Engine
from metapeak.tracer.liveness import Category, Phase
from metapeak.tracer.optimizer_states import mark_optimizer_states
from metapeak.tracer.phantom import DEVICE, DEVICE_NAME
from metapeak.tracer.recorder import Recorder

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
# Micro-batches of one step that are traced, see Note [Gradient accumulation].
TRACED_MICRO_BATCHES, TRACED_UNTIL_SYNC = 2, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingLoop:
    """How a script trains; the defaults are a plain loop.

    `autocast` is the region's dtype, `autocast_region` where it ends: Note [Where autocast ends]. `grad_scaler`: loss
    scaling. `max_grad_norm`: clipping of the norm of all gradients. `grad_accum`, `accumulate_in_float32`: Note
    [Gradient accumulation], and `sync_each_batch` too. `optimizer_in_backward`: Note [Optimizer in backward].
    """

    autocast: torch.dtype | None = None
    autocast_region: str = "forward"
    grad_scaler: bool = False
    max_grad_norm: float | None = None
    grad_accum: int = 1
    accumulate_in_float32: bool = False
    sync_each_batch: bool = True
    optimizer_in_backward: bool = False

    def run(
        self,
        recorder: Recorder,
        model: torch.nn.Module,
        batches: Sequence[Any],
        make_optimizer: MakeOptimizer | None,
        compute_loss: Callable[[torch.nn.Module, Any], torch.Tensor],
        iterations: int,
        progress: Callable[[str], None],
    ) -> None:
        """Train, inside `recorder.recording()`. As in a script, a loss lives until the next one takes its name.

        The graph behind it dies after backward, as in the Hugging Face Trainer (Trainer.training_step returns
        `loss.detach()`). It matters where the graph holds a leaf that is no parameter: a frozen embedding's output that
        was made to require a gradient (enable_input_require_grads), and that gradient.
        """
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with contextlib.ExitStack() as around:
            around.enter_context(when_gradients_come(trainable, lambda parameter: mark_gradient(recorder, parameter)))
            optimizer = self._optimizer(recorder, trainable, make_optimizer, around)
            scaler = torch.amp.GradScaler(DEVICE_NAME, enabled=self.grad_scaler)
            around.enter_context(noting_outputs(recorder, model))
            if self.autocast is not None and self.autocast_region == "forward":
                around.enter_context(autocast_forward(model, self.autocast))
            for iteration in range(1, iterations + 1):
                for batch, synced in self._micro_batches(model, batches):
                    synced(model)
                    with recorder.phase(Phase.FORWARD, iteration), self._autocast_loss():
                        progress(f"iteration {iteration}: forward")
                        loss = compute_loss(model, batch)
                        recorder.note_loss(loss)
                    with recorder.phase(Phase.BACKWARD, iteration):
                        progress(f"iteration {iteration}: backward")
                        scaler.scale(loss / self.grad_accum if self.grad_accum > 1 else loss).backward()
                        loss = loss.detach()
                        recorder.note_graph_end()
                        for parameter in trainable:  # FSDP1 gives gradients without running their hooks
                            mark_gradient(recorder, parameter)
                with recorder.phase(Phase.OPTIMIZER, iteration):
                    if optimizer is None:
                        model.zero_grad(set_to_none=True)
                        continue
                    progress(f"iteration {iteration}: optimizer")
                    self._step(recorder, optimizer, scaler)
                    mark_optimizer_states(recorder, optimizer)
                    optimizer.zero_grad(set_to_none=True)
            recorder.close()

    def run_engine(
        self,
        recorder: Recorder,
        engine: Engine,
        batches: Sequence[Any],
        compute_loss: Callable[[torch.nn.Module, Any], torch.Tensor],
        iterations: int,
        progress: Callable[[str], None],
    ) -> None:
        """Train with an engine, inside `recorder.recording()`: it scales the loss, reduces, clips, steps and frees."""
        with noting_outputs(recorder, engine.module):
            for iteration in range(1, iterations + 1):
                for batch in self.batches_of_engine(batches):
                    with recorder.phase(Phase.FORWARD, iteration):
                        progress(f"iteration {iteration}: forward")
                        loss = compute_loss(engine.model, batch)
                        recorder.note_loss(loss)
                    with recorder.phase(Phase.BACKWARD, iteration):
                        progress(f"iteration {iteration}: backward")
                        engine.backward(loss)
                        loss = loss.detach()
                        recorder.note_graph_end()
                    with recorder.phase(Phase.OPTIMIZER, iteration):
                        progress(f"iteration {iteration}: optimizer")
                        engine.step()
            recorder.close()

    @staticmethod
    def batches_of_engine(batches: Sequence[Any]) -> Sequence[Any]:
        """The micro-batches to trace: gradients are created, added to, and reduced with the last."""
        return batches if len(batches) <= TRACED_UNTIL_SYNC else [*batches[: TRACED_UNTIL_SYNC - 1], batches[-1]]

    def _micro_batches(self, model, batches: Sequence[Any]) -> list[tuple[Any, Callable]]:
        """(batch, what switches the reduction of gradients for it) of the micro-batches to trace."""
        if self.sync_each_batch or len(batches) == 1 or not _can_defer(model):
            return [(batch, lambda model: None) for batch in batches[:TRACED_MICRO_BATCHES]]
        traced = [*batches[: TRACED_UNTIL_SYNC - 1], batches[-1]] if len(batches) > 2 else list(batches)
        return [(batch, _defer) for batch in traced[:-1]] + [(traced[-1], _reduce)]

    def _autocast_loss(self):
        if self.autocast is None or self.autocast_region != "loss":
            return contextlib.nullcontext()
        return torch.autocast(DEVICE_NAME, dtype=self.autocast)

    def _optimizer(self, recorder, trainable, make_optimizer, around) -> torch.optim.Optimizer | None:
        """The optimizer of all trainable parameters, or None when there is none or each has one in its hook."""
        if make_optimizer is None or not trainable:
            return None
        if self.optimizer_in_backward:
            optimizers = {id(parameter): make_optimizer([parameter]) for parameter in trainable}

            def step(parameter):
                optimizer = optimizers[id(parameter)]
                optimizer.step()
                mark_optimizer_states(recorder, optimizer)
                optimizer.zero_grad(set_to_none=True)

            around.enter_context(when_gradients_come(trainable, step))
            return None
        optimizer = make_optimizer(trainable)
        for parameter, master in getattr(optimizer, "master_weights", ()):
            recorder.mark(master, Category.OPTIMIZER_STATE, parameter)
        if self.accumulate_in_float32:
            low = [parameter for parameter in trainable if parameter.dtype is not torch.float32]
            for parameter in low:
                parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32, device=DEVICE)
                recorder.mark(parameter.main_grad, Category.GRADIENT, parameter)
            around.enter_context(when_gradients_come(low, _accumulate))
        return optimizer

    def _step(self, recorder: Recorder, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        if hasattr(optimizer, "take_gradients"):  # master weights: from here on the gradients are theirs
            optimizer.take_gradients()
            for parameter, master in optimizer.master_weights:
                recorder.mark(master.grad, Category.GRADIENT, parameter)
        if self.max_grad_norm is not None:
            scaler.unscale_(optimizer)
            owners = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            # CUDA's default; asked for, because it is decided by the type of the gradients.
            _clip_norm(owners, self.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()


def _can_defer(model: torch.nn.Module) -> bool:
    """Whether the ranks of this model share gradients."""
    return any(hasattr(model, name) for name in ("set_requires_gradient_sync", "no_sync"))


def _defer(model: torch.nn.Module) -> None:
    _switch_reduction(model, False)


def _reduce(model: torch.nn.Module) -> None:
    _switch_reduction(model, True)


def _switch_reduction(model: torch.nn.Module, on: bool) -> None:
    """Whether the next backward reduces gradients over the ranks: FSDP2's switch, or what `no_sync` of the others sets.

    Sources: torch/nn/parallel/distributed.py, torch/distributed/fsdp/fully_sharded_data_parallel.py (no_sync).
    """
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(on)
    elif hasattr(model, "require_backward_grad_sync"):
        model.require_backward_grad_sync = on
    else:
        for part in model.modules():
            if hasattr(part, "_sync_gradients"):
                part._sync_gradients = on


def mark_gradient(recorder: Recorder, parameter: torch.Tensor) -> None:
    recorder.mark(parameter.grad, Category.GRADIENT, parameter)


def _accumulate(parameter: torch.Tensor) -> None:
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


@contextlib.contextmanager
def when_gradients_come(parameters: Iterable[torch.Tensor], hook: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """`hook` runs when a parameter's gradient is there."""
    handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter in parameters]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def noting_outputs(recorder: Recorder, model: torch.nn.Module) -> Iterator[None]:
    """The dtypes of what the model returns, and of its logits as its head made them, for the report."""
    dtypes = recorder.graph.output_dtypes

    def note(module, args, output):
        if isinstance(output, dict):
            dtypes.update((name, _dtype_name(value)) for name, value in output.items() if _is_float(value))

    def note_head(module, args, output):
        if _is_float(output):
            dtypes["head"] = _dtype_name(output)

    handles = [model.register_forward_hook(note)]
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    if isinstance(head, torch.nn.Module):
        handles.append(head.register_forward_hook(note_head))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@contextlib.contextmanager
def autocast_forward(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """`model.forward` inside an autocast region, its outputs then in float32; as Accelerator.prepare_model wraps it."""
    from accelerate.utils.operations import convert_outputs_to_fp32

    before = model.__dict__.get("forward")
    model.forward = convert_outputs_to_fp32(torch.autocast(DEVICE_NAME, dtype=dtype)(model.forward))
    try:
        yield
    finally:
        if before is None:
            del model.forward
        else:
            model.forward = before


def _clip_norm(owners: list[torch.Tensor], max_norm: float) -> None:
    """`clip_grad_norm_`; for gradients on several meshes, which it cannot span, one norm a mesh and then theirs.

    Source: transformers 5.24 trainer.py (_mixed_mesh_grad_norm).
    """
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for owner in owners:
        if owner.grad is not None:
            by_mesh.setdefault(getattr(owner.grad, "device_mesh", None), []).append(owner)
    if len(by_mesh) <= 1:
        torch.nn.utils.clip_grad_norm_(owners, max_norm, foreach=True)
        return
    norms = []
    for group in by_mesh.values():
        norm = torch.nn.utils.get_total_norm([owner.grad for owner in group], foreach=True)
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total, foreach=True)
