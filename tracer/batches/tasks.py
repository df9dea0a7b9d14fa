"""The batch of one training step: CPU tensors of the shapes and values that a real data loader would give a model.

A batch is full: no padding, every sample as long as the others. Labels are a tensor of their own with the inputs'
values, so every position counts. What a model takes is read from the signature of its `forward`; what it looks for
in the values (an end-of-sequence token, placeholders of an image) is there the same number of times in each sample.

Legend of shapes: B batch size, S tokens, T decoder tokens, C channels, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from metapeak.tracer.batches.draft import Draft, sequence_length
from metapeak.tracer.batches.image_text import image_classification, image_text
from metapeak.tracer.batches.images import mask_generation, pixels, semantic_segmentation
from metapeak.tracer.batches.speech import speech
from metapeak.tracer.batches.text import (
    language_model,
    question_answering,
    sequence_classification,
    sequence_to_sequence,
    text_inputs,
    token_classification,
)
from metapeak.tracer.batches.transcription import ctc, speech_to_text
from metapeak.tracer.errors import UnknownName
from metapeak.tracer.spec import BatchSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """`tensors`: keyword arguments of the model's forward, on the CPU. `notes`: sentences about what was assumed."""

    tensors: dict[str, Tensor]
    notes: tuple[str, ...] = ()


def make_batch(model: nn.Module, task: str, batch: BatchSpec) -> Batch:
    """A full batch for one training step of `model` at `task` (see TASKS).

    Raises UnknownName for a task that is not there, ModelConfigError when the model cannot take what was asked
    (a sequence past its learned positions) or has no loss of its own.
    """
    if task not in TASKS:
        raise UnknownName("task", task, TASKS)
    draft = Draft(model=model, task=task, spec=batch)
    TASKS[task](draft)
    _say_what_is_not_read(draft)
    return Batch(tensors=draft.tensors, notes=tuple(dict.fromkeys(draft.notes)))


def _say_what_is_not_read(draft: Draft) -> None:
    """A note for each size that was given and that this batch has no place for."""
    spec, images = draft.spec, any("pixel" in name or "patches" in name for name in draft.tensors)
    given = {
        "target_len": spec.target_len is not None and draft.task not in _WITH_TARGETS,
        "image_size": spec.image_size is not None and not images,
        "num_images": spec.num_images != 1 and draft.task != "image-text-to-text",
    }
    draft.notes += [f"{name} is not used: {draft.task} has no place for it" for name, unread in given.items() if unread]


def _pretraining(draft: Draft) -> None:
    """The pretraining heads: labels of tokens, and what they want beside (sentence order, masked patches)."""
    batch = draft.spec.batch_size
    if "labels" in draft.takes and "input_ids" in draft.takes:
        language_model(draft)
        for name in ("next_sentence_label", "sentence_order_label"):
            if name in draft.takes:
                draft.tensors[name] = torch.zeros(batch, dtype=torch.int64)
    elif draft.config.model_type == "vit_mae":
        pixels(draft)
    else:
        draft.ask_labels()


def _feature_extraction(draft: Draft) -> None:
    """Inputs only: the model gives no loss, see `sum_of_features`. CLIP and its kin get images and texts."""
    both = hasattr(draft.config, "text_config") and hasattr(draft.config, "vision_config")
    pairs = both and draft.takes >= {"pixel_values", "input_ids"}
    if "pixel_values" in draft.takes and (pairs or "input_ids" not in draft.takes):
        pixels(draft)
    if "input_ids" in draft.takes:
        ids = text_inputs(draft, sequence_length(draft, draft.spec.seq_len))
        if "decoder_input_ids" in draft.takes:
            draft.tensors["decoder_input_ids"] = ids.clone()
    elif "pixel_values" not in draft.takes:
        speech(draft)
    draft.notes.append("the model has no loss of its own: the sum of its features stands for one")


def sum_of_features(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """A loss for a model that has none: the sum of its first output, in float32."""
    output = model(**batch)
    features = output[0] if not isinstance(output, Tensor) else output
    return features.float().sum()


_WITH_TARGETS = ("seq2seq-lm", "speech-seq2seq", "ctc")
TASKS: dict[str, Callable[[Draft], None]] = {
    "causal-lm": language_model,
    "masked-lm": language_model,
    "seq2seq-lm": sequence_to_sequence,
    "sequence-classification": sequence_classification,
    "token-classification": token_classification,
    "question-answering": question_answering,
    "image-classification": image_classification,
    "image-text-to-text": image_text,
    "speech-seq2seq": speech_to_text,
    "ctc": ctc,
    "semantic-segmentation": semantic_segmentation,
    "mask-generation": mask_generation,
    "feature-extraction": _feature_extraction,
    "pretraining": _pretraining,
}
