"""The batch of one training step: CPU tensors of the shapes and values that a real data loader would give a model.

A batch is full: no padding, every sample as long as the others. Labels are a tensor of their own with the inputs'
values, so every position counts. What a model takes is read from the signature of its `forward`; what it looks for
in the values (an end-of-sequence token, placeholders of an image) is there the same number of times in each sample.

Legend of shapes: B batch size, S tokens, T decoder tokens, C channels, H and W pixels.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from metapeak.tracer.dispatch import PhantomMode
from metapeak.tracer.errors import ModelConfigError, UnknownName
from metapeak.tracer.phantom import phantom_from_cpu
from metapeak.tracer.prepare import nested_configs
from metapeak.tracer.sequences import exact_length, most_positions, ordinary_token_ids, trained_length, vocabulary_size
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
    draft = _Draft(model=model, task=task, spec=batch)
    TASKS[task](draft)
    _say_what_is_not_read(draft)
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


def _say_what_is_not_read(draft: _Draft) -> None:
    """A note for each size that was given and that this batch has no place for."""
    spec, images = draft.spec, any("pixel" in name or "patches" in name for name in draft.tensors)
    given = {
        "target_len": spec.target_len is not None and draft.task not in _WITH_TARGETS,
        "image_size": spec.image_size is not None and not images,
        "num_images": spec.num_images != 1 and draft.task != "image-text-to-text",
    }
    draft.notes += [f"{name} is not used: {draft.task} has no place for it" for name, unread in given.items() if unread]


# -- how long a sequence may be ----------------------------------------------------------------------------------------


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
        default = draft.spec.default_seq_len
        length = min(limit for limit in (default, most, trained) if limit is not None)
        if length < default:
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
    if "lang_ids" in draft.takes and draft.config.default_language is None:
        draft.tensors["lang_ids"] = torch.zeros(draft.spec.batch_size, dtype=torch.int64)
        draft.notes.append("every sample is in the model's first language, for the config names no default_language")
    return ids


def _language_model(draft: _Draft) -> None:
    """Causal and masked language models: labels [B, S] at every position."""
    draft.ask_labels()
    ids = _text_inputs(draft, _sequence_length(draft, draft.spec.seq_len))
    if draft.config.model_type == "git":  # its loss skips the image's tokens, so there has to be one
        _pixels(draft, num_images=1)
    if draft.config.model_type == "voxtral_realtime":  # a stretch of audio for every token
        frames = ids.size(1) * draft.config.audio_length_per_tok
        mels = draft.config.audio_config.num_mel_bins
        draft.tensors["input_features"] = _floats(draft, (ids.size(0), mels, frames))
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
    _decoder_inputs(draft, ids)
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
    if draft.config.model_type == "longformer":  # question and context: <s> q </s></s> c </s>; attends globally to q
        ids[:, [ids.size(1) // 4, ids.size(1) // 4 + 1, -1]] = draft.config.sep_token_id
    _decoder_inputs(draft, ids)
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
    if "spatial_shapes" in draft.takes:
        _patches_of_any_shape(draft)
    elif draft.config.model_type == "imagegpt":  # its processor turns pixels into ids of colours
        draft.tensors["input_ids"] = ordinary_token_ids(draft.model, spec.batch_size, draft.config.n_positions)
    elif "input_ids" in draft.takes:
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


# -- images and text ---------------------------------------------------------------------------------------------------
# The processor puts as many placeholder tokens into the text as the vision tower returns features, and the model fails
# when they differ. So the tower is run, on shapes alone, to count them.


def _image_text(draft: _Draft) -> None:
    """Placeholders of the images, then text: `input_ids` [B, S], the pixels, labels [B, S] (-100 at placeholders)."""
    draft.ask_labels()
    if "input_ids" not in draft.takes:
        return _image_to_text(draft)
    if "cross_attention_mask" in draft.takes:
        return _tiled_images_and_text(draft)
    spec = draft.spec
    images = _image_inputs(draft)
    placeholder = _image_token(draft)
    per_sample = _count_image_tokens(draft, images) // spec.batch_size
    length = _sequence_length(draft, spec.seq_len)
    if per_sample >= length:
        if spec.seq_len is not None:
            raise ModelConfigError(
                f"Asked for seq_len {length}, but {spec.num_images} image(s) take {per_sample} tokens of each sample "
                f"(tokens <= seq_len - 1). Try seq_len {per_sample + 128} or a smaller image_size."
            )
        length = per_sample + 128
        draft.notes.append(f"seq_len is {length}: {per_sample} tokens of the images and 128 of text")
    ids = ordinary_token_ids(draft.model, spec.batch_size, length)
    labels = ids.clone()
    ids[:, :per_sample] = placeholder
    labels[:, :per_sample] = -100
    draft.tensors |= {"input_ids": ids, **images}
    if "attention_mask" in draft.takes:
        draft.tensors["attention_mask"] = torch.ones_like(ids)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in draft.takes:
            draft.tensors[name] = (ids == placeholder).to(torch.int64)
    draft.tensors["labels"] = labels
    if getattr(draft.config, "is_encoder_decoder", False):
        _decoder_inputs(draft, labels)
    draft.notes.append(f"{spec.num_images} image(s) a sample take {per_sample} of its {length} tokens")


def _tiled_images_and_text(draft: _Draft) -> None:
    """Llama 3.2 Vision: the text attends to images cut into tiles; one token of the text stands for each image."""
    spec, vision = draft.spec, draft.config.vision_config
    images, tiles = (spec.batch_size, spec.num_images), vision.max_num_tiles
    side = vision.image_size  # of a tile; an image that needs all tiles has the last of the supported aspect ratios
    ids = _text_inputs(draft, _sequence_length(draft, spec.seq_len))
    labels = ids.clone()
    ids[:, : spec.num_images] = _image_token(draft)
    labels[:, : spec.num_images] = -100
    draft.tensors |= {
        "pixel_values": _floats(draft, (*images, tiles, vision.num_channels, side, side)),
        "aspect_ratio_ids": torch.full(images, len(vision.supported_aspect_ratios)),
        "aspect_ratio_mask": torch.ones(*images, tiles, dtype=torch.int64),
        "cross_attention_mask": torch.ones(spec.batch_size, ids.size(1), spec.num_images, tiles, dtype=torch.int64),
        "labels": labels,
    }
    draft.notes.append(f"{spec.num_images} image(s) a sample, each of {tiles} tiles of {side} x {side} pixels")


def _image_to_text(draft: _Draft) -> None:
    """Encoder of images, decoder of text (vision-encoder-decoder, pix2struct)."""
    if "flattened_patches" in draft.takes:
        patches, width = (
            2048,
            2 + 3 * 16 * 16,
        )  # Pix2StructImageProcessor: max_patches, row and column before the pixels
        draft.tensors["flattened_patches"] = _floats(draft, (draft.spec.batch_size, patches, width))
        draft.tensors["attention_mask"] = torch.ones(draft.spec.batch_size, patches)
    else:
        _pixels(draft)
    labels = ordinary_token_ids(draft.model, draft.spec.batch_size, _sequence_length(draft, draft.spec.seq_len))
    draft.tensors["labels"] = labels
    _decoder_inputs(draft, labels)


def _image_token(draft: _Draft) -> int:
    for part in nested_configs(draft.config):
        for name in ("image_token_id", "image_token_index", "img_context_token_id", "image_placeholder_token_id"):
            value = getattr(part, name, None)
            if isinstance(value, int):
                return value
    raise ModelConfigError(
        f"{type(draft.model).__name__} takes images and text, but its config names no image_token_id to stand for an "
        "image in the text. Give your own model and batch as `file.py:function`."
    )


def _image_inputs(draft: _Draft) -> dict[str, Tensor]:
    """The images of all samples in the form that the model's forward takes, without the text."""
    count = draft.spec.batch_size * draft.spec.num_images
    part = _vision_config(draft.config)
    if "image_grid_thw" in draft.takes:
        return _patched_images(draft, part, count)
    channels, height, width = image_shape(part, draft.spec.image_size)
    if "image_position_ids" in draft.takes:
        return _patches_with_positions(draft, part, count)
    if "spatial_shapes" in draft.takes:
        _patches_of_any_shape(draft)
        return {name: draft.tensors.pop(name) for name in ("pixel_values", "pixel_attention_mask", "spatial_shapes")}
    if "pixel_attention_mask" in draft.takes:  # Idefics: images of one sample side by side
        shape = (draft.spec.batch_size, draft.spec.num_images, channels, height, width)
        mask = torch.ones(*shape[:2], height, width, dtype=torch.int64)
        return {"pixel_values": _floats(draft, shape), "pixel_attention_mask": mask}
    images = {"pixel_values": _floats(draft, (count, channels, height, width))}
    # LLaVA hands image_sizes on to its tower, and only Pixtral's takes them.
    wants_sizes = draft.config.model_type != "llava" or part.model_type == "pixtral"
    if "image_sizes" in draft.takes and wants_sizes:
        images["image_sizes"] = torch.tensor([[height, width]] * count)
        if hasattr(draft.config, "image_grid_pinpoints"):  # LLaVA-NeXT: the image whole, and cut into crops
            images["pixel_values"] = _floats(draft, (count, 1 + _crops(draft.config, height), channels, height, width))
    return images


