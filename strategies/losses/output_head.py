"""The part of a causal language model behind its last hidden state, and a forward that puts a loss of ours there.

`replace_loss` gives the model a forward of two steps: the backbone as it is, then the loss path. Whatever wraps the
model (PEFT, autocast, a trainer's loss function) still calls `model(**batch).loss`.
Sources: transformers PreTrainedModel.base_model and get_output_embeddings; the scales of logits as the models' own
forwards apply them (Gemma 2, Cohere, Granite, Falcon-H1).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutput

from metapeak.tracer.errors import InputError

# (loss, logits that the model's output carries or None), from the model, its last hidden state and the labels.
LossPath = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], tuple[torch.Tensor, Any]]
# Collects tensors while it lasts.
Held = AbstractContextManager[Sequence[torch.Tensor]]
# What a model returns instead of logits, from the model and its last hidden state; and the loss of that and the labels.
Head = Callable[[torch.nn.Module, torch.Tensor], Any]
LossOfLogits = Callable[[Any, torch.Tensor], torch.Tensor]


def causal_lm(module: torch.nn.Module) -> torch.nn.Module:
    """The language model itself, also when PEFT wraps it."""
    unwrap = getattr(module, "get_base_model", None)
    return unwrap() if unwrap is not None else module


def output_head(model: torch.nn.Module) -> torch.nn.Module:
    """The module that makes logits of hidden states. A LoRA on it is refused: see `check_head`."""
    return model.get_output_embeddings()


def check_head(model: torch.nn.Module, loss: str) -> None:
    """Raise InputError when `loss` cannot be put behind the model's last hidden state."""
    kind = type(model).__name__
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    if head is None or getattr(model, "base_model", model) is model:
        raise InputError(
            f"loss {loss} takes the last hidden state and the output head of a causal language model, and {kind} has "
            "none. Leave --loss out for the model's own loss."
        )
    if getattr(head, "lora_A", None):
        raise InputError(
            f"loss {loss} reads the weight of the output head, and here a LoRA adapter sits on it: the adapter would "
            "be left out. Take the head out of the LoRA targets, or leave --loss out."
        )
    if not isinstance(head, torch.nn.Linear) and getattr(head, "original_module", None) is None:
        raise InputError(
            f"loss {loss} needs an output head that is one linear layer, but {kind} has a {type(head).__name__}. "
            "Leave --loss out for the model's own loss."
        )
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        raise InputError(f"loss {loss} leaves out the router's loss that {kind} adds. Set output_router_logits false.")


def check_weight_reader(model: torch.nn.Module, loss: str) -> None:
    """As `check_head`, for losses that multiply by the head's weight themselves."""
    check_head(model, loss)
    head = output_head(model)
    if not isinstance(head, torch.nn.Linear):
        raise InputError(
            f"loss {loss} reads the weight of the output head, and here the head is a {type(head).__name__}. "
            "Leave --loss out, or take the head out of modules_to_save."
        )


def project(model: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of hidden states (..., H) -> (..., V), with the model's own scaling of them."""
    logits = output_head(model)(hidden)
    config = model.config.get_text_config()
    multiplier, divisor = logit_scale(config), getattr(config, "logits_scaling", None)
    if multiplier is not None:
        logits = logits * multiplier
    if divisor is not None:
        logits = logits / divisor
    softcap = getattr(config, "final_logit_softcapping", None)
    if softcap is not None:
        logits = logits / softcap
        logits = torch.tanh(logits)
        logits = logits * softcap
    return logits


def logit_scale(config: Any) -> float | None:
    """What the model multiplies its logits by, or None."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None


def replace_loss(
    model: torch.nn.Module, path: LossPath, held: Callable[[torch.nn.Module], Held] = lambda model: nullcontext(())
) -> None:
    """Let `model(**batch)` run the backbone, then `path` on its last hidden state, in place.

    The hidden state is held until there is a loss; what `held(model)` collects while the backbone runs goes out with
    the logits, in the field of hidden states.
    """

    def forward(self, *args, labels=None, **kwargs):
        with held(self) as tensors:
            outputs = self.base_model(*args, **kwargs)
        loss, logits = path(self, outputs[0], labels)
        return CausalLMOutput(loss=loss, logits=logits, hidden_states=tuple(tensors) or None)

    model.forward = types.MethodType(forward, model)


def replace_head(model: torch.nn.Module, head: Head, loss_of: LossOfLogits, *, held: bool = False) -> None:
    """Let `model(**batch)` return what `head` makes of its last hidden state, with the loss of that, in place.

    As where the training loop computes the loss: the hidden state is gone by then. With `held` the loop's variable
    keeps the logits through the step; the next ones take its name before their loss is computed.
    """
    variable = []

    def run(self, *args, **kwargs):
        outputs = self.base_model(*args, **kwargs)
        return head(self, outputs[0])

    def forward(self, *args, labels=None, **kwargs):
        logits = run(self, *args, **kwargs)
        if held:
            variable[:] = [logits]
        return CausalLMOutput(loss=loss_of(logits, labels), logits=logits)

    model.forward = types.MethodType(forward, model)


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Labels (B, S) moved so that position n asks for token n + 1; the last position asks for nothing."""
    padded = torch.nn.functional.pad(labels, (0, 1), value=-100)
    return padded[..., 1:].contiguous()
