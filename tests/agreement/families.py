"""Tiny models of many families: fp32, eager attention, no dropout, so that a CPU run does what a GPU run would."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers as hf

_TEXT = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_THREE_LAYERS = {**_TEXT, "num_hidden_layers": 3}


@dataclass(frozen=True)
class Family:
    """A model class with a tiny config, and the batch that its step takes."""

    name: str
    model_class: type
    make_config: Callable[[], hf.PretrainedConfig]
    image: bool = False

    def build(self, device="cpu"):
        config = self.make_config()
        config.use_cache = False
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        torch.manual_seed(0)
        with torch.device(device):
            return self.model_class(config).train()

    def batch(self):
        if self.image:
            return {"pixel_values": torch.rand(2, 3, 32, 32), "labels": torch.arange(2)}
        ids = torch.arange(2 * 24).view(2, 24) % 101
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


FAMILIES = [
    Family(
        "gpt2",
        hf.GPT2LMHeadModel,
        lambda: hf.GPT2Config(
            vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        ),
    ),
    Family("llama", hf.LlamaForCausalLM, lambda: hf.LlamaConfig(**_TEXT, num_key_value_heads=2)),
    Family("qwen3", hf.Qwen3ForCausalLM, lambda: hf.Qwen3Config(**_TEXT, num_key_value_heads=2, head_dim=16)),
    Family(
        "gemma3, sliding window of 8 on two of three layers",
        hf.Gemma3ForCausalLM,
        lambda: hf.Gemma3TextConfig(
            **_THREE_LAYERS,
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    Family(
        "mamba",
        hf.MambaForCausalLM,
        lambda: hf.MambaConfig(vocab_size=101, hidden_size=32, num_hidden_layers=2, state_size=8),
    ),
    Family("gpt-neox", hf.GPTNeoXForCausalLM, lambda: hf.GPTNeoXConfig(**_TEXT)),
    Family(
        "opt",
        hf.OPTForCausalLM,
        lambda: hf.OPTConfig(
            vocab_size=101,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=64,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
            dropout=0.0,
        ),
    ),
    Family("phi", hf.PhiForCausalLM, lambda: hf.PhiConfig(**_TEXT)),
    Family(
        "bert",
        hf.BertForMaskedLM,
        lambda: hf.BertConfig(**_TEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    ),
    Family(
        "modernbert, local attention of 8",
        hf.ModernBertForMaskedLM,
        lambda: hf.ModernBertConfig(
            **_THREE_LAYERS,
            global_attn_every_n_layers=3,
            local_attention=8,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
        ),
    ),
    Family(
        "t5",
        hf.T5ForConditionalGeneration,
        lambda: hf.T5Config(
            vocab_size=101,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
    ),
    Family(
        "vit",
        hf.ViTForImageClassification,
        lambda: hf.ViTConfig(
            **{key: value for key, value in _TEXT.items() if key != "vocab_size"},
            image_size=32,
            patch_size=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=7,
        ),
        image=True,
    ),
    # Every token goes to every expert, so that routing does not depend on values that the phantom GPU cannot know.
    Family(
        "mixtral, all experts",
        hf.MixtralForCausalLM,
        lambda: hf.MixtralConfig(**_TEXT, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=4),
    ),
]
