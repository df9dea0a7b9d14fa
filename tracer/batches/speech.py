"""Batches of speech: waveforms or spectrograms, and transcripts."""

from __future__ import annotations

import torch

from metapeak.tracer.batches.draft import Draft, floats
from metapeak.tracer.errors import ModelConfigError
from metapeak.tracer.prepare import nested_configs

SAMPLING_RATE = 16_000  # samples a second; every speech model of transformers is trained at this rate or says otherwise
AUDIO_SECONDS = 10
FRAMES_PER_SECOND = 100  # of a log-mel spectrogram with a hop of 10 ms


def speech(draft: Draft) -> None:
    """The audio of every sample: waveforms [B, samples] or spectrograms, whose layout depends on the model."""
    config, batch = draft.config, draft.spec.batch_size
    name = next((n for n in ("input_features", "input_values", "inputs") if n in draft.takes), None)
    if name is None:
        raise ModelConfigError(
            f"{type(draft.model).__name__} takes no audio that is known here ({draft.model.main_input_name})."
        )
    if name != "input_features":
        draft.tensors[name] = floats(draft, (batch, AUDIO_SECONDS * SAMPLING_RATE))
        draft.notes.append(f"a sample is {AUDIO_SECONDS} s of audio at {SAMPLING_RATE:,} samples a second")
        return
    encoder = next((part for part in nested_configs(config) if hasattr(part, "num_mel_bins")), config)
    if config.model_type == "whisper":
        frames = 2 * config.max_source_positions  # the processor pads every clip to 30 s; the first convolution halves
        draft.tensors[name] = floats(draft, (batch, config.num_mel_bins, frames))
        draft.notes.append(f"a sample is a spectrogram of {frames} frames, the length that the model always takes")
        return
    frames = AUDIO_SECONDS * FRAMES_PER_SECOND
    width = next(
        (
            value
            for part in (encoder, *nested_configs(config))
            for key in ("feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins", "input_dim")
            if isinstance(value := getattr(part, key, None), int)
        ),
        80,
    )
    draft.tensors[name] = floats(draft, (batch, frames, width))
    if "attention_mask" in draft.takes:
        draft.tensors["attention_mask"] = torch.ones(batch, frames, dtype=torch.int64)
    draft.notes.append(f"a sample is a spectrogram of {frames} frames ({AUDIO_SECONDS} s)")
