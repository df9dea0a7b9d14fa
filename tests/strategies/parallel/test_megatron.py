"""Megatron's distributed optimizer: padding of its buffers, bytes a parameter, and laws over ranks."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metapeak.strategies import simulate_options
from metapeak.strategies.parallel.megatron import buffer_places
from metapeak.tracer.errors import InputError
from metapeak.tracer.liveness import Category, Phase
from tests.strategies.parallel.test_sharded_steps import CONFIG


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "config.json"
    path.write_text(json.dumps(CONFIG | {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128}))
    known = {}

    def run(**options):
        key = json.dumps(options, sort_keys=True)
        if key not in known:
            step = {"seq_len": 16, "batch_size": 2, "precision": "bf16-mixed", "engine": "megatron"}
            known[key] = simulate_options(str(path), {**step, **options})
        return known[key]

    return run


def between_steps(simulation, category):
    liveness = simulation.worst.liveness
    at = int(((liveness.op_phase == Phase.FORWARD) & (liveness.op_iteration == 2)).argmax())
    alive = (liveness.birth < at) & (at < liveness.death) & (liveness.nbytes > 16)
    return int(liveness.nbytes[alive & (liveness.category == category)].sum())


@given(st.lists(st.integers(1, 500), min_size=1, max_size=9), st.integers(1, 9))
def test_parameters_are_aligned_and_the_end_divides(sizes, ranks):
    places, numel = buffer_places(sizes, ranks)
    assert numel % ranks == 0 and numel % 128 == 0 and all(place % 64 == 0 for place in places)
    ends = [place + size for place, size in zip(places, sizes)]
    assert all(end <= place for end, place in zip(ends[1:], places))  # the last comes first
    assert 0 <= numel - max(ends) < ranks * 128


@pytest.mark.parametrize(("reduce_dtype", "gradient"), [(None, 4), ("bf16", 2)])
def test_bytes_a_parameter_are_the_documented_ones(tiny, reduce_dtype, gradient):
    """Megatron-LM docs/source/api-guide/dist_optimizer.md: bf16 parameters and fp32 gradients 6 + 12 / d."""
    simulation = tiny(dp_shard=4, **({"reduce_dtype": reduce_dtype} if reduce_dtype else {}))
    count = simulation.model.parameters
    padded = count + -count % 128
    assert between_steps(simulation, Category.PARAMETER) == 2 * padded
    assert between_steps(simulation, Category.GRADIENT) == gradient * padded
    # Padding is at the end, on the last rank.
    assert between_steps(simulation, Category.OPTIMIZER_STATE) == 12 * padded // 4


def test_more_ranks_never_raise_a_peak(tiny):
    peaks = [max(phase.peak_bytes for phase in tiny(dp_shard=world).worst.phases) for world in (1, 4, 32)]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3


def test_accumulation_adds_into_the_buffer(tiny):
    one, four = tiny(dp_shard=4), tiny(dp_shard=4, grad_accum=4)
    batches = sum(four.worst.liveness.nbytes[four.worst.liveness.category == Category.INPUT])
    batch = sum(one.worst.liveness.nbytes[one.worst.liveness.category == Category.INPUT])
    ends = [phase.end_bytes - batches for phase in four.worst.phases if phase.phase == "backward"]
    assert ends[-1] == [phase.end_bytes for phase in one.worst.phases if phase.phase == "backward"][-1] - batch


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"optimizer": "sgd"}, "takes Adam only"),
        ({"method": "lora"}, "trains whole models"),
        ({"precision": "fp16-mixed"}, "its loss scaling is not predicted"),
        ({"optimizer_args": "lr=1"}, "steps with FusedAdam"),
    ],
)
def test_what_is_not_covered_is_refused(tiny, options, says):
    with pytest.raises(InputError, match=says):
        tiny(dp_shard=2, **options)


def test_a_published_steady_value_is_the_buffers_and_three_workspaces():
    """Megatron-LM tests/functional_tests/test_cases/gpt/gpt3_mcore_te_tp1_pp1_dist_optimizer_fim_dataset,
    golden_values_dev_dgx_h100.json: allocated between steps on one of eight H100s, a log that rounds to 32 bytes.

    What the buffers do not explain are workspaces of cuBLAS on Hopper, PyTorch's two and Transformer Engine's one.
    """
    published, workspace = 581_489_664, 32 << 20
    hidden, vocabulary = 512, -(-50257 // 128) * 128
    layer = [hidden, hidden]  # a norm's weight and bias
    layer += [hidden * hidden, hidden, *layer, 3 * hidden * hidden, 3 * hidden]
    layer += [4 * hidden * hidden, 4 * hidden, 4 * hidden * hidden, hidden]
    sizes = [vocabulary * hidden, 1024 * hidden, *layer * 12, hidden, hidden]
    _, numel = buffer_places(sizes, 8)
    assert numel == sum(sizes)  # nothing to pad
    held = numel * (2 + 4) + numel // 8 * 12
    assert published - held - 3 * workspace == 4_608
