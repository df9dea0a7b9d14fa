"""Scaled dot product attention on the phantom GPU: the kernel that CUDA would choose, and what it saves.

`torch.nn.functional.scaled_dot_product_attention` decides among its kernels by the device. For the phantom GPU this
module decides as CUDA does, then calls the same aten operator (flash, memory-efficient, cuDNN or the composite math
path), so autograd saves what it saves on CUDA and the operator's own meta kernel gives the shapes.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (select_sdp_backend and the checks it calls) and
aten/src/ATen/native/transformers/attention.cpp (scaled_dot_product_attention, pad_last_dim, preprocess_mask).
Not modelled: preferring cuDNN on Hopper where the build does. It saves tensors of the same sizes as flash attention.
"""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from metapeak.tracer.errors import InputError

aten = torch.ops.aten


class AttentionKernel(enum.Enum):
    """Implementations of scaled dot product attention."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    CUDNN = "cudnn"
    MATH = "math"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionChoice:
    """How to choose: as CUDA does on a GPU of this compute capability, or the kernel that the user forces."""

    compute_capability: tuple[int, int] = (8, 0)
    forced: AttentionKernel | None = None
    # Keys and values are copied for every head of the queries before flash attention 2, as transformers did for most
    # families before its common attention functions (4.48).
    repeat_kv: bool = False


_choice = AttentionChoice()


@contextlib.contextmanager
def attention_choice(choice: AttentionChoice) -> Iterator[None]:
    """Choose kernels by `choice` inside."""
    global _choice
    before, _choice = _choice, choice
    try:
        yield
    finally:
        _choice = before


def repeats_kv() -> bool:
    """Whether keys and values are copied for every head before flash attention 2."""
    return _choice.repeat_kv


def choose_kernel(query, key, value, attn_mask, dropout_p: float, is_causal: bool, enable_gqa: bool) -> AttentionKernel:
    """The kernel that CUDA would run for these tensors, shapes [batch, heads, length, head size].

    Raises InputError when the user forces a kernel that cannot run.
    """
    refusals = {
        AttentionKernel.FLASH: _refuses_flash(query, key, value, attn_mask, is_causal, enable_gqa),
        AttentionKernel.EFFICIENT: _refuses_efficient(query, key, value, attn_mask, enable_gqa),
        AttentionKernel.CUDNN: _refuses_flash(query, key, value, None, is_causal, enable_gqa),
        AttentionKernel.MATH: None,
    }
    if _choice.forced is not None:
        if refusals[_choice.forced] is not None:
            raise InputError(
                f"attention '{_choice.forced.value}' cannot run here: {refusals[_choice.forced]}. "
                "Leave the choice to torch, or use 'math'."
            )
        return _choice.forced
    for kernel in (AttentionKernel.FLASH, AttentionKernel.EFFICIENT):
        if refusals[kernel] is None:
            return kernel
    return AttentionKernel.MATH


def _refuses_flash(query, key, value, attn_mask, is_causal, enable_gqa) -> str | None:
    if _choice.compute_capability < (8, 0):
        return "flash attention needs compute capability 8.0"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"flash attention takes fp16 and bf16, not {query.dtype}"
    if attn_mask is not None:
        return "flash attention takes no attention mask"
    if query.dim() != 4:
        return "flash attention takes tensors of four dimensions"
    head_dim = query.size(-1)
    if not (head_dim == key.size(-1) == value.size(-1)) or head_dim > 256:
        return "flash attention needs equal head sizes of at most 256 for query, key and value"
    if is_causal and query.size(-2) != key.size(-2):
        return "flash attention takes a causal mask only for query and key of one length"
    if query.size(-3) != key.size(-3) and not enable_gqa:
        return "the numbers of heads differ"
    return _refuses_layout(query, key, value)


def _refuses_efficient(query, key, value, attn_mask, enable_gqa) -> str | None:
    if _choice.compute_capability < (5, 0):
        return "memory-efficient attention needs compute capability 5.0"
    if query.dtype == torch.bfloat16 and _choice.compute_capability < (8, 0):
        return "memory-efficient attention takes bf16 from compute capability 8.0 on"
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"memory-efficient attention does not take {query.dtype}"
    if query.dim() != 4:
        return "memory-efficient attention takes tensors of four dimensions"
    if query.size(-3) != key.size(-3):
        return "memory-efficient attention needs equal numbers of heads"
    alignment = _gemm_alignment(query.dtype)
    if query.size(-1) != key.size(-1) or query.size(-1) % alignment or value.size(-1) % alignment:
        return f"memory-efficient attention needs head sizes that are multiples of {alignment}"
    return _refuses_layout(query, key, value)


def _gemm_alignment(dtype: torch.dtype) -> int:
    """sdp_utils.cpp, minimum_gemm_alignment: 128-bit loads with tensor cores from compute capability 8.0."""
    if _choice.compute_capability >= (8, 0):
        return 4 if dtype == torch.float32 else 8
    if _choice.compute_capability >= (7, 0) and dtype != torch.float32:
        return 8
    return 1


def _refuses_layout(query, key, value) -> str | None:
    if any(tensor.numel() and tensor.stride(-1) != 1 for tensor in (query, key, value)):
        return "the last dimension of query, key and value has to be dense"
    if any(tensor.size(-2) == 0 for tensor in (query, key, value)):
        return "a length is zero"
    return None


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """What CUDA does for `torch.nn.functional.scaled_dot_product_attention`, with the kernel of `choose_kernel`."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, torch.scalar_tensor(-math.inf, dtype=query.dtype, device=query.device))
    kernel = choose_kernel(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if kernel is AttentionKernel.MATH:
        _refuse_math_in_a_ring(query, key, attn_mask, is_causal, enable_gqa)
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    if kernel is AttentionKernel.FLASH:
        head_dim = query.size(-1)
        padded = [pad_last_dim(tensor, 8) for tensor in (query, key, value)]
        scale = 1 / math.sqrt(head_dim) if scale is None else scale
        output = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return output[..., :head_dim] if output.size(-1) != head_dim else output
    _refuse_padded_statistics_in_a_ring(query, kernel)
    needs_statistics = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    if kernel is AttentionKernel.CUDNN:
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, attn_mask, needs_statistics, dropout_p, is_causal, False, scale=scale
        )[0]
    if attn_mask is not None:
        attn_mask = _preprocess_mask(attn_mask, query, key)
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs_statistics, dropout_p, is_causal, scale=scale
    )[0]


