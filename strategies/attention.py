"""The attention implementation: what the model is built with, and which kernel runs.

What it changes: the `attn_implementation` of transformers and the choice among SDPA's kernels.
Where each byte comes from: aten's attention operators with torch's own meta kernels (tracer/attention.py);
flash2-repeat-kv copies keys and values for every head first, as Mistral, Mixtral, Qwen2 and others did in transformers
before 4.48 (MistralFlashAttention2.forward and its like; Llama did not).
Not modelled: flash3, flex.
Sources: transformers integrations/flash_attention.py and modeling_flash_attention_utils.py for flash2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from metapeak.tracer.errors import InputError, UnknownName

if TYPE_CHECKING:
    from metapeak.tracer.attention import AttentionChoice
    from metapeak.tracer.models import ResolvedModel

# Values of the option `attention` -> (attn_implementation of transformers, kernel that SDPA is forced to).
ATTENTION: dict[str, tuple[str | None, str | None]] = {
    "auto": (None, None),
    "eager": ("eager", None),
    "sdpa": ("sdpa", None),
    "flash2": ("flash_attention_2", None),
    "flash2-repeat-kv": ("flash_attention_2", None),
    "efficient": ("sdpa", "efficient"),
    "cudnn": ("sdpa", "cudnn"),
    "math": ("sdpa", "math"),
}


def check_attention(name: str | None) -> None:
    """Raise UnknownName for a value that the option `attention` does not have."""
    if (name or "auto") not in ATTENTION:
        raise UnknownName("attention implementation", name, ATTENTION)


def check_attention_dtype(name: str | None, dtype: str) -> None:
    """Raise InputError when flash attention is asked for in a dtype that its kernels do not take.

    `dtype` is what layers compute in: that of autocast or of FSDP's mixed precision, else that of the weights.
    """
    if (name or "").startswith("flash2") and dtype not in ("float16", "bfloat16"):
        raise InputError(
            f"attention {name} takes float16 and bfloat16, but layers compute in {dtype}. "
            "Give --weights-dtype or --autocast bf16, or another attention."
        )


def check_attention_of(model: ResolvedModel, name: str | None) -> None:
    """Raise InputError where a model that is not built by transformers is asked for an implementation of transformers.

    The choice among SDPA's kernels holds for whatever calls SDPA.
    """
    implementation, _ = ATTENTION[name or "auto"]
    if implementation in ("eager", "flash_attention_2") and (model.package or model.factory):
        raise InputError(f"attention {name} belongs to models of transformers; {model.id} has attention of its own.")


def attention_of(name: str | None, compute_capability: tuple[int, int]) -> tuple[str | None, AttentionChoice]:
    """(attn_implementation for the model's config or None for its default, how SDPA chooses its kernel)."""
    from metapeak.tracer.attention import AttentionChoice, AttentionKernel

    check_attention(name)
    implementation, forced = ATTENTION[name or "auto"]
    return implementation, AttentionChoice(
        compute_capability=compute_capability,
        forced=AttentionKernel(forced) if forced else None,
        repeat_kv=name == "flash2-repeat-kv",
    )
