"""Plans: candidates multiply out, times and costs obey their laws, and what is shown was simulated and fits."""

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metapeak.strategies.planning.candidates import Candidate, Model, Open, candidates, counts_of, refusal
from metapeak.strategies.planning.offers import interruption, offers
from metapeak.strategies.planning.planner import SAME, STATES_RULE, plan
from metapeak.strategies.planning.profiles import profile, record_step
from metapeak.strategies.planning.step_time import Work, step_time
from metapeak.strategies.request import simulate_resolved
from metapeak.strategies.settings import options_of, resolve
from metapeak.tracer.errors import InputError
from metapeak.tracer.gpus import find_gpu
from metapeak.tracer.instances import all_instances, read_instances
from metapeak.tracer.simulation import Verdict
from tests.strategies.parallel.test_sharded_steps import CONFIG

H100, L4 = find_gpu("h100"), find_gpu("l4")
WORK = Work(
    forward_flops=2 * 10**13, backward_flops=4 * 10**13, block_flops=18 * 10**12, traffic_bytes=10**11,
    parameter_bytes=16 * 10**9, gradient_bytes=16 * 10**9, state_bytes=64 * 10**9, blocks=32, hidden_bytes=8192,
)  # fmt: skip
ONE = Candidate(
    gpu="h100-sxm", gpus=8, method="full", tp=1, dp_shard=8, dp_replicate=1, batch_size=1, grad_accum=4,
    checkpointing="none",
)  # fmt: skip


@settings(derandomize=True, deadline=None, max_examples=30)
@given(gpus=st.integers(1, 48), micro=st.sampled_from([None, 1, 2]), factor=st.integers(1, 12))
def test_degrees_multiply_to_the_gpus_and_batches_to_the_tokens(gpus, micro, factor):
    tokens = 128 * gpus * factor
    free = Open(gpus=[gpus], batch_size=None if micro is None else [micro])
    found = list(candidates(["h100-sxm"], free, seq_len=128, tokens_per_batch=tokens))
    assert len(set(found)) == len(found)
    for one in found:
        assert one.tp * one.pp * one.cp * one.dp_shard * one.dp_replicate == gpus and one.tp <= 8
        assert one.batch_size * one.grad_accum * one.data_parallel * 128 == tokens
        assert micro in (None, one.batch_size)


def test_numbers_of_gpus():
    assert counts_of("8..64") == [8, 16, 32, 64]
    assert counts_of("3, 1..4") == [1, 2, 3, 4]
    for text in ("0", "8..4", "many", "", "8..x"):
        with pytest.raises(InputError, match="--gpus"):
            counts_of(text)


def test_laws_of_time():
    plain = step_time(WORK, ONE, H100, 4096)
    assert 0 < plain.seconds[0] < plain.seconds[1]
    # Dense arithmetic of 4 micro-batches at 70 % of 989 TFLOPs is the least that it can take.
    assert plain.seconds[0] >= 4 * 6e13 / (0.7 * 989.4e12)
    recompute = step_time(WORK, replace(ONE, checkpointing="full"), H100, 4096)
    assert recompute.seconds[0] >= plain.seconds[0] and recompute.seconds[1] > plain.seconds[1]
    assert step_time(WORK, replace(ONE, gpu="l4"), L4, 4096).middle > plain.middle
    across = replace(ONE, gpus=16, dp_shard=16)
    slow, fast = (step_time(WORK, across, H100, 4096, (rate, rate)) for rate in (1e9, 50e9))
    assert slow.middle > fast.middle and slow.bound == "messages"


def test_offers_need_a_fabric_for_several_machines():
    time = step_time(WORK, ONE, H100, 4096)
    inside = offers(all_instances(), ONE, time, 4096)
    assert {offer.machines for offer in inside} == {1}
    assert all(offer.instance.count >= 8 for offer in inside)
    prices = [offer.on_demand for offer in inside if offer.on_demand]
    assert prices == sorted(prices)
    tokens = ONE.grad_accum * 8 * 4096
    first = inside[0]
    assert first.on_demand[0] == pytest.approx(first.price_hour / 3600 * time.seconds[0] / tokens * 1e6)
    across = offers(all_instances(), replace(ONE, gpus=64, dp_shard=64), time, 4096)
    assert across and all(
        offer.instance.is_clustered and offer.machines * offer.instance.count == 64 for offer in across
    )


def test_an_interruption_costs_half_an_interval_and_a_read():
    lost = interruption(WORK, machines=2, interval_minutes=30)
    assert lost.checkpoint_bytes == 80 * 10**9
    assert lost.write_seconds == (8.0, 80.0) and lost.lost_seconds == (908.0, 980.0)


