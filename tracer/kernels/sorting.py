"""Sorting and what is made of it: gradients of embeddings and of indexing, scans, masks turned into indices.

cub's temporary storage is computed as cub lays it out: blocks rounded up to 256 bytes, and 255 bytes to align the
first. Source: cub/util_allocator.cuh and cub/device/dispatch/dispatch_radix_sort.cuh (InvokeSingleTile,
InvokeOnesweep); two recorded sorts of torch give 72,191 and 138,751 bytes for 4,096 and 8,192 indices, as this does.
"""

from __future__ import annotations

import math

from metapeak.tracer.kernels.registry import Call, Tensor, itemsize, workspace

_INDEX = 8  # bytes of an int64
_ALIGN = 256
# cub's tuning of its radix sort (policy hubs for compute capability 8.0): threads x items, nominal for 4-byte elements.
_SINGLE_TILE = (256, 19)
_ONESWEEP = (384, 21)
_RADIX_BITS = 8
_PORTION = (1 << 28) - 1


def cub_bytes(*sizes: int) -> int:
    """Temporary storage of cub for parts of these sizes."""
    return sum(-(-size // _ALIGN) * _ALIGN for size in sizes) + _ALIGN - 1


def radix_sort_bytes(count: int, key_bytes: int, value_bytes: int, bits: int) -> int:
    """Temporary storage of cub's radix sort of `count` keys (with values) by `bits` bits.

    Few enough sort in one block. Above: a histogram a digit, states of the blocks, second buffers of keys and values,
    and counters. Not modelled: other tunings of newer GPUs, about 1 KiB in 3,456 items instead of 3,840.

    >>> radix_sort_bytes(2048, 8, 8, 14), radix_sort_bytes(4096, 8, 8, 14), radix_sort_bytes(8192, 8, 8, 14)
    (1, 72191, 138751)
    """
    widest = max(key_bytes, value_bytes, 4)
    threads, nominal = _SINGLE_TILE
    if count <= threads * max(1, nominal * 4 // widest):
        return 1
    threads, nominal = _ONESWEEP
    tile = threads * max(1, nominal * 4 // widest)
    portion = _PORTION // tile * tile
    passes, portions = -(-bits // _RADIX_BITS), -(-count // portion)
    blocks = -(-min(count, portion) // tile)
    again = 0 if passes <= 1 else count
    return cub_bytes(
        portions * passes * (1 << _RADIX_BITS) * 8,
        blocks * (1 << _RADIX_BITS) * 4,
        again * key_bytes,
        again * value_bytes,
        portions * passes * 4,
    )


def scan_bytes(count: int, element_bytes: int) -> int:
    """Temporary storage of a scan, selection or reduction of cub: a state a tile of about 1,920 elements, bounded
    from above. Source: cub/agent/single_pass_scan_operators.cuh, ScanTileState (status and value, 32 tiles of padding).
    """
    return cub_bytes((-(-count // 1920) + 32) * 2 * max(element_bytes, 4))


# -- gradients of embeddings and indexing ------------------------------------------------------------------------------


@workspace("embedding_dense_backward")
def embedding_backward(call: Call) -> list[int]:
    """Nothing for up to 3,072 indices, unless gradients are scaled by frequency; above, indices are sorted and rows of
    equal ones summed in parts of ten.

    Alive beside the result: sorted and original positions, offsets and counts of segments of equal indices, and the
    float32 sums of the parts, [indices / 10 + distinct indices, D]; the number of distinct ones is taken as its bound,
    min(indices, rows of the table), as torch does.
    Source: aten/src/ATen/native/cuda/Embedding.cu (embedding_dense_backward_cuda), EmbeddingBackwardKernel.cu.
    """
    grad, indices, rows = call.args[:3]
    scaled = bool(call.arg(4, "scale_grad_by_freq", False))
    count, index = indices.numel, indices.itemsize
    copies = [grad.contiguous_copy_bytes, indices.contiguous_copy_bytes]
    if count <= 3072 and not scaled:
        return copies
    segments = min(count, rows)
    parts = count // 10 + segments
    positions = [count * index] * (3 if scaled else 2)
    of_segments = [segments * index] * 3 + [parts * index] + [_INDEX] * 2
    width = grad.shape[-1]
    return [*copies, *positions, *of_segments, parts * width * max(4, grad.itemsize)]


@workspace("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(call: Call) -> list[int]:
    """Accumulating: the linear index, its order (sorted, original, range) and cub's storage, and values that have to be
    expanded. Writing takes nothing beyond the indices that masks become.

    Source: aten/src/ATen/native/cuda/Indexing.cu, index_put_with_sort_kernel, and TensorAdvancedIndexing.cpp.
    """
    table, indices, values = call.args[:3]
    of_masks = _mask_indices(table, indices, call)
    if not call.arg(3, "accumulate", False):
        return of_masks
    count, covered = _indexed(indices, of_masks)
    slice_elements = math.prod(table.shape[covered:])
    expanded = count * slice_elements
    copy = values.nbytes if values.numel == expanded and not values.is_contiguous else 0
    copy = expanded * values.itemsize if values.numel != expanded else copy
    bits = max(1, (math.prod(table.shape[:covered]) - 1).bit_length())
    order = [count * _INDEX] * 4 + [radix_sort_bytes(count, _INDEX, _INDEX, bits)] if count else []
    return [*of_masks, copy, *order]


def _indexed(indices, of_masks) -> tuple[int, int]:
    """(number of index tuples, dimensions that they cover), the leading ones taken."""
    extents, covered = [1], 0
    for item in indices:
        if item is None:
            continue
        masked = item.dtype in ("bool", "uint8")
        covered += len(item.shape) if masked else 1
        extents.append((of_masks[0] // _INDEX) if masked and of_masks else item.numel)
    return max(extents), covered


@workspace("index", "_unsafe_index", "masked_select")
def index(call: Call) -> list[int]:
    """Indices of a mask's true elements, int64 for each of its dimensions. Source: TensorAdvancedIndexing.cpp,
    IndexingUtils.h (expandTensors).
    """
    table, indices = call.args[:2]
    if isinstance(indices, Tensor):
        return [call.outputs[0].numel * len(indices.shape) * _INDEX]
    return _mask_indices(table, indices, call)


def _mask_indices(table: Tensor, indices, call: Call) -> list[int]:
    blocks = []
    for item in indices:
        if item is None or item.dtype not in ("bool", "uint8"):
            continue
        output = call.outputs[0] if call.op.split(".")[1] in ("index", "_unsafe_index") else None
        chosen = item.numel  # of a write, how many are true is not recorded: at most all
        if output is not None:
            rest = max(1, table.numel // max(1, item.numel))
            chosen = output.numel // rest
        elif not call.arg(3, "accumulate", False) and call.args[2].numel == 1:
            return []  # masked_fill
        blocks.append(chosen * len(item.shape) * _INDEX)
    return blocks


@workspace("masked_scatter")
def masked_scatter(call: Call) -> list[int]:
    """An int64 prefix sum as large as the tensor, and cub's storage. Source: IndexKernel.cpp (masked_scatter__cuda)."""
    tensor, mask = call.args[:2]
    return [tensor.numel * _INDEX, mask.contiguous_copy_bytes, scan_bytes(tensor.numel, _INDEX)]


@workspace("repeat_interleave")
def repeat_interleave(call: Call) -> list[int]:
    """The cumulative repeats. Source: aten/src/ATen/native/Repeat.cpp, repeat_interleave_common."""
    repeats = call.args[0] if call.overload == "Tensor" else call.arg(1, "repeats")
    return [repeats.numel * _INDEX] if isinstance(repeats, Tensor) else []


# -- sorting and scanning ----------------------------------------------------------------------------------------------


@workspace("sort", "argsort")
def sort(call: Call) -> list[int]:
    """Nothing for rows of at most 4,096 elements, sorted in shared memory; above by the number of rows: one at a time
    (indices), up to 127 at once (two pairs of row and index an element, and keys), or a segmented sort.

    Source: aten/src/ATen/native/cuda/Sort.cpp (should_use_small_sort), SortStable.cu.
    """
    tensor = call.args[0]
    stable = call.overload.endswith("stable")
    dim = call.arg(2 if stable else 1, "dim", -1)
    rows_of = tensor.shape[dim % len(tensor.shape)] if tensor.shape else 1
    if rows_of <= 4096 or not tensor.numel:
        return []
    rows, key = tensor.numel // rows_of, tensor.itemsize
    bits = key * 8
    if rows == 1 or rows_of >= 1_000_000:
        return [rows_of * _INDEX, radix_sort_bytes(rows_of, key, _INDEX, bits)]
    if rows < 128:
        storage = radix_sort_bytes(tensor.numel, key, _INDEX, bits)
        return [tensor.numel * _INDEX, tensor.numel * _INDEX, tensor.nbytes, storage]
    return [tensor.numel * _INDEX, cub_bytes(tensor.nbytes, tensor.numel * _INDEX)]


@workspace("cumsum", "cumprod", "logcumsumexp")
def cumulative(call: Call) -> list[int]:
    """cub's storage where the whole tensor is one row; other scans need none. Source: ScanUtils.cuh, scan_dim."""
    tensor, dim = call.args[0], call.arg(1, "dim", 0)
    if not tensor.shape or tensor.shape[dim % len(tensor.shape)] != tensor.numel:
        return []
    return [scan_bytes(tensor.numel, call.outputs[0].itemsize)]


@workspace("nonzero", "nonzero_static")
def nonzero(call: Call) -> list[int]:
    """Counts and cub's storage. Source: aten/src/ATen/native/cuda/Nonzero.cu."""
    return [4, scan_bytes(call.args[0].numel, 4)]


@workspace("_unique2", "unique_consecutive", "unique_dim", "unique_dim_consecutive")
def unique(call: Call) -> list[int]:
    """A sorted copy with its order and cub's storage. Source: aten/src/ATen/native/cuda/UniqueCub.cu."""
    tensor = call.args[0]
    storage = radix_sort_bytes(tensor.numel, tensor.itemsize, _INDEX, tensor.itemsize * 8)
    return [tensor.nbytes, tensor.numel * _INDEX, tensor.numel * _INDEX, storage]


@workspace("randperm")
def randperm(call: Call) -> list[int]:
    """Random keys, the range and cub's storage. Source: aten/src/ATen/native/cuda/Randperm.cu."""
    count, index = call.outputs[0].numel, itemsize(call.outputs[0].dtype)
    return [count * 4, count * 4, count * index, radix_sort_bytes(count, 4, index, 32)] if count else []


@workspace("multinomial")
def multinomial(call: Call) -> list[int]:
    """Exponential noise as large as the probabilities. Source: aten/src/ATen/native/Distributions.cpp, multinomial."""
    return [call.args[0].nbytes]
