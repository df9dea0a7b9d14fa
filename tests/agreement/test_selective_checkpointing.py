"""Selective checkpointing as a rewrite against create_selective_checkpoint_contexts traced anew: every operation."""

from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as draw
from torch import nn

from metapeak.strategies.checkpoint_policies import (
    MATMULS,
    parse_policy,
    policy_plan,
    policy_regions,
    selective_regions,
)
from metapeak.strategies.checkpoint_study import saved_bytes
from metapeak.strategies.gradient_checkpointing import (
    CheckpointModules,
    GradientCheckpointing,
    apply_checkpoint_plan,
    strategy_for,
)
from metapeak.strategies.recompute import checkpointed
from metapeak.strategies.regions import regions_of
from metapeak.tracer.capture import record_training_step
from metapeak.tracer.errors import InputError, TraceError
from tests.agreement.families import FAMILIES
from tests.agreement.test_checkpointing import adamw, modules, outermost, timeline, trace

RANDOM = settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
FLASH = "aten._scaled_dot_product_flash_attention.default"
by_name = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def retrace(model, batch, plan):
    apply_checkpoint_plan(model, plan)
    return timeline(record_training_step(model, batch, adamw)[0].liveness())


def op_at(graph, operation):
    return graph.op_names[graph.op[operation]]


def operators(graph, regions):
    """Operators of these regions whose results are always new storages."""
    made, others = set(), set()
    for value, node in enumerate(graph.value_node):
        if any(region.begin <= node < region.end for region in regions):
            own = graph.birth[graph.value_storage[value]] == node
            (made if own else others).add(op_at(graph, node))
    return sorted(made - others)


def blocks_of(graph):
    return parse_policy("full").modules(graph)


@by_name
@pytest.mark.parametrize("text", ["selective:torchtitan", "selective:matmul-every-2", "selective:ops=bmm,mul"])
def test_named_policies(family, text):
    graph, policy = trace(family), parse_policy(text)
    ran = {
        name for name in operators(graph, regions_of(graph, blocks_of(graph))) if name.split(".")[1] in ("bmm", "mul")
    }
    assert len(ran) == 2
    rewritten = checkpointed(graph, policy_regions(policy, graph))
    assert timeline(rewritten) == retrace(family.build("meta"), family.batch(), policy_plan(policy, graph))


@by_name
@RANDOM
@given(data=draw.data())
def test_random_sets_of_operators_in_random_sets_of_modules(family, data):
    graph = trace(family)
    names = outermost(data.draw(draw.lists(draw.sampled_from(modules(family)), min_size=1, max_size=6, unique=True)))
    made = operators(graph, regions_of(graph, names))
    ops = data.draw(draw.lists(draw.sampled_from(made), max_size=6, unique=True)) if made else []
    every_second = data.draw(draw.booleans())
    plan = {"checkpointed": names, "save_ops": ops, "every_second_matmul": every_second}
    equals_the_library_or_both_refuse(graph, family, plan)


@by_name
def test_every_output_saved(family):
    graph = trace(family)
    plan = {"checkpointed": blocks_of(graph), "save_ops": operators(graph, regions_of(graph, blocks_of(graph)))}
    equals_the_library_or_both_refuse(graph, family, plan)


def equals_the_library_or_both_refuse(graph, family, plan):
    """An output that is written in place is refused here, and by torch.utils.checkpoint in backward."""
    try:
        regions = selective_regions(
            graph, plan["checkpointed"], plan["save_ops"], plan.get("every_second_matmul", False)
        )
    except InputError as error:
        assert "writes its output in place" in str(error)
        with pytest.raises(TraceError, match="has been mutated"):
            retrace(family.build("meta"), family.batch(), plan)
    else:
        assert timeline(checkpointed(graph, regions)) == retrace(family.build("meta"), family.batch(), plan)


def test_an_output_written_in_place_is_refused_as_the_library_does():
    t5 = next(family for family in FAMILIES if family.name == "t5")
    blocks = blocks_of(trace(t5))
    with pytest.raises(InputError, match=r"'aten.add.Tensor': 'aten.add_.Tensor' writes its output in place"):
        selective_regions(trace(t5), blocks, ["add"])
    equals_the_library_or_both_refuse(trace(t5), t5, {"checkpointed": blocks, "save_ops": ["aten.add.Tensor"]})


@by_name
def test_relations_that_always_hold(family):
    graph = trace(family)
    blocks = blocks_of(graph)
    full = regions_of(graph, blocks)
    assert selective_regions(graph, blocks, ()) == full
    some = selective_regions(graph, blocks, MATMULS, True)
    more = selective_regions(graph, blocks, MATMULS)
    assert all(set(few.kept) < set(many.kept) for few, many in zip(some, more))
    saved = [saved_bytes(checkpointed(graph, regions)) for regions in (full, some, more)]
    assert saved == sorted(set(saved))  # saving more outputs keeps more at the end of forward
    again = [sum(region.length for region in regions) for regions in (full, some, more)]
    assert again == sorted(set(again), reverse=True)  # and runs fewer operations again


