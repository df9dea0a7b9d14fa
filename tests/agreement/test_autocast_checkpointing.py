"""Checkpointing under autocast: the rewrite of one trace against torch.utils.checkpoint traced anew, every operation.

A recompute runs in an autocast region of its own, so it casts weights again and frees the casts when it ends.
"""

import collections
import functools

import pytest
import torch
import transformers as hf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as draw

from metapeak.strategies.checkpoint_policies import parse_policy, policy_liveness, policy_plan, policy_regions
from metapeak.strategies.checkpoint_table import checkpoint_table
from metapeak.strategies.gradient_checkpointing import apply_checkpoint_plan
from metapeak.strategies.recompute import checkpointed
from metapeak.strategies.regions import regions_of
from metapeak.tracer.capture import record_training_step
from metapeak.tracer.training_loop import TrainingLoop
from tests.agreement.families import _TEXT, FAMILIES, Family
from tests.agreement.test_checkpointing import REENTRANT_DIFFERENCES, adamw, outermost, timeline

RANDOM = settings(max_examples=3, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
LOOP = TrainingLoop(autocast=torch.bfloat16)
# One block whose weights every layer uses: the second layer finds its casts in the cache.
ALBERT = Family(
    "albert",
    hf.AlbertForMaskedLM,
    lambda: hf.AlbertConfig(
        **_TEXT, embedding_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_hidden_groups=1
    ),
)


def matrix(*always):
    """All families, of which these run by default."""
    return pytest.mark.parametrize(
        "family",
        [
            pytest.param(family, id=family.name, marks=() if family.name in always else pytest.mark.slow)
            for family in [*FAMILIES, ALBERT]
        ],
    )


@functools.cache
def trace(family):
    return record_training_step(family.build("meta"), family.batch(), adamw, decouple_saves=True, loop=LOOP)[0]


def retrace(family, plan):
    model = family.build("meta")
    apply_checkpoint_plan(model, plan)
    return timeline(record_training_step(model, family.batch(), adamw, loop=LOOP)[0].liveness())


@functools.cache
def modules(family):
    graph = trace(family)
    called = [graph.module_names[index] for index in dict.fromkeys(graph.saved.call_module) if index >= 0]
    return [name for name in called if name and regions_of(graph, [name])]


@matrix("gpt2", "llama", "albert")
def test_every_block(family):
    graph = trace(family)
    assert graph.saved.casts
    names = parse_policy("full").modules(graph)
    assert timeline(checkpointed(graph, regions_of(graph, names))) == retrace(family, {"checkpointed": names})


# Operators by which reentrant checkpoints differ from the rewrite under autocast, beside those of float32. The forward
# runs without grad there, and the recompute on detached inputs, which are leaves:
REENTRANT_AUTOCAST_DIFFERENCES = {
    # ... a cast made without grad needs none, so matmul does not fold it into a product of matrices (LinearAlgebra.cpp,
    # should_fold).
    "mamba": {
        "aten.expand.default",
        "aten.view.default",
        "aten.bmm.default",
        "aten.mm.default",
        "aten.clone.default",
        "aten._unsafe_view.default",
        "aten.t.default",
        "aten.transpose.int",
    },
    # ... the cast of a region's input is cached as if it were a weight's: q, k and v share one.
    "bert": {"aten._to_copy.default", "aten.add.Tensor"},
}


@matrix("gpt2", "llama", "bert")
def test_reentrant(family):
    if family is ALBERT:
        pytest.skip("its only block gets no input that requires grad, which a reentrant checkpoint needs")
    graph = trace(family)
    names = parse_policy("full").modules(graph)
    real = retrace(family, {"checkpointed": names, "use_reentrant": True})
    ours = timeline(checkpointed(graph, regions_of(graph, names, reentrant=True)))
    known = {**REENTRANT_DIFFERENCES, **REENTRANT_AUTOCAST_DIFFERENCES}
    if family.name in known:
        count, of_ours = (collections.Counter(name for name, _, _ in steps) for steps in (real, ours))
        different = {name for name in count | of_ours if count[name] != of_ours[name]}
        assert different and different <= known[family.name] | {"aten._to_copy.default"}
    else:
        assert ours == real


@matrix("llama")
@RANDOM
@given(data=draw.data())
def test_random_sets_of_modules(family, data):
    names = outermost(data.draw(draw.lists(draw.sampled_from(modules(family)), min_size=1, max_size=8, unique=True)))
    graph = trace(family)
    assert timeline(checkpointed(graph, regions_of(graph, names))) == retrace(family, {"checkpointed": names})


@pytest.mark.parametrize("part", ["", ".attention", ".attention.query", ".ffn"])
def test_a_weight_that_several_layers_share_is_cast_again_by_each_recompute(part):
    graph, names = trace(ALBERT), ["albert.encoder.albert_layer_groups.0.albert_layers.0" + part]
    regions = regions_of(graph, names)
    assert [bool(region.recast) for region in regions] == [False, True] * 2  # two layers, two iterations
    assert timeline(checkpointed(graph, regions)) == retrace(ALBERT, {"checkpointed": names})
    table = checkpoint_table(graph, [(names[0], regions)])
    assert table.exact
    peaks = [checkpointed(graph, chosen).live_bytes().max() for chosen in ([], regions)]
    assert table.peaks([[False], [True]]).tolist() == peaks


@matrix("gpt2")
@pytest.mark.parametrize("text", ["selective:torchtitan", "offload", "nested:*attn,*mlp,*attention,*Attention,*mixer"])
def test_other_policies(family, text):
    graph, policy = trace(family), parse_policy(text)
    if text == "offload":
        assert timeline(policy_liveness(policy, graph)[0]) == retrace(family, policy_plan(policy, graph))
    else:
        rewritten = checkpointed(graph, policy_regions(policy, graph))
        assert timeline(rewritten) == retrace(family, policy_plan(policy, graph))
