"""Composite operators that look at the device: what they do on CUDA, for the phantom GPU.

PyTorch decides in C++, above the dispatch mode, how such an operator is made of others, and some of them ask whether
the tensor is on CUDA. Those are registered here for the phantom GPU with CUDA's answer. Others were looked at and do
the same on both: dropout (fused), rms_norm and weight_norm (fused), layer and group norm, batch norm (the cuDNN variant
keeps the same statistics), pooling, cross entropy, linear. Attention is in attention.py.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten


def softmax(input, dim, dtype=None):
    """fp16 to fp32 is one kernel on CUDA, without a copy of the input. Source: aten/src/ATen/native/SoftMax.cpp."""
    if input.dtype == torch.float16 and dtype == torch.float32:
        return aten._softmax(input, dim, True)
    return aten._softmax(input if dtype is None else input.to(dtype), dim, False)


def log_softmax(input, dim, dtype=None):
    """As `softmax`."""
    if input.dtype == torch.float16 and dtype == torch.float32:
        return aten._log_softmax(input, dim, True)
    return aten._log_softmax(input if dtype is None else input.to(dtype), dim, False)


_library = torch.library.Library("aten", "IMPL")
_library.impl("softmax.int", softmax, "AutogradPrivateUse1")
_library.impl("log_softmax.int", log_softmax, "AutogradPrivateUse1")
