"""One model on several GPUs: which hold it, and which of those is cheapest.

What it changes: nothing; it serves once for every GPU, for kernels and engines' defaults differ between them.
Where each number comes from: serve.py; prices from tracer/instances.py, as the share of an instance that one replica
takes.
Not modelled: prices of cards that no instance of the catalogue has; those come last.
Sources: see those files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from metapeak.strategies.serving.serve import Serving
from metapeak.strategies.serving.settings import serve_resolved
from metapeak.strategies.serving.speed import Cost
from metapeak.tracer.errors import InputError
from metapeak.tracer.gpus import find_gpu
from metapeak.tracer.instances import instances_with
from metapeak.tracer.simulation import Option, Verdict


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A GPU with what serving on it gives, or why it cannot (`refused`). `price_hour` is that of one replica on the
    cheapest instance (None: no instance has the card).
    """

    gpu: str
    serving: Serving | None = None
    refused: str | None = None
    price_hour: float | None = None

    @property
    def fits(self) -> bool:
        """Whether the asked sequences fit at the worst end of every range."""
        return self.serving is not None and self.serving.fit.verdict is Verdict.FITS

    @property
    def cheapest(self) -> Cost | None:
        costs = self.serving.costs if self.serving is not None else ()
        return min(costs, key=lambda cost: cost.instance.price_hour / cost.replicas, default=None)


def compare_gpus(
    reference: str, options: Mapping[str, Option], *, progress: Callable[[str], None] = lambda what: None
) -> list[Candidate]:
    """A candidate for each GPU that the option `gpu` names, separated by commas: those that fit first, cheapest first.

    Raises UnknownName for a name that is no GPU's, and what `serve` raises when no GPU can serve the model.
    """
    names = [find_gpu(name.strip()).id for name in options["gpu"].value.split(",") if name.strip()]
    ranks = options["tp"].value * options["pp"].value
    candidates = []
    for name in dict.fromkeys(names):
        chosen = dict(options) | {"gpu": replace(options["gpu"], value=name)}
        price = min(
            (item.price_hour / (int(item.count) // ranks) for item in instances_with(find_gpu(name), ranks)),
            default=None,
        )
        try:
            serving = serve_resolved(reference, chosen, progress=lambda what, name=name: progress(f"{name}: {what}"))
        except InputError as error:
            candidates.append(Candidate(gpu=name, refused=str(error), price_hour=price))
        else:
            candidates.append(Candidate(gpu=name, serving=serving, price_hour=price))
    if all(candidate.serving is None for candidate in candidates):
        raise InputError(candidates[0].refused if candidates else "--gpu names no GPU.")
    return sorted(candidates, key=_order)


def _order(candidate: Candidate) -> tuple:
    verdicts = (Verdict.FITS, Verdict.BORDERLINE, Verdict.DOES_NOT_FIT)
    verdict = verdicts.index(candidate.serving.fit.verdict) if candidate.serving is not None else len(verdicts)
    return verdict, candidate.price_hour is None, candidate.price_hour or 0.0
