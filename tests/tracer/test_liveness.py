"""Liveness against numbers that can be counted by hand, and against brute force."""

import random

import numpy as np
import pytest

from metapeak.tracer.liveness import Category, Liveness, Phase, round_to_blocks


def make_liveness(storages, phases):
    """`storages`: (birth, death, bytes, category); `phases`: (iteration, phase) of each operation."""
    columns = list(zip(*storages)) or [(), (), (), ()]
    count, ops = len(storages), len(phases)
    return Liveness(
        birth=np.array(columns[0], dtype=np.int32),
        death=np.array(columns[1], dtype=np.int32),
        nbytes=np.array(columns[2], dtype=np.int64),
        category=np.array(columns[3], dtype=np.int8),
        module=np.zeros(count, dtype=np.int32),
        source=np.full(count, -1, dtype=np.int32),
        dtype=np.zeros(count, dtype=np.int16),
        shapes=[(nbytes,) for nbytes in columns[2]],
        op=np.zeros(ops, dtype=np.int32),
        op_phase=np.array([phase for _, phase in phases], dtype=np.int8),
        op_iteration=np.array([iteration for iteration, _ in phases], dtype=np.int16),
        op_module=np.zeros(ops, dtype=np.int32),
        op_recompute=np.zeros(ops, dtype=bool),
        op_names=["op"],
        module_names=[""],
        source_names=[],
        dtype_names=["uint8"],
    )


#  op:          0     1    2    3
#  parameter  100   100  100  100    outlives the step
#  activation       700  700         freed before op 3
#  temporary              50         freed before op 3
#  gradient                   300    freed after the last op
HAND_MADE = make_liveness(
    [
        (0, 5, 100, Category.PARAMETER),
        (1, 3, 700, Category.ACTIVATION),
        (2, 3, 50, Category.TEMPORARY),
        (3, 4, 300, Category.GRADIENT),
    ],
    [(0, Phase.LOAD), (1, Phase.FORWARD), (1, Phase.BACKWARD), (1, Phase.BACKWARD)],
)


def test_live_bytes_by_hand():
    HAND_MADE.lint()
    assert HAND_MADE.live_bytes().tolist() == [100, 800, 850, 400]
    assert HAND_MADE.peak_index() == 2
    assert HAND_MADE.live_bytes(rounded=True).tolist() == [512, 512 + 1024, 512 + 1024 + 512, 512 + 512]
    assert HAND_MADE.live_bytes(without=[Category.ACTIVATION]).tolist() == [100, 100, 150, 400]


def test_of_equal_peaks_the_steady_iteration_s_is_named():
    twice = make_liveness(
        [(0, 1, 500, Category.TEMPORARY), (1, 2, 100, Category.TEMPORARY), (2, 3, 500, Category.TEMPORARY)],
        [(1, Phase.FORWARD), (1, Phase.BACKWARD), (2, Phase.FORWARD)],
    )
    assert twice.peak_index() == 2
    assert twice.instant(2).iteration == 2


def test_breakdown_sums_to_the_peak():
    breakdown = HAND_MADE.breakdown(2)
    assert {category: nbytes for category, nbytes in breakdown.items() if nbytes} == {
        Category.PARAMETER: 100,
        Category.ACTIVATION: 700,
        Category.TEMPORARY: 50,
    }
    assert sum(breakdown.values()) == 850


def test_phases_and_steady():
    assert [(phase.phase, phase.peak_bytes, phase.end_bytes) for phase in HAND_MADE.phases()] == [
        ("load", 100, 100),
        ("forward", 800, 800),
        ("backward", 850, 100),  # the gradient is freed after the last operation
    ]
    assert HAND_MADE.steady_bytes() == 100


def test_largest_first():
    assert [tensor.nbytes for tensor in HAND_MADE.largest(2, 2)] == [700, 100]
    assert HAND_MADE.largest(2)[0].category == "activation"


def test_added_storages_count_as_their_category():
    more = HAND_MADE.with_storages(
        birth=[1], death=[5], nbytes=[1000], category=Category.WORKSPACE, module=[0], shapes=[(1000,)], dtype="uint8"
    )
    more.lint()
    assert more.live_bytes().tolist() == [100, 1800, 1850, 1400]
    assert [phase.peak_bytes for phase in more.phases()] == [phase.peak_bytes for phase in HAND_MADE.phases()]
    assert more.steady_bytes() == HAND_MADE.steady_bytes()


@pytest.mark.parametrize("seed", range(20))
def test_equals_brute_force(seed):
    chance = random.Random(seed)
    ops = chance.randint(1, 30)
    storages = []
    for _ in range(chance.randint(0, 40)):
        birth = chance.randrange(ops)
        category = chance.choice(list(Category))
        storages.append((birth, chance.randint(birth, ops + 1), chance.randint(0, 5000), category))
    liveness = make_liveness(storages, [(1, Phase.FORWARD)] * ops)
    brute = [sum(nbytes for birth, death, nbytes, _ in storages if birth <= op < death) for op in range(ops)]
    assert liveness.live_bytes().tolist() == brute
    assert int(liveness.live_bytes().max()) == sum(liveness.breakdown(liveness.peak_index()).values())
    assert liveness.steady_bytes() == sum(
        nbytes for _, death, nbytes, category in storages if death == ops + 1 and category is not Category.WORKSPACE
    )


@pytest.mark.parametrize(
    "storage",
    [(3, 2, 1, 0), (-1, 2, 1, 0), (0, 9, 1, 0), (0, 1, -1, 0)],
    ids=["dies first", "early", "late", "negative"],
)
def test_lint_finds(storage):
    with pytest.raises(ValueError):
        make_liveness([storage], [(1, Phase.FORWARD)] * 5).lint()


def test_blocks_of_512_bytes():
    assert [round_to_blocks(nbytes) for nbytes in (0, 1, 512, 513)] == [0, 512, 512, 1024]
