"""Settings of a config that a maximum needs before the model is built from it."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PretrainedConfig

# Probabilities of leaving a whole layer out of a step. Sources: modeling_bart.py, modeling_wav2vec2.py, ...
_LAYERDROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "speech_decoder_layerdrop", "layer_drop")


def prepare_config(config: PretrainedConfig) -> tuple[str, ...]:
    """Set `config` (and the configs inside it) for a training step; returns a sentence for each thing that changed.

    Caches are off, as every trainer has them. No layer is dropped: a maximum wants the step in which all of them run.
    """
    notes = []
    for part in nested_configs(config):
        part.use_cache = False
        for name in _LAYERDROP:
            if getattr(part, name, None):
                setattr(part, name, 0.0)
                notes.append(f"{name} was set to 0, so that no layer is skipped")
    return tuple(dict.fromkeys(notes))


def nested_configs(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """`config` and every config among its attributes, outermost first."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from nested_configs(value)
