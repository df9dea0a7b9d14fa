"""Weights on one rank of an engine: the real module's storages, cut as engines cut them.

What it changes: nothing; it reads the module on meta, after the quantisation strategies changed it.
Where each byte comes from: the storages of parameters and buffers, tied ones once; matrices in a format without layers
here (float8, GGUF) by the format's blocks. Tensor parallelism: the model's own plan, and a table of rows of the
vocabulary cut over ranks (vllm/model_executor/layers/vocab_parallel_embedding.py pads it to a multiple of 64). Keys'
and values' projections are cut over at most as many ranks as there are heads of them. Pipeline parallelism: blocks over
stages, what is left over to the last but one (vllm/distributed/utils.py, get_pp_indices), the embedding on the first,
norm and head on the last.
Not modelled: layouts that kernels make of weights after loading (Marlin's tiles, padded experts).
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metapeak.strategies.serving.formats import FORMATS

if TYPE_CHECKING:
    from torch import nn

VOCABULARY_PADDING = 64
_KEY_VALUE = ("k_proj", "v_proj", "key", "value")


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """One storage: the module that holds it, its tensor's name and shape, its bytes, and the block it is in (None:
    before the first block, or `last` for what comes after the blocks).
    """

    module: str
    name: str
    nbytes: int
    shape: tuple[int, ...]
    block: int | None
    kind: str


def weights_of(model: nn.Module, quantization: str | None, num_blocks: int) -> list[Weight]:
    """Every storage of weights and buffers once. `num_blocks` is the number of the decoder's layers."""
    from torch import nn

    packing = FORMATS.get(quantization or "")
    head = _head_of(model)
    blocks = _decoder_blocks(model, num_blocks)
    left_out = getattr(model, "metapeak_not_packed", ())
    found: list[Weight] = []
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in seen:
                continue
            seen.add(storage._cdata)
            nbytes = storage.nbytes()
            linear = isinstance(module, nn.Linear) and name == "weight" and module is not head
            experts = name in module._parameters and tensor.dim() == 3
            if packing is not None and (linear or experts) and not _matches(path, left_out):
                nbytes = packing.bytes_of(tensor.numel() // tensor.shape[-1], tensor.numel())
            kind = "embedding" if isinstance(module, nn.Embedding) else "head" if module is head else "other"
            found.append(
                Weight(
                    module=path,
                    name=name,
                    nbytes=nbytes,
                    shape=tuple(tensor.shape),
                    block=_block_of(path, blocks),
                    kind=kind,
                )
            )
    return found


def padded_vocabulary_bytes(model: nn.Module) -> int:
    """Bytes that tables of the vocabulary grow by when their rows are padded to a multiple of 64; tied ones once."""
    tables = {}
    for get in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, get)()
        weight = getattr(module, "weight", None)
        if weight is not None and weight.dim() == 2:
            tables[weight.untyped_storage()._cdata] = weight
    return sum(
        (-weight.shape[0] % VOCABULARY_PADDING) * weight.shape[1] * weight.element_size() for weight in tables.values()
    )


def rotary_tables(model: nn.Module) -> list[tuple[int, ...]]:
    """Shapes [positions, rotary size] of the tables of cosines and sines that an engine computes beforehand, one for
    each distinct rotary embedding of the decoder. Source: vllm/model_executor/layers/rotary_embedding (cos_sin_cache in
    the weights' dtype, get_rope's dictionary).
    """
    text = model.config.get_text_config(decoder=True)
    positions = getattr(text, "max_position_embeddings", None)
    found = {}
    for path, module in model.named_modules():
        if any(word in path for word in ("vision", "visual", "audio")):
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and name.endswith("inv_freq") and not name.startswith("original"):
                found[name, buffer.numel()] = (positions, 2 * buffer.numel())
    return list(found.values()) if isinstance(positions, int) else []


# Projections that engines keep as one matrix. Source: packed_modules_mapping of vllm's model classes.
_MERGED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


def allocated_bytes(sizes: list[tuple[str, int]]) -> int:
    """What torch.cuda.memory_allocated shows after storages of (module path, bytes) were made one by one, projections
    of one module merged: blocks of the caching allocator.
    """
    from metapeak.tracer.device.address_space import InventedAddresses
    from metapeak.tracer.device.allocator import CachingAllocator
    from metapeak.tracer.device.allocator_config import DEFAULT_CONFIG

    merged: dict[tuple[str, str], int] = {}
    for number, (path, nbytes) in enumerate(sizes):
        parent, _, last = path.rpartition(".")
        key = (parent, _MERGED[last]) if last in _MERGED else (path, str(number))
        merged[key] = merged.get(key, 0) + nbytes
    allocator = CachingAllocator(DEFAULT_CONFIG, InventedAddresses())
    return sum(allocator.malloc(nbytes).size for nbytes in merged.values() if nbytes)


