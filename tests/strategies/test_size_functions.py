"""Sizes as functions of batch and length equal those of direct traces; ranges end where the graph changes."""

import json
import random

import numpy as np
import pytest

from metapeak.reports.commands.base import DONE
from metapeak.strategies.lengths import Steps, distribution, read_lengths
from metapeak.strategies.request import simulate_resolved
from metapeak.strategies.settings import options_of, resolve
from metapeak.strategies.size_functions import NotAPolynomial, size_functions
from metapeak.tracer.errors import InputError
from tests.reports.command_line import metapeak
from tests.strategies.parallel.test_sharded_steps import CONFIG

_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "vocab_size": 90, "torch_dtype": "float32"}  # fmt: skip
MODELS = {
    "llama": CONFIG,
    "qwen3": {**_SMALL, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8},
    "mistral": {
        **_SMALL, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64,
    },
    "gemma3": {
        **_SMALL, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "sliding_window": 64,
        "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": {
        **_SMALL, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4,
    },
    "phi3": {**_SMALL, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0},
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 2, "n_head": 4,
        "n_positions": 1024, "vocab_size": 90,
    },
    "bert": {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 90, "max_position_embeddings": 1024,
    },
    "opt": {
        "model_type": "opt", "architectures": ["OPTForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "ffn_dim": 48, "vocab_size": 90, "max_position_embeddings": 1024,
        "word_embed_proj_dim": 32,
    },
    "gpt_neox": {
        **_SMALL, "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "max_position_embeddings": 1024,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sizes")

    def of(name):
        path = folder / name / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(MODELS[name]))
        return str(path)

    return of


def options(**values):
    return resolve(options_of(values, "call"))


def direct(reference, size, **values):
    return simulate_resolved(reference, options(batch_size=size[0], seq_len=size[1], **values))


def check(reference, name, batches, points, **values):
    """`points` random sizes of each batch equal their own traces: bytes, shapes, and all that comes of them."""
    steps = Steps(reference(name), options(**values))
    chosen = random.Random(name)
    for batch in batches:
        sizes = [(batch, chosen.randint(20, 500)) for _ in range(points)]
        steps.cover([(batch, 16), *((batch, length) for length in range(20, 501, 20)), *sizes, (batch, 512)])
        peaks = steps.peak_bytes(sizes)
        for size in sizes:
            alone, graph = direct(reference(name), size, **values), steps.graph(size)
            assert graph.nbytes == alone.graph.nbytes, size
            assert graph.value_shape == alone.graph.value_shape, size
            assert graph.value_stride == alone.graph.value_stride, size
            assert peaks[size] == int(alone.graph.liveness().live_bytes().max())
            assert steps.simulate(size).worst.device_bytes == alone.worst.device_bytes, size
    return steps


def test_sizes_of_a_step_equal_direct_traces(reference):
    steps = check(reference, "llama", [1, 3], 2)
    assert len(steps.ranges) == 2 and steps.traces == 10 and not steps.reasons


def test_the_same_with_a_policy_that_is_a_rewrite(reference):
    check(reference, "llama", [2], 2, checkpointing="every:2", optimizer="sgd")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_two_hundred_sizes_of_ten_models_equal_direct_traces(reference, name):
    check(reference, name, [1, 2], 10)


def test_both_dimensions_at_once(reference):
    path = reference("llama")
    found = size_functions(lambda size: direct(path, size).graph, (2, 32), (7, 300))
    for size in ((2, 32), (3, 77), (6, 255)):
        assert found.graph(size).nbytes == direct(path, size).graph.nbytes
    assert (found.peak_bytes([(4, 64), (4, 65)]) > 0).all() and np.diff(found.peak_bytes([(4, 64), (4, 65)])) > 0
    for outside in ((8, 64), (2, 301), (1, 64)):
        with pytest.raises(InputError, match="outside what was traced"):
            found.graph(outside)
    with pytest.raises(NotAPolynomial, match="a batch of 1"):
        size_functions(lambda size: direct(path, size).graph, (1, 32), (4, 64))


def test_what_is_no_polynomial_is_refused_with_an_example(reference):
    path = reference("llama")

    def odd(size):
        graph = direct(path, size).graph
        graph.nbytes[-1] = size[1] ** 3
        return graph

    with pytest.raises(NotAPolynomial, match="is no polynomial of batch and length"):
        size_functions(odd, (1, 32), (1, 300))


def test_the_distribution_of_a_file(reference, tmp_path):
    lengths = [40, 300, 64, 100, 200, 120, 31]
    path = tmp_path / "lengths"
    path.write_text("\n".join(map(str, lengths)))
    assert read_lengths(str(path)) == lengths
    found = distribution(reference("llama"), options(batch_size=2, gpu="t4"), lengths)
    assert found.padded.counts == {(2, 300): 1, (2, 100): 1, (2, 200): 1} and found.left_over == 1
    assert found.packed.counts == {(1, 340): 1, (1, 164): 1, (1, 320): 1}
    percent, size, simulation = found.padded.percentiles[-1]
    assert (percent, size) == (100, (2, 300))
    assert simulation.worst.device_bytes == direct(reference("llama"), (2, 300), gpu="t4").worst.device_bytes
    assert found.padded.fitting == 3
    assert found.padding_percent == pytest.approx(100 * (1 - 824 / 1200))


def test_on_the_command_line(reference, tmp_path):
    path = tmp_path / "lengths"
    path.write_text("17\n\n99\n50\n23\n")
    run = metapeak("estimate", reference("llama"), "--seq-lens", str(path), "--batch-size", "2", "--json", "-")
    assert run.returncode == DONE, run.stderr
    record = json.loads(run.stdout)
    assert record["sequences"] == 4 and record["padded"]["percentiles"][-1]["length"] == 99
    assert "largest" in metapeak("estimate", reference("llama"), "--seq-lens", str(path), "--batch-size", "2").stdout
    for text, says in (
        ("12\nx\n", "lengths:2: 'x' is no length"),
        ("", "holds no length"),
        ("5\n", "fewer than a batch"),
    ):
        path.write_text(text)
        run = metapeak("estimate", reference("llama"), "--seq-lens", str(path), "--batch-size", "2")
        assert run.returncode == 1 and says in run.stderr
    path.write_text("17\n50\n")
    for flags, says in (
        (["--batch-size", "1,2"], "takes one value of --batch-size"),
        (["--evaluate"], "leave evaluation, generation, saving and loading out"),
    ):
        run = metapeak("estimate", reference("llama"), "--seq-lens", str(path), *flags)
        assert run.returncode == 1 and says in run.stderr
    run = metapeak("estimate", reference("llama"), "--seq-lens", str(path), "--seq-len", "5")
    assert run.returncode == 1 and "--seq-len does not go with --seq-lens" in run.stderr
