"""FSDP2 as a rewrite of a recorded, unsharded step: one rank's timeline without running it again, for sweeps.

What it changes: a unit's parameters become shards, gathered before its forward and its backward and freed after them;
its gradients are reduce-scattered into one buffer after its backward; the optimizer's states and temporaries are those
of the shards.
Where each byte comes from: activations, temporaries and their lifetimes are those of the trace; buffers and the order
of events are those of `fully_shard`, which the oracle (strategies/parallel/fsdp2.py, the real library on the phantom
GPU) runs: equal live bytes at every operation of the model, at the end of every phase, and at the peaks.
Not modelled, and refused: HSDP, resharding to fewer ranks, CPU offload, gradient accumulation, units that are called
more than once or not at all, optimizers whose storages are not of the parameters' shapes, gradient clipping, inputs
that several units get and that require a gradient (encoder-decoders), inputs that mixed precision would cast.
Sources: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (unshard, wait_for_unshard, reshard, post_backward,
_backward_prefetch), _fsdp_collectives.py (foreach_all_gather, foreach_all_gather_copy_out, foreach_reduce),
_fsdp_state.py (_post_forward, _pre_backward, _root_post_backward_final_callback).

Note [Mixed precision]
    MixedPrecisionPolicy runs a unit on parameters cast to `param_dtype`, so the trace has to be of the model in that
    dtype; shards and optimizer are of `orig_dtype`, gradients are reduced in `reduce_dtype` (None: in param_dtype).

Note [Two buffers in forward]
    In forward the buffer of an all-gather is kept until the next unit has copied out its own: FSDPCommContext keeps it
    so that copying out can overlap with the next gather, and wait_for_unshard's local variable holds it to its return.
    So both buffers and the next unit's parameters are there at once. In backward a buffer is freed after its copy-out,
    but the next unit's gather is issued before this unit's backward runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from metapeak.strategies.parallel.fsdp2_plan import ITEMSIZE, Event, Parameter, Plan, Sharding, Unit
from metapeak.tracer.errors import InputError
from metapeak.tracer.graph import StepGraph
from metapeak.tracer.liveness import Category, Liveness, Phase


def sharded(liveness: Liveness, graph: StepGraph, units: Iterable[str], sharding: Sharding) -> Liveness:
    """The liveness of one rank of a step whose units (module paths) and root are under `fully_shard`.

    `liveness` is the unsharded step's, as recorded or with checkpointing (strategies/recompute.py); `graph` was
    recorded with `decouple_saves`. Raises InputError for what this file refuses.
    """
    plan = Plan.of(liveness, graph, tuple(units), sharding)
    timeline = _Timeline(liveness, plan, sharding)
    for event in plan.events:
        timeline.happen(event)
    result = timeline.finish()
    result.lint()
    return result


# -- what it allocates and frees ---------------------------------------------------------------------------------------


class _Timeline:
    """Adds operations and storages to the plain step, event by event.

    Time is that of the new step: `_now` is the index of the next operation to be added.
    """

    def __init__(self, plain: Liveness, plan: Plan, sharding: Sharding):
        self._plain, self._plan, self._sharding = plain, plan, sharding
        self._at: list[int] = []
        self._ops: list[tuple[str, int, int, int]] = []  # name, module, iteration, phase
        self._rows: list[list] = []  # birth, death, nbytes, category, module
        self._event: Event | None = None
        self._kept_in_forward: int | None = None  # see Note [Two buffers in forward]
        self._reduced: int | None = None  # the last reduce-scatter's input
        self._order: list[Unit] = []
        self._deaths: dict[int, int] = {}  # plain gradients
        self._ends: list[tuple[int, list[int]]] = []  # (new row, plain gradients that it dies with)

    @property
    def _now(self) -> int:
        return self._event.at + len(self._ops)

    def happen(self, event: Event) -> None:
        self._event = event
        getattr(self, "_" + event.what)(event.unit)

    # -- the hooks of fully_shard --

    def _pre_forward(self, unit: Unit) -> None:
        if unit.is_root:
            self._order.clear()
        self._unshard(unit)
        self._wait(unit, in_forward=True)

    def _post_forward(self, unit: Unit) -> None:
        if unit.reshards:
            self._reshard(unit)
        unit.place = len(self._order)
        self._order.append(unit)
        if unit.is_root:
            self._free_kept()

    def _pre_backward(self, unit: Unit) -> None:
        self._unshard(unit)
        self._wait(unit, in_forward=False)
        if unit.place > 0:
            self._unshard(self._order[unit.place - 1])

    def _post_backward(self, unit: Unit) -> None:
        self._reshard(unit)
        self._free_reduced()
        gradients = unit.gradients.get(self._event.iteration, [])
        trainable = [parameter for parameter in unit.parameters if parameter.trainable]
        if not gradients:
            return
        world, used = self._sharding.world_size, trainable[0].nbytes_each
        total = sum(parameter.padded_numel(world) for parameter in trainable) * world
        original = self._original(trainable[0])
        reduced = ITEMSIZE[self._sharding.reduce_dtype] if self._sharding.reduce_dtype else used
        self._reduced = self._allocate("aten.empty.memory_format", total * reduced, Category.COMMUNICATION)
        self._run("fsdp.chunk_cat.default")
        for row in gradients:
            self._deaths[row] = self._now
        output = self._allocate("aten.empty.memory_format", total // world * reduced, Category.GRADIENT)
        self._run("c10d._reduce_scatter_base_.default")
        if original != reduced:
            cast = self._allocate("aten._to_copy.default", total // world * original, Category.GRADIENT)
            self._free(output)
            output = cast
        self._ends.append((output, gradients))

    def _finish_backward(self, unit: Unit) -> None:
        self._free_reduced()

    # -- gathering --

    def _unshard(self, unit: Unit) -> None:
        """Issue the all-gather, unless the parameters are there or it was issued already."""
        if unit.unsharded or unit.pending or not unit.parameters:
            return
        unit.pending = True
        world = self._sharding.world_size
        if world == 1:
            return
        numel = sum(parameter.padded_numel(world) for parameter in unit.parameters)
        each = self._uniform(unit)
        flat = None
        if self._is_cast(unit):
            flat = self._allocate("aten.empty.memory_format", numel * each, Category.COMMUNICATION)
            self._run("aten._foreach_copy_.default")
        unit.gathered = self._allocate("aten.empty.memory_format", numel * world * each, Category.COMMUNICATION)
        self._run("fsdp.all_gather_copy_in.default")
        self._run("c10d._allgather_base_.default")
        if flat is not None:
            self._free(flat)

    def _wait(self, unit: Unit, in_forward: bool) -> None:
        """Copy out what was gathered; unsharded parameters include the padding of all shards."""
        if not unit.pending:
            return
        unit.pending = False
        world = self._sharding.world_size
        name = "storage.resize_" if unit.was_gathered else "aten.empty.memory_format"
        unit.was_gathered = True
        cast = None
        for parameter in unit.parameters:
            numel = parameter.padded_numel(world) * world
            if world == 1 and self._is_cast(unit):
                before, cast = (
                    cast,
                    self._allocate("aten._to_copy.default", numel * parameter.nbytes_each, Category.COMMUNICATION),
                )
                if before is not None:
                    self._free(before)
            row = self._allocate(name, numel * parameter.nbytes_each, Category.PARAMETER)
            unit.unsharded.append(row)
            if world == 1:
                self._run("aten.copy_.default")
        if cast is not None:
            self._free(cast)
        if world == 1:
            return
        self._run("fsdp.split_with_sizes_copy.default")
        if in_forward:
            self._free_kept()
            self._kept_in_forward = unit.gathered
        else:
            self._free(unit.gathered)
        unit.gathered = None

    def _reshard(self, unit: Unit) -> None:
        for row in unit.unsharded:
            self._free(row)
        unit.unsharded.clear()

    def _free_kept(self) -> None:
        if self._kept_in_forward is not None:
            self._free(self._kept_in_forward)
            self._kept_in_forward = None

    def _free_reduced(self) -> None:
        if self._reduced is not None:
            self._free(self._reduced)
            self._reduced = None

    def _uniform(self, unit: Unit) -> int:
        sizes = {parameter.nbytes_each for parameter in unit.parameters}
        if len(sizes) > 1:
            raise InputError("A unit's parameters are of different dtypes: FSDP2 is not rewritten for that.")
        return sizes.pop()

    def _original(self, parameter: Parameter) -> int:
        name = self._sharding.orig_dtype
        return ITEMSIZE[name] if name else parameter.nbytes_each

    def _is_cast(self, unit: Unit) -> bool:
        return any(self._original(parameter) != parameter.nbytes_each for parameter in unit.parameters)

    # -- rows --

    def _run(self, name: str) -> None:
        event = self._event
        phase = Phase.FORWARD if event.what.endswith("forward") else Phase.BACKWARD
        self._at.append(event.at)
        self._ops.append((name, event.unit.module, event.iteration, int(phase)))

    def _allocate(self, name: str, nbytes: int, category: Category) -> int:
        self._rows.append([self._now, None, nbytes, int(category), self._event.unit.module])
        self._run(name)
        return len(self._rows) - 1

    def _free(self, row: int) -> None:
        self._rows[row][1] = self._now

    # -- the result --

    def finish(self) -> Liveness:
        plain = self._plain
        at = np.asarray(self._at, dtype=np.int64)
        # What died at an insertion went before it; what was born there comes after it.
        birth = plain.birth + np.searchsorted(at, plain.birth, side="right")
        death = plain.death + np.searchsorted(at, plain.death, side="left")
        seeds = self._plan.seeds
        death[seeds] = plain.death[seeds] + np.searchsorted(at, plain.death[seeds], side="right")
        nbytes = plain.nbytes.copy()
        for row, size in self._resized_rows():
            nbytes[row] = size
        for new, gradients in self._ends:
            self._rows[new][1] = int(max(death[row] for row in gradients))
        for row, when in self._deaths.items():
            death[row] = when
        end = plain.num_ops + len(at) + 1
        rows = [[b, end if d is None else d, *rest] for b, d, *rest in self._rows]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 5)
        result = replace(
            self._with_operations(at), birth=birth.astype(np.int32), death=death.astype(np.int32), nbytes=nbytes
        )
        return _with_rows(result, columns)

    def _resized_rows(self):
        """(plain storage, its bytes on this rank) of parameters and of what the optimizer makes."""
        world, rank = self._sharding.world_size, self._sharding.rank
        for unit in self._plan.units:
            for parameter in unit.parameters:
                yield parameter.row, parameter.padded_numel(world) * self._original(parameter)
        for row, parameter in self._plan.optimizer_rows.items():
            yield row, parameter.local_numel(world, rank) * self._original(parameter)

    def _with_operations(self, at: np.ndarray) -> Liveness:
        plain = self._plain
        names = list(plain.op_names)
        index = {name: number for number, name in enumerate(names)}
        for name, *_ in self._ops:
            if name not in index:
                index[name] = len(names)
                names.append(name)
        added = np.array([(index[name], *rest) for name, *rest in self._ops], dtype=np.int64).reshape(-1, 4)

        def insert(column, values):
            return np.insert(column, at, values).astype(column.dtype)

        return replace(
            plain,
            op=insert(plain.op, added[:, 0]),
            op_module=insert(plain.op_module, added[:, 1]),
            op_iteration=insert(plain.op_iteration, added[:, 2]),
            op_phase=insert(plain.op_phase, added[:, 3]),
            op_recompute=insert(plain.op_recompute, False),
            op_node=insert(plain.op_node, -1),
            op_names=names,
        )


def _with_rows(liveness: Liveness, columns: np.ndarray) -> Liveness:
    """`columns`: birth, death, nbytes, category, module of each new storage."""
    count = len(columns)

    def extend(column, values):
        return np.concatenate([column, np.asarray(values, dtype=column.dtype)])

    names = list(liveness.dtype_names)
    if "uint8" not in names:
        names.append("uint8")
    return replace(
        liveness,
        birth=extend(liveness.birth, columns[:, 0]),
        death=extend(liveness.death, columns[:, 1]),
        nbytes=extend(liveness.nbytes, columns[:, 2]),
        category=extend(liveness.category, columns[:, 3]),
        module=extend(liveness.module, columns[:, 4]),
        source=extend(liveness.source, [-1] * count),
        dtype=extend(liveness.dtype, [names.index("uint8")] * count),
        shapes=[*liveness.shapes, *((int(nbytes),) for nbytes in columns[:, 2])],
        dtype_names=names,
    )
