"""Attention: accumulators of the backward kernels, split keys of the forward, copies of strided gradients.

Shapes: B batch, S length of the queries, T of the keys, H heads, D head size.
"""

from __future__ import annotations

import math

from metapeak.tracer.kernels.registry import Call, Device, Tensor, workspace

_FLOAT = 4


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# -- flash attention ---------------------------------------------------------------------------------------------------


def flash_backward_workspace(batch: int, queries: int, keys: int, heads: int, kv_heads: int, head_dim: int) -> list:
    """softmax_d [B, H, S rounded up to 128] and dq_accum [B, that, H, D rounded up] in float32, and with fewer key
    heads dk and dv expanded to all heads in the input's dtype, given in elements times 2 bytes.

    D is rounded up to 32, above 128 to 64. Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp,
    mha_bwd. Not modelled: deterministic algorithms, which keep one dq_accum a split.

    >>> flash_backward_workspace(1, 100, 100, 2, 1, 40)
    [1024, 65536, 16000, 16000]
    """
    rounded = _up(queries, 128)
    blocks = [batch * heads * rounded * _FLOAT, batch * rounded * heads * _rounded_head_dim(head_dim) * _FLOAT]
    if kv_heads != heads:
        blocks += [batch * keys * heads * head_dim * 2] * 2
    return blocks


def _rounded_head_dim(head_dim: int) -> int:
    return _up(head_dim, 32 if head_dim <= 128 else 64)


@workspace("_scaled_dot_product_flash_attention_backward")
def sdpa_flash_backward(call: Call) -> list[int]:
    """Tensors are [B, H, S, D]; gradient and output have to be dense as [B, S, H, D], else they are copied."""
    grad, query, key, _, out = call.args[:5]
    (batch, heads, queries, head_dim), keys = query.shape, key.shape[2]
    copies = [tensor.transposed(1, 2).contiguous_copy_bytes for tensor in (grad, out)]
    return [*copies, *flash_backward_workspace(batch, queries, keys, heads, key.shape[1], head_dim)]


@workspace("_flash_attention_backward")
def flash_backward(call: Call) -> list[int]:
    """Tensors are [B, S, H, D], or packed [total S, H, D]: then 128 rows of room are added for every sequence.

    Source: as `flash_backward_workspace`, and mha_varlen_bwd.
    """
    grad, query, key, _, out = call.args[:5]
    copies = [tensor.contiguous_copy_bytes for tensor in (grad, out)]
    starts = call.arg(6, "cum_seq_q")
    if starts is None:
        (batch, queries, heads, head_dim), keys = query.shape, key.shape[1]
        return [*copies, *flash_backward_workspace(batch, queries, keys, heads, key.shape[2], head_dim)]
    total, heads, head_dim = query.shape
    batch, longest = starts.shape[0] - 1, _up(call.arg(8, "max_q"), 128)
    softmax_d = batch * heads * longest * _FLOAT
    dq_accum = (total + 128 * batch) * heads * _rounded_head_dim(head_dim) * _FLOAT
    expanded = [key.shape[0] * heads * head_dim * 2] * 2 if key.shape[1] != heads else []
    return [*copies, softmax_d, dq_accum, *expanded]


@workspace("_scaled_dot_product_flash_attention")
def sdpa_flash_forward(call: Call) -> list[int]:
    """Partial outputs and row statistics when few queries are split over keys (set_params_splitkv, flash_api.cpp)."""
    query, key = call.args[:2]
    (batch, heads, queries, head_dim), keys = query.shape, key.shape[2]
    return _split_keys(batch, heads, queries, keys, head_dim, call.arg(3, "dropout_p", 0.0), call.device)


@workspace("_flash_attention_forward")
def flash_forward(call: Call) -> list[int]:
    query, key = call.args[:2]
    if call.arg(3, "cum_seq_q") is not None:
        return []
    (batch, queries, heads, head_dim), keys = query.shape, key.shape[1]
    return _split_keys(batch, heads, queries, keys, head_dim, call.arg(7, "dropout_p", 0.0), call.device)


def _split_keys(batch, heads, queries, keys, head_dim, dropout, device: Device) -> list[int]:
    splits = 1 if dropout else num_splits(batch, heads, queries, keys, head_dim, device.multiprocessors)
    if splits == 1:
        return []
    rows = splits * batch * heads * queries * _FLOAT
    return [rows, rows * _rounded_head_dim(head_dim)]


