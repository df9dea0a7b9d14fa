"""Batches of speech and its transcripts."""

from __future__ import annotations

import torch

from metapeak.tracer.batches.draft import Draft
from metapeak.tracer.batches.speech import speech
from metapeak.tracer.batches.text import decoder_inputs, language_model
from metapeak.tracer.sequences import ordinary_token_ids

DEFAULT_TRANSCRIPT = 128


def speech_to_text(draft: Draft) -> None:
    """Speech recognition with a decoder: audio and labels [B, T]."""
    draft.ask_labels()
    spec = draft.spec
    if "decoder_input_ids" not in draft.takes:
        return language_model(draft)
    speech(draft)
    labels = ordinary_token_ids(draft.model, spec.batch_size, _transcript_length(draft))
    draft.tensors["labels"] = labels.clone()
    decoder_inputs(draft, labels)


def ctc(draft: Draft) -> None:
    """Speech recognition by CTC: audio and labels [B, T], none of them the blank (the config's pad_token_id)."""
    draft.ask_labels()
    speech(draft)
    length, size = _transcript_length(draft), draft.config.vocab_size
    blank = draft.config.pad_token_id
    ids = torch.tensor([token for token in range(size) if token != blank])
    labels = ids[torch.arange(draft.spec.batch_size * length) % len(ids)].view(draft.spec.batch_size, length)
    draft.tensors["labels"] = labels


def _transcript_length(draft: Draft) -> int:
    asked = draft.spec.target_len or draft.spec.seq_len
    if asked is None:
        draft.notes.append(f"a transcript has {DEFAULT_TRANSCRIPT} tokens")
        return DEFAULT_TRANSCRIPT
    return asked
