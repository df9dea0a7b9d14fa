"""The batch of one training step: CPU tensors of the shapes and values that a real data loader would give a model.

A batch is full: no padding, every sample as long as the others. Labels are a tensor of their own with the inputs'
values, so every position counts. What a model takes is read from the signature of its `forward`; what it looks for
in the values (an end-of-sequence token, placeholders of an image) is there the same number of times in each sample.

Legend of shapes: B batch size, S tokens, T decoder tokens, C channels, H and W pixels.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from metapeak.tracer.errors import ModelConfigError, UnknownName
from metapeak.tracer.prepare import nested_configs
from metapeak.tracer.spec import BatchSpec

DEFAULT_SEQ_LEN = 2048


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
    draft = _Draft(model=model, task=task, spec=batch)
    TASKS[task](draft)
    return Batch(tensors=draft.tensors, notes=tuple(dict.fromkeys(draft.notes)))


@dataclass(kw_only=True)
class _Draft:
    """A batch being made."""

    model: nn.Module
    task: str
    spec: BatchSpec
    tensors: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.config = self.model.config
        self.text_config = self.config.get_text_config()
        self.takes = frozenset(inspect.signature(self.model.forward).parameters)

    def ask_labels(self) -> None:
        if "labels" not in self.takes:
            raise ModelConfigError(
                f"Asked for a training step of {type(self.model).__name__} ({self.task}), but its forward takes no "
                f"`labels` and gives no loss. Try a class with a loss, or give your own model and loss as "
                f"`file.py:function`."
            )


# -- token ids ---------------------------------------------------------------------------------------------------------


def vocabulary_size(model: nn.Module) -> int:
    """How many token ids the model's input embedding has."""
    try:
        embedding = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        embedding = None
    if isinstance(embedding, nn.Embedding):
        return embedding.num_embeddings
    for config in nested_configs(model.config.get_text_config()):
        if isinstance(getattr(config, "vocab_size", None), int):
            return config.vocab_size
    raise ModelConfigError(f"{type(model).__name__} has no token embedding and its config no vocab_size.")


def special_token_ids(config) -> frozenset[int]:
    """Every token id that `config` or a config inside it gives a meaning."""
    found = set()
    for part in nested_configs(config):
        for name, value in vars(part).items():
            if name.endswith(("token_id", "token_index", "token_ids")):
                found.update(item for item in (value if isinstance(value, (list, tuple)) else [value]))
    return frozenset(item for item in found if isinstance(item, int))


def ordinary_token_ids(model: nn.Module, batch_size: int, length: int) -> Tensor:
    """Token ids of shape [B, S], int64: the vocabulary in order and again, special tokens left out."""
    size = vocabulary_size(model)
    special = special_token_ids(model.config)
    # Ids to draw from: no more than the batch needs, so that a vocabulary of 256,000 costs nothing.
    ordinary = []
    for token in range(size):
        if token not in special:
            ordinary.append(token)
            if len(ordinary) == batch_size * length:
                break
    ids = torch.tensor(ordinary or [0], dtype=torch.int64)
    return ids[torch.arange(batch_size * length) % len(ids)].view(batch_size, length)


# -- how long a sequence may be ----------------------------------------------------------------------------------------

# Names of tables of learned or precomputed absolute positions: a position past their end is an index error on a device.
_POSITION_TABLES = frozenset({
    "position_embeddings", "position_embedding", "positions_embed", "embed_positions", "wpe", "pos_encoding",
    "embed_position", "pos_embeddings", "pos_embedding",
})  # fmt: skip
_NOT_TEXT = ("vision", "visual", "image", "audio", "speech", "perceiver", "entity", "pixel", "video", "qformer")
_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_seq_length", "seq_length", "n_ctx")


def most_positions(model: nn.Module) -> int | None:
    """The longest sequence that the model's tables of absolute positions allow; None when it has none."""
    limits = []
    for name, module in model.named_modules():
        path = name.split(".")
        if any(word in part for part in path for word in _NOT_TEXT):
            continue
        if isinstance(module, nn.Embedding) and path[-1] in _POSITION_TABLES:
            # BART's tables start at `offset`, RoBERTa's behind the padding token's row.
            padding = 0 if module.padding_idx is None else module.padding_idx + 1
            limits.append(module.num_embeddings - (getattr(module, "offset", 0) or padding))
        for key in _POSITION_TABLES:
            table = module._buffers.get(key)
            if table is not None and table.dim() == 2:
                limits.append(table.size(0))
    return min(limits, default=None)