def test_a_newer_catalogue(tmp_path):
    header = "cloud,instance_type,accelerator,count,vcpus,host_mem_gib,gpu_mem_gib,price_hour,spot_price_hour,region,"
    header += "spot_region,gpu_link,fabric,local_nvme_gb,source\n"
    path = tmp_path / "new.csv"
    path.write_text(header + "aws,p9.big,H100,8,1,1,80,1.5,,here,,,EFA x32 3200 Gbps,,mine\n")
    (item,) = read_instances(str(path))
    assert (item.name, item.price_hour, item.fabric_bytes) == ("p9.big", 1.5, 400e9)
    path.write_text("cloud,name\naws,x\n")
    with pytest.raises(InputError, match="needs the columns of the catalogue"):
        read_instances(str(path))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("planned") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_what_is_shown_was_simulated_and_fits(model):
    given = options_of({"seq_len": 16}, "call")
    found = plan(
        model,
        [given],
        [L4],
        Open(gpus=[1, 2], batch_size=[1, 2]),
        instances=all_instances(),
        tokens_per_batch=64,
        top=3,
    )
    assert len(found.found) == 3 and found.simulated >= 3
    kinds = {
        (one.candidate.gpus, one.candidate.tp, one.candidate.cp, one.candidate.checkpointing) for one in found.found
    }
    assert len(kinds) == 3
    for one in found.found:
        assert one.simulation.fit.verdict is Verdict.FITS
        again = simulate_resolved(model, resolve(given, options_of(one.candidate.options, "plan")))
        assert again.worst.device_bytes == one.simulation.worst.device_bytes
    costs = [(one.offers[0].on_demand[0] * one.offers[0].on_demand[1]) ** 0.5 for one in found.found]
    assert all(a <= b * SAME for a, b in itertools.pairwise(costs))
    assert found.candidates == sum(found.excluded.values()) + found.simulated + found.left


def test_what_is_too_large_is_not_shown(model):
    given = options_of({"seq_len": 16}, "call")
    tiny = replace(L4, usable_bytes=1 << 16)
    found = plan(model, [given], [tiny], Open(gpus=[1]), instances=(), tokens_per_batch=16)
    assert not found.found and found.candidates == found.excluded[STATES_RULE] > 0
    with pytest.raises(InputError, match="Take a multiple of 16"):
        plan(model, [given], [L4], Open(gpus=[1]), instances=(), tokens_per_batch=17)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_no_rank_takes_less_than_the_bound(model, precision):
    """Each degree, policy and several micro-batches: what is simulated is never below what was left out by."""
    given = [options_of({"seq_len": 16, "precision": precision}, "call")]
    kinds = {
        sharded: profile(
            *(record_step(model, given, "full", ("none", "full"), sharded=sharded, batch=b) for b in (2, 3))
        )
        for sharded in (True, False)
    }
    assert all(kind.exact for kind in kinds.values())
    plain = replace(ONE, gpu="l4", gpus=2, dp_shard=1, grad_accum=1)
    for one in (
        replace(plain, gpus=1, batch_size=3),
        replace(plain, dp_shard=2, batch_size=5),
        replace(plain, dp_shard=2, batch_size=1, grad_accum=3, checkpointing="full"),
        replace(plain, tp=2, batch_size=2),
        replace(plain, dp_replicate=2, batch_size=4, checkpointing="full"),
        replace(plain, cp=2, batch_size=2),
        replace(plain, gpus=4, pp=2, dp_shard=2, grad_accum=4, batch_size=2, schedule="1f1b"),
    ):
        if one.cp > 1 and precision == "fp32":
            continue  # no ring attention in float32
        simulation = simulate_resolved(model, resolve(*given, options_of(one.options, "plan")))
        least = kinds[one.is_sharded].least_bytes(one, L4)
        assert least <= simulation.worst.device_range[0], one


def test_rules_leave_out_what_cannot_be():
    dense = Model(blocks=4, heads=6, experts=0, has_tp=True, is_causal_lm=True)
    free = Open(gpus=[16])
    for change, says in (
        ({"tp": 4}, "attention heads"),
        ({"tp": 2, "method": "lora"}, "adapters"),
        ({"pp": 2, "cp": 2}, "left out of plans"),
        ({"pp": 2, "grad_accum": 1}, "as many microbatches"),
        ({"pp": 8, "grad_accum": 8, "gpus": 16}, "more stages than blocks"),
        ({"pp": 2, "grad_accum": 8}, "inside one machine"),
        ({"cp": 2}, "fewer than 1024 tokens"),
    ):
        assert says in refusal(replace(ONE, **change), dense, free, 1024)
    assert refusal(replace(ONE, pp=2, grad_accum=8), dense, replace(free, pp=[2]), 1024) is None
    experts = Open(gpus=[8], ep=[1, 2, 3], batch_size=[1], policies=["none"])
    found = candidates(["l4"], experts, replace(dense, experts=6), seq_len=64, tokens_per_batch=None)
    assert {one.ep for one in found} == {1, 2}


def test_processes_find_the_same(model):
    here, there = (
        plan(
            model, [options_of({"seq_len": 16}, "call")], [L4], Open(gpus=[2], batch_size=[2]), instances=(),
            tokens_per_batch=64, top=1, jobs=jobs,
        )
        for jobs in (1, 2)
    )  # fmt: skip
    assert here.found[0].candidate == there.found[0].candidate
    assert here.found[0].simulation.worst.device_bytes == there.found[0].simulation.worst.device_bytes
