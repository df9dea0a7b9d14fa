"""Precision and the training loop: which dtype everything gets, and what the script does around backward and step.

What it changes: the loop that is traced (autocast, loss scaling, accumulation, clipping, optimizer in backward).
Where each byte comes from: PyTorch's autocast with CUDA's lists, GradScaler and clip_grad_norm_ run in the traced loop.
Not modelled: steps that loss scaling skips; fp8.
Sources: tracer/autocast.py and tracer/training_loop.py name them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from metapeak.tracer.errors import InputError, UnknownName

if TYPE_CHECKING:
    import torch

    from metapeak.tracer.gpus import Gpu
    from metapeak.tracer.spec import ModelSpec, StepSpec
    from metapeak.tracer.training_loop import TrainingLoop

AUTOCAST_DTYPES = ("bfloat16", "float16")
AUTOCAST_REGIONS = ("forward", "loss")
GRADIENT_DTYPES = ("float32",)
# Names of the option `precision` -> (weights dtype, autocast dtype).
PRECISIONS: dict[str, tuple[str, str | None]] = {
    "fp32": ("float32", None),
    "bf16": ("bfloat16", None),
    "fp16": ("float16", None),
    "bf16-mixed": ("float32", "bfloat16"),
    "fp16-mixed": ("float32", "float16"),
}
MAX_GRAD_ACCUM = 1 << 20


def check_precision(spec: ModelSpec, step: StepSpec, gpu: Gpu | None) -> None:
    """Raise InputError or UnknownName for a loop that cannot run; needs no model."""
    for name, value, known in (
        ("autocast dtype", step.autocast, AUTOCAST_DTYPES),
        ("autocast region", step.autocast_region, AUTOCAST_REGIONS),
        ("gradient accumulation dtype", step.grad_accum_dtype, GRADIENT_DTYPES),
    ):
        if value is not None and value not in known:
            raise UnknownName(name, str(value), known)
    if not isinstance(step.grad_accum, int) or not 1 <= step.grad_accum <= MAX_GRAD_ACCUM:
        raise InputError(f"grad_accum is {step.grad_accum!r}, but has to be a whole number from 1 to {MAX_GRAD_ACCUM}.")
    norm = step.max_grad_norm
    if norm is not None and not (isinstance(norm, (int, float)) and 0 < norm < math.inf):
        raise InputError(f"max_grad_norm is {norm!r}, but has to be a positive number. Leave it out for no clipping.")
    if step.optimizer.implementation == "in-backward":
        _check_in_backward(step)
    if gpu is not None and not gpu.supports_bf16:
        asked = {"--autocast": step.autocast, "--weights-dtype": spec.dtype}
        for option, dtype in asked.items():
            if dtype == "bfloat16":
                raise InputError(
                    f"bf16 was asked for ({option} or --precision), but {gpu.id} has none: {_bf16_rule(gpu)}. "
                    "Use fp16-mixed or fp32, or another GPU."
                )


def _check_in_backward(step: StepSpec) -> None:
    reasons = {
        "grad_accum": (step.grad_accum > 1, "gradients are freed before the next micro-batch"),
        "max_grad_norm": (step.max_grad_norm is not None, "the norm of all gradients is known only after backward"),
        "autocast fp16": (step.autocast == "float16", "loss scaling looks at all gradients before a step"),
        "master_weights": (step.optimizer.master_weights, "no framework combines them"),
        "grad_accum_dtype": (step.grad_accum_dtype is not None, "nothing is accumulated"),
    }
    for name, (given, reason) in reasons.items():
        if given:
            raise InputError(
                f"The optimizer runs in backward (implementation in-backward), which excludes {name}: {reason}. "
                "Use implementation foreach or fused."
            )


def _bf16_rule(gpu: Gpu) -> str:
    if gpu.compute_capability is None:
        return "the vendor lists no bf16 units"
    return "compute capability {}.{} < 8.0, PyTorch would emulate it".format(*gpu.compute_capability)


def training_loop(step: StepSpec, module: torch.nn.Module, *, own_loss: bool) -> TrainingLoop:
    """The loop of a step on this model, its strategies applied. `own_loss`: the loss is computed outside the model.

    Raises InputError where PyTorch refuses the dtypes.
    """
    import torch

    from metapeak.tracer.training_loop import TrainingLoop

    trained = {parameter.dtype for parameter in module.parameters() if parameter.requires_grad}
    masters = step.optimizer.master_weights
    if step.autocast == "float16" and torch.float16 in trained and not masters:
        raise InputError(
            "fp16 autocast needs loss scaling, and GradScaler refuses gradients in fp16 ('Attempting to unscale FP16 "
            "gradients'): trainable weights in fp16 have such. Use --precision fp16-mixed (float32 weights), float32 "
            "adapters, or --master-weights."
        )
    if step.grad_accum_dtype == "float32" and not masters and trained - {torch.float32}:
        raise InputError(
            f"Gradients accumulated in float32 for weights in {_names(trained - {torch.float32})}: a gradient has its "
            "weight's dtype, so an optimizer sees them only through float32 copies. Add --master-weights."
        )
    return TrainingLoop(
        autocast=getattr(torch, step.autocast) if step.autocast else None,
        autocast_region=region_of(step, own_loss=own_loss),
        grad_scaler=step.autocast == "float16",
        max_grad_norm=step.max_grad_norm,
        grad_accum=step.grad_accum,
        accumulate_in_float32=step.grad_accum_dtype == "float32",
        sync_each_batch=step.sync_each_batch,
        optimizer_in_backward=step.optimizer.implementation == "in-backward",
    )


def region_of(step: StepSpec, *, own_loss: bool) -> str:
    """Where autocast ends: as asked for, else where trainers end it (forward) and scripts with a loss of their own."""
    return step.autocast_region or ("loss" if own_loss else "forward")


def precision_notes(
    step: StepSpec, module: torch.nn.Module, gpu: Gpu | None, *, own_loss: bool, engine: bool = False
) -> tuple[str, ...]:
    """What the report has to say about precision and the loop; with an `engine`, which has a loop of its own."""
    import torch

    notes = []
    if step.autocast is not None:
        region = {
            "forward": "around the model's forward, whose outputs are then float32 (as accelerate does)",
            "loss": "around forward and loss",
        }[region_of(step, own_loss=own_loss)]
        notes.append(f"autocast {step.autocast} is {region}; casts of trainable float32 weights are kept until it ends")
    if step.autocast == "float16":
        notes.append("fp16 autocast trains with torch.amp.GradScaler, and no step is skipped for overflow")
    dtypes = {parameter.dtype for parameter in module.parameters()}
    trained = {parameter.dtype for parameter in module.parameters() if parameter.requires_grad}
    if torch.float16 in trained and step.autocast is None and not engine:
        notes.append(
            "weights are trained in fp16 without loss scaling (GradScaler refuses fp16 gradients): memory is right, "
            "but small gradients vanish in a real run; fp16-mixed keeps float32 weights"
        )
    if gpu is not None and not gpu.supports_bf16 and torch.bfloat16 in dtypes:
        notes.append(f"the model's dtype is bf16, which {gpu.id} has not ({_bf16_rule(gpu)})")
    if step.grad_accum > 1:
        two = "two of them are traced (three where gradients wait for the last to be reduced)"
        notes.append(
            f"the batches of all {step.grad_accum} micro-batches lie on the GPU together, as the Hugging Face Trainer "
            f"loads them; {'up to three of them are traced' if engine else two}, the others repeat the second"
        )
    if step.grad_accum_dtype == "float32" and not trained - {torch.float32}:
        notes.append("gradients are float32 as the weights are, so grad_accum_dtype changes nothing")
    return tuple(notes)


def _names(dtypes) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
