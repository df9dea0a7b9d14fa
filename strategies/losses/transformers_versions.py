"""The loss of older transformers versions, in which more copies of the logits live at the same time.

What it changes: the model's forward behind its last hidden state. Where each byte comes from: ordinary torch operators
in the order and with the names (references) of that version:
* loss function (4.48: most models): logits in the model's dtype, held by the forward; an fp32 copy and its shifted,
  contiguous copy, both held by the loss function; log-probabilities. 14 bytes a logit at bf16, in forward.
* upcast in the model (4.45: most models): fp32 logits, held by the forward and its output; the shifted copy;
  log-probabilities. 12 bytes a logit.
* no upcast (GPT-2, BigCode, OPT, Falcon, ...): logits, shifted copy and log-probabilities in the model's dtype.
* cache (GPTBigCode): those versions did not switch it off for checkpointing, as others did. What a layer caches is a
  view of its whole fused projection, and the model's output holds it until there is a loss.
Not modelled: what else changed between the versions (attention masks).
Sources: transformers v4.45.2 and v4.48.1, models/*/modeling_*.py (the loss in each class's forward) and
loss/loss_utils.py of v4.48.1 (ForCausalLMLoss, fixed_cross_entropy); models/gpt_bigcode (GPTBigCodeModel.forward,
`presents`; GPTBigCodeAttention.forward, `key_value`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from metapeak.strategies.losses.output_head import Held, LossPath, project
from metapeak.tracer.errors import InputError

# Classes whose forward calls the shared loss function (v4.48.1), ...
_LOSS_FUNCTION_4_48 = (
    "AriaText Bamba Cohere Cohere2 DiffLlama Emu3 Gemma Gemma2 Glm Granite Jamba Llama Mistral Mixtral Nemotron Olmo "
    "Olmo2 Olmoe Phi Phi3 Phimoe Qwen2 Qwen2Moe Starcoder2 Zamba"
)
# ... whose forward makes the logits fp32 itself, ...
_IN_MODEL_4_48 = "CodeGen FalconMamba GPTNeo GPTJ GraniteMoe JetMoe Mamba Mamba2 Moshi RecurrentGemma"
_IN_MODEL_4_45 = (
    "CodeGen Cohere FalconMamba Gemma Gemma2 GPTNeo GPTJ Granite GraniteMoe Jamba JetMoe Llama Mamba Mamba2 Mistral "
    "Mixtral Nemotron Olmo Olmoe Phi Phi3 Qwen2 Qwen2Moe RecurrentGemma Starcoder2"
)
# ... and whose forward computes the loss in the dtype of the logits (the same in both versions).
_NO_UPCAST = "BioGpt Bloom CTRL Dbrx Falcon GPT2 GPTBigCode GPTNeoX Mpt OpenAIGPT OPT Persimmon StableLm"

TRANSFORMERS_VERSIONS: dict[str, dict[str, str]] = {
    "4.48": {"loss function": _LOSS_FUNCTION_4_48, "in the model": _IN_MODEL_4_48, "no upcast": _NO_UPCAST},
    "4.45": {"in the model": _IN_MODEL_4_45, "no upcast": _NO_UPCAST},
}


# Classes whose forward kept a cache in training, although activations are checkpointed: the end of the name of the
# fused projection that cached keys and values are views of.
_CACHED = {"GPTBigCodeForCausalLM": ".attn.c_attn"}


def cache_of_version(class_name: str) -> Callable[[torch.nn.Module], Held]:
    """What a model class of those versions keeps for a cache while its backbone runs."""
    ending = _CACHED.get(class_name)
    return _cached(ending) if ending is not None else lambda model: contextlib.nullcontext(())


def _cached(ending: str) -> Callable[[torch.nn.Module], Held]:
    @contextlib.contextmanager
    def collect(model):
        cache: list[torch.Tensor] = []
        hooks = [
            part.register_forward_hook(lambda part, args, out: cache.append(out[..., model.config.hidden_size :]))
            for name, part in model.named_modules()
            if name.endswith(ending)
        ]
        try:
            yield cache
        finally:
            for hook in hooks:
                hook.remove()

    return collect


def path_of_version(version: str, class_name: str) -> LossPath:
    """The loss path that a model class had in that transformers version. Raises InputError when it had none."""
    paths = {"loss function": in_loss_function, "in the model": in_model, "no upcast": without_upcast}
    name = class_name.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    for where, names in TRANSFORMERS_VERSIONS[version].items():
        if name in names.split():
            return paths[where]
    raise InputError(
        f"loss transformers-{version} is the loss that a model class had in transformers {version}, and {class_name} "
        "was not one of its causal language models (or computes its loss in a way that was not read). "
        "Leave --loss out for the loss of the installed version."
    )


def in_loss_function(model, hidden, labels):
    """ForCausalLMLoss of 4.48: the copies are made inside the loss function; the forward holds the logits."""
    logits = project(model, hidden)
    return _loss_function(logits, labels), logits


def _loss_function(logits, labels):
    logits = logits.float()
    shift_logits = logits[..., :-1, :].contiguous()
    shift_labels = labels[..., 1:].contiguous()
    shift_logits = shift_logits.view(-1, shift_logits.size(-1))
    shift_labels = shift_labels.view(-1)
    return torch.nn.functional.cross_entropy(shift_logits, shift_labels)


def in_model(model, hidden, labels):
    """The forward itself makes the logits fp32; its output holds those."""
    logits = project(model, hidden).float()
    return _in_forward(logits, labels)


def without_upcast(model, hidden, labels):
    """The loss is computed in the dtype of the logits."""
    logits = project(model, hidden)
    return _in_forward(logits, labels)


def _in_forward(logits, labels):
    shift_logits = logits[..., :-1, :].contiguous()
    shift_labels = labels[..., 1:].contiguous()
    loss = torch.nn.functional.cross_entropy(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))
    return loss, logits
