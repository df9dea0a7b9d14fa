"""Tiny models and how they are spread over ranks, said twice: to the real library on the CPU and to metapeak.

Sizes are odd on purpose: 101 tokens, 3 key heads and a width of 36 divide by neither two nor four, so shards are
padded.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf

_UNEVEN = {
    "vocab_size": 101,
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "intermediate_size": 70,
}
_EVEN = {**_UNEVEN, "vocab_size": 104, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}


def llama(device: str, **sizes) -> torch.nn.Module:
    """A Llama for training; eager attention, as the CPU and a GPU run it alike."""
    config = hf.LlamaConfig(**{**_UNEVEN, **sizes}, use_cache=False, attn_implementation="eager")
    torch.manual_seed(0)
    with torch.device(device):
        return hf.LlamaForCausalLM(config).train()


def gpt2(device: str) -> torch.nn.Module:
    """Tied embeddings, biases, and a fused projection."""
    config = hf.GPT2Config(
        vocab_size=101,
        n_embd=36,
        n_layer=2,
        n_head=4,
        n_positions=64,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        use_cache=False,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    with torch.device(device):
        return hf.GPT2LMHeadModel(config).train()


def lora(device: str) -> torch.nn.Module:
    """Frozen and trainable parameters in one unit."""
    import peft

    config = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with torch.device(device):
        return peft.get_peft_model(llama(device), config).train()


def checkpointed(device: str) -> torch.nn.Module:
    model = llama(device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def for_tensor_parallel(device: str) -> torch.nn.Module:
    return llama(device, **_EVEN)


def for_sequence_parallel(device: str, **sizes) -> torch.nn.Module:
    """A width that four ranks share, as torch's styles want it, and a vocabulary that they do not."""
    return llama(device, **{**_EVEN, "intermediate_size": 72, "vocab_size": 101, **sizes})


def for_context_parallel(device: str, **sizes) -> torch.nn.Module:
    """SDPA, whose memory-efficient kernel takes float32 and heads of 8."""
    model = llama(device, **{**_EVEN, **sizes})
    model.set_attn_implementation("sdpa")
    return model


def experts(device: str, **sizes) -> torch.nn.Module:
    """A mixture of experts whose products are those of a loop, which the CPU and a GPU run alike."""
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    sizes = {**_EVEN, **moe, **sizes}
    config = hf.Qwen3MoeConfig(**sizes, use_cache=False, attn_implementation="eager", experts_implementation="eager")
    torch.manual_seed(0)
    with torch.device(device):
        return hf.Qwen3MoeForCausalLM(config).train()


def long_batch() -> dict[str, torch.Tensor]:
    """Sequences that eight chunks of 32 tokens make."""
    ids = torch.arange(2 * 256).view(2, 256) % 101
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(2 * 12).view(2, 12) % 101
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


_BLOCKS = ("LlamaDecoderLayer", "GPT2Block", "Qwen3MoeDecoderLayer")


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [part for part in model.modules() if type(part).__name__ in _BLOCKS]


@dataclass(frozen=True, kw_only=True)
class Case:
    """`technique` is fsdp2, fsdp1, ddp, tp, cp or ep; `options` are its options in metapeak's words.

    With `degree` in them FSDP2 shards over the ranks that remain. `save` is what follows the steps, in those words;
    `evaluate`: an evaluation of a batch comes before it.
    """

    name: str
    technique: str
    build: Callable[[str], torch.nn.Module] = llama
    batch: Callable[[], dict[str, torch.Tensor]] = batch
    options: dict[str, Any] = field(default_factory=dict)
    save: str | None = None
    evaluate: bool = False


BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}

