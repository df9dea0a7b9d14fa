"""The functions of the flash_attn package on the phantom GPU, so that transformers takes its flash attention 2 path.

transformers decides by `attn_implementation="flash_attention_2"` which masks to build, what to unpad and which casts
to make, then calls `flash_attn_func` or `flash_attn_varlen_func`. Inside `flash_attention_2_available()` it finds them
here: they call aten's flash operator, whose backward saves what the package saves (q, k, v, out, log-sum-exp, rng
state).

Source: flash_attn/flash_attn_interface.py (FlashAttnFunc, FlashAttnVarlenFunc); head sizes are padded to a multiple of
8 there too. Not modelled: alibi slopes, softcap (it changes no shape).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from metapeak.tracer.attention import pad_last_dim, repeats_kv
from metapeak.tracer.errors import InputError


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Attention over q [batch, length, heads, head size], k and v with their own number of heads; returns q's shape."""
    if repeats_kv():
        k, v = (_repeated(tensor, q.size(2)) for tensor in (k, v))
    return _attend(q, k, v, (None, None, q.size(1), k.size(1)), dropout_p, softmax_scale, causal, window_size)


def _repeated(tensor, heads):
    """A copy with `heads` heads, made and laid out as by transformers' repeat_kv [batch, heads, length, head size]."""
    by_head = tensor.transpose(1, 2)
    batch, kv_heads, length, size = by_head.shape
    if kv_heads == heads:
        return tensor
    copies = by_head[:, :, None].expand(batch, kv_heads, heads // kv_heads, length, size)
    return copies.reshape(batch, heads, length, size).transpose(1, 2)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """Attention over packed sequences, q [total length, heads, head size]; returns q's shape."""
    lengths = (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    return _attend(q, k, v, lengths, dropout_p, softmax_scale, causal, window_size)


def _attend(q, k, v, lengths, dropout_p, softmax_scale, causal, window_size):
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise InputError(f"flash attention 2 takes fp16 and bf16, not {q.dtype}. Use another dtype or attention.")
    if q.size(-1) > 256:
        raise InputError(f"flash attention 2 takes head sizes up to 256, not {q.size(-1)}. Use another attention.")
    head_dim = q.size(-1)
    q, k, v = (pad_last_dim(tensor, 8) for tensor in (q, k, v))
    left, right = (None if size < 0 else size for size in window_size)
    output = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        *lengths,
        dropout_p,
        causal,
        False,
        scale=1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale,
        window_size_left=left,
        window_size_right=right,
    )[0]
    return output[..., :head_dim] if output.size(-1) != head_dim else output


@contextlib.contextmanager
def flash_attention_2_available() -> Iterator[None]:
    """Inside, transformers believes that the flash_attn package is installed and finds the functions above."""
    from transformers import modeling_flash_attention_utils as utils

    def imports(implementation, *args, **kwargs):
        return flash_attn_func, flash_attn_varlen_func, None, utils._pad_input, utils._unpad_input

    def available(*args, **kwargs):
        return True

    checks = utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    patched = {
        **checks,
        "general_availability_check": available,
        "pkg_availability_check": available,
        "supported_devices": ((available, "phantom"),),
        "custom_supported_devices": (),
    }
    with (
        _replaced(vars(utils), {"_lazy_imports": imports, "_loaded_implementation": None}),
        _replaced(utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX, {2: patched}),
    ):
        yield


@contextlib.contextmanager
def _replaced(mapping: Any, values: Mapping) -> Iterator[None]:
    before = {key: mapping[key] for key in values}
    mapping.update(values)
    try:
        yield
    finally:
        mapping.update(before)
