"""Kernels of the quantisation libraries, as operators that allocate their results and compute nothing.

Each allocates what the launcher of the CUDA kernel allocates, so that the recorder sees one operator where CUDA runs
one kernel. Imports torch: loaded from inside functions only.

Sources: bitsandbytes 0.50 backends/cuda/ops.py (every kernel writes into a tensor that its launcher makes with
torch.empty); AutoGPTQ and GPTQModel nn_modules/triton_utils/dequant.py, dequant248; AutoAWQ awq_ext dequantize.
"""

from __future__ import annotations

import torch

_bnb = torch.library.Library("bnb", "DEF")
_gptq = torch.library.Library("gptq", "DEF")
_awq = torch.library.Library("awq", "DEF")


def _operator(library: torch.library.Library, schema: str):
    """Define an operator with the decorated function as its kernel on meta: all that the phantom GPU asks for."""

    def define(function):
        name = library.define(schema)
        library.impl(name, function, "Meta")
        return function

    return define


@_operator(_bnb, "dequantize_blockwise(Tensor A, Tensor absmax, Tensor code, ScalarType dtype) -> Tensor")
def _dequantize_blockwise(A, absmax, code, dtype):
    return torch.empty_like(A, dtype=dtype)


@_operator(_bnb, "dequantize_4bit(Tensor A, Tensor absmax, int[] shape, ScalarType dtype) -> Tensor")
def _dequantize_4bit(A, absmax, shape, dtype):
    return A.new_empty(shape, dtype=dtype)


@_operator(_bnb, "int8_vectorwise_quant(Tensor A) -> (Tensor, Tensor)")
def _int8_vectorwise_quant(A):
    return A.new_empty(A.shape, dtype=torch.int8), A.new_empty(A.numel() // A.shape[-1], dtype=torch.float32)


@_operator(_bnb, "int8_linear_matmul(Tensor A, Tensor B) -> Tensor")
def _int8_linear_matmul(A, B):
    return A.new_empty((*A.shape[:-1], B.shape[0]), dtype=torch.int32)


@_operator(_bnb, "int8_mm_dequant(Tensor A, Tensor row_stats, Tensor col_stats, Tensor? bias) -> Tensor")
def _int8_mm_dequant(A, row_stats, col_stats, bias):
    return torch.empty_like(A, dtype=torch.float16)


@_operator(_gptq, "dequantize(Tensor qweight, Tensor scales, Tensor qzeros, Tensor g_idx, ScalarType dtype) -> Tensor")
def _gptq_dequantize(qweight, scales, qzeros, g_idx, dtype):
    return qweight.new_empty((g_idx.shape[0], scales.shape[1]), dtype=dtype)


@_operator(_awq, "dequantize(Tensor qweight, Tensor scales, Tensor qzeros) -> Tensor")
def _awq_dequantize(qweight, scales, qzeros):
    return scales.new_empty((qweight.shape[0], scales.shape[1]))
