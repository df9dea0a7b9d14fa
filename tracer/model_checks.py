"""Whether a config describes a model, and in words why not.

A class accepts or refuses its own config: what it raises is passed on in one sentence. The checks here are for what
classes let through although no forward pass can run: sizes below one, heads that do not group, more experts a token
than experts. Nothing is refused that a class can run: an explicit head_dim frees hidden_size from the number of heads,
and a feed-forward width may be any number.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from metapeak.tracer.errors import ModelConfigError
from metapeak.tracer.hub import one_line

HIDDEN = ("hidden_size", "d_model", "n_embd", "embed_dim")
HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads")
POSITIVE_SIZES = (
    *HIDDEN,
    *HEADS,
    *("decoder_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"),
    *("patch_size", "image_size", "num_channels"),
)
NOT_NEGATIVE_SIZES = (
    *("intermediate_size", "moe_intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
)
_WRAPPING = re.compile(r"^(Class validation error for validator|Validation error for field) '\w+': \w+: ")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def check_sizes(config: Mapping[str, Any], where: str) -> None:
    """Raise ModelConfigError when a size that the config states is below one (or negative where zero means none)."""
    for path, part in _parts(config):
        for name in (*POSITIVE_SIZES, *NOT_NEGATIVE_SIZES):
            least = 1 if name in POSITIVE_SIZES else 0
            for value in _numbers(part.get(name)):
                if value < least:
                    raise ModelConfigError(f"{where}: {path}{name} is {value}; it must be at least {least}.")


def check_heads_and_experts(config: Mapping[str, Any], where: str) -> None:
    """Raise ModelConfigError when attention heads do not group or a token asks for more experts than there are.

    `config` is what the config class made of the file (its `to_dict()`), so defaults of the class take part.
    """
    for path, part in _parts(config):
        heads, groups = part.get("num_attention_heads"), part.get("num_key_value_heads")
        if _is_count(heads) and _is_count(groups) and heads % groups:
            raise ModelConfigError(
                f"{where}: {path}num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({groups}): "
                f"{heads} = {heads // groups} * {groups} + {heads % groups}."
            )
        chosen = part.get("num_experts_per_tok")
        for name in EXPERTS:
            experts = part.get(name)
            if _is_count(chosen) and _is_count(experts) and chosen > experts:
                raise ModelConfigError(
                    f"{where}: {path}num_experts_per_tok ({chosen}) is larger than {name} ({experts})."
                )


def explain_refusal(error: Exception, config: Mapping[str, Any], class_name: str, where: str) -> ModelConfigError:
    """The error to raise when a class refuses its config: the class's words, and the fields that contradict."""
    said = _WRAPPING.sub("", one_line(error))
    if isinstance(error, ImportError):
        return ModelConfigError(f"{where}: {class_name} needs a package that is not installed: {said}.")
    if isinstance(error, KeyError):
        said = f"nothing is known under {said}"
    found = list(_contradictions(config, error, said))
    named = f" ({'; '.join(found)})" if found else ""
    return ModelConfigError(f"{where}: {class_name} cannot be built from this config: {said}{named}.")


def _contradictions(config: Mapping[str, Any], error: Exception, said: str) -> Iterator[str]:
    """The fields of the file behind what a class said: classes use other names than the file does."""
    about_division = "multiple" in said or "divisible" in said
    for path, part in _parts(config):
        for hidden_name, heads_name in itertools.product(HIDDEN, HEADS) if about_division else ():
            hidden, heads = part.get(hidden_name), part.get(heads_name)
            if _is_count(hidden) and _is_count(heads) and hidden % heads:
                yield f"{path}{hidden_name} {hidden} is not a multiple of {heads_name} {heads}"
        padding, vocabulary = part.get("pad_token_id"), part.get("vocab_size")
        if "padding_idx" in said.lower() and _is_count(padding) and _is_count(vocabulary) and padding >= vocabulary:
            yield f"{path}pad_token_id {padding} is not below vocab_size {vocabulary}"
        if isinstance(error, KeyError):
            yield from (f"{path}{name}" for name, value in part.items() if (value,) == error.args)


def _parts(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The config and its sub-configs, with the prefix of their fields (`text_config.`)."""
    yield path, config
    for name, value in config.items():
        if isinstance(value, Mapping) and name.endswith("_config") and name != "quantization_config":
            yield from _parts(value, f"{path}{name}.")


def _numbers(value: object) -> list[int | float]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in values if isinstance(item, (int, float)) and not isinstance(item, bool)]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
