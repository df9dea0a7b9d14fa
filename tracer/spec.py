"""What to trace: the model and the step, as plain values without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Which model.

    `reference` is a Hugging Face id (optionally `@revision`), a folder, a config.json, `file.py:function` or
    `package.module:function`. `task` overrides the one that the config's `architectures` names (see models.TASKS).
    `dtype` is the weights dtype (`float32`, `bfloat16`, `float16`); None takes the config's.
    """

    reference: str
    task: str | None = None
    trust_remote_code: bool = False
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSpec:
    """The micro-batch of one data-parallel rank: samples, and tokens or pixels a sample.

    `seq_len` None takes `default_seq_len` tokens or the model's maximum if that is less. `target_len` is the decoder's
    length of sequence-to-sequence models (None: seq_len), `image_size` the pixels a side (None: the config's),
    `num_images` the images a sample of image-text models.
    """

    batch_size: int = 1
    seq_len: int | None = None
    target_len: int | None = None
    image_size: int | None = None
    num_images: int = 1
    default_seq_len: int = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """The optimizer: its name (see strategies/optimizers/registry.py, or `package.Class`), and how it works.

    `implementation` None is what CUDA picks for that class (`foreach` for most of torch.optim); else `foreach`,
    `fused`, `for-loop`, `bitsandbytes`, `torchao`, or `in-backward`: an optimizer a parameter, stepped as soon as its
    gradient is there. `state_dtype` is the dtype of the moments of adam and adamw (`float32`, `bfloat16`, `float16`;
    None: the parameter's). `arguments` are the class's own (a mapping, kept as sorted pairs): `{"weight_decay": 0.1}`.
    `master_weights`: it works on float32 copies of weights in 16 bits.
    """

    name: str = "adamw"
    implementation: str | None = None
    state_dtype: str | None = None
    arguments: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
    master_weights: bool = False

    def __post_init__(self):
        object.__setattr__(self, "arguments", tuple(sorted(dict(self.arguments).items())))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpec(BatchSpec):
    """One training step: the batch, the optimizer, the attention kernel, and how many steps to trace.

    `attention` None is what the model's default implementation gets on the GPU; else `eager`, `sdpa`, or a kernel to
    force (`flash2`, `efficient`, `cudnn`, `math`). Two iterations show the creation of optimizer states and the steady
    step.

    `autocast` is the dtype of an autocast region (`bfloat16`, `float16`; fp16 brings loss scaling), `autocast_region`
    where it ends (`forward`, `loss`; None: after the model's forward, or with the loss that a function of yours gave).
    `grad_accum` micro-batches a step; `grad_accum_dtype` `float32` adds 16-bit gradients up in float32 buffers.
    `sync_each_batch`: ranks reduce gradients after every micro-batch instead of only after the last.
    `max_grad_norm` clips the norm of all gradients. See tracer/training_loop.py.

    `full_trace`: every block is recorded, also where a few tell the rest (tracer/depth).
    """

    optimizer: OptimizerSpec = OptimizerSpec()
    attention: str | None = None
    iterations: int = 2
    autocast: str | None = None
    autocast_region: str | None = None
    grad_accum: int = 1
    grad_accum_dtype: str | None = None
    sync_each_batch: bool = False
    max_grad_norm: float | None = None
    full_trace: bool = False
