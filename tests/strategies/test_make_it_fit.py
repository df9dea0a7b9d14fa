"""Shared traces answer as direct simulations do, and every suggestion is true."""

import json

import pytest

from metapeak.strategies.make_it_fit import COSTS, _Floor, _Search, changes_of, make_it_fit, suggestions_record
from metapeak.strategies.request import simulate_resolved
from metapeak.strategies.settings import options_of, resolve
from metapeak.strategies.shared_trace import SharedTraces
from metapeak.tracer.errors import InputError
from metapeak.tracer.simulation import Option, Verdict

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 2048,
    "torch_dtype": "float32",
}
ALBERT = {
    "model_type": "albert",
    "architectures": ["AlbertForMaskedLM"],
    "hidden_size": 32,
    "embedding_size": 16,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
}
POLICIES = {
    "full": ("none", "full", "every:2", "selective:attention", "offload"),
    "lora": ("none", "full"),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def options(**values):
    return resolve(options_of({"batch_size": 2, "seq_len": 128, **values}, "call"))


def numbers(simulation):
    rank = simulation.worst
    return (
        rank.requested_bytes,
        rank.allocated_bytes,
        rank.reserved_bytes,
        rank.steady_bytes,
        [(phase.iteration, phase.phase, phase.peak_bytes, phase.end_bytes) for phase in rank.phases],
        simulation.fit and (simulation.fit.verdict, simulation.fit.headroom_bytes),
    )


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_shared_trace_answers_as_a_direct_one(llama, method):
    shared = SharedTraces(llama)
    asked = [
        options(method=method, checkpointing=policy, gpu_memory="64MiB", allocator_config=config)
        for policy in POLICIES[method]
        for config in (None, "expandable_segments:True")
    ]
    for one in asked:
        found, direct = shared.simulate(one), simulate_resolved(llama, one)
        assert numbers(found) == numbers(direct), one["checkpointing"].value
        assert {n: o.value for n, o in found.options.items()} == {n: o.value for n, o in direct.options.items()}
    # A frozen base lets gradients reach its blocks only where something is checkpointed.
    assert shared.traces == (1 if method == "full" else 2)


def test_what_changes_the_step_is_traced_anew(llama):
    shared = SharedTraces(llama)
    for values in ({}, {"batch_size": 4}, {"optimizer": "sgd"}, {"checkpointing": "full", "optimizer": "sgd"}):
        one = options(**values)
        assert numbers(shared.simulate(one)) == numbers(simulate_resolved(llama, one))
    assert shared.traces == 3


def test_a_switch_that_the_model_has_not_is_refused_as_alone(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(ALBERT))
    one = resolve(options_of({"seq_len": 16, "checkpointing": "full"}, "call"))
    shared = SharedTraces(str(path))
    plain = resolve(options_of({"seq_len": 16}, "call"))
    assert numbers(shared.simulate(plain)) == numbers(simulate_resolved(str(path), plain))
    with pytest.raises(InputError, match="supports no gradient checkpointing"):
        shared.simulate(one)


@pytest.fixture(scope="module")
def suggested(llama):
    # Logits of 16 x 4,096 tokens: far more than the range of context and libraries, so the verdicts are clear.
    asked = options(batch_size=16, seq_len=4096, gpu_memory="6GiB")
    simulation = simulate_resolved(llama, asked)
    assert simulation.fit.verdict is not Verdict.FITS
    return asked, simulation, make_it_fit(llama, simulation, asked, count=100)


def test_every_suggestion_is_what_a_direct_simulation_says(llama, suggested):
    asked, _, found = suggested
    assert found.suggestions and found.left == 0
    for suggestion in found.suggestions:
        changed = dict(asked)
        for change in suggestion.changes:
            changed |= {name: Option(value=value, origin="test") for name, value in change.options.items()}
        direct = simulate_resolved(llama, changed)
        assert direct.fit.verdict is Verdict.FITS
        assert direct.worst.device_bytes == suggestion.device_bytes


def test_suggestions_are_cheapest_first_and_no_pair_holds_one_that_suffices(suggested):
    _, _, found = suggested
    costs = [suggestion.cost for suggestion in found.suggestions]
    assert costs == sorted(costs)
    singles = {one.changes[0].name for one in found.suggestions if len(one.changes) == 1}
    pairs = [one for one in found.suggestions if len(one.changes) == 2]
    assert not [pair.name for pair in pairs if {change.name for change in pair.changes} & singles]
    for one in found.suggestions:
        assert one.cost >= sum(COSTS[change.kind] for change in one.changes)
        recomputes = any(change.kind == "recompute" for change in one.changes)
        assert (one.extra_flops_percent > 0) == recomputes
        assert one.costs and all(one.costs)


def test_changes_that_are_given_are_not_suggested(llama):
    asked = options(
        gpu_memory="64MiB",
        method="lora",
        checkpointing="full",
        optimizer="adamw8bit",
        allocator_config="expandable_segments:True",
        batch_size=1,
        loss="fused-linear",
        weights_dtype="bf16",
    )
    names = {change.name for change in changes_of(simulate_resolved(llama, asked), asked)}
    assert names == {"method qlora"}


def test_where_nothing_fits_the_closest_is_named(llama):
    asked = options(gpu_memory="600MiB", seq_len=4096, batch_size=1)
    found = make_it_fit(llama, simulate_resolved(llama, asked), asked, seconds=1)
    record = suggestions_record(found)
    assert record["found"] == [] and found.closest is not None
    assert record["closest"]["headroom_bytes"] < 0
    json.dumps(record)


def test_the_floor_lies_below_what_is_simulated(llama, suggested):
    asked, simulation, found = suggested
    floor = _Floor(simulation)
    for one in (*found.suggestions, *changes_alone(llama, simulation, asked)):
        assert 0 < floor.least(one.changes) <= one.simulation.worst.requested_bytes, one.name
    # Room for the parameters and a fifth of them, beside the least that a context takes.
    room = (250 << 20) + simulation.model.parameter_bytes * 6 // 5
    floor = _Floor(simulate_resolved(llama, options(seq_len=16, gpu_memory=str(room))))
    allowed = {change.name for change in changes_of(simulation, asked) if floor.allows((change,))}
    assert allowed == {"method lora", "method qlora"}


def changes_alone(llama, simulation, asked):
    """A few single changes, simulated."""
    search = _Search(SharedTraces(llama), asked)
    for change in changes_of(simulation, asked):
        if change.name in ("expandable segments", "checkpointing full", "bf16", "8-bit optimizer"):
            search.attempt((change,))
    return search.tried


def test_no_new_trace_is_begun_when_the_time_is_over(llama):
    asked = options(gpu_memory="600MiB", seq_len=4096)
    found = make_it_fit(llama, simulate_resolved(llama, asked), asked, seconds=0)
    assert found.tried == 0 and found.left > 5
