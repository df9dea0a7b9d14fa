"""Pipelines: how stages are cut, what is refused before a trace, and laws of a rank's live bytes."""

import json

import pytest

from metapeak.reports.data import record_of
from metapeak.strategies import simulate_options
from metapeak.strategies.parallel.layout import Layout
from metapeak.strategies.parallel.megatron_schedules import megatron_order
from metapeak.strategies.parallel.pipeline import PipelineParallel
from metapeak.strategies.parallel.played import order_of
from metapeak.strategies.parallel.schedules import Schedule, parse_schedule
from metapeak.strategies.parallel.stages import split_blocks
from metapeak.tracer.errors import InputError, UnknownName
from metapeak.tracer.liveness import Category, Phase
from metapeak.tracer.simulation_file import simulation_from_bytes, simulation_to_bytes
from tests.strategies.parallel.test_options import refusal, resolved, strategies

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 130,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 48,
    "n_layer": 4,
    "n_head": 4,
    "vocab_size": 130,
    "n_positions": 64,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder, known = tmp_path_factory.mktemp("tiny"), {}
    for name, config in (("llama", CONFIG), ("gpt2", GPT2)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))

    def run(name="llama", **options):
        key = json.dumps([name, options], sort_keys=True)
        if key not in known:
            known[key] = simulate_options(str(folder / name / "config.json"), {"seq_len": 16, **options})
        return known[key]

    return run


def loaded(rank):
    liveness = rank.liveness
    which = (liveness.category == Category.PARAMETER) & (liveness.op_phase[liveness.birth] == Phase.LOAD)
    return int(liveness.nbytes[which].sum())


BLOCKS = [f"model.layers.{number}" for number in range(12)]


def test_equal_stages():
    assert split_blocks(BLOCKS, 4) == ([range(0, 3), range(3, 6), range(6, 9), range(9, 12)], ())


def test_stages_that_do_not_divide_are_those_of_torchtitan():
    """126 blocks, the embedding and the head are 128: 8 a stage, 7 beside each of the two."""
    ranges, notes = split_blocks([f"layers.{number}" for number in range(126)], 16)
    assert [len(one) for one in ranges] == [7, *[8] * 14, 7]
    assert "126 blocks / 16 stages = 7.88" in notes[0]
    ranges, notes = split_blocks(BLOCKS[:5], 4)  # so the last stage would have the head alone
    assert [len(one) for one in ranges] == [2, 1, 1, 1] and "earlier stages have one more" in notes[0]


def test_cuts_are_first_blocks_or_paths():
    expected = [range(0, 1), range(1, 10), range(10, 12)]
    assert split_blocks(BLOCKS, 3, ("1", "10"))[0] == expected
    assert split_blocks(BLOCKS, 3, ("model.layers.1", "model.layers.10"))[0] == expected


@pytest.mark.parametrize(
    ("stages", "split", "message"),
    [
        (13, None, "13 stages, but the model has 12 blocks"),
        (2, ("model.layers.3.mlp",), "inside the block model.layers.3"),
        (2, ("model.norm",), "no block 'model.norm'"),
        (2, ("12",), "rise from 1 to 11"),
        (3, ("5", "5"), "rise from 1 to 11"),
        (3, ("5",), "1 cuts, which make 2 stages, but there are 3"),
    ],
)
def test_cuts_that_cannot_be(stages, split, message):
    with pytest.raises(InputError, match=message):
        split_blocks(BLOCKS, stages, split)


def test_schedules_by_name():
    assert parse_schedule("zbv") == Schedule(name="zbv", virtual=2)
    assert parse_schedule("interleaved-1f1b:3").stages_of(1, 4) == [1, 5, 9]
    with pytest.raises(UnknownName, match="gpipe, 1f1b, interleaved-1f1b:V"):
        parse_schedule("waves")
    with pytest.raises(InputError, match="zbv has 2 stages a rank, not 3"):
        parse_schedule("zbv:3")


@pytest.mark.parametrize(
    ("name", "pp", "microbatches", "message"),
    [
        ("1f1b", 4, 3, r"Number of microbatches \(3\) must be greater than"),
        ("interleaved-1f1b:2", 4, 9, "multiple of the number of rounds"),
        ("dualpipev", 2, 3, "at least as many microbatches as stages"),
    ],
)
def test_what_torchs_schedule_refuses_is_refused_in_its_words(name, pp, microbatches, message):
    with pytest.raises(InputError, match=message):
        parse_schedule(name).check(pp, microbatches)


def test_options_of_a_pipeline():
    (pipeline,) = strategies(pp=4, schedule="interleaved-1f1b:2")
    schedule = Schedule(name="interleaved-1f1b", virtual=2)
    assert pipeline == PipelineParallel(layout=Layout(pp=4), schedule=schedule, microbatches=8)
    assert resolved(pp=2)["schedule"].value == "1f1b" and resolved(pp=2)["microbatches"].value == 2
    sharded = resolved(pp=2, dp_shard=2)["reshard_after_forward"]
    assert sharded.value == "never" and "torchtitan" in sharded.origin
    assert "belongs to a pipeline" in refusal(schedule="gpipe")
    assert "3 stages / pp 2 = 1.5 a rank, no whole number" in refusal(pp=2, pp_split="1,2")
    assert "sharded by engine fsdp2" in refusal(pp=2, dp_replicate=2)
    assert "last stage returns logits" in refusal(pp=2, loss="chunked")