def num_splits(batch: int, heads: int, queries: int, keys: int, head_dim: int, multiprocessors: int) -> int:
    """Into how many parts flash attention splits the keys. Source: flash_api.cpp, num_splits_heuristic.

    One when there is work for 80 % of twice the multiprocessors; else the fewest that come within 85 % of the best
    use of the last wave of blocks.

    >>> num_splits(1, 12, 128, 2048, 64, 108), num_splits(4, 32, 4096, 4096, 128, 108)
    (8, 1)
    """
    block = 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64
    key_blocks = -(-keys // block)
    work, places = batch * heads * -(-queries // 64), 2 * multiprocessors
    if work >= 0.8 * places:
        return 1
    efficiency = {}
    for splits in range(1, min(128, places, key_blocks) + 1):
        if splits > 1 and -(-key_blocks // splits) == -(-key_blocks // (splits - 1)):
            continue
        waves = work * splits / places
        efficiency[splits] = waves / math.ceil(waves)
    best = max(efficiency.values())
    return next(splits for splits, value in efficiency.items() if value >= 0.85 * best)


# -- memory-efficient attention ----------------------------------------------------------------------------------------


def efficient_backward_workspace(
    batch: int, queries: int, keys: int, heads: int, head_dim: int, value_dim: int, *, half: bool, device: Device
) -> list[int]:
    """delta [B, H, S] in float32, and the accumulators of the kernel that is chosen.

    For every batch and head: the gradient of the queries in tiles of block_i x block_j floats with 16 bytes of locks
    each; where the gradients of keys and values do not fit in registers (half precision above a head size of block_i)
    those too, once a split of the keys. float32 has delta computed outside, from the product of gradient and output.

    Source: aten/src/ATen/native/transformers/cuda/attention_backward.cu (_efficient_attention_backward), and
    mem_eff_attention/kernel_backward.h (Params::workspace_size), kernels/generate_kernels.py (which kernels exist).
    Not modelled: GPUs with too little shared memory for the 128 x 128 kernel fall back to 128 x 64 or 64 x 64.

    >>> efficient_backward_workspace(1, 64, 64, 1, 64, 64, half=True, device=Device())
    [256, 16400]
    """
    block_i, block_j, in_registers = _efficient_blocks(max(head_dim, value_dim), half, device)
    delta = batch * heads * queries * _FLOAT
    tiles = -(-queries // block_i) * -(-head_dim // block_j)
    elements = tiles * (block_i * block_j + 4)
    if half and not in_registers:
        key_blocks = -(-keys // block_j)
        splits = max(1, min(key_blocks, 200 // (batch * heads)))
        elements += splits * _up(keys, block_j) * (_up(head_dim, block_i) + _up(value_dim, block_i))
    accumulators = batch * heads * _up(elements, 4) * _FLOAT
    if half:
        return [delta, accumulators]
    product = batch * queries * heads * value_dim * _FLOAT
    return max([delta, accumulators], [product, delta], key=sum)


def _efficient_blocks(head_dim: int, half: bool, device: Device) -> tuple[int, int, bool]:
    """(block_i, block_j, whether gradients of keys and values stay in registers)."""
    newer = device.compute_capability >= (8, 0)
    block_i = 128 if head_dim > 64 and (newer or (half and device.compute_capability >= (7, 0))) else 64
    in_registers = half and head_dim <= block_i
    return block_i, 128 if in_registers and newer and head_dim > 64 else 64, in_registers


@workspace("_scaled_dot_product_efficient_attention_backward")
def sdpa_efficient_backward(call: Call) -> list[int]:
    """Tensors are [B, H, S, D]; the gradient has to be dense as [B, S, H, D], else it is copied.

    A gradient for the mask has its last dimension rounded up to 16, which the traced result has already.
    """
    grad, query, key, value = call.args[:4]
    (batch, heads, queries, head_dim), keys, value_dim = query.shape, key.shape[2], value.shape[3]
    blocks = efficient_backward_workspace(
        batch, queries, keys, heads, head_dim, value_dim, half=query.itemsize == 2, device=call.device
    )
    return [grad.transposed(1, 2).contiguous_copy_bytes, *blocks]


@workspace("_scaled_dot_product_efficient_attention")
def sdpa_efficient_forward(call: Call) -> list[int]:
    """A float32 accumulator of the output where a row does not fit in registers: half precision, D above 128.

    Source: attention.cu (_efficient_attention_forward), kernel_forward.h (kNeedsOutputAccumulatorBuffer).
    """
    query, _, value = call.args[:3]
    batch, heads, queries, _ = query.shape
    if query.itemsize == 2 and value.shape[3] > 128:
        return [batch * queries * heads * value.shape[3] * _FLOAT]
    return []


# -- cuDNN attention ---------------------------------------------------------------------------------------------------


@workspace("_scaled_dot_product_cudnn_attention_backward")
def cudnn_backward(call: Call) -> list[int]:
    """Assumed: float32 accumulators of the query's gradient and of the rows' sums, as flash attention's algorithm has.

    cuDNN's own plan decides; it is closed. Source of where it is allocated: aten/src/ATen/native/cudnn/MHA.cpp,
    run_cudnn_SDP_bprop.
    """
    query: Tensor = call.args[1]
    batch, heads, queries, head_dim = query.shape
    return [batch * heads * queries * _FLOAT, batch * heads * queries * head_dim * _FLOAT]
