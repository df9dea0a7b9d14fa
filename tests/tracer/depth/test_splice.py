"""What splicing takes for a repeat, and what it refuses."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from metapeak.tracer.capture import record_training_step
from metapeak.tracer.depth import CannotSplice, repeats_of, shortened, splice
from metapeak.tracer.depth.groups import groups_of


def llama(**changes):
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=14, num_attention_heads=4, **changes
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


@pytest.fixture
def short():
    """(graph of a shortened Llama, its repeats)."""
    model = llama()
    (repeats,) = repeats_of(model)
    ids = torch.ones(2, 16, dtype=torch.int64)
    with shortened(model, [repeats]):
        graph, _ = record_training_step(model, {"input_ids": ids, "labels": ids}, torch.optim.AdamW, iterations=1)
    return graph, repeats


def rows_of(graph, repeats, group):
    groups = groups_of(graph, repeats)
    return [row for row, of in enumerate(groups.storages) if of == group]


def test_a_shortened_model_is_whole_again_afterwards():
    model = llama()
    (repeats,) = repeats_of(model)
    before = [name for name, _ in model.named_modules()]
    with shortened(model, [repeats]):
        assert len(model.model.layers) == 9 == model.config.num_hidden_layers
        assert [layer.self_attn.layer_idx for layer in model.model.layers] == list(range(9))
    assert [name for name, _ in model.named_modules()] == before
    assert model.config.num_hidden_layers == 14
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == list(range(14))


def test_a_spliced_graph_keeps_its_own_rules(short):
    graph, repeats = short
    spliced = splice(graph, repeats)
    spliced.lint()
    assert {name for name in spliced.module_names if name.endswith("mlp")} == {
        f"model.layers.{block}.mlp" for block in range(14)
    }


@pytest.mark.parametrize("column", ["nbytes", "death", "category"])
def test_a_neighbour_that_differs_in_one_row_is_refused(short, column):
    graph, repeats = short
    getattr(graph, column)[rows_of(graph, repeats, repeats.template + 1)[-1]] += 1
    with pytest.raises(CannotSplice, match=column):
        splice(graph, repeats)


def test_a_neighbour_that_reads_another_tensor_is_refused(short):
    graph, repeats = short
    groups = groups_of(graph, repeats)
    reading = [op for op, of in enumerate(groups.ops) if of == repeats.template + 1 and len(graph.args[op]) > 1]
    first, second, *others = graph.args[reading[5]]
    graph.args[reading[5]] = (second, first, *others)
    with pytest.raises(CannotSplice, match="args"):
        splice(graph, repeats)


def test_what_is_freed_by_a_copied_block_alone_is_refused(short):
    graph, repeats = short
    groups = groups_of(graph, repeats)
    inside = [op for op, of in enumerate(groups.ops) if of == repeats.template]
    outside = next(row for row, of in enumerate(groups.storages) if of not in range(9) and graph.birth[row] < inside[0])
    graph.death[outside] = inside[len(inside) // 2]
    with pytest.raises(CannotSplice):
        splice(graph, repeats)


def kinds(pattern):
    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear = nn.Linear(4, width, device="meta")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block(ord(kind)) for kind in pattern)

        def forward(self, hidden):
            for block in self.blocks:
                hidden = block(hidden)
            return hidden

    return Model()


@pytest.mark.parametrize(
    "pattern, kept, period",
    [
        ("a" * 20, 9, 1),
        ("x" + "a" * 20 + "y", 11, 1),
        ("ab" * 10, 10, 2),
        ("aab" * 8 + "a", 16, 3),
        ("x" * 3 + "aaab" * 8, 23, 4),
    ],
)
def test_blocks_that_are_kept(pattern, kept, period):
    (repeats,) = repeats_of(kinds(pattern))
    assert (len(repeats.kept), repeats.period) == (kept, period)
    assert len(repeats.kept) + repeats.added * repeats.period == len(pattern) == repeats.total
    # The blocks that stay are of the same kinds, in the same order, as if the model were that short.
    short = "".join(pattern[block] for block in repeats.kept)
    assert short[repeats.start :][: 2 * period] == short[repeats.start + period :][: 2 * period]
    assert (short[: repeats.start], short[-2:]) == (pattern[: repeats.start], pattern[-2:])


@pytest.mark.parametrize("pattern", ["a" * 9, "abcdefgh" * 2, "a" * 5 + "b" * 5, "abacabadabacabae"])
def test_nothing_is_left_out_where_nothing_repeats(pattern):
    assert repeats_of(kinds(pattern)) == ()


def test_a_class_that_asks_for_a_block_by_its_number_is_recorded_whole():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4, device="meta") for _ in range(20))

        def forward(self, hidden):
            for number, block in enumerate(self.blocks):
                hidden = block(hidden)
                if number == 12:
                    hidden = hidden * 2
            return hidden

    assert repeats_of(Picky()) == ()