def test_what_a_pipeline_cannot_train_is_refused(tiny):
    with pytest.raises(InputError, match="Use microbatches 6"):
        tiny(pp=2, microbatches=2, grad_accum=3)
    with pytest.raises(InputError, match="without loss scaling"):
        tiny(pp=2, precision="fp16-mixed")
    with pytest.raises(InputError, match="GPT2LMHeadModel changes its inputs_embeds"):
        tiny("gpt2", pp=2)


def test_stages_hold_the_parameters_of_the_model(tiny):
    simulation = tiny(pp=2, microbatches=2)
    assert sum(loaded(rank) for rank in simulation.ranks) == simulation.model.parameter_bytes
    assert [rank.coordinates["pp"] for rank in simulation.ranks] == [0, 1]
    names = set(simulation.ranks[1].liveness.module_names)
    assert "stage1.model.layers.2.mlp" in names and "stage1.model.layers.1.mlp" not in names


def test_degree_one_is_no_pipeline(tiny):
    alone, plain = tiny(pp=1), tiny()
    assert alone.worst.phases == plain.worst.phases and alone.worst.actions == ()


def test_what_a_1f1b_rank_keeps_in_flight(tiny):
    for pp, microbatches in ((2, 2), (2, 5), (4, 6)):
        ranks = tiny(pp=pp, microbatches=microbatches).ranks
        found = [max(action.in_flight for action in rank.actions) for rank in ranks]
        assert found == [min(pp - place, microbatches) for place in range(pp)]


def test_gpipe_keeps_all_in_flight_and_more_than_1f1b(tiny):
    gpipe, steady = tiny(pp=2, schedule="gpipe", microbatches=5), tiny(pp=2, microbatches=5)
    assert max(action.in_flight for action in gpipe.ranks[0].actions) == 5
    assert gpipe.worst.requested_bytes > steady.worst.requested_bytes


def test_the_record_has_the_schedule(tiny):
    simulation = tiny(pp=2, microbatches=5)
    record = record_of(simulation)["pipeline"]
    assert record["max_over_mean"] >= 1
    first = record["ranks"][0]
    assert [action["action"] for action in first["actions"] if action["iteration"] == 2] == [
        f"0{kind}{number}" for _, kind, number in (action.split(" ") for action in _FIRST_OF_TWO)
    ] + ["0R"]
    assert first["actions"][0]["peak_bytes"] >= first["actions"][0]["end_bytes"] > 0
    kept = simulation_from_bytes(simulation_to_bytes(simulation), None)
    assert kept.ranks[0].actions == simulation.ranks[0].actions
    assert record_of(tiny())["pipeline"] is None


_FIRST_OF_TWO = ("0 F 0", "0 F 1", "0 B 0", "0 F 2", "0 B 1", "0 F 3", "0 B 2", "0 F 4", "0 B 3", "0 B 4")


def test_stages_pass_parts_of_a_sequence_that_is_cut(tiny):
    """What neighbours send into has a rank's own part of the tokens: 1 / (cp x tp), with sequence_parallel."""
    options = {"pp": 2, "seq_len": 128, "microbatches": 2, "precision": "bf16"}
    whole = _buffers(tiny(**options))
    assert whole == _buffers(tiny(**options, tp=2)) == 2 * _buffers(tiny(**options, cp=2))
    cut = tiny(**options, tp=2, cp=2, sequence_parallel=True)
    assert whole == 4 * _buffers(cut)
    assert "parts of the sequence go between stages" in " ".join(cut.how.assumptions)


def _buffers(simulation):
    liveness = simulation.ranks[-1].liveness
    row = [place for place, shape in enumerate(liveness.shapes) if len(shape) == 3 and shape[-1] == 48]
    which = [place for place in row if liveness.category[place] == Category.COMMUNICATION]
    return int(liveness.nbytes[which].sum())


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8), (4, 12)])
def test_megatrons_orders_are_those_of_torch_where_both_have_one(pp, microbatches):
    for ours, theirs in (("megatron-1f1b", "1f1b"), ("megatron-interleaved:3", "interleaved-1f1b:3")):
        for place in range(pp):
            given = (place, pp, microbatches)
            found = [one for one in order_of(parse_schedule(ours), *given) if one[0] != "R"]
            assert found == [one for one in order_of(parse_schedule(theirs), *given) if one[0] != "R"]


def test_megatron_takes_fewer_microbatches_than_stages(tiny):
    ranks = tiny(pp=4, schedule="megatron-1f1b", microbatches=2).ranks
    assert [max(action.in_flight for action in rank.actions) for rank in ranks] == [2, 2, 2, 1]


@pytest.mark.parametrize("group", [4, 6])
def test_megatrons_interleaved_warm_up_decides_what_is_in_flight(group):
    """(pp - rank - 1) x 2 + (virtual - 1) x group forwards, and the one of the first pair."""
    for place in range(4):
        in_flight, most = 0, 0
        for kind, _, _ in megatron_order(place, 4, 2, 12, group):
            in_flight += {"F": 1, "B": -1}[kind]
            most = max(most, in_flight)
        assert in_flight == 0 and most == 2 * (4 - place - 1) + group + 1


def test_what_megatron_refuses_is_refused():
    assert parse_schedule("megatron-interleaved:2:6") == Schedule(name="megatron-interleaved", virtual=2, group=6)
    for schedule, message in (
        ("megatron-interleaved:2:3", "has to lie between pp 4 and microbatches 9"),
        ("megatron-interleaved:2", "microbatches 9 mod .* = 1, which has to be 0 or pp 4"),
    ):
        with pytest.raises(InputError, match=message):
            parse_schedule(schedule).check(4, 9)


def test_order_of_gpipe_reduces_once():
    order = order_of(parse_schedule("gpipe"), 0, 2, 2)
    assert order == [("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1), ("R", 0, -1)]
