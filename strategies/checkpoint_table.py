"""The peak of every set of checkpointed regions, thousands a second, from one trace.

Whether a storage is alive at an instant depends, for almost every storage, on one region alone: the one that saves it
or that keeps it as an input. So the live bytes of any set are linear in which regions are checkpointed:

    live(instant) = plain(instant) + sum over checkpointed regions of change(region, instant)

with one more instant for every operation of a region's recompute, which counts only if that region is checkpointed.
Instants at which no region's change differs are merged, keeping the largest. `CheckpointTable.peaks` is then a product
of matrices. Storages that depend on two regions at once are looked for; `exact` says that there are none, and what is
reported is scored by `recompute.checkpointed` in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from metapeak.strategies.recompute import Holds, latest, recomputed
from metapeak.strategies.regions import Region
from metapeak.tracer.graph import StepGraph
from metapeak.tracer.liveness import Liveness


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointTable:
    """`plain` [instants] and `change` [candidates, instants] in bytes; `needs` [instants] is the candidate that an
    instant of a recompute belongs to, -1 for instants of the plain step. `exact`: the table equals the rewrite.
    """

    names: tuple[str, ...]
    plain: np.ndarray
    change: np.ndarray
    needs: np.ndarray
    exact: bool

    def peaks(self, choices: np.ndarray) -> np.ndarray:
        """Peak requested bytes (no kernel workspaces) of each row of `choices` [policies, candidates], booleans."""
        chosen = np.asarray(choices, dtype=np.float64)
        best = np.full(len(chosen), 0.0)
        for start in range(0, len(self.plain), 4096):  # keeps the product in the processor's cache
            part = slice(start, start + 4096)
            live = chosen @ self.change[:, part] + self.plain[part]
            needs = self.needs[part]
            bound = needs >= 0
            live[:, bound] *= chosen[:, needs[bound]]
            best = np.maximum(best, live.max(axis=1))
        return best.astype(np.int64)


def checkpoint_table(graph: StepGraph, candidates: Sequence[tuple[str, Sequence[Region]]]) -> CheckpointTable:
    """The table for candidates: (name, the regions that are checkpointed together: one an iteration, say)."""
    plain, holds = graph.liveness(), Holds.of(graph)
    regions = [(index, region) for index, (_, members) in enumerate(candidates) for region in members]
    wanted = [region.wanted_tick for _, region in regions if region.length]
    ticks = np.sort(np.concatenate([holds.op_tick, np.array(wanted, dtype=np.float64)]))
    base, changes = _Curve(ticks), [_Curve(ticks) for _ in candidates]

    alone, choices = _lifetimes(plain, holds, regions)
    base.add(holds.op_tick[plain.birth], alone, plain.nbytes)
    exact = True
    for row, deaths in choices.items():
        floor, deaths = _deciding(deaths, int(alone[row]))
        size = int(plain.nbytes[row])
        base.add(alone[row], floor, size)
        exact &= len(deaths) <= 1
        for candidate, (if_kept, if_checkpointed) in deaths.items():
            base.add(floor, if_kept, size)
            changes[candidate].add(if_kept, if_checkpointed, size)

    # A recompute has an instant for each of its operations; what it makes for backward counts there afterwards.
    locals_of: list[tuple[int, int, np.ndarray]] = []
    for candidate, region in regions:
        if region.length:
            copies = recomputed(plain, holds, region)
            sizes = plain.nbytes[copies.row]
            on = copies.lives_on
            changes[candidate].add(region.wanted_tick + 1, copies.after[on, 0], sizes[on])
            local = _Curve(np.arange(region.length))
            local.add(copies.birth, np.where(on, region.length, copies.death), sizes)
            locals_of.append((candidate, int(np.searchsorted(ticks, region.wanted_tick)), local.values()))

    live = base.values()
    change = np.array([curve.values() for curve in changes]).reshape(len(candidates), len(live))
    operations = np.searchsorted(ticks, holds.op_tick)
    columns = [(live[operations], change[:, operations], np.full(len(operations), -1))]
    columns += [
        (live[at] + local, np.repeat(change[:, at : at + 1], len(local), axis=1), np.full(len(local), candidate))
        for candidate, at, local in locals_of
    ]
    merged = _merged(*(np.concatenate(parts, axis=-1) for parts in zip(*columns)))
    return CheckpointTable(names=tuple(name for name, _ in candidates), exact=exact, **merged)


def _lifetimes(plain: Liveness, holds: Holds, regions) -> tuple[np.ndarray, dict[int, dict[int, list[int]]]]:
    """(tick until which each storage lives whatever is checkpointed; storage -> candidate -> [tick until which it holds
    the storage if it is not checkpointed, if it is]).
    """
    owner = np.full(len(holds.save_row), -1, dtype=np.int64)
    begin = np.zeros(len(holds.save_row), dtype=np.int64)
    for candidate, region in regions:
        owner[region.saves.start : region.saves.stop] = candidate
        begin[region.saves.start : region.saves.stop] = region.begin
    save = np.concatenate([np.arange(len(holds.save_row)), holds.ghost_save])
    until = np.concatenate([holds.release, holds.ghost])
    rows = holds.save_row[save]
    free = owner[save] < 0
    alone = latest(holds.eager, rows[free], until[free])[:, 0]

    choices: dict[int, dict[int, list[int]]] = {}
    stays = plain.birth[rows] < begin[save]  # made before the region: it is there also for a checkpointed one
    for _, region in regions:
        if region.recast:
            inside = (save >= region.saves.start) & (save < region.saves.stop)
            stays &= ~(inside & np.isin(rows, region.recast_rows))
    for row, candidate, tick, foreign in zip(rows[~free], owner[save][~free], until[~free, 0], stays[~free]):
        deaths = choices.setdefault(int(row), {}).setdefault(int(candidate), [0, 0])
        deaths[0] = max(deaths[0], int(tick))
        if foreign:
            deaths[1] = max(deaths[1], int(tick))
    for candidate, region in regions:
        for row in region.inputs:
            deaths = choices.setdefault(row, {}).setdefault(candidate, [0, 0])
            deaths[1] = max(deaths[1], region.over[0])
    return alone, choices


def _deciding(deaths: dict[int, list[int]], floor: int) -> tuple[int, dict[int, list[int]]]:
    """(tick until which the storage lives whatever is chosen, candidates that can make it live longer).

    Ticks of those candidates are at least the first. One that always holds it longest decides alone.
    """
    floor = max(floor, *(min(ticks) for ticks in deaths.values()))
    longer = {candidate: ticks for candidate, ticks in deaths.items() if max(ticks) > floor}
    return floor, {candidate: [max(tick, floor) for tick in ticks] for candidate, ticks in longer.items()}


class _Curve:
    """Bytes alive at instants (their ticks in order), from intervals of ticks [start, end)."""

    def __init__(self, ticks: np.ndarray):
        self._ticks, self._steps = ticks, np.zeros(len(ticks) + 1, dtype=np.int64)

    def add(self, start, end, sizes) -> None:
        """Intervals may run backwards: then the bytes are missing between `end` and `start`."""
        np.add.at(self._steps, np.searchsorted(self._ticks, start), np.sum(sizes) if np.ndim(start) == 0 else sizes)
        np.subtract.at(self._steps, np.searchsorted(self._ticks, end), sizes)

    def values(self) -> np.ndarray:
        return np.cumsum(self._steps)[:-1]


def _merged(plain: np.ndarray, change: np.ndarray, needs: np.ndarray) -> dict[str, np.ndarray]:
    """Neighbouring instants with equal changes and needs become one, with the larger plain bytes."""
    differs = np.ones(len(plain), dtype=bool)
    differs[1:] = (change[:, 1:] != change[:, :-1]).any(axis=0) | (needs[1:] != needs[:-1])
    largest = np.zeros(int(differs.sum()), dtype=np.int64)
    np.maximum.at(largest, np.cumsum(differs) - 1, plain)
    return {"plain": largest, "change": change[:, differs].astype(np.float64), "needs": needs[differs]}
