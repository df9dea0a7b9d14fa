"""The rewrite of one trace against torch.utils.checkpoint traced anew: live bytes at every operation."""

import collections
import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as draw

from metapeak.strategies.checkpoint_planner import least_peak, least_recompute
from metapeak.strategies.checkpoint_policies import parse_policy, policy_liveness, policy_plan
from metapeak.strategies.checkpoint_study import saved_bytes
from metapeak.strategies.checkpoint_table import checkpoint_table
from metapeak.strategies.gradient_checkpointing import CheckpointEveryBlock, apply_checkpoint_plan
from metapeak.strategies.recompute import checkpointed
from metapeak.strategies.regions import regions_of
from metapeak.tracer.capture import record_training_step
from metapeak.tracer.errors import InputError
from metapeak.tracer.flops import operation_flops
from metapeak.tracer.liveness import Phase
from tests.agreement.families import FAMILIES

# The same examples in every run, so that a green run stays green; other seeds are for whoever changes the rewrite.
RANDOM = settings(max_examples=4, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
by_name = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)

# transformers changes these models under its own switch beyond wrapping blocks, so that the steps differ.
# T5: T5Attention gives its zero position bias a gradient (modeling_t5.py, `position_bias.requires_grad = True`).
CHANGED_BY_THE_SWITCH = {"t5"}


def adamw(parameters):
    return torch.optim.AdamW(parameters, foreach=True)


@functools.cache
def trace(family):
    return record_training_step(family.build("meta"), family.batch(), adamw, decouple_saves=True)[0]


@functools.cache
def modules(family):
    """Modules that can be checkpointed: called in the forward, with a name."""
    graph = trace(family)
    called = [graph.module_names[index] for index in dict.fromkeys(graph.saved.call_module) if index >= 0]
    return [name for name in called if name and regions_of(graph, [name])]


def timeline(liveness):
    """(operation, live bytes, phase) without detach, a view that saving and unpacking add in either way."""
    live = liveness.live_bytes()
    return [
        (liveness.op_names[liveness.op[index]], int(live[index]), int(liveness.op_phase[index]))
        for index in range(liveness.num_ops)
        if liveness.op_phase[index] != Phase.LOAD and "detach" not in liveness.op_names[liveness.op[index]]
    ]


def retrace(family, names):
    model = family.build("meta")
    apply_checkpoint_plan(model, {"checkpointed": names})
    return record_training_step(model, family.batch(), adamw)[0].liveness()


def outermost(names):
    return [name for name in names if not any(name.startswith(other + ".") for other in names)]


@by_name
def test_a_decoupled_trace_gives_the_plain_step(family):
    plain, _ = record_training_step(family.build("meta"), family.batch(), adamw)
    assert timeline(trace(family).liveness()) == timeline(plain.liveness())
    assert timeline(checkpointed(trace(family), [])) == timeline(plain.liveness())


@by_name
def test_every_block_as_the_model_s_own_switch(family):
    model = family.build("meta")
    CheckpointEveryBlock().prepare(model)
    switched, _ = record_training_step(model, family.batch(), adamw)
    graph = trace(family)
    rewritten = checkpointed(graph, regions_of(graph, parse_policy("full").modules(graph)))
    if family.name in CHANGED_BY_THE_SWITCH:
        assert timeline(rewritten) != timeline(switched.liveness())
        assert timeline(rewritten) == timeline(retrace(family, parse_policy("full").modules(graph)))
    else:
        assert timeline(rewritten) == timeline(switched.liveness())


@by_name
def test_core_attention(family):
    graph = trace(family)
    if family.name in ("mamba", "gpt2 without interface"):
        with pytest.raises(InputError, match="no attention of this model"):
            parse_policy("selective:attention").modules(graph)
        return
    names = parse_policy("selective:attention").modules(graph)
    assert timeline(checkpointed(graph, regions_of(graph, names))) == timeline(retrace(family, names))