def _patches_with_positions(draft: _Draft, part, count: int) -> dict[str, Tensor]:
    """Gemma 4: patches [images, P, C * side * side] and their (x, y) [images, P, 2], at the most that are allowed."""
    pool = part.pooling_kernel_size
    tokens = getattr(draft.config, "vision_soft_tokens_per_image", None) or 280
    rows = max(side for side in range(1, math.isqrt(tokens) + 1) if tokens % side == 0)
    y, x = torch.meshgrid(torch.arange(rows * pool), torch.arange(tokens // rows * pool), indexing="ij")
    positions = torch.stack([x, y], dim=-1).view(1, -1, 2).repeat(count, 1, 1)
    pixels = _floats(draft, (count, positions.size(1), 3 * part.patch_size**2))
    return {"pixel_values": pixels, "image_position_ids": positions}


def _crops(config, side: int) -> int:
    """How many crops LLaVA-NeXT makes of an image of the tower's own size: the best fitting of the grids."""
    from transformers.image_processing_utils import select_best_resolution

    best_height, best_width = select_best_resolution((side, side), config.image_grid_pinpoints)
    return (best_height // side) * (best_width // side)


def _patched_images(draft: _Draft, part, count: int) -> dict[str, Tensor]:
    """Qwen-VL and its kin: patches of all images in one matrix, [images * rows * columns, C * time * P * P]."""
    patch, merge = part.patch_size, getattr(part, "spatial_merge_size", None) or 1
    time = getattr(part, "temporal_patch_size", None) or 1
    channels = image_shape(part, None)[0]
    side = draft.spec.image_size or getattr(part, "image_size", None) or DEFAULT_IMAGE_SIZE
    side = side if isinstance(side, int) else side[0]
    cells = max(side // (patch * merge), 1) * merge
    patches = _floats(draft, (count * cells * cells, channels * time * patch * patch))
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, cells, cells]] * count)}


