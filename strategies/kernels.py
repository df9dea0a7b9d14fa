"""Fused kernels in place of a model's own modules, as the option `kernels` names them.

What it changes: the forwards of norms, of attentions (rotary embeddings, projections with LoRA) and the cross entropy
that the loss path calls; each becomes an autograd function that allocates what the library's does.
Where each byte comes from: see the files in strategies/fused_kernels/. The kernels themselves allocate nothing.
Not modelled: the tables that Triton's autotuner and its launchers keep on the host.
Sources: Unsloth's kernels as fms-acceleration carries them (plugins/fused-ops-and-kernels, at 876e2ed).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from metapeak.strategies.base import NoOpStrategy
from metapeak.tracer.errors import UnknownName

if TYPE_CHECKING:
    import torch

    from metapeak.tracer.graph import StepGraph

KERNELS = {
    "fused-rmsnorm": "RMSNorm as Unsloth's kernel: the input's gradient takes the place of the output's, no gradient "
    "of the weight",
    "fused-rope": "rotary embeddings as Unsloth's kernel: queries and keys are rotated in place",
    "fused-cross-entropy": "cross entropy as Unsloth's kernel: no log-probabilities, the gradient of the logits takes "
    "their place",
    "fused-lora": "attention projections with LoRA on nf4 as Unsloth's function: dequantised once in forward and once "
    "in backward, the input after dropout saved",
}


def check_kernels(names: tuple[str, ...]) -> None:
    """Raise UnknownName for a kernel that is not known."""
    for name in names:
        if name not in KERNELS:
            raise UnknownName("kernel", name, KERNELS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels(NoOpStrategy):
    """Fused kernels by name, see KERNELS. One that finds no place in the model changes nothing, and a note says so.

    Goes behind the loss path and the adapters: it works on what they made. Raises UnknownName.
    """

    names: tuple[str, ...]
    name = "kernels"

    def __post_init__(self) -> None:
        check_kernels(self.names)

    def prepare(self, module: torch.nn.Module) -> torch.nn.Module:
        from metapeak.strategies.fused_kernels.cross_entropy import use_cross_entropy
        from metapeak.strategies.losses.output_head import causal_lm

        for name in self.names:
            if name == "fused-cross-entropy":
                use_cross_entropy(causal_lm(module))
            else:
                for place in _file_of(name).places(module):
                    _file_of(name).use(place)
        return module

    def notes(self, module: torch.nn.Module) -> tuple[str, ...]:
        return tuple(
            f"{name} changes nothing: the model has no place for it"
            for name in self.names
            if name != "fused-cross-entropy" and not _file_of(name).places(module)
        )

    def remarks(self, graph: StepGraph) -> tuple[str, ...]:
        if "fused-cross-entropy" not in self.names or "metapeak.unsloth_cross_entropy.default" in graph.op_names:
            return ()
        return ("fused-cross-entropy changes nothing: this loss path does not call torch's cross entropy",)

    def assumptions(self) -> tuple[str, ...]:
        return tuple(f"{name}: {KERNELS[name]}" for name in self.names)


def _file_of(name: str):
    """The file of a kernel for modules: `places` lists what it goes into, `use` puts it there."""
    from metapeak.strategies.fused_kernels import lora, norm, rope

    return {"fused-rmsnorm": norm, "fused-rope": rope, "fused-lora": lora}[name]
