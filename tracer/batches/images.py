"""Batches of images: classification, segmentation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from metapeak.tracer.batches.draft import Draft, floats
from metapeak.tracer.prepare import nested_configs


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


def pixels(draft: Draft, num_images: int = 1) -> Tensor:
    """`pixel_values` of shape [B * images, C, H, W], in the model's dtype as its processor's output is cast."""
    channels, height, width = image_shape(draft.config, draft.spec.image_size)
    pixels = floats(draft, (draft.spec.batch_size * num_images, channels, height, width))
    draft.tensors["pixel_values"] = pixels
    return pixels


def patches_of_any_shape(draft: Draft) -> None:
    """SigLIP 2: patches [B, patches, C * P * P], which of them are real, and their grid [B, 2]."""
    part = _image_config(draft.config)
    patches = part.num_patches
    side = math.isqrt(patches)
    draft.tensors["pixel_values"] = floats(
        draft, (draft.spec.batch_size, side * side, part.num_channels * part.patch_size**2)
    )
    draft.tensors["pixel_attention_mask"] = torch.ones(draft.spec.batch_size, side * side, dtype=torch.int64)
    draft.tensors["spatial_shapes"] = torch.full((draft.spec.batch_size, 2), side, dtype=torch.int64)


def semantic_segmentation(draft: Draft) -> None:
    """Images and a class for each pixel, labels [B, H, W]."""
    draft.ask_labels()
    batch, _, height, width = pixels(draft).shape
    draft.tensors["labels"] = (torch.arange(batch * height * width) % draft.config.num_labels).view(
        batch, height, width
    )


def mask_generation(draft: Draft) -> None:
    draft.ask_labels()