# Operators by which a step with reentrant checkpoints differs from the rewrite, with the reason.
REENTRANT_DIFFERENCES = {
    # Under a reentrant checkpoint the forward runs without grad, where autograd makes no copy of a tensor that an
    # in-place operator is about to overwrite (Mixtral's router, `router_top_value /= ...`).
    "mixtral, all experts": {"aten.clone.default"},
    # T5's blocks return the position bias that they were given: an autograd function makes a view of such an output,
    # and gives zeros for the gradient of an output that nobody used.
    "t5": {
        "aten.view.default",
        "aten.zeros.default",
        "aten.new_empty_strided.default",
        "aten.copy_.default",
        "aten.add.Tensor",
        "aten.sum.dim_IntList",
    },
}


@by_name
def test_reentrant_checkpoints(family):
    graph = trace(family)
    names = parse_policy("full").modules(graph)
    model = family.build("meta")
    apply_checkpoint_plan(model, {"checkpointed": names, "use_reentrant": True})
    real = timeline(record_training_step(model, family.batch(), adamw)[0].liveness())
    rewritten = timeline(checkpointed(graph, regions_of(graph, names, reentrant=True)))
    if family.name in REENTRANT_DIFFERENCES:
        count, ours = (collections.Counter(name for name, _, _ in steps) for steps in (real, rewritten))
        assert {name for name in count | ours if count[name] != ours[name]} == REENTRANT_DIFFERENCES[family.name]
    else:
        assert rewritten == real


@by_name
@pytest.mark.parametrize("text", ["every:2", "layers:0", "modules:*mlp,*.mixer,*DenseReluDense,*.feed_forward,*fc1"])
def test_named_policies(family, text):
    graph = trace(family)
    if text.startswith("modules"):
        names = [name for name in modules(family) if name.split(".")[-1] in ("mlp", "mixer", "DenseReluDense", "fc1")]
        names = outermost(names or modules(family)[1:3])
    else:
        names = parse_policy(text).modules(graph)
    assert timeline(checkpointed(graph, regions_of(graph, names))) == timeline(retrace(family, names))


@by_name
@RANDOM
@given(data=draw.data())
def test_random_sets_of_modules(family, data):
    names = outermost(data.draw(draw.lists(draw.sampled_from(modules(family)), min_size=1, max_size=8, unique=True)))
    graph = trace(family)
    assert timeline(checkpointed(graph, regions_of(graph, names))) == timeline(retrace(family, names))


@by_name
def test_offload_to_the_host(family):
    graph = trace(family)
    names = parse_policy("offload").modules(graph)
    rewritten, host_bytes = policy_liveness(parse_policy("offload"), graph)
    model = family.build("meta")
    apply_checkpoint_plan(model, policy_plan(parse_policy("offload"), graph))
    assert timeline(rewritten) == timeline(record_training_step(model, family.batch(), adamw)[0].liveness())

    # the host's side: what the blocks of a real model on the CPU save, every save for itself
    real, packed = family.build("cpu"), []

    def watched(forward, *args, **kwargs):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: packed.append(tensor.nbytes) or tensor, lambda t: t
        ):
            return forward(*args, **kwargs)

    for name in names:
        module = real.get_submodule(name)
        module.forward = functools.partial(watched, module.forward)
    real(**family.batch())
    assert host_bytes == sum(packed)


def test_a_module_in_a_module_in_a_block():
    """Found by the random sets below: an event just before three recomputes that start at one instant."""
    bert = next(family for family in FAMILIES if family.name == "bert")
    chosen = {
        *parse_policy("full").modules(trace(bert)),
        "bert.encoder.layer.0.output",
        "bert.encoder.layer.0.output.dense",
    }
    names = [name for name in modules(bert) if name in chosen]
    assert timeline(checkpointed(trace(bert), regions_of(trace(bert), names))) == timeline(retrace(bert, names))


@by_name
@RANDOM
@given(data=draw.data())
def test_random_sets_of_nested_modules(family, data):
    """Every block, and modules inside the blocks, inside one another too."""
    graph = trace(family)
    blocks = parse_policy("full").modules(graph)
    inside = [name for name in modules(family) if name.startswith(tuple(block + "." for block in blocks))]
    chosen = {*blocks, *data.draw(draw.lists(draw.sampled_from(inside), min_size=1, max_size=6))}
    names = [name for name in modules(family) if name in chosen]
    assert timeline(checkpointed(graph, regions_of(graph, names))) == timeline(retrace(family, names))


