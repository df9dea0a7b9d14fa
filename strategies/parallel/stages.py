"""Stages of a pipeline, cut from a causal language model of transformers: which blocks, and the module that remains.

A stage keeps the model's class and paths. Blocks of other stages let their input through, and so do the embedding
outside the first stage and final norm and head outside the last; between stages go the hidden states, which a later
stage takes as `inputs_embeds`. Where a model does more than that between its blocks, its first run says so and is
refused.
Sources: torchtitan distributed/pipeline_parallel.py (pipeline_module_split, generate_llm_fqn_per_model_part).
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from metapeak.tracer.blocks import block_names
from metapeak.tracer.errors import InputError


class Passed(nn.Module):
    """Stands where another stage has its module: what comes in goes out, in a tuple where blocks return one."""

    def __init__(self, *, in_tuple: bool = False):
        super().__init__()
        self._in_tuple = in_tuple

    def forward(self, hidden, *args, **kwargs):
        return (hidden,) if self._in_tuple else hidden


@dataclass(frozen=True, kw_only=True)
class StageParts:
    """Where the parts of a model are that stages share out: paths of its blocks, embeddings, final norm and head."""

    blocks: tuple[str, ...]
    embeddings: tuple[str, ...]
    after: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module) -> StageParts:
        """Raises InputError for a model that is not built like that."""
        name = type(model).__name__
        embedding = getattr(model, "get_input_embeddings", lambda: None)()
        head = getattr(model, "get_output_embeddings", lambda: None)()
        base = getattr(model, getattr(model, "base_model_prefix", "") or "-", None)
        blocks = block_names(model)
        if embedding is None or head is None or not isinstance(base, nn.Module) or not blocks:
            raise InputError(f"pp: {name} is no causal language model of transformers with blocks and a head to cut.")
        owners = {block.rpartition(".")[0] for block in blocks}
        if len(owners) > 1:
            raise InputError(
                f"pp: the blocks of {name} are in {', '.join(sorted(owners))}: a pipeline has one chain of blocks."
            )
        paths = {id(part): path for path, part in model.named_modules()}
        owner = owners.pop()
        parent, _, container = owner.rpartition(".")
        siblings = list(model.get_submodule(parent).named_children())
        later = siblings[[child for child, _ in siblings].index(container) + 1 :]
        norms = [
            f"{parent}.{child}" if parent else child
            for child, part in later
            if "norm" in (child + type(part).__name__).lower() or child == "ln_f"
        ]
        return cls(blocks=tuple(blocks), embeddings=(paths[id(embedding)],), after=(*norms, paths[id(head)]))


def split_blocks(
    blocks: Sequence[str], stages: int, split: Sequence[str] | None = None
) -> tuple[list[range], tuple[str, ...]]:
    """(the blocks of every stage, sentences for the report).

    `split` are the first blocks of all later stages, as numbers or module paths. Without one, stages are equal; where
    blocks do not divide, the embedding and the head count as a block each and earlier stages get one more, as in
    torchtitan. Raises InputError where that is not possible.
    """
    count = len(blocks)
    if stages > count:
        raise InputError(
            f"{stages} stages, but the model has {count} blocks, and every stage needs one: stages <= blocks."
        )
    if split:
        cuts = [0, *(_cut(entry, blocks) for entry in split), count]
        if len(cuts) - 1 != stages:
            raise InputError(
                f"pp_split has {len(split)} cuts, which make {len(cuts) - 1} stages, but there are {stages} "
                "(pp x virtual stages); cuts = stages - 1."
            )
        if any(first >= after for first, after in pairwise(cuts)):
            raise InputError(
                f"pp_split {', '.join(map(str, split))}: first blocks have to rise from 1 to {count - 1}, the last."
            )
        return [range(first, after) for first, after in pairwise(cuts)], ()
    whole, rest = divmod(count, stages)
    if not rest:
        return [range(stage * whole, (stage + 1) * whole) for stage in range(stages)], ()
    layers, more = divmod(count + 2, stages)
    sizes = [layers + (stage < more) for stage in range(stages)]
    sizes[0], sizes[-1] = sizes[0] - 1, sizes[-1] - 1
    how = "as torchtitan counts, embedding and head as a block each"
    if min(sizes) < 1:  # a stage would have the embedding or the head alone
        sizes, how = [whole + (stage < rest) for stage in range(stages)], "earlier stages have one more"
    note = (
        f"{count} blocks / {stages} stages = {count / stages:.2f} is no whole number: stages have "
        f"{', '.join(map(str, sizes))} blocks ({how}); --pp-split names other cuts"
    )
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes)], (note,)


def _cut(entry: str, blocks: Sequence[str]) -> int:
    if entry.isdigit():
        return int(entry)
    if entry in blocks:
        return blocks.index(entry)
    inside = next((block for block in blocks if entry.startswith(block + ".")), None)
    if inside is not None:
        raise InputError(f"pp_split {entry} is inside the block {inside}; stages are cut between blocks.")
    raise InputError(f"pp_split: the model has no block {entry!r}. Its blocks: {blocks[0]} ... {blocks[-1]}.")


def stage_module(model: nn.Module, blocks: range, stage: int, num_stages: int) -> nn.Module:
    """A copy of the model that holds the given blocks alone, and runs from hidden states to hidden states.

    The first stage takes token ids, the last one returns logits. Tied weights that lie on two stages are two.
    """
    parts = StageParts.of(model)
    first, last = stage == 0, stage == num_stages - 1
    in_tuple = _returns_tuple(model.get_submodule(parts.blocks[0]))
    memo: dict[int, object] = {}
    for number, name in enumerate(parts.blocks):
        if number not in blocks:
            memo[id(model.get_submodule(name))] = Passed(in_tuple=in_tuple)
    for name in (() if first else parts.embeddings) + (() if last else parts.after):
        memo[id(model.get_submodule(name))] = Passed()
    copied = copy.deepcopy(model, memo)
    own = [parts.blocks[number] for number in blocks]
    copied.forward = functools.partial(_forward, copied, type(model), own, first, last)
    return copied


def _returns_tuple(block: nn.Module) -> bool:
    """Its annotation may say so and its code return the bare hidden states (Gemma 3); the code is right."""
    forward = inspect.unwrap(type(block).forward)
    returned = re.findall(r"^\s*return (.+)$", inspect.getsource(forward), flags=re.MULTILINE)
    if returned and re.fullmatch(r"\w*hidden_states", returned[-1].strip()):
        return False
    return "tuple" in str(inspect.signature(forward).return_annotation).lower()


def _forward(model, kind, own, first, last, hidden, **given):
    """What a stage computes; raises InputError where the model does something to the hidden states on their way."""
    seen: dict[str, torch.Tensor] = {}
    begin, end = (model.get_submodule(name) for name in (own[0], own[-1]))
    handles = [
        begin.register_forward_pre_hook(_note_input(seen), with_kwargs=True),
        end.register_forward_hook(_note_output(seen)),
    ]
    inputs = {"input_ids" if first else "inputs_embeds": hidden, "use_cache": False, **given}
    try:
        base = getattr(model, model.base_model_prefix)
        output = kind.forward(model, **inputs).logits if last else base(**inputs)[0]
    finally:
        for handle in handles:
            handle.remove()
    if not first and not _is_same(seen.get("input"), hidden):
        raise InputError(f"pp: {kind.__name__} changes its inputs_embeds before its blocks; later stages cannot do so.")
    if not last and not _is_same(seen.get("output"), output):
        raise InputError(f"pp: {kind.__name__} changes the hidden states after its blocks in ways that stages cannot.")
    return output


def _is_same(one, other) -> bool:
    """Whether two tensors are the same memory: FSDP hands on views of what it is given."""
    one, other = getattr(one, "_local_tensor", one), getattr(other, "_local_tensor", other)
    if one is None or one.shape != other.shape:
        return False
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _note_input(seen):
    def note(module, args, kwargs):
        seen["input"] = args[0] if args else kwargs.get("hidden_states")

    return note


def _note_output(seen):
    def note(module, args, output):
        seen["output"] = output[0] if isinstance(output, tuple) else output

    return note
