"""Bounds on speed and cost, worked out by hand."""

from dataclasses import replace

import pytest

from metapeak.strategies.serving.speed import BANDWIDTH_REACHED, FLOPS_REACHED, Traffic, costs_of, egress_cost, speed_of
from metapeak.tracer.gpus import find_gpu

H100 = find_gpu("h100")


def speed(**changes):
    options = {"sequence_bytes": 10**9, "batch": 8, "ranks": 1, "dtype": "bf16", "checkpoint_bytes": 16 * 10**9}
    return speed_of(H100, Traffic(always_bytes=16 * 10**9, prefill_flops=16e9), **(options | changes))


def test_decode_is_bandwidth_over_bytes_read():
    slow, fast = BANDWIDTH_REACHED
    assert speed().decode_one == pytest.approx((slow * 3350 / 17, fast * 3350 / 17))
    assert speed().decode_batch == pytest.approx((slow * 3350 * 8 / 24, fast * 3350 * 8 / 24))


def test_prefill_is_flops_over_flops_a_token():
    slow, fast = FLOPS_REACHED
    assert speed(ranks=2).prefill == pytest.approx((slow * 2 * 989.4e12 / 16e9, fast * 2 * 989.4e12 / 16e9))


def test_a_mixture_reads_more_experts_the_larger_the_batch():
    traffic = Traffic(always_bytes=0, expert_bytes=128, experts=128, active=8)
    read = [traffic.weights_read(batch) for batch in (1, 2, 16, 10_000)]
    assert read[0] == pytest.approx(8)
    assert read == sorted(read) and 15 < read[1] < 16 and read[-1] == pytest.approx(128)


def test_cost_is_price_over_tokens_and_replicas_share_an_instance():
    found = costs_of(H100, speed(), 1)
    eight = next(cost for cost in found if cost.instance.count == 8)
    low, high = speed().decode_batch
    assert eight.replicas == 8
    per_token = eight.instance.price_hour / 3600 / 8 * 1e6
    assert eight.on_demand == pytest.approx((per_token / high, per_token / low))
    assert [cost.on_demand for cost in found] == sorted(cost.on_demand for cost in found)


def test_a_replica_of_three_leaves_two_of_eight_idle():
    assert next(cost for cost in costs_of(H100, speed(), 3) if cost.instance.count == 8).replicas == 2


def test_no_bandwidth_no_speed():
    gpu = replace(H100, bandwidth_bytes=None)
    assert (
        speed_of(gpu, Traffic(always_bytes=1), sequence_bytes=1, batch=1, ranks=1, dtype="bf16", checkpoint_bytes=1)
        is None
    )


def test_egress_is_four_bytes_a_token():
    assert egress_cost(250_000_000, 0.1) == pytest.approx(0.1)
