"""Parallelism that cuts inside layers, through `simulate`: tensor, sequence, loss, context and expert parallelism."""

import json
import re

import pytest

from metapeak.strategies import simulate_options
from metapeak.strategies.parallel.tensor_parallel import tp_plan_of
from metapeak.tracer.errors import InputError
from metapeak.tracer.liveness import Category, Phase

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "moe_intermediate_size": 96,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
MISTRAL = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 32}
BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 64, "num_hidden_layers": 1}
BERT |= {"num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, config in (("llama", LLAMA), ("moe", MOE), ("mistral", MISTRAL), ("bert", BERT)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    known = {}

    def simulated(name="llama", **options):
        key = json.dumps([name, options], sort_keys=True)
        if key not in known:
            path = str(folder / name / "config.json")
            known[key] = simulate_options(path, {"seq_len": 64, "batch_size": 2, **options})
        return known[key]

    return simulated


def ends(rank, phase):
    return [one.end_bytes for one in rank.phases if one.phase == phase]


def loaded(rank):
    liveness = rank.liveness
    which = (liveness.category == Category.PARAMETER) & (liveness.op_phase[liveness.birth] == Phase.LOAD)
    return int(liveness.nbytes[which].sum())


def said(simulation):
    return " ".join(simulation.how.assumptions)


@pytest.mark.parametrize("options", [{"tp": 1, "cp": 1, "ep": 1}, {"tp": 1, "sequence_parallel": True}])
def test_degree_one_is_the_identity(run, options):
    plain, one = run("moe").worst, run("moe", **options).worst
    assert one.phases == plain.phases and one.device_bytes == plain.device_bytes


@pytest.mark.slow
def test_degree_one_is_the_identity_beside_fsdp2(run):
    assert run("moe", dp_shard=2, tp=1, cp=1, ep=1).worst.phases == run("moe", dp_shard=2).worst.phases


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("llama", {"tp": 3}, "num_attention_heads 4 / tp 3 = 1.33 is no whole number of heads"),
        ("llama", {"tp": 2, "tp_plan": "model.layers.*.mlp.up=colwise"}, "model.layers.*.mlp.up names no module"),
        ("llama", {"tp": 2, "tp_plan": "lm_head=columns"}, "no style columns. Styles: .*rowwise"),
        ("llama", {"tp": 2, "sequence_parallel": True, "seq_len": 65}, "seq_len 65 / tp 2 = 32.50"),
        ("llama", {"tp": 2, "cp": 2, "sequence_parallel": True, "seq_len": 66}, "seq_len 66 / .*"),
        ("moe", {"tp": 2, "sequence_parallel": True}, "style moe_tp_experts, which has no counterpart"),
        ("bert", {"tp": 2, "loss_parallel": True}, "logits of causal language models"),
        ("llama", {"sequence_parallel": True}, "sequence_parallel belongs to tp"),
        ("llama", {"expert_load_skew": 1.5}, "expert_load_skew belongs to ep"),
        ("llama", {"cp": 3}, r"seq_len 64 / \(2 x cp 3\) = 10.67 is no whole number of tokens"),
        ("llama", {"cp": 2, "attention": "eager"}, "cp 2 with attention eager"),
        ("llama", {"cp": 2, "attention": "math"}, "covers flash, memory-efficient and cuDNN attention"),
        ("llama", {"cp": 2, "attention": "efficient", "seq_len": 96}, "24 is no multiple of 32"),
        ("llama", {"cp": 2, "engine": "ddp"}, "engine ddp with cp 2"),
        ("mistral", {"cp": 2}, "sliding_attention"),
        ("bert", {"cp": 2}, "has to be a causal language model"),
        ("llama", {"ep": 2, "dp_shard": 2}, "no expert parallel plan"),
        ("moe", {"ep": 3, "dp_shard": 3}, "num_experts 8 / ep 3 = 2.67 is no whole number of experts"),
        ("moe", {"ep": 2}, "dp_shard 1 x cp 1 x tp 1 / ep 2 = 0.50"),
        ("moe", {"ep": 2, "tp": 4}, "ep 2 / tp 4 = 0.50"),
        ("moe", {"ep": 2, "dp_shard": 2, "expert_load_skew": 3.0}, "= 2: a token chooses each"),
    ],
)
def test_what_cannot_be_cut_is_refused(run, name, options, words):
    with pytest.raises(InputError) as refused:
        run(name, **options)
    assert re.search(words, str(refused.value))


def test_plans_of_files(tmp_path):
    plan = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
    written = tuple(f"{path}={style}" for path, style in plan.items())
    lines = "\n".join(f"'{path}': {style}" for path, style in plan.items())
    for name, text in (("plan.json", json.dumps(plan)), ("plan.yaml", lines)):
        (tmp_path / name).write_text(text)
        assert tp_plan_of(str(tmp_path / name)) == written
    (tmp_path / "list.yaml").write_text("- colwise")
    for name in ("none.json", "list.yaml"):
        with pytest.raises(InputError):
            tp_plan_of(str(tmp_path / name))


