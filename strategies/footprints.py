"""Side by side: what the same model needs when it is pre-trained, fine-tuned, or trained through adapters.

What it changes: nothing; a case is a set of options, and each is simulated on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from metapeak.tracer.device.overheads import overheads
from metapeak.tracer.errors import MetapeakError
from metapeak.tracer.gpus import Gpu, all_gpus
from metapeak.tracer.liveness import Category
from metapeak.tracer.simulation import Simulation, Verdict

# Tokens a sample of pre-training, or the model's maximum if that is less.
PRETRAINING_SEQ_LEN = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A way to train: its name and the options that make it. `long` asks for sequences as pre-training has them."""

    name: str
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    long: bool = False


STANDARD_CASES = (
    Case(name="pre-training", options={"method": "full", "precision": "bf16-mixed"}, long=True),
    Case(name="full fine-tune", options={"method": "full"}),
    Case(name="LoRA", options={"method": "lora"}),
    Case(name="QLoRA", options={"method": "qlora"}),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Footprint:
    """One case simulated, or refused with the reason. `smallest_gpu` is the smallest of the catalogue that holds it."""

    case: Case
    simulation: Simulation | None = None
    refused: str | None = None
    smallest_gpu: Gpu | None = None

    @property
    def states_bytes(self) -> int:
        """Model states at the peak: parameters, gradients, optimizer states and buffers."""
        states = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE, Category.BUFFER)
        return self._bytes(states)

    @property
    def activation_bytes(self) -> int:
        """Activations and temporaries at the peak."""
        return self._bytes((Category.ACTIVATION, Category.TEMPORARY))

    def _bytes(self, categories: Iterable[Category]) -> int:
        breakdown = self.simulation.worst.breakdown
        return sum(breakdown.get(category, 0) for category in categories)


def footprints(cases: Iterable[Case], run: Callable[[Case], Simulation]) -> list[Footprint]:
    """Each case simulated by `run`, in order; one that cannot be is kept with its reason."""
    results = []
    for case in cases:
        try:
            simulation = run(case)
        except MetapeakError as error:
            results.append(Footprint(case=case, refused=str(error)))
            continue
        results.append(Footprint(case=case, simulation=simulation, smallest_gpu=smallest_gpu(simulation)))
    return results


def smallest_gpu(simulation: Simulation, gpus: Iterable[Gpu] | None = None) -> Gpu | None:
    """The GPU with the least usable memory that holds the worst rank with its overheads; None when none does."""
    worst = simulation.worst
    fitting = [
        gpu
        for gpu in (all_gpus() if gpus is None else gpus)
        if replace(worst, overheads=overheads(gpu, worst.overheads.groups)).fit_on(gpu).verdict is Verdict.FITS
    ]
    return min(fitting, key=lambda gpu: (gpu.usable_bytes, gpu.marketed_gb, gpu.id), default=None)
