"""Sequence parallelism on top of a tensor parallel plan, by torch's own styles, placed as torchtitan places them.

What it changes: the embedding's result, residuals and norms are DTensors cut along the sequence; a block's attention
and feed-forward gather it before their column-wise products and reduce-scatter it after the row-wise ones; parameters
of norms are replicated DTensors. The head gathers, too; its logits are whole, or stay cut over the vocabulary.
Where each byte comes from: `parallelize_module` with ColwiseParallel, RowwiseParallel, SequenceParallel and
PrepareModuleInput. transformers 5.24 has no sequence parallelism of its own ("Not wired up yet").
Sources: torchtitan models/llama3/parallelize.py (apply_tp); torch/distributed/tensor/parallel/style.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from metapeak.tracer.blocks import block_names
from metapeak.tracer.errors import InputError


def apply_sequence_parallelism(
    module: torch.nn.Module, mesh: DeviceMesh, plan: Mapping[str, str], *, sharded_logits: str | None = None
) -> None:
    """Cut the module in place. `plan` has a style of transformers by path; `sharded_logits` names the head whose logits
    stay cut. Raises InputError for styles and modules that have no counterpart.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    parameters = {name for name, _ in module.named_parameters()}
    styles: dict[str, Any] = {}
    own: dict[str, str] = {}
    for name, style in plan.items():
        if style == "replicated_with_grad_allreduce":  # norms of heads: they see whole sequences
            own[name] = style
        elif name not in parameters:
            styles[name] = _style(name, style)
    if sharded_logits is not None:
        styles[sharded_logits] = _sharded_logits()
    styles |= _between(module, {*styles, *own})
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    apply_tensor_parallelism(module, mesh, own)
    parallelize_module(module, mesh, styles)
    for name, parameter in module.named_parameters():  # torch's SequenceParallel forgets what is frozen
        parameter.requires_grad_(trained[name])


def pass_parts_between_stages(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    """A stage of a pipeline then takes and returns this rank's part of hidden states, as a plain tensor: what it does
    in between are DTensors, but neighbours send the part alone (torchtitan's parts are plain everywhere).
    """
    forward = module.forward

    def of_parts(hidden: torch.Tensor, **given: Any) -> Any:
        if hidden.is_floating_point():  # not token ids
            hidden = DTensor.from_local(hidden, mesh, (Shard(1),), run_check=False)
        output = forward(hidden, **given)
        cut = isinstance(output, DTensor) and output.placements == (Shard(1),)
        return output.to_local() if cut else output

    module.forward = of_parts


def apply_loss_parallelism(module: torch.nn.Module, mesh: DeviceMesh, head: str) -> None:
    """Cut the head alone, its logits left in parts."""
    parallelize_module(module, mesh, {head: _sharded_logits()})


def _sharded_logits() -> Any:
    return ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)


def _style(name: str, style: str) -> Any:
    """torch's style for one of transformers, its result cut along the sequence where that one's is whole."""
    part: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False}
    whole: dict[str, Any] = {"output_layouts": Replicate()}
    known = {
        "colwise": ColwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(**whole),
        "colwise_rep": lambda: ColwiseParallel(**whole),
        "rowwise": lambda: RowwiseParallel(**part),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate(), **part),
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate(), **part),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate(), **part),
        "embedding_colwise": lambda: ColwiseParallel(**part),
    }
    if style not in known:
        raise InputError(
            f"sequence_parallel: {name} has style {style}, which has no counterpart in torch's styles. "
            f"Styles that have: {', '.join(known)}."
        )
    return known[style]()


def _between(module: torch.nn.Module, planned: Collection[str]) -> dict[str, Any]:
    """Styles of what stands between the planned layers: norms on parts, containers of planned layers gather.

    Raises InputError for a module with parameters that is neither.
    """
    blocks = block_names(module)
    above = {"", *(".".join(parts[:depth]) for parts in map(_parts, blocks) for depth in range(1, len(parts)))}
    styles: dict[str, Any] = {}
    for parent in [*above, *blocks]:
        for child, part in module.get_submodule(parent).named_children():
            name = f"{parent}.{child}" if parent else child
            if name in above or name in blocks or name in planned or not any(True for _ in part.parameters()):
                continue
            if parent in blocks and any(one.startswith(name + ".") for one in planned):
                styles[name] = _GatherSequence()
            elif "norm" in type(part).__name__.lower():
                styles[name] = SequenceParallel()
            else:
                raise InputError(
                    f"sequence_parallel: {name} ({type(part).__name__}) has parameters, but is no norm and has no "
                    "style in the plan, so it is not known what it does with a part of the sequence."
                )
    return styles


def _parts(name: str) -> list[str]:
    return name.split(".")


class _GatherSequence(ParallelStyle):
    """What PrepareModuleInput does, for whichever inputs of the module are cut along the sequence: transformers calls
    attention by name and feed-forward by position.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def gathered(value: Any) -> Any:
            if isinstance(value, DTensor) and value.placements == (Shard(1),):
                return value.redistribute(placements=(Replicate(),))
            return value

        def hook(module, inputs, named):
            return tuple(map(gathered, inputs)), {name: gathered(value) for name, value in named.items()}

        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module
