"""The FSDP2 rewrite of an unsharded step equals the real `fully_shard` on the phantom GPU, byte for byte.

Compared: peak and end of every phase, and live bytes at every operation of the model in order, which includes the last
one of every unit's forward and backward. What FSDP itself runs (copies, views, collectives) is left out of the second
comparison, because the rewrite adds one operation an allocation only.
"""

import functools

import pytest
import torch

from metapeak.strategies.parallel.fsdp2 import FSDP2
from metapeak.strategies.parallel.fsdp2_plan import Sharding
from metapeak.strategies.parallel.fsdp2_rewrite import sharded
from metapeak.strategies.parallel.layout import Layout
from metapeak.strategies.recompute import checkpointed
from metapeak.strategies.regions import regions_of
from metapeak.tracer.capture import record_training_step
from metapeak.tracer.distributed import one_rank_of
from metapeak.tracer.errors import InputError
from metapeak.tracer.liveness import Category, Phase
from metapeak.tracer.training_loop import TrainingLoop
from tests.agreement.distributed import cases
from tests.agreement.distributed.cases import batch
from tests.agreement.distributed.test_real_ranks import foreach_adamw
from tests.agreement.families import FAMILIES

_MODELS = {
    "uneven llama": (cases.llama, batch),
    "uneven gpt2": (cases.gpt2, batch),
    "lora": (cases.lora, batch),
    "checkpointing": (cases.checkpointed, batch),
}
_FAMILIES = {family.name: (family.build, family.batch) for family in FAMILIES}
# name -> (param_dtype, reduce_dtype)
_PRECISIONS = {
    "fp32": (None, None),
    "bf16": ("bfloat16", None),
    "bf16 reduced in fp32": ("bfloat16", "float32"),
    "fp32 reduced in bf16": (None, "bfloat16"),
}
# Operators of FSDP's own, and views, which a backward hook may stand between.
_NOT_COMPARED = (
    "storage.resize_", "aten.empty", "aten.view", "aten._unsafe_view", "aten.as_strided", "aten.detach", "aten.split",
    "aten.slice", "aten.alias", "aten.copy_", "aten._foreach_copy_", "aten._to_copy", "aten._chunk_cat", "fsdp.",
    "c10d.", "load",
)  # fmt: skip


@functools.cache
def plain(name, param_dtype, **options):
    """The unsharded step, its parameters in the dtype that FSDP computes in."""
    build, make_batch = {**_MODELS, **_FAMILIES}[name]
    model = build("meta")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, param_dtype)) if param_dtype else parameter.data
    return record_training_step(model, make_batch(), foreach_adamw, decouple_saves=True, **options)[0]


def oracle(name, world_size, rank, reshard, param_dtype, reduce_dtype):
    build, make_batch = {**_MODELS, **_FAMILIES}[name]
    strategy = FSDP2(
        layout=Layout(dp_shard=world_size),
        reshard_after_forward=reshard,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
    )
    with one_rank_of(world_size, rank):
        graph, _ = record_training_step(build("meta"), make_batch(), foreach_adamw, distribute=strategy.distribute)
    return graph.liveness()


def rewritten(graph, liveness, world_size, rank, reshard, param_dtype, reduce_dtype):
    sharding = Sharding(
        world_size=world_size,
        rank=rank,
        reshard_after_forward=reshard,
        orig_dtype="float32" if param_dtype else None,
        reduce_dtype=reduce_dtype,
    )
    return sharded(liveness, graph, graph.block_names, sharding)


def at_every_operation(liveness):
    live = liveness.live_bytes()
    names = [liveness.op_names[op] for op in liveness.op]
    return [
        (int(liveness.op_iteration[index]), Phase(int(liveness.op_phase[index])).label, name, int(live[index]))
        for index, name in enumerate(names)
        if not name.startswith(_NOT_COMPARED) and liveness.op_phase[index] in (Phase.FORWARD, Phase.BACKWARD)
    ]


