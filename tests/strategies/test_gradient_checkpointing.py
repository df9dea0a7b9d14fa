"""Policies: what they select, what they refuse, and what they say of modules that they can do nothing for."""

import pytest
import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration

from metapeak.strategies.checkpoint_policies import parse_policy
from metapeak.strategies.gradient_checkpointing import (
    CheckpointEveryBlock,
    GradientCheckpointing,
    apply_checkpoint_plan,
)
from metapeak.tracer.blocks import block_names
from metapeak.tracer.capture import record_training_step
from metapeak.tracer.errors import InputError


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x).tanh()


class Stack(torch.nn.Module):
    def __init__(self, count=8):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def stack_graph(change=lambda model: None):
    with torch.device("meta"):
        model = Stack()
    change(model)
    return record_training_step(model, (torch.ones(2, 8),), None, iterations=1, decouple_saves=True)[0]


@pytest.mark.parametrize(
    "text, numbers",
    [
        ("none", []),
        ("full", list(range(8))),
        ("every:1", list(range(8))),
        ("every:4", [3, 7]),  # the fourth and the eighth
        ("layers:0-2,5", [0, 1, 2, 5]),
    ],
)
def test_policies_select_blocks(text, numbers):
    policy = parse_policy(text)
    assert policy.name == text
    assert policy.modules(stack_graph()) == [f"layers.{number}" for number in numbers]


def test_patterns_select_modules_and_not_what_is_inside_them():
    graph = stack_graph()
    assert parse_policy("modules:*.inner").modules(graph) == [f"layers.{number}.inner" for number in range(8)]
    assert parse_policy("modules:layers.1*").modules(graph) == ["layers.1"]


def test_nested_takes_blocks_and_modules_inside():
    names = parse_policy("nested:layers.[01].inner").modules(stack_graph())
    assert names == ["layers.0", "layers.0.inner", "layers.1", "layers.1.inner", *(f"layers.{n}" for n in range(2, 8))]
    with pytest.raises(InputError, match="matches no module inside"):
        parse_policy("nested:*.outer").modules(stack_graph())


@pytest.mark.parametrize("text", ["", "half", "every:0", "every:x", "layers:", "layers:a", "layers:5-2", "modules:"])
def test_unknown_policies_are_refused(text):
    with pytest.raises(InputError):
        parse_policy(text)


def test_a_block_out_of_range_is_refused():
    with pytest.raises(InputError, match=r"8 is out of range: the model has 8 blocks, 0 to 7"):
        parse_policy("layers:8").modules(stack_graph())


def test_blocks_inside_blocks_are_not_listed():
    outer = torch.nn.Sequential(Stack(2), Stack(2))
    assert block_names(outer) == ["0", "1"]
    assert block_names(torch.nn.Linear(2, 2)) == []


def test_a_model_without_blocks_is_cut_where_one_tensor_passes():
    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.left, self.right = Block(), Block(), Block()
            self.pair, self.head = Pair(), Block()

        def forward(self, x):
            stem = self.stem(x)
            both = self.pair(self.left(stem), self.right(stem))
            return self.head(both).sum()

    class Pair(torch.nn.Module):
        def forward(self, left, right):
            return left * right.sigmoid()

    with torch.device("meta"):
        model = Branches()
    graph = record_training_step(model, (torch.ones(2, 8),), None, iterations=1, decouple_saves=True)[0]
    # one tensor enters and leaves each Block; two enter Pair
    assert graph.block_names == []
    assert parse_policy("full").modules(graph) == ["stem", "left", "right", "head"]


def test_frozen_blocks_are_named_as_ignored():
    """The first three save nothing: their weights and their input need no gradient."""
    graph = stack_graph(lambda model: [layer.requires_grad_(False) for layer in model.layers[:3]])
    (sentence,) = GradientCheckpointing().remarks(graph)
    assert "layers.0 ... layers.2 (3 blocks)" in sentence


def test_a_vision_tower_in_evaluation_mode_is_named_as_ignored_by_the_model_s_own_switch():
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    text = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "vocab_size": 32,
    }  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=31, vision_feature_layer=-1)
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config).train()
    model.model.vision_tower.eval()
    strategy = CheckpointEveryBlock()
    strategy.prepare(model)
    ids = torch.arange(12).view(1, 12)
    ids[0, :3] = 31
    ids = torch.cat([ids[:, :3], torch.full((1, 1), 31), ids[:, 3:]], dim=1)  # four patches, four placeholders
    batch = {"input_ids": ids, "labels": ids.clone(), "pixel_values": torch.ones(1, 3, 8, 8), "use_cache": False}
    batch["attention_mask"] = torch.ones_like(ids)
    model.config.vision_feature_select_strategy = "default"
    graph, _ = record_training_step(model, batch, None, iterations=1)
    (sentence,) = strategy.remarks(graph)
    assert "vision_tower" in sentence and "(2 blocks)" in sentence and "language_model" not in sentence


def test_a_plan_for_another_model_is_refused():
    with pytest.raises(InputError, match=r"layers\.9"):
        apply_checkpoint_plan(Stack(), {"checkpointed": ["layers.9"]})


def test_an_applied_plan_computes_the_same():
    torch.manual_seed(0)
    model, x = Stack(), torch.rand(2, 8)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    apply_checkpoint_plan(model, {"checkpointed": ["layers.1", "layers.5"]})
    for gradient, plain in zip(torch.autograd.grad(model(x), list(model.parameters())), expected):
        assert torch.equal(gradient, plain)
