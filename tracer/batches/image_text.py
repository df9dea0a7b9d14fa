"""Batches of images and text.

The processor puts as many placeholder tokens into the text as the vision tower returns features, and the model fails
when they differ. So the tower is run, on shapes alone, to count them.
"""

from __future__ import annotations

import contextlib
import inspect
import math

import torch
from torch import Tensor

from metapeak.tracer.batches.draft import Draft, class_labels, floats, sequence_length
from metapeak.tracer.batches.images import image_shape, patches_of_any_shape, pixels
from metapeak.tracer.batches.text import decoder_inputs, text_inputs
from metapeak.tracer.dispatch import PhantomMode
from metapeak.tracer.errors import ModelConfigError
from metapeak.tracer.phantom import phantom_from_cpu
from metapeak.tracer.prepare import nested_configs
from metapeak.tracer.sequences import ordinary_token_ids


def image_text(draft: Draft) -> None:
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
    length = sequence_length(draft, spec.seq_len)
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
        decoder_inputs(draft, labels)
    draft.notes.append(f"{spec.num_images} image(s) a sample take {per_sample} of its {length} tokens")


def _tiled_images_and_text(draft: Draft) -> None:
    """Llama 3.2 Vision: the text attends to images cut into tiles; one token of the text stands for each image."""
    spec, vision = draft.spec, draft.config.vision_config
    images, tiles = (spec.batch_size, spec.num_images), vision.max_num_tiles
    side = vision.image_size  # of a tile; an image that needs all tiles has the last of the supported aspect ratios
    ids = text_inputs(draft, sequence_length(draft, spec.seq_len))
    labels = ids.clone()
    ids[:, : spec.num_images] = _image_token(draft)
    labels[:, : spec.num_images] = -100
    draft.tensors |= {
        "pixel_values": floats(draft, (*images, tiles, vision.num_channels, side, side)),
        "aspect_ratio_ids": torch.full(images, len(vision.supported_aspect_ratios)),
        "aspect_ratio_mask": torch.ones(*images, tiles, dtype=torch.int64),
        "cross_attention_mask": torch.ones(spec.batch_size, ids.size(1), spec.num_images, tiles, dtype=torch.int64),
        "labels": labels,
    }
    draft.notes.append(f"{spec.num_images} image(s) a sample, each of {tiles} tiles of {side} x {side} pixels")


def _image_to_text(draft: Draft) -> None:
    """Encoder of images, decoder of text (vision-encoder-decoder, pix2struct)."""
    if "flattened_patches" in draft.takes:
        patches, width = (
            2048,
            2 + 3 * 16 * 16,
        )  # Pix2StructImageProcessor: max_patches, row and column before the pixels
        draft.tensors["flattened_patches"] = floats(draft, (draft.spec.batch_size, patches, width))
        draft.tensors["attention_mask"] = torch.ones(draft.spec.batch_size, patches)
    else:
        pixels(draft)
    labels = ordinary_token_ids(draft.model, draft.spec.batch_size, sequence_length(draft, draft.spec.seq_len))
    draft.tensors["labels"] = labels
    decoder_inputs(draft, labels)


def _image_token(draft: Draft) -> int:
    for part in nested_configs(draft.config):
        for name in ("image_token_id", "image_token_index", "img_context_token_id", "image_placeholder_token_id"):
            value = getattr(part, name, None)
            if isinstance(value, int):
                return value
    raise ModelConfigError(
        f"{type(draft.model).__name__} takes images and text, but its config names no image_token_id to stand for an "
        "image in the text. Give your own model and batch as `file.py:function`."
    )