def check(name, world_size, reshard, precision):
    param_dtype, reduce_dtype = _PRECISIONS[precision]
    graph = plain(name, param_dtype)
    for rank in sorted({0, world_size - 1}):
        case = (world_size, rank, reshard, param_dtype, reduce_dtype)
        assert_equal(rewritten(graph, graph.liveness(), *case), oracle(name, *case))


def assert_equal(ours, theirs):
    first = next(
        (pair for pair in zip(at_every_operation(ours), at_every_operation(theirs)) if pair[0] != pair[1]), None
    )
    assert first is None
    assert len(at_every_operation(ours)) == len(at_every_operation(theirs))
    assert ours.phases() == theirs.phases()


@pytest.mark.parametrize(
    "name, world_size, reshard, precision",
    [
        ("uneven llama", 1, None, "fp32"),
        ("uneven llama", 64, None, "bf16 reduced in fp32"),
        ("uneven gpt2", 3, False, "bf16"),
        ("lora", 8, True, "fp32"),
        ("checkpointing", 2, None, "bf16 reduced in fp32"),
    ],
)
def test_rewrite_equals_fully_shard(name, world_size, reshard, precision):
    check(name, world_size, reshard, precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", _PRECISIONS)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("name", _MODELS)
def test_rewrite_equals_fully_shard_everywhere(name, world_size, reshard, precision):
    check(name, world_size, reshard, precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16 reduced in fp32"])
@pytest.mark.parametrize("world_size", [1, 8, 64])
@pytest.mark.parametrize("name", _FAMILIES)
def test_rewrite_equals_fully_shard_for_every_family(name, world_size, precision):
    if name == "t5" or (name == "mamba" and precision != "fp32"):
        with pytest.raises(InputError, match="not rewritten for that"):
            check(name, world_size, None, precision)
    else:
        check(name, world_size, None, precision)


@pytest.mark.parametrize("world_size", [1, 3])
def test_rewrite_of_rewritten_checkpointing_equals_fully_shard_of_checkpointed_model(world_size):
    graph = plain("uneven llama", "bfloat16")
    liveness = checkpointed(graph, regions_of(graph, graph.block_names))
    case = (world_size, world_size - 1, None, "bfloat16", "float32")
    assert rewritten(graph, liveness, *case).phases() == oracle("checkpointing", *case).phases()


def test_shards_of_all_ranks_are_the_parameters_and_their_padding():
    graph = plain("uneven llama", None)
    whole = sum(size for size, kind in zip(graph.nbytes, graph.category) if kind == Category.PARAMETER)
    for world_size in (2, 3, 5):
        held = padding = 0
        for rank in range(world_size):
            liveness = rewritten(graph, graph.liveness(), world_size, rank, None, None, None)
            held += int(liveness.nbytes[: len(graph.nbytes)][liveness.category[: len(graph.nbytes)] == 0].sum())
        for row, kind in enumerate(graph.category):
            if kind == Category.PARAMETER:
                rows = graph.value_shape[graph.storage_value[row]][0]
                padding += graph.nbytes[row] // rows * (-rows % world_size)
        assert held == whole + padding


def test_what_is_not_rewritten_is_refused():
    graph = plain("uneven llama", None)
    liveness, units = graph.liveness(), graph.block_names
    with pytest.raises(InputError, match="rank 2 is not one of 2"):
        sharded(liveness, graph, units, Sharding(world_size=2, rank=2))
    with pytest.raises(InputError, match="no module"):
        sharded(liveness, graph, ["model.layers.9"], Sharding(world_size=2, rank=0))
    accumulated = plain("uneven llama", None, loop=TrainingLoop(grad_accum=2))
    with pytest.raises(InputError, match="called more than once"):
        sharded(accumulated.liveness(), accumulated, units, Sharding(world_size=2, rank=0))
    clipped = plain("uneven llama", None, loop=TrainingLoop(max_grad_norm=1.0))
    with pytest.raises(InputError, match="like no parameter"):
        sharded(clipped.liveness(), clipped, units, Sharding(world_size=2, rank=0))
    tied = plain("uneven gpt2", None)
    with pytest.raises(InputError, match="in the same one"):
        sharded(tied.liveness(), tied, ["transformer.wte", *tied.block_names], Sharding(world_size=2, rank=0))
