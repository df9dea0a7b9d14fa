"""The engines' rules on layouts and sizes that can be worked out in the margin."""

import pytest

from metapeak.strategies.serving.engines import Request, find_engine
from metapeak.strategies.serving.formats import FORMATS
from metapeak.strategies.serving.weights import Weight, allocated_bytes, cuts, rank_sizes, stages_of
from metapeak.tracer.gpus import find_gpu
from metapeak.tracer.kv_cache import CacheLayer, CacheLayout

GIB, MIB = 1 << 30, 1 << 20
FULL = CacheLayer(kind="DynamicLayer", token_bytes=1024, heads=8)
SLIDING = CacheLayer(kind="DynamicSlidingWindowLayer", token_bytes=1024, window=128, heads=8)


def layout(*layers):
    return CacheLayout(layers=layers, dtype="bfloat16", kind="DynamicCache")


@pytest.mark.parametrize(
    ("gpu", "version", "max_model_len", "tokens", "seqs"),
    [
        ("h100", (0, 10, 2), 4096, 8192, 1024),
        ("a100", (0, 10, 2), 4096, 2048, 256),
        ("l40s", (0, 10, 2), 4096, 2048, 256),
        ("h100", (0, 6, 5), 8192, 8192, 256),  # one whole sequence before chunked prefill
        ("h100", (0, 6, 5), 131072, 2048, 256),  # chunked by default above 32,768
    ],
)
def test_vllm_defaults_by_version_and_card(gpu, version, max_model_len, tokens, seqs):
    settings = find_engine("vllm").settings(Request(max_model_len=max_model_len, version=version), find_gpu(gpu))
    assert (settings.batched_tokens, settings.max_seqs) == (tokens, seqs)


def test_vllm_deducts_graphs_from_0_21_on():
    engine, gpu = find_engine("vllm"), find_gpu("l40s")
    for version, inside in (((0, 20), False), ((0, 21), True)):
        request = Request(max_model_len=4096, version=version)
        budget = engine.budget(request, engine.settings(request, gpu), gpu)
        assert any("graphs" in item.name for item in budget.charges) is inside
        assert any("graphs" in item.name for item in budget.outside) is not inside
    eager = Request(max_model_len=4096, version=(0, 21), cuda_graphs=False)
    budget = engine.budget(eager, engine.settings(eager, gpu), gpu)
    assert not any("graphs" in item.name for item in (*budget.charges, *budget.outside))


def test_vllm_keeps_a_window_and_a_prefill_of_sliding_layers():
    engine, gpu = find_engine("vllm"), find_gpu("l40s")
    settings = engine.settings(Request(max_model_len=8192, max_num_batched_tokens=512), gpu)
    # 127 + 512 tokens are 40 blocks of 16, and one more
    assert engine.sequence_bytes(layout(FULL, SLIDING), 8192, 0, settings) == 1024 * (8192 + 41 * 16)
    assert engine.sequence_bytes(layout(FULL, SLIDING), 20, 0, settings) == 2 * 1024 * 32


def test_llama_cpp_gives_windows_a_micro_batch_and_whole_pads():
    engine, gpu = find_engine("llama.cpp"), find_gpu("l40s")
    settings = engine.settings(Request(max_model_len=8192), gpu)
    # 128 + 512 cells are three pads of 256
    assert engine.sequence_bytes(layout(FULL, SLIDING), 8192, 0, settings) == 1024 * (8192 + 768)


def test_sglang_leaves_ten_gib_on_large_cards():
    engine = find_engine("sglang")
    large = engine.settings(Request(max_model_len=8192), find_gpu("h100"))
    assert large.memory_fraction == round((81559 - 512 - 12288 - 512 - 128) / 81559, 3)
    short = engine.settings(Request(max_model_len=8192, max_num_batched_tokens=4096), find_gpu("h100"))
    assert short.memory_fraction == round((81559 - 10240) / 81559, 3)
    small = engine.settings(Request(max_model_len=8192), find_gpu("l4"))
    assert small.memory_fraction == round((23034 - 512 - 3072 - 48 - 128) / 23034, 3)


def test_gguf_blocks():
    # llama.cpp prints Q4_K as 4.5 bits and Q6_K as 6.5625 bits a weight
    assert (FORMATS["q4_k"].bits, FORMATS["q6_k"].bits, FORMATS["q8_0"].bits) == (4.5, 6.5625, 8.5)
    assert FORMATS["fp8"].bytes_of(10, 1000) == 1000 + 4 * 10


def test_weights_are_cut_as_the_plan_says():
    plan = {"layers.*.q_proj": "colwise", "layers.*.k_proj": "colwise", "layers.*.o_proj": "rowwise"}

    def weight(name, shape=(8, 8), kind="other", tensor="weight"):
        return Weight(module=name, name=tensor, nbytes=128, shape=shape, block=0, kind=kind)

    assert cuts(weight("layers.0.q_proj"), plan, tp=8, kv_heads=2) == 8
    assert cuts(weight("layers.0.k_proj"), plan, tp=8, kv_heads=2) == 2  # heads of keys repeat
    assert cuts(weight("layers.0.o_proj", (8,), tensor="bias"), plan, tp=8, kv_heads=2) == 1
    assert cuts(weight("layers.0.norm", (8,)), plan, tp=8, kv_heads=2) == 1
    assert cuts(weight("embed_tokens", kind="embedding"), plan, tp=8, kv_heads=2) == 8


def test_stages_hold_every_weight_once():
    weights = [
        Weight(module="embed", name="weight", nbytes=100, shape=(10, 10), block=None, kind="embedding"),
        *(
            Weight(module=f"layers.{n}", name="weight", nbytes=10 + n, shape=(2, 2), block=n, kind="other")
            for n in range(7)
        ),
        Weight(module="norm", name="weight", nbytes=7, shape=(10,), block=None, kind="other"),
        Weight(module="head", name="weight", nbytes=90, shape=(10, 10), block=None, kind="head"),
    ]
    stages = stages_of(7, 3)
    parts = [
        sum(size for _, size in rank_sizes(weights, {}, tp=1, stage=stage, stages=stages, kv_heads=1))
        for stage in range(3)
    ]
    assert sum(parts) == sum(weight.nbytes for weight in weights)
    assert [len(stage) for stage in stages] == [2, 3, 2]
    assert parts[0] == 100 + 10 + 11 and parts[2] == 15 + 16 + 7 + 90


def test_allocated_bytes_count_whole_blocks():
    # Two projections merged: 2 x 2.5 MiB in a 20 MiB segment, split exactly.
    assert allocated_bytes([("a.q_proj", 5 * MIB // 2), ("a.k_proj", 5 * MIB // 2)]) == 5 * MIB
    # 19.5 MiB of a segment of 20: what is left is no more than 1 MiB and is not split off.
    assert allocated_bytes([("a", 39 * MIB // 2)]) == 20 * MIB