CASES = {
    case.name: case
    for case in (
        Case(name="fsdp2", technique="fsdp2"),
        Case(name="fsdp2, no reshard", technique="fsdp2", options={"reshard_after_forward": False}),
        Case(name="fsdp2, root resharded too", technique="fsdp2", options={"reshard_after_forward": True}),
        Case(name="fsdp2, bf16", technique="fsdp2", options=BF16),
        Case(name="fsdp2, bf16 reduced in bf16", technique="fsdp2", options={"param_dtype": "bfloat16"}),
        Case(name="fsdp2, gpt2", technique="fsdp2", build=gpt2),
        Case(name="fsdp2, checkpointing", technique="fsdp2", build=checkpointed),
        Case(name="fsdp2, bf16, checkpointing", technique="fsdp2", build=checkpointed, options=BF16),
        Case(name="fsdp2, lora", technique="fsdp2", build=lora),
        Case(name="fsdp2, lora, bf16", technique="fsdp2", build=lora, options=BF16),
        Case(name="fsdp1", technique="fsdp1"),
        Case(name="fsdp1, flat parameters", technique="fsdp1", options={"use_orig_params": False}),
        Case(name="fsdp1, bf16", technique="fsdp1", options={"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}),
        Case(name="fsdp1, shard grad op", technique="fsdp1", options={"sharding": "SHARD_GRAD_OP"}),
        Case(name="fsdp1, lora", technique="fsdp1", build=lora),
        Case(name="ddp", technique="ddp"),
        Case(name="ddp, views of buckets", technique="ddp", options={"gradient_as_bucket_view": True}),
        Case(name="ddp, lora", technique="ddp", build=lora),
        Case(name="tp", technique="tp", build=for_tensor_parallel),
        Case(name="tp, sequence", technique="tp", build=for_sequence_parallel, options={"sequence_parallel": True}),
        Case(name="tp, loss", technique="tp", build=for_tensor_parallel, options={"loss_parallel": True}),
        Case(
            name="tp, sequence and loss",
            technique="tp",
            build=for_sequence_parallel,
            options={"sequence_parallel": True, "loss_parallel": True},
        ),
        Case(name="cp", technique="cp", build=for_context_parallel, batch=long_batch),
        Case(
            name="cp, alltoall",
            technique="cp",
            build=for_context_parallel,
            batch=long_batch,
            options={"rotation": "alltoall"},
        ),
        Case(name="ep", technique="ep", build=experts),
        # With four ranks two of them hold the same part of the model, sharded between them.
        Case(
            name="tp x fsdp2",
            technique="tp",
            build=for_sequence_parallel,
            options={"degree": 2, "sequence_parallel": True, "loss_parallel": True},
        ),
        Case(name="cp x fsdp2", technique="cp", build=for_context_parallel, batch=long_batch, options={"degree": 2}),
        Case(name="ep x fsdp2", technique="ep", build=experts, options={"degree": 2}),
    )
}

SAVES = {
    case.name: case
    for case in (
        Case(name="fsdp2, save full", technique="fsdp2", save="full"),
        Case(name="fsdp2, save full-on-device", technique="fsdp2", save="full-on-device"),
        Case(name="fsdp2, save sharded", technique="fsdp2", save="sharded"),
        Case(name="fsdp2, bf16, save full", technique="fsdp2", options=BF16, save="full"),
        Case(name="fsdp2, tied, save full", technique="fsdp2", build=gpt2, save="full"),
        Case(name="fsdp2, save adapter", technique="fsdp2", build=lora, save="adapter"),
        Case(name="fsdp2, evaluation, save full", technique="fsdp2", save="full", evaluate=True),
        Case(name="fsdp1, evaluation, save full", technique="fsdp1", save="full", evaluate=True),
        Case(name="fsdp1, save full", technique="fsdp1", save="full"),
        Case(name="fsdp1, save full-on-device", technique="fsdp1", save="full-on-device"),
        Case(name="fsdp1, save sharded", technique="fsdp1", save="sharded"),
        Case(
            name="fsdp1, flat parameters, save full", technique="fsdp1", options={"use_orig_params": False}, save="full"
        ),
        Case(name="fsdp1, save adapter", technique="fsdp1", build=lora, save="adapter"),
    )
}