DEFAULT_IMAGE_SIZE = 448


def _vision_config(config):
    for name in ("vision_config", "thinker_config", "vq_config"):
        part = getattr(config, name, None)
        if part is not None:
            return _vision_config(part)
    return config


def _count_image_tokens(draft: _Draft, images: dict[str, Tensor]) -> int:
    """Features that the model's `get_image_features` returns for `images`; on meta it runs on shapes alone."""
    owner = draft.model if hasattr(draft.model, "get_image_features") else getattr(draft.model, "model", None)
    if not hasattr(owner, "get_image_features"):
        raise ModelConfigError(
            f"{type(draft.model).__name__} has no get_image_features: the number of tokens of an image is not known. "
            "Give your own model and batch as `file.py:function`."
        )
    takes = inspect.signature(owner.get_image_features).parameters
    arguments = {name: value for name, value in images.items() if name in takes}
    on_meta = next(draft.model.parameters()).device.type == "meta"
    try:
        with torch.no_grad(), PhantomMode(_Nobody()) if on_meta else contextlib.nullcontext():
            if on_meta:
                arguments = {name: phantom_from_cpu(value) for name, value in arguments.items()}
            features = owner.get_image_features(**arguments)
    except Exception as error:
        raise ModelConfigError(
            f"{type(draft.model).__name__}.get_image_features fails on "
            f"{ {name: tuple(value.shape) for name, value in images.items()} }: {type(error).__name__}: {error}"
        ) from error
    if hasattr(features, "last_hidden_state"):
        pooled = getattr(features, "pooler_output", None)
        features = features.last_hidden_state if pooled is None else pooled
    features = features if isinstance(features, (list, tuple)) else [features]
    return sum(math.prod(feature.shape[:-1]) for feature in features)


class _Nobody:
    """An observer of the phantom GPU that writes nothing down."""

    def record(self, func, args, kwargs, outputs) -> None:
        pass

    def location(self) -> tuple[int, str]:
        return 0, "get_image_features"


def _semantic_segmentation(draft: _Draft) -> None:
    """Images and a class for each pixel, labels [B, H, W]."""
    draft.ask_labels()
    batch, _, height, width = _pixels(draft).shape
    draft.tensors["labels"] = (torch.arange(batch * height * width) % draft.config.num_labels).view(
        batch, height, width
    )


def _mask_generation(draft: _Draft) -> None:
    draft.ask_labels()


# -- speech ------------------------------------------------------------------------------------------------------------

SAMPLING_RATE = 16_000  # samples a second; every speech model of transformers is trained at this rate or says otherwise
AUDIO_SECONDS = 10
FRAMES_PER_SECOND = 100  # of a log-mel spectrogram with a hop of 10 ms
DEFAULT_TRANSCRIPT = 128


