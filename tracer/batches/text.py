"""Batches of text: language models, sequence to sequence, classification, questions."""

from __future__ import annotations

import torch
from torch import Tensor

from metapeak.tracer.batches.draft import Draft, class_labels, floats, sequence_length
from metapeak.tracer.batches.images import pixels
from metapeak.tracer.batches.speech import speech
from metapeak.tracer.sequences import ordinary_token_ids, vocabulary_size


def text_inputs(draft: Draft, length: int) -> Tensor:
    """`input_ids` and `attention_mask` of shape [B, S]; returns the ids."""
    ids = ordinary_token_ids(draft.model, draft.spec.batch_size, length)
    draft.tensors["inputs" if draft.config.model_type == "perceiver" else "input_ids"] = ids
    if "attention_mask" in draft.takes:
        draft.tensors["attention_mask"] = torch.ones_like(ids)
    if "lang_ids" in draft.takes and draft.config.default_language is None:
        draft.tensors["lang_ids"] = torch.zeros(draft.spec.batch_size, dtype=torch.int64)
        draft.notes.append("every sample is in the model's first language, for the config names no default_language")
    return ids


def language_model(draft: Draft) -> None:
    """Causal and masked language models: labels [B, S] at every position."""
    draft.ask_labels()
    ids = text_inputs(draft, sequence_length(draft, draft.spec.seq_len))
    if draft.config.model_type == "git":  # its loss skips the image's tokens, so there has to be one
        pixels(draft, num_images=1)
    if draft.config.model_type == "voxtral_realtime":  # a stretch of audio for every token
        frames = ids.size(1) * draft.config.audio_length_per_tok
        mels = draft.config.audio_config.num_mel_bins
        draft.tensors["input_features"] = floats(draft, (ids.size(0), mels, frames))
    draft.tensors["labels"] = ids.clone()


def sequence_to_sequence(draft: Draft) -> None:
    """Encoder-decoder: labels [B, T]; the model makes its decoder inputs from them."""
    draft.ask_labels()
    if "decoder_input_ids" not in draft.takes:
        return language_model(draft)
    spec = draft.spec
    main = draft.model.main_input_name
    if main == "input_ids":
        source = sequence_length(draft, spec.seq_len)
        text_inputs(draft, source)
        target = source if spec.target_len is None else sequence_length(draft, spec.target_len, "target_len")
    else:
        speech(draft)
        target = sequence_length(draft, spec.target_len or spec.seq_len, "target_len")
    labels = ordinary_token_ids(draft.model, spec.batch_size, target)
    draft.tensors["labels"] = labels.clone()
    decoder_inputs(draft, labels)


def decoder_inputs(draft: Draft, labels: Tensor) -> None:
    if getattr(draft.config, "decoder_start_token_id", None) is None and "decoder_input_ids" in draft.takes:
        draft.tensors["decoder_input_ids"] = labels.clone()
        draft.notes.append("the config names no decoder_start_token_id, so the batch brings decoder_input_ids")


def sequence_classification(draft: Draft) -> None:
    """One label a sample. The last token is the end of sequence, which BART and T5 look for."""
    draft.ask_labels()
    ids = text_inputs(draft, sequence_length(draft, draft.spec.seq_len))
    eos = getattr(draft.text_config, "eos_token_id", None)
    eos = eos[0] if isinstance(eos, (list, tuple)) and eos else eos
    if isinstance(eos, int) and 0 <= eos < vocabulary_size(draft.model):
        ids[:, -1] = eos
    if getattr(draft.text_config, "pad_token_id", None) is None and draft.spec.batch_size > 1:
        # The decoders' heads refuse several samples without one. No sample holds it: the batch is full.
        draft.text_config.pad_token_id = draft.config.pad_token_id = -1
        draft.notes.append("the config names no pad_token_id, which several samples need; none of them is padded")
    decoder_inputs(draft, ids)
    draft.tensors["labels"] = class_labels(draft, (draft.spec.batch_size,))


def token_classification(draft: Draft) -> None:
    draft.ask_labels()
    ids = text_inputs(draft, sequence_length(draft, draft.spec.seq_len))
    draft.tensors["labels"] = ids % max(draft.config.num_labels, 1)


def question_answering(draft: Draft) -> None:
    """The answer's first and last token of each sample, shape [B]."""
    ids = text_inputs(draft, sequence_length(draft, draft.spec.seq_len))
    if not draft.takes >= {"start_positions", "end_positions"}:
        draft.ask_labels()
    eos = getattr(draft.text_config, "eos_token_id", None)
    if isinstance(eos, int) and 0 <= eos < vocabulary_size(draft.model):
        ids[:, -1] = eos
    if draft.config.model_type == "longformer":  # question and context: <s> q </s></s> c </s>; attends globally to q
        ids[:, [ids.size(1) // 4, ids.size(1) // 4 + 1, -1]] = draft.config.sep_token_id
    decoder_inputs(draft, ids)
    draft.tensors["start_positions"] = torch.zeros(draft.spec.batch_size, dtype=torch.int64)
    draft.tensors["end_positions"] = torch.full((draft.spec.batch_size,), ids.size(1) // 2, dtype=torch.int64)