def test_a_given_plan_goes_before_the_models_own(run):
    rules = "lm_head=replicate,model.embed_tokens=replicate"
    head = LLAMA["vocab_size"] * LLAMA["hidden_size"] * 2
    assert loaded(run(tp=2, tp_plan=rules).worst) == loaded(run(tp=2).worst) + head


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}, {"tp_plan": "lm_head=replicate"}])
def test_the_note_on_whole_parameters_is_what_a_rank_holds(run, options):
    simulation = run(tp=2, **options)
    whole = simulation.model.parameter_bytes - 2 * (simulation.model.parameter_bytes - loaded(simulation.worst))
    assert f"{whole:,} in all" in said(simulation)
    assert "model.layers.*.input_layernorm.weight 256" in said(simulation)


def test_sequence_parallel_keeps_a_part_of_norms_and_residuals(run):
    tensor, sequence = run(tp=2).worst, run(tp=2, sequence_parallel=True).worst
    # Of each token and layer at the end of forward: inputs of two norms in float32 and their results, two residuals.
    rows = LLAMA["hidden_size"] * 2 * 64
    assert ends(tensor, "forward")[0] - ends(sequence, "forward")[0] > LLAMA["num_hidden_layers"] * 2 * rows * 4 / 2
    assert ends(tensor, "optimizer") == ends(sequence, "optimizer")


def test_loss_parallel_keeps_a_part_of_the_logits(run):
    whole, part = run(tp=2).worst, run(tp=2, loss_parallel=True).worst
    assert part.not_shared["logits"] < 0.7 * whole.not_shared["logits"]  # 16 bytes of each of a half, against 12
    assert part.requested_bytes < whole.requested_bytes


def test_context_parallel_needs_less_for_longer_sequences(run):
    half, whole = run(cp=2, seq_len=512).worst, run(dp_shard=2, seq_len=512).worst
    assert half.steady_bytes == whole.steady_bytes
    assert half.not_shared["activations"] < 0.7 * whole.not_shared["activations"]
    assert half.coordinates.keys() >= {"cp"} and "ring attention (allgather)" in said(run(cp=2, seq_len=512))


def test_ranks_of_a_ring_differ_by_their_place(run, monkeypatch):
    places = [(rank.rank, rank.count) for rank in run(cp=4).ranks]
    assert places == [(0, 1), (1, 2), (3, 1)]
    # Ranks between the ends of the ring are alike: trace each.
    monkeypatch.setattr("metapeak.strategies.parallel.layout.np.clip", lambda places, low, high: 2 * places)
    each = run(cp=4, cp_rotation="allgather").ranks
    assert len(each) == 4 and each[1].phases == each[2].phases


def test_experts_are_spread_and_the_rest_sharded(run):
    simulation = run("moe", dp_shard=4, ep=2)
    assert loaded(simulation.worst) == loaded(run("moe", dp_shard=4).worst)
    with_experts = run("moe", tp=2, ep=2)
    experts = 2 * 8 * 96 * 64 * 3 * 2
    assert loaded(with_experts.worst) >= experts // 2
    assert "8 experts / ep 2 = 4 experts of each layer a rank" in said(simulation)
    assert "transformers' own" in said(simulation)
    assert "experts" not in next(one for one in with_experts.how.assumptions if one.startswith("whole on each"))


def test_a_load_skew_is_what_the_busiest_rank_holds_more(run):
    peaks = [run("moe", dp_shard=2, ep=2, expert_load_skew=skew).worst.requested_bytes for skew in (1.0, 2.0)]
    assert peaks == sorted(set(peaks))
    assert peaks[0] == run("moe", dp_shard=2, ep=2).worst.requested_bytes


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (
            "llama",
            {"tp": 2, "dp_shard": 2, "sequence_parallel": True, "loss_parallel": True, "precision": "bf16-mixed"},
        ),
        pytest.param(
            "llama", {"cp": 2, "dp_shard": 2, "dp_replicate": 2, "checkpointing": "full"}, marks=pytest.mark.slow
        ),
        ("llama", {"cp": 2, "tp": 2, "dp_shard": 2, "sequence_parallel": True}),
        pytest.param("moe", {"cp": 2, "ep": 4, "dp_shard": 2, "grad_accum": 2}, marks=pytest.mark.slow),
        ("moe", {"tp": 2, "dp_shard": 2, "ep": 4, "max_grad_norm": 1.0}),  # gradients on two meshes
    ],
)
def test_degrees_compose(run, name, options):
    simulation = run(name, **options)
    worlds = [options.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "cp", "tp")]
    assert sum(rank.count for rank in simulation.ranks) == worlds[0] * worlds[1] * worlds[2] * worlds[3]
    assert simulation.worst.requested_bytes < run(name).worst.requested_bytes