@by_name
@settings(RANDOM, max_examples=10)
@given(data=draw.data())
def test_relations_that_always_hold(family, data):
    graph = trace(family)
    blocks = parse_policy("full").modules(graph)
    some = data.draw(draw.sets(draw.sampled_from(blocks)))
    more = some | data.draw(draw.sets(draw.sampled_from(blocks)))
    saved = [
        saved_bytes(checkpointed(graph, regions_of(graph, [name for name in blocks if name in chosen])))
        for chosen in (set(), some, more, set(blocks))
    ]
    assert saved == sorted(saved, reverse=True)  # a superset never keeps more at the end of forward


def candidates_of(graph, names):
    return [(name, regions) for name in names if (regions := regions_of(graph, [name]))]


def parts_of_blocks(family):
    """(graph of forward and backward alone, up to eight of its modules one level below the blocks)."""
    graph, _ = record_training_step(family.build("meta"), family.batch(), None, iterations=1, decouple_saves=True)
    called = [graph.module_names[index] for index in dict.fromkeys(graph.saved.call_module) if index >= 0]
    inside = [name for name in called if name.startswith(tuple(block + "." for block in graph.block_names))]
    depth = min(name.count(".") for name in inside)
    return graph, candidates_of(graph, [name for name in inside if name.count(".") == depth])[:8]


def all_choices(candidates):
    return np.array(list(itertools.product([False, True], repeat=len(candidates))))


def rewritten_peaks(graph, candidates, choices):
    """Peaks of the rewrite for some of the choices, evenly spread: (their rows, bytes)."""
    rows = np.linspace(0, len(choices) - 1, num=min(24, len(choices))).astype(int)
    names = [[name for (name, _), take in zip(candidates, choices[row]) if take] for row in rows]
    return rows, [int(checkpointed(graph, regions_of(graph, some)).live_bytes().max()) for some in names]


@by_name
def test_the_table_equals_the_rewrite(family):
    graph, candidates = parts_of_blocks(family)
    choices, table = all_choices(candidates), checkpoint_table(graph, candidates)
    rows, rewritten = rewritten_peaks(graph, candidates, choices)
    peaks = table.peaks(choices)[rows].tolist()
    if table.exact:
        assert peaks == rewritten
    else:  # a storage that several regions keep as an input counts for each of them
        assert all(peak >= real for peak, real in zip(peaks, rewritten))
    alone = [checkpoint_table(graph, [candidate]) for candidate in candidates]
    assert all(table.exact for table in alone)
    for candidate, table in zip(candidates, alone):
        _, (plain, chosen) = rewritten_peaks(graph, [candidate], all_choices([candidate]))
        assert table.peaks(np.array([[False], [True]])).tolist() == [plain, chosen]


@by_name
def test_the_planner_equals_brute_force(family):
    graph, candidates = parts_of_blocks(family)
    choices, table = all_choices(candidates), checkpoint_table(graph, candidates)
    peaks, flops = table.peaks(choices), operation_flops(graph)
    costs = np.array([
        sum(int(flops[region.begin : region.stop].sum()) for region in regions if region.length)
        for _, regions in candidates
    ])  # fmt: skip
    previous = None
    for budget in np.linspace(peaks.min(), peaks.max(), 6).astype(int):
        chosen = least_recompute(table, costs, int(budget))
        cost = int(chosen @ costs)
        assert table.peaks(chosen[None])[0] <= budget
        assert cost == min(int(row @ costs) for row, peak in zip(choices, peaks) if peak <= budget)
        assert previous is None or cost <= previous  # a larger budget never costs more recompute
        previous = cost
    assert least_recompute(table, costs, int(peaks.min()) - 1) is None
    assert table.peaks(least_peak(table)[None])[0] == peaks.min()


@by_name
def test_flops_equal_torch_s_counter_on_the_cpu(family):
    from torch.utils.flop_counter import FlopCounterMode

    graph, _ = record_training_step(family.build("meta"), family.batch(), None, iterations=1)
    model = family.build("cpu")
    with FlopCounterMode(display=False) as counter:
        model(**family.batch()).loss.backward()
    assert operation_flops(graph).sum() == counter.get_total_flops()