def trained_length(config) -> int | None:
    """The number of positions that the config names, whatever the model does past it."""
    text = config.get_text_config()
    for part in (text, config):
        for name in _LENGTH_FIELDS:
            value = getattr(part, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def exact_length(model: nn.Module) -> tuple[int, str] | None:
    """(length, rule) for models that train on sequences of one length only."""
    config = model.config
    if config.model_type == "reformer" and config.axial_pos_embds:
        return math.prod(config.axial_pos_shape), f"the product of axial_pos_shape {tuple(config.axial_pos_shape)}"
    if config.model_type == "perceiver":
        return config.max_position_embeddings, "max_position_embeddings, which the tokenizer always fills"
    return None


def _sequence_length(draft: _Draft, asked: int | None, what: str = "seq_len") -> int:
    exact = exact_length(draft.model)
    if exact is not None:
        length, rule = exact
        if asked is not None and asked != length:
            raise ModelConfigError(
                f"Asked for {what} {asked}, but {type(draft.model).__name__} trains on {length} tokens only ({rule}). "
                f"Try {what} {length}."
            )
        return length
    most, trained = most_positions(draft.model), trained_length(draft.config)
    if asked is None:
        length = min(limit for limit in (DEFAULT_SEQ_LEN, most, trained) if limit is not None)
        if length < DEFAULT_SEQ_LEN:
            draft.notes.append(f"{what} is {length}, the most that the model has positions for")
        return length
    if asked < 1:
        raise ModelConfigError(f"Asked for {what} {asked}; a sequence has at least one token.")
    if most is not None and asked > most:
        raise ModelConfigError(
            f"Asked for {what} {asked}, but {type(draft.model).__name__} has {most} positions in its table of absolute "
            f"positions: a real run fails with an index error. Try {what} {most} or less."
        )
    if trained is not None and asked > trained:
        draft.notes.append(
            f"{what} {asked} is past the {trained} positions of the config; positions are computed, so it runs"
        )
    return asked


# -- text --------------------------------------------------------------------------------------------------------------


def _text_inputs(draft: _Draft, length: int) -> Tensor:
    """`input_ids` and `attention_mask` of shape [B, S]; returns the ids."""
    ids = ordinary_token_ids(draft.model, draft.spec.batch_size, length)
    draft.tensors["inputs" if draft.config.model_type == "perceiver" else "input_ids"] = ids
    if "attention_mask" in draft.takes:
        draft.tensors["attention_mask"] = torch.ones_like(ids)
    return ids


def _language_model(draft: _Draft) -> None:
    """Causal and masked language models: labels [B, S] at every position."""
    draft.ask_labels()
    ids = _text_inputs(draft, _sequence_length(draft, draft.spec.seq_len))
    if draft.takes >= {"pixel_values", "input_ids"} and draft.config.model_type == "git":
        _pixels(draft, num_images=1)
    draft.tensors["labels"] = ids.clone()


def _sequence_to_sequence(draft: _Draft) -> None:
    """Encoder-decoder: labels [B, T]; the model makes its decoder inputs from them."""
    draft.ask_labels()
    if "decoder_input_ids" not in draft.takes:
        return _language_model(draft)
    spec = draft.spec
    main = draft.model.main_input_name
    if main == "input_ids":
        source = _sequence_length(draft, spec.seq_len)
        _text_inputs(draft, source)
        target = source if spec.target_len is None else _sequence_length(draft, spec.target_len, "target_len")
    else:
        _speech(draft)
        target = _sequence_length(draft, spec.target_len or spec.seq_len, "target_len")
    labels = ordinary_token_ids(draft.model, spec.batch_size, target)
    draft.tensors["labels"] = labels.clone()
    _decoder_inputs(draft, labels)


def _decoder_inputs(draft: _Draft, labels: Tensor) -> None:
    if getattr(draft.config, "decoder_start_token_id", None) is None and "decoder_input_ids" in draft.takes:
        draft.tensors["decoder_input_ids"] = labels.clone()
        draft.notes.append("the config names no decoder_start_token_id, so the batch brings decoder_input_ids")


def _sequence_classification(draft: _Draft) -> None:
    """One label a sample. The last token is the end of sequence, which BART and T5 look for."""
    draft.ask_labels()
    ids = _text_inputs(draft, _sequence_length(draft, draft.spec.seq_len))
    eos = getattr(draft.text_config, "eos_token_id", None)
    eos = eos[0] if isinstance(eos, (list, tuple)) and eos else eos
    if isinstance(eos, int) and 0 <= eos < vocabulary_size(draft.model):
        ids[:, -1] = eos
    if getattr(draft.text_config, "pad_token_id", None) is None and draft.spec.batch_size > 1:
        # The decoders' heads refuse several samples without one. No sample holds it: the batch is full.
        draft.text_config.pad_token_id = draft.config.pad_token_id = -1
        draft.notes.append("the config names no pad_token_id, which several samples need; none of them is padded")
    draft.tensors["labels"] = _class_labels(draft, (draft.spec.batch_size,))


def _class_labels(draft: _Draft, shape: tuple[int, ...]) -> Tensor:
    """Class indices, or floats where the config's problem is a regression or has several labels."""
    num_labels = getattr(draft.config, "num_labels", 1)
    problem = getattr(draft.config, "problem_type", None)
    if problem == "regression" or (problem is None and num_labels == 1):
        return torch.zeros(shape if num_labels == 1 else (*shape, num_labels))
    if problem == "multi_label_classification":
        return torch.zeros(*shape, num_labels)
    return (torch.arange(math.prod(shape)) % num_labels).view(shape)


def _token_classification(draft: _Draft) -> None:
    draft.ask_labels()
    ids = _text_inputs(draft, _sequence_length(draft, draft.spec.seq_len))
    draft.tensors["labels"] = ids % max(draft.config.num_labels, 1)


def _question_answering(draft: _Draft) -> None:
    """The answer's first and last token of each sample, shape [B]."""
    ids = _text_inputs(draft, _sequence_length(draft, draft.spec.seq_len))
    if not draft.takes >= {"start_positions", "end_positions"}:
        draft.ask_labels()
    eos = getattr(draft.text_config, "eos_token_id", None)
    if isinstance(eos, int) and 0 <= eos < vocabulary_size(draft.model):
        ids[:, -1] = eos
    draft.tensors["start_positions"] = torch.zeros(draft.spec.batch_size, dtype=torch.int64)
    draft.tensors["end_positions"] = torch.full((draft.spec.batch_size,), ids.size(1) // 2, dtype=torch.int64)


# -- images ------------------------------------------------------------------------------------------------------------


def _image_config(config):
    for part in nested_configs(config):
        if getattr(part, "image_size", None) is not None or getattr(part, "patch_size", None) is not None:
            return part
    return config


def image_shape(config, asked: int | None) -> tuple[int, int, int]:
    """(C, H, W) of the images that a model with this config takes; 224 pixels a side where it says nothing."""
    part = _image_config(config)
    channels = next(
        (
            getattr(part, name)
            for name in ("num_channels", "in_channels", "in_chans", "num_input_channels")
            if isinstance(getattr(part, name, None), int)
        ),
        3,
    )
    size = asked or getattr(part, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else (size[-2], size[-1])
    return channels, int(height), int(width)


def _pixels(draft: _Draft, num_images: int = 1) -> Tensor:
    """`pixel_values` of shape [B * images, C, H, W], in the model's dtype as its processor's output is cast."""
    channels, height, width = image_shape(draft.config, draft.spec.image_size)
    pixels = _floats(draft, (draft.spec.batch_size * num_images, channels, height, width))
    draft.tensors["pixel_values"] = pixels
    return pixels


def _floats(draft: _Draft, shape: tuple[int, ...]) -> Tensor:
    dtype = next((p.dtype for p in draft.model.parameters() if p.dtype.is_floating_point), torch.float32)
    return torch.full(shape, 0.5, dtype=dtype)


def _image_classification(draft: _Draft) -> None:
    draft.ask_labels()
    spec = draft.spec
    model_type = draft.config.model_type
    if "spatial_shapes" in draft.takes:
        _patches_of_any_shape(draft)
    elif "inputs" in draft.takes and "pixel_values" not in draft.takes:
        pass
    elif "input_ids" in draft.takes and model_type == "shieldgemma2":
        return _image_text(draft)
    else:
        _pixels(draft)
    draft.tensors["labels"] = _class_labels(draft, (spec.batch_size,))


def _patches_of_any_shape(draft: _Draft) -> None:
    """SigLIP 2: patches [B, patches, C * P * P], which of them are real, and their grid [B, 2]."""
    part = _image_config(draft.config)
    patches = part.num_patches
    side = math.isqrt(patches)
    draft.tensors["pixel_values"] = _floats(
        draft, (draft.spec.batch_size, side * side, part.num_channels * part.patch_size**2)
    )
    draft.tensors["pixel_attention_mask"] = torch.ones(draft.spec.batch_size, side * side, dtype=torch.int64)
    draft.tensors["spatial_shapes"] = torch.full((draft.spec.batch_size, 2), side, dtype=torch.int64)


def _image_text(draft: _Draft) -> None:
    raise ModelConfigError(f"{type(draft.model).__name__}: no batch is known for image and text together yet.")


# -- speech ------------------------------------------------------------------------------------------------------------


def _speech(draft: _Draft) -> None:
    raise ModelConfigError(f"{type(draft.model).__name__}: no batch is known for {draft.model.main_input_name} yet.")


TASKS: dict[str, Callable[[_Draft], None]] = {
    "causal-lm": _language_model,
    "masked-lm": _language_model,
    "seq2seq-lm": _sequence_to_sequence,
    "sequence-classification": _sequence_classification,
    "token-classification": _token_classification,
    "question-answering": _question_answering,
    "image-classification": _image_classification,
}