def _refuse_math_in_a_ring(query, key, attn_mask, is_causal: bool, enable_gqa: bool) -> None:
    """Context parallelism passes DTensors: the math path has no ring.

    Source: torch/distributed/tensor/experimental/_context_parallel/_attention.py (_sdpa_handler).
    """
    if type(query).__name__ != "DTensor":
        return
    why = (
        _refuses_flash(query, key, key, attn_mask, is_causal, enable_gqa),
        _refuses_efficient(query, key, key, attn_mask, enable_gqa),
    )
    raise InputError(
        "context parallelism covers flash, memory-efficient and cuDNN attention, but here CUDA would run none of them: "
        f"{why[0]}; {why[1]}."
    )


# Rows that the memory-efficient kernel pads its statistics to. Source: mem_eff_attention/kernel_forward.h (kAlignLSE).
_ALIGNED_STATISTICS = 32


def _refuse_padded_statistics_in_a_ring(query, kernel: AttentionKernel) -> None:
    """torch's ring attention merges results by their statistics, which have to be of one length.

    Source: torch/distributed/tensor/experimental/_context_parallel/_attention.py (_SDPAMerger._merge_one).
    """
    if type(query).__name__ != "DTensor" or kernel is not AttentionKernel.EFFICIENT:
        return
    length, chunks = query.size(-2), 2 * query.device_mesh.size()
    if length % (chunks * _ALIGNED_STATISTICS):
        raise InputError(
            f"context parallelism with memory-efficient attention: seq_len {length} / (2 x cp {chunks // 2}) = "
            f"{length / chunks:g} is no multiple of {_ALIGNED_STATISTICS}, to which the kernel pads row statistics; "
            "torch's ring attention fails to merge them."
        )


def pad_last_dim(tensor, alignment: int):
    """The tensor with its last dimension zero-padded to a multiple of `alignment`, a copy unless it is one already."""
    rest = tensor.size(-1) % alignment
    return torch.nn.functional.pad(tensor, [0, alignment - rest]) if rest else tensor


def _preprocess_mask(mask, query, key):
    """The memory-efficient kernel reads rows of 16 elements: pad (a copy), slice, expand over batch and heads."""
    length = mask.size(-1)
    if length % 16:
        mask = pad_last_dim(mask, 16)[..., :length]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


_library = torch.library.Library("aten", "IMPL")
_library.impl("scaled_dot_product_attention", scaled_dot_product_attention, "AutogradPrivateUse1")