def stages_of(num_blocks: int, pp: int) -> list[range]:
    """The decoder's blocks of each pipeline stage, as vLLM cuts them.

    >>> stages_of(32, 2), [len(stage) for stage in stages_of(30, 4)]
    ([range(0, 16), range(16, 32)], [7, 8, 8, 7])
    """
    sizes = [num_blocks // pp] * pp
    left = num_blocks % pp
    for position in range(2, left + 2):  # from the last but one backwards
        sizes[-position] += 1
    starts = [sum(sizes[:stage]) for stage in range(pp)]
    return [range(start, start + size) for start, size in zip(starts, sizes)]


def rank_sizes(
    weights: list[Weight], plan: dict[str, str], *, tp: int, stage: int, stages: list[range], kv_heads: int
) -> list[tuple[str, int]]:
    """(module, bytes) of every storage on one rank of `tp` of a pipeline stage."""
    first, last = stage == 0, stage == len(stages) - 1
    found = []
    for weight in weights:
        if weight.block is None:
            after = weight.kind == "head" or (weight.kind == "other" and len(weight.shape) == 1)
            here = (last if after else first) or (weight.kind == "embedding" and last and len(stages) == 1)
        else:
            here = weight.block in stages[stage]
        if here:
            found.append((weight.module, -(-weight.nbytes // cuts(weight, plan, tp=tp, kv_heads=kv_heads))))
    return found


def cuts(weight: Weight, plan: dict[str, str], *, tp: int, kv_heads: int) -> int:
    """Over how many ranks a storage is cut.

    >>> q = Weight(module="layers.0.q_proj", name="weight", nbytes=64, shape=(8, 4), block=0, kind="other")
    >>> cuts(q, {"layers.*.q_proj": "colwise"}, tp=2, kv_heads=8), cuts(q, {}, tp=2, kv_heads=8)
    (2, 1)
    """
    if tp == 1:
        return 1
    if weight.kind in ("embedding", "head"):
        return tp
    full = f"{weight.module}.{weight.name}" if weight.module else weight.name
    style = next(
        (
            style
            for pattern, style in plan.items()
            if any(fnmatch.fnmatchcase(x, pattern) for x in (weight.module, full))
        ),
        None,
    )
    if style is None or style.startswith(("replicated", "mla_kv_a", "sequence")):
        return 1
    if len(weight.shape) == 1 and style.startswith("rowwise"):
        return 1  # the bias is added after the reduction
    if weight.module.rpartition(".")[2] in _KEY_VALUE:
        return min(tp, kv_heads)
    return tp


def plan_of(model: nn.Module, weights: list[Weight]) -> tuple[dict[str, str], str | None]:
    """(the model's tensor parallel plan, what to say where it says nothing of the blocks: then every matrix is cut)."""
    plan = dict(getattr(model, "tp_plan", None) or {})
    inside = {weight.module for weight in weights if weight.block is not None}
    if any(fnmatch.fnmatchcase(path, pattern) for pattern in plan for path in inside):
        return plan, None
    matrices = {weight.module: "colwise" for weight in weights if weight.block is not None and len(weight.shape) >= 2}
    return plan | matrices, (
        f"{type(model).__name__} has no tensor parallel plan for its blocks in transformers: every matrix of a block "
        "is taken to be cut over the ranks"
    )


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether a module is named by a checkpoint's list: a name, its end, a parent or `re:` and an expression."""
    return any(
        re.match(pattern[3:], path) is not None
        if pattern.startswith("re:")
        else path == pattern or path.startswith(pattern + ".") or path.endswith("." + pattern)
        for pattern in patterns
    )


def _head_of(model: nn.Module) -> nn.Module | None:
    get = getattr(model, "get_output_embeddings", None)
    return get() if get is not None else None


def _decoder_blocks(model: nn.Module, num_blocks: int) -> dict[str, int]:
    """Path -> number of the decoder's blocks: the run of blocks of one parent that has `num_blocks` of them."""
    from metapeak.tracer.blocks import block_names

    by_parent: dict[str, list[str]] = {}
    for name in block_names(model):
        by_parent.setdefault(name.rpartition(".")[0], []).append(name)
    fitting = [names for names in by_parent.values() if len(names) == num_blocks]
    # Of an encoder and a decoder of the same depth the decoder comes last.
    return {name: number for number, name in enumerate(fitting[-1])} if fitting else {}


def _block_of(path: str, blocks: dict[str, int]) -> int | None:
    parts = path.split(".")
    return next((blocks[p] for end in range(len(parts), 0, -1) if (p := ".".join(parts[:end])) in blocks), None)
