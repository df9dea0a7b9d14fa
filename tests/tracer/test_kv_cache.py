"""The measured layout of a cache against what transformers' own cache holds after a real `generate` on the CPU."""

import pytest
import torch
import transformers as hf

from metapeak.tracer.errors import InputError
from metapeak.tracer.inference import check_generates, generation_batch, record_inference
from metapeak.tracer.kv_cache import PROBE_TOKENS, CacheLayer, CacheLayout, measure_cache

_TEXT = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_MLA = {
    **_TEXT, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "head_dim": 8,
}  # fmt: skip
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "head_dim": 8,
}  # fmt: skip

MODELS = {
    "gpt2, every head its own": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=None)
    ),
    "llama, grouped heads": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_GROUPED)),
    "qwen3, explicit head size": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_GROUPED, head_dim=16)),
    "falcon, one head for all": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(
            vocab_size=101, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, multi_query=True,
            bos_token_id=1, eos_token_id=None,
        )
    ),
    "gpt-bigcode, one head for all": lambda: hf.GPTBigCodeForCausalLM(
        hf.GPTBigCodeConfig(
            vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=None
        )
    ),
    "mistral, window of 5": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_GROUPED, sliding_window=5)),
    "gemma2, alternating": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**_GROUPED, head_dim=16, sliding_window=6, layer_types=_SLIDING[:2])
    ),
    "gemma3, window of 8 on two of three": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(
            **{**_GROUPED, "num_hidden_layers": 3}, head_dim=16, sliding_window=8, layer_types=_SLIDING
        )
    ),
    "gpt-oss, sinks and windows": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **_GROUPED, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=7,
            layer_types=_SLIDING[:2],
        )
    ),
    "deepseek-v3, latent": lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**_MLA)),
    "deepseek-v2, latent": lambda: hf.DeepseekV2ForCausalLM(
        hf.DeepseekV2Config(**{**_MLA, "topk_method": "greedy"})
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    ),
    "bloom": lambda: hf.BloomForCausalLM(
        hf.BloomConfig(vocab_size=101, hidden_size=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=None)
    ),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=101, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
            max_position_embeddings=64, word_embed_proj_dim=32, eos_token_id=None,
        )
    ),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**_GROUPED)),
    "cohere": lambda: hf.CohereForCausalLM(hf.CohereConfig(**_GROUPED)),
    "mamba, states alone": lambda: hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=101, hidden_size=32, num_hidden_layers=2, state_size=8, eos_token_id=None)
    ),
    "mamba2, states alone": lambda: hf.Mamba2ForCausalLM(
        hf.Mamba2Config(
            vocab_size=101, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8, n_groups=1,
            chunk_size=8, eos_token_id=None,
        )
    ),
    "jamba, scans and attention": lambda: hf.JambaForCausalLM(
        hf.JambaConfig(
            **{**_GROUPED, "num_hidden_layers": 4}, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
            expert_layer_offset=1, num_experts=2, mamba_d_state=8, mamba_d_conv=4, use_mamba_kernels=False,
        )
    ),
    "qwen3-next, delta rule and attention": lambda: hf.Qwen3NextForCausalLM(
        hf.Qwen3NextConfig(
            **_GROUPED, **_LINEAR, layer_types=["linear_attention", "full_attention"], num_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        )
    ),
    "lfm2, convolutions and attention": lambda: hf.Lfm2ForCausalLM(
        hf.Lfm2Config(**_GROUPED, layer_types=["conv", "full_attention"], conv_L_cache=3)
    ),
    "llava, the text model nested": lambda: hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(
            text_config=hf.LlamaConfig(**_GROUPED).to_dict() | {"model_type": "llama"},
            vision_config={
                "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
                "num_attention_heads": 2, "image_size": 16, "patch_size": 8, "projection_dim": 16,
            },
            image_token_index=100,
        )
    ),
    "t5, cross-attention": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=101, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0,
            eos_token_id=None,
        )
    ),
    "bart, cross-attention": lambda: hf.BartForConditionalGeneration(
        hf.BartConfig(
            vocab_size=101, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
            eos_token_id=2, forced_eos_token_id=None, decoder_start_token_id=1,
        )
    ),
}  # fmt: skip
# Of kinds that the others have, too: pytest -m slow.
MORE = (
    "gpt-bigcode, one head for all", "deepseek-v2, latent", "mixtral", "bloom", "phi3", "cohere",
    "mamba2, states alone", "bart, cross-attention",
)  # fmt: skip
PROMPT, GENERATED = 11, 4


def built(make, device):
    torch.manual_seed(0)
    with torch.device(device):
        return make().eval()


def generated_cache(model):
    """(cache, tokens that it holds, encoder's) after `generate` on the CPU; the last token drawn is not in it."""
    ids = torch.arange(3, 3 + PROMPT)[None]
    options = {"max_new_tokens": GENERATED, "min_new_tokens": GENERATED, "do_sample": False}
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, return_dict_in_generate=True, **options
    )
    held = out.sequences.shape[1] - 1
    return getattr(out, "cache", None) or out.past_key_values, held, PROMPT if model.config.is_encoder_decoder else 0