def _speech(draft: _Draft) -> None:
    """The audio of every sample: waveforms [B, samples] or spectrograms, whose layout depends on the model."""
    config, batch = draft.config, draft.spec.batch_size
    name = next((n for n in ("input_features", "input_values", "inputs") if n in draft.takes), None)
    if name is None:
        raise ModelConfigError(
            f"{type(draft.model).__name__} takes no audio that is known here ({draft.model.main_input_name})."
        )
    if name != "input_features":
        draft.tensors[name] = _floats(draft, (batch, AUDIO_SECONDS * SAMPLING_RATE))
        draft.notes.append(f"a sample is {AUDIO_SECONDS} s of audio at {SAMPLING_RATE:,} samples a second")
        return
    encoder = next((part for part in nested_configs(config) if hasattr(part, "num_mel_bins")), config)
    if config.model_type == "whisper":
        frames = 2 * config.max_source_positions  # the processor pads every clip to 30 s; the first convolution halves
        draft.tensors[name] = _floats(draft, (batch, config.num_mel_bins, frames))
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
    draft.tensors[name] = _floats(draft, (batch, frames, width))
    if "attention_mask" in draft.takes:
        draft.tensors["attention_mask"] = torch.ones(batch, frames, dtype=torch.int64)
    draft.notes.append(f"a sample is a spectrogram of {frames} frames ({AUDIO_SECONDS} s)")


def _speech_to_text(draft: _Draft) -> None:
    """Speech recognition with a decoder: audio and labels [B, T]."""
    draft.ask_labels()
    spec = draft.spec
    if "decoder_input_ids" not in draft.takes:
        return _language_model(draft)
    _speech(draft)
    labels = ordinary_token_ids(draft.model, spec.batch_size, _transcript_length(draft))
    draft.tensors["labels"] = labels.clone()
    _decoder_inputs(draft, labels)


def _ctc(draft: _Draft) -> None:
    """Speech recognition by CTC: audio and labels [B, T], none of them the blank (the config's pad_token_id)."""
    draft.ask_labels()
    _speech(draft)
    length, size = _transcript_length(draft), draft.config.vocab_size
    blank = draft.config.pad_token_id
    ids = torch.tensor([token for token in range(size) if token != blank])
    labels = ids[torch.arange(draft.spec.batch_size * length) % len(ids)].view(draft.spec.batch_size, length)
    draft.tensors["labels"] = labels


def _transcript_length(draft: _Draft) -> int:
    asked = draft.spec.target_len or draft.spec.seq_len
    if asked is None:
        draft.notes.append(f"a transcript has {DEFAULT_TRANSCRIPT} tokens")
        return DEFAULT_TRANSCRIPT
    return asked


# -- the rest ----------------------------------------------------------------------------------------------------------


def _pretraining(draft: _Draft) -> None:
    """The pretraining heads: labels of tokens, and what they want beside (sentence order, masked patches)."""
    batch = draft.spec.batch_size
    if "labels" in draft.takes and "input_ids" in draft.takes:
        _language_model(draft)
        for name in ("next_sentence_label", "sentence_order_label"):
            if name in draft.takes:
                draft.tensors[name] = torch.zeros(batch, dtype=torch.int64)
    elif draft.config.model_type == "vit_mae":
        _pixels(draft)
    else:
        draft.ask_labels()


def _feature_extraction(draft: _Draft) -> None:
    """Inputs only: the model gives no loss, see `sum_of_features`. CLIP and its kin get images and texts."""
    both = hasattr(draft.config, "text_config") and hasattr(draft.config, "vision_config")
    pairs = both and draft.takes >= {"pixel_values", "input_ids"}
    if "pixel_values" in draft.takes and (pairs or "input_ids" not in draft.takes):
        _pixels(draft)
    if "input_ids" in draft.takes:
        ids = _text_inputs(draft, _sequence_length(draft, draft.spec.seq_len))
        if "decoder_input_ids" in draft.takes:
            draft.tensors["decoder_input_ids"] = ids.clone()
    elif "pixel_values" not in draft.takes:
        _speech(draft)
    draft.notes.append("the model has no loss of its own: the sum of its features stands for one")


def sum_of_features(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """A loss for a model that has none: the sum of its first output, in float32."""
    output = model(**batch)
    features = output[0] if not isinstance(output, Tensor) else output
    return features.float().sum()


_WITH_TARGETS = ("seq2seq-lm", "speech-seq2seq", "ctc")
TASKS: dict[str, Callable[[_Draft], None]] = {
    "causal-lm": _language_model,
    "masked-lm": _language_model,
    "seq2seq-lm": _sequence_to_sequence,
    "sequence-classification": _sequence_classification,
    "token-classification": _token_classification,
    "question-answering": _question_answering,
    "image-classification": _image_classification,
    "image-text-to-text": _image_text,
    "speech-seq2seq": _speech_to_text,
    "ctc": _ctc,
    "semantic-segmentation": _semantic_segmentation,
    "mask-generation": _mask_generation,
    "feature-extraction": _feature_extraction,
    "pretraining": _pretraining,
}
