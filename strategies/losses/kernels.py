"""Triton kernels of loss libraries, as operators that say what they read and write and compute nothing.

Where each byte comes from: the kernels allocate nothing; their callers do, in the files beside this one.
Sources: liger_kernel 0.8.5 ops/cross_entropy.py (liger_cross_entropy_kernel, element_mul_kernel); trl 1.16
kernels/chunked_logprob.py (_forward_kernel, _backward_kernel); unsloth's cross_entropy_loss.py as fms-acceleration
carries it (plugins/fused-ops-and-kernels, kernels/unsloth).
"""

from __future__ import annotations

import torch

from metapeak.strategies.operators import declare

declare(
    # logits become their gradient; one loss a row
    "liger_cross_entropy(Tensor(a!) logits, Tensor target, Tensor(b!) losses) -> ()",
    "liger_element_mul(Tensor(a!) x, Tensor factor) -> ()",
    # one tile of logits is folded into the running statistics of its rows
    "trl_fold_tile(Tensor tile, Tensor target, Tensor(a!)[] statistics) -> ()",
    # one tile of logits becomes its gradient
    "trl_gradient_of_tile(Tensor(a!) tile, Tensor target, Tensor log_z, Tensor gradient) -> ()",
    "unsloth_cross_entropy(Tensor logits, Tensor target, Tensor(a!) losses, Tensor(b!) logsumexp) -> ()",
    "unsloth_cross_entropy_backward(Tensor(a!) logits, Tensor target, Tensor logsumexp, Tensor gradient) -> ()",
)

kernel = torch.ops.metapeak
