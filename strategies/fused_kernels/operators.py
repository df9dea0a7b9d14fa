"""Unsloth's Triton kernels, as operators that say what they read and write and compute nothing.

Where each byte comes from: the kernels allocate nothing; their callers do, in the files beside this one.
Source: fms-acceleration, plugins/fused-ops-and-kernels, kernels/unsloth (rms_layernorm.py, rope_embedding.py).
"""

from __future__ import annotations

import torch

from metapeak.strategies.operators import declare

declare(
    "unsloth_rms_norm(Tensor(a!) out, Tensor x, Tensor weight, Tensor(b!) scale) -> ()",
    # the gradient of the output becomes that of the input
    "unsloth_rms_norm_backward(Tensor(a!) grad, Tensor x, Tensor weight, Tensor scale) -> ()",
    # rotated where it lies, and back again
    "unsloth_rope(Tensor(a!) x, Tensor cos, Tensor sin) -> ()",
)

kernel = torch.ops.metapeak