def _image_inputs(draft: Draft) -> dict[str, Tensor]:
    """The images of all samples in the form that the model's forward takes, without the text."""
    count = draft.spec.batch_size * draft.spec.num_images
    part = _vision_config(draft.config)
    if "image_grid_thw" in draft.takes:
        return _patched_images(draft, part, count)
    channels, height, width = image_shape(part, draft.spec.image_size)
    if "image_position_ids" in draft.takes:
        return _patches_with_positions(draft, part, count)
    if "spatial_shapes" in draft.takes:
        patches_of_any_shape(draft)
        return {name: draft.tensors.pop(name) for name in ("pixel_values", "pixel_attention_mask", "spatial_shapes")}
    if "pixel_attention_mask" in draft.takes:  # Idefics: images of one sample side by side
        shape = (draft.spec.batch_size, draft.spec.num_images, channels, height, width)
        mask = torch.ones(*shape[:2], height, width, dtype=torch.int64)
        return {"pixel_values": floats(draft, shape), "pixel_attention_mask": mask}
    images = {"pixel_values": floats(draft, (count, channels, height, width))}
    # LLaVA hands image_sizes on to its tower, and only Pixtral's takes them.
    wants_sizes = draft.config.model_type != "llava" or part.model_type == "pixtral"
    if "image_sizes" in draft.takes and wants_sizes:
        images["image_sizes"] = torch.tensor([[height, width]] * count)
        if hasattr(draft.config, "image_grid_pinpoints"):  # LLaVA-NeXT: the image whole, and cut into crops
            images["pixel_values"] = floats(draft, (count, 1 + _crops(draft.config, height), channels, height, width))
    return images


def _patches_with_positions(draft: Draft, part, count: int) -> dict[str, Tensor]:
    """Gemma 4: patches [images, P, C * side * side] and their (x, y) [images, P, 2], at the most that are allowed."""
    pool = part.pooling_kernel_size
    tokens = getattr(draft.config, "vision_soft_tokens_per_image", None) or 280
    rows = max(side for side in range(1, math.isqrt(tokens) + 1) if tokens % side == 0)
    y, x = torch.meshgrid(torch.arange(rows * pool), torch.arange(tokens // rows * pool), indexing="ij")
    positions = torch.stack([x, y], dim=-1).view(1, -1, 2).repeat(count, 1, 1)
    pixels = floats(draft, (count, positions.size(1), 3 * part.patch_size**2))
    return {"pixel_values": pixels, "image_position_ids": positions}


def _crops(config, side: int) -> int:
    """How many crops LLaVA-NeXT makes of an image of the tower's own size: the best fitting of the grids."""
    from transformers.image_processing_utils import select_best_resolution

    best_height, best_width = select_best_resolution((side, side), config.image_grid_pinpoints)
    return (best_height // side) * (best_width // side)


def _patched_images(draft: Draft, part, count: int) -> dict[str, Tensor]:
    """Qwen-VL and its kin: patches of all images in one matrix, [images * rows * columns, C * time * P * P]."""
    patch, merge = part.patch_size, getattr(part, "spatial_merge_size", None) or 1
    time = getattr(part, "temporal_patch_size", None) or 1
    channels = image_shape(part, None)[0]
    side = draft.spec.image_size or getattr(part, "image_size", None) or DEFAULT_IMAGE_SIZE
    side = side if isinstance(side, int) else side[0]
    cells = max(side // (patch * merge), 1) * merge
    patches = floats(draft, (count * cells * cells, channels * time * patch * patch))
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, cells, cells]] * count)}


DEFAULT_IMAGE_SIZE = 448


def _vision_config(config):
    for name in ("vision_config", "thinker_config", "vq_config"):
        part = getattr(config, name, None)
        if part is not None:
            return _vision_config(part)
    return config


def _count_image_tokens(draft: Draft, images: dict[str, Tensor]) -> int:
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


def image_classification(draft: Draft) -> None:
    draft.ask_labels()
    spec = draft.spec
    if "spatial_shapes" in draft.takes:
        patches_of_any_shape(draft)
    elif draft.config.model_type == "imagegpt":  # its processor turns pixels into ids of colours
        draft.tensors["input_ids"] = ordinary_token_ids(draft.model, spec.batch_size, draft.config.n_positions)
    elif "input_ids" in draft.takes:
        return image_text(draft)
    else:
        pixels(draft)
    draft.tensors["labels"] = class_labels(draft, (spec.batch_size,))