def bytes_of(cache):
    """Bytes of the storages of keys, values and states, looked up by name."""
    if hasattr(cache, "cross_attention_cache"):
        return bytes_of(cache.self_attention_cache) + bytes_of(cache.cross_attention_cache)
    storages = {}
    for layer in cache.layers:
        tensors = [getattr(layer, "keys", None), getattr(layer, "values", None)]
        for name in ("conv_states", "recurrent_states"):
            held = getattr(layer, name, None)
            tensors += list(held.values()) if isinstance(held, dict) else list(held or [])
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in MORE else []) for name in MODELS]
)
def test_the_layout_gives_the_bytes_of_a_real_cache(name):
    model = built(MODELS[name], "meta")
    layout = measure_cache(model, generation_batch(model, None, 1, PROBE_TOKENS))
    cache, tokens, encoder = generated_cache(built(MODELS[name], "cpu"))
    assert layout.bytes_at(tokens, encoder) == bytes_of(cache) > 0


def test_a_cache_of_two_sequences_is_that_of_one_twice():
    model = built(MODELS["gemma3, window of 8 on two of three"], "meta")
    one = measure_cache(model, generation_batch(model, None, 1, PROBE_TOKENS))
    assert measure_cache(model, generation_batch(model, None, 2, PROBE_TOKENS)) == one


def test_what_is_known_of_a_layout_by_hand():
    llama = built(MODELS["llama, grouped heads"], "meta")
    layout = measure_cache(llama, generation_batch(llama, None, 1, PROBE_TOKENS))
    # two layers x keys and values x 2 heads of 8 x 4 bytes
    assert (layout.bytes_per_token, layout.windows, layout.state_bytes) == (2 * 2 * 2 * 8 * 4, (), 0)
    latent = built(MODELS["deepseek-v3, latent"], "meta")
    layout = measure_cache(latent, generation_batch(latent, None, 1, PROBE_TOKENS))
    # two layers x (kv_lora_rank + qk_rope_head_dim) x 4 bytes, one copy for all heads
    assert (layout.bytes_per_token, {layer.heads for layer in layout.layers}) == (2 * (12 + 8) * 4, {1})


def test_ranks_share_heads_and_never_less_than_one():
    layer = CacheLayer(kind="DynamicLayer", token_bytes=4096, heads=8)
    layout = CacheLayout(layers=(layer,), dtype="bfloat16", kind="DynamicCache")
    assert [layout.on_ranks(tp).bytes_per_token for tp in (1, 2, 8, 16)] == [4096, 2048, 512, 512]


@pytest.mark.parametrize("name", ["llama, grouped heads", "deepseek-v3, latent"])
def test_a_rank_of_real_tensor_parallelism_keeps_what_the_layout_says(name):
    from metapeak.strategies.parallel.layout import Layout
    from metapeak.strategies.parallel.tensor_parallel import TensorParallel
    from metapeak.tracer.capture import move_to_phantom
    from metapeak.tracer.dispatch import unrecorded
    from metapeak.tracer.distributed import one_rank_of

    whole = built(MODELS[name], "meta")
    expected = measure_cache(whole, generation_batch(whole, None, 1, PROBE_TOKENS)).on_ranks(2)
    with one_rank_of(2, 0):
        cut = built(MODELS[name], "meta")
        move_to_phantom(cut)
        with unrecorded():
            cut = TensorParallel(layout=Layout(tp=2)).distribute(cut)
        assert measure_cache(cut, generation_batch(cut, None, 1, PROBE_TOKENS)) == expected


@pytest.mark.parametrize(
    "name", ["llama, grouped heads", "gemma3, window of 8 on two of three", "gpt2, every head its own"]
)
def test_generation_needs_what_the_cpu_holds(name):
    """Peak and end of the prefill and of every decoded token, to the byte."""
    from tests.agreement.cpu_oracle import run_script_on_cpu

    def make():
        model = MODELS[name]()
        model.config._attn_implementation = "eager"
        return model

    ids = torch.arange(2 * 24).view(2, 24) % 101
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    traced = record_inference(built(make, "meta"), batch, decode_tokens=2, logits_rows=1)
    model = built(make, "cpu")
    resident = [*model.parameters(), *model.buffers(), *batch.values()]

    def script(begin):
        with torch.no_grad():
            begin(1)
            cache = hf.DynamicCache(config=model.config)
            output = model(**batch, use_cache=True, cache=cache, logits_to_keep=1)
            del output
            for number in range(2):
                begin(2 + number)
                mask = torch.cat([batch["attention_mask"], torch.ones(2, 1 + number, dtype=torch.int64)], dim=-1)
                model(input_ids=ids[:, -1:], attention_mask=mask, use_cache=True, cache=cache)
                del mask
        return cache

    # A sliding layer copies its window, one int64, to the device; on the CPU it is there already.
    windows = 8 * (getattr(model.config, "layer_types", None) or []).count("sliding_attention")
    measured = {number: peak + windows for number, peak, _ in run_script_on_cpu(resident, script)}
    phases = {phase.iteration: phase.peak_bytes for phase in traced.graph.liveness().phases() if phase.iteration}
    assert phases == measured


def test_an_encoder_serves_no_tokens():
    with torch.device("meta"):
        model = hf.BertForMaskedLM(hf.BertConfig(**{**_TEXT, "pad_token_id": 0}))
    with pytest.raises(InputError, match="generates no tokens"):
        check_generates(model, "bert")