def test_what_lies_behind_the_early_stop_stays_in_the_cache_until_the_last_save_goes():
    llama = next(family for family in FAMILIES if family.name == "llama")
    graph = trace(llama)
    regions = selective_regions(graph, blocks_of(graph), ["aten.add.Tensor"])
    assert all(op_at(graph, region.left_in_cache[-1]) == "aten.add.Tensor" for region in regions)
    plain, rewritten = (checkpointed(graph, some) for some in (regions_of(graph, blocks_of(graph)), regions))
    last = regions[0].left_in_cache[-1]  # the first block's output: the second holds it as its input as long as itself
    row = int((rewritten.birth == last).nonzero()[0][0])
    assert rewritten.num_ops - rewritten.death[row] < plain.num_ops - plain.death[row]


class Net(nn.Module):
    """A branch that the loss does not need, and one with operators of several outputs."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(16, 32)
        self.unused = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
        self.branch = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 8))

    def forward(self, x):
        hidden = self.inside(x)
        unused = self.unused(hidden)
        logits = self.branch(hidden)
        return SimpleNamespace(loss=logits.pow(2).sum(), logits=logits, unused=unused.detach())


def build_net():
    with torch.device("meta"):
        return Net().train()


@pytest.mark.parametrize(
    "ops", [["addmm"], ["gelu"], ["native_dropout", "native_batch_norm"], ["tanh", "gelu", "addmm"]]
)
def test_a_region_that_backward_never_wants_and_operators_of_several_outputs(ops):
    batch = {"x": torch.rand(6, 16)}
    graph, _ = record_training_step(build_net(), batch, adamw, decouple_saves=True)
    regions = selective_regions(graph, ["unused", "branch"], ops)
    assert {region.wanted is None for region in regions} == {True, False}
    assert any(region.kept for region in regions)
    plan = {"checkpointed": ["unused", "branch"], "save_ops": ops}
    assert timeline(checkpointed(graph, regions)) == retrace(build_net(), batch, plan)


def build_flash_llama():
    """bf16, with the flash kernel for scaled dot product attention."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = hf.LlamaConfig(vocab_size=101, num_hidden_layers=2, use_cache=False, **sizes)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        return hf.LlamaForCausalLM(config).to(torch.bfloat16).train()


@pytest.mark.parametrize(
    "text", ["selective:torchtitan", "selective:ops=_scaled_dot_product_flash_attention", "selective:matmul-every-2"]
)
def test_flash_attention_is_kept(text):
    batch, policy = FAMILIES[1].batch(), parse_policy(text)
    graph, _ = record_training_step(build_flash_llama(), batch, adamw, decouple_saves=True)
    regions = policy_regions(policy, graph)
    kept = [[op_at(graph, operation) for operation in region.kept] for region in regions]
    # In a block: q, k, v, attention, o, gate, up, down.
    in_a_block = {
        "selective:torchtitan": ["aten.mm.default"] * 2 + [FLASH] + ["aten.mm.default"] * 2,
        "selective:matmul-every-2": ["aten.mm.default"] * 4,
    }.get(text, [FLASH])
    assert kept == [in_a_block] * 4  # two blocks, two iterations
    rewritten = timeline(checkpointed(graph, regions))
    assert rewritten == retrace(build_flash_llama(), batch, policy_plan(policy, graph))
    assert rewritten == timeline(GradientCheckpointing(policy=policy).rewrite(graph.liveness(), graph))
    model = build_flash_llama()
    CheckpointModules(plan=policy_plan(policy, graph)).prepare(model)
    assert rewritten == timeline(record_training_step(model, batch, adamw)[0].liveness())


def test_spellings_of_operators_and_what_is_refused():
    llama = next(family for family in FAMILIES if family.name == "llama")
    graph = trace(llama)
    kept = [
        [region.kept for region in policy_regions(parse_policy(f"selective:ops={name}"), graph)]
        for name in ("mm", "aten.mm", "mm.default", "aten.mm.default")
    ]
    assert kept[0][0] and all(other == kept[0] for other in kept)
    for text in ("selective:torchtitan", "selective:matmul-every-2", "selective:ops=mm,aten._softmax.default"):
        assert parse_policy(text).name == text
        assert strategy_for(parse_policy(text)) == GradientCheckpointing(policy=parse_policy(text))
    for text in ("selective", "selective:ops=", "selective:ops=mm,", "selective:matmul-every-3"):
        with pytest.raises(InputError, match="Unknown checkpointing policy"):
            parse_policy(text)
    with pytest.raises(InputError, match=r"no block runs 'addmm'. Operators that run: .*aten.mm.default"):
        policy_regions(parse_policy("selective:ops=mm,addmm"), graph)
    for op in ("view", "t", "aten.detach"):
        with pytest.raises(InputError, match=r"returns a view|no block runs"):
            policy_regions(parse_policy(f"selective:ops={op}"), graph)
    with pytest.raises(InputError, match="saves 'matmull', which is no operator"):
        apply_checkpoint_plan(llama.build("meta"), {"checkpointed": blocks_of(graph), "save_ops": ["matmull"]})
