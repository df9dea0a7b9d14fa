"""diffusers: `diffusers:LTX-Video`, `diffusers:CogVideoX-5b`, ...: the transformer that is trained, with its own class.

Where each byte comes from: diffusers' class runs in the trace on precomputed latents and text embeddings, as training
scripts (finetrainers, diffusers' examples) do that keep the VAE and the text encoder off the device. The loss is the
mean squared error of the prediction, in float32.
Not modelled: schedulers' tables and noise that scripts draw on the device (a few times the latents: megabytes).
Sources: diffusers 0.42 models/transformers/{transformer_ltx,cogvideox_transformer_3d}.py; finetrainers
training/cogvideox_text_to_video_sft.py at 363841a; the models' published configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from metapeak.tracer.errors import UnknownName
from metapeak.tracer.packages.base import Inputs, LossFunction, Package

if TYPE_CHECKING:
    import torch
    from torch import nn

    from metapeak.tracer.spec import BatchSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A transformer of diffusers: its class, what differs from its defaults, and one sample of its training.

    `latent` is the shape of a sample's latents, `text` that of its text embeddings; `video` says what they stand for.
    """

    class_name: str
    video: str
    latent: tuple[int, ...]
    text: tuple[int, int]
    config: Mapping[str, Any] = field(default_factory=dict)


_COGVIDEOX = {
    "patch_size": 2, "in_channels": 16, "out_channels": 16, "attention_head_dim": 64, "time_embed_dim": 512,
    "text_embed_dim": 4096, "sample_width": 90, "sample_height": 60, "sample_frames": 49,
    "temporal_compression_ratio": 4, "max_text_seq_length": 226,
}  # fmt: skip
_COGVIDEOX_SAMPLE = {"video": "49 frames of 480 x 720", "latent": (13, 16, 60, 90), "text": (226, 4096)}
MODELS: dict[str, Model] = {
    "LTX-Video": Model(
        class_name="LTXVideoTransformer3DModel",
        video="49 frames of 512 x 768",
        latent=(7 * 16 * 24, 128),
        text=(128, 4096),
    ),
    "CogVideoX-5b": Model(
        class_name="CogVideoXTransformer3DModel",
        config=_COGVIDEOX | {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True},
        **_COGVIDEOX_SAMPLE,
    ),
    "CogVideoX-2b": Model(
        class_name="CogVideoXTransformer3DModel",
        config=_COGVIDEOX | {"num_attention_heads": 30, "num_layers": 30, "use_rotary_positional_embeddings": False},
        **_COGVIDEOX_SAMPLE,
    ),
}


def name_of(class_name: str, config: Mapping[str, Any]) -> str:
    """The name of the model with this class and config. Raises UnknownName."""
    for name, model in MODELS.items():
        if model.class_name == class_name and dict(model.config) == dict(config):
            return name
    raise UnknownName("diffusers config of", class_name, MODELS)


class Diffusers(Package):
    prefix = "diffusers"
    modules = ("diffusers",)
    task = "denoising"
    default_dtype = "bfloat16"
    losses = ("eager",)
    autocast_region = "forward"  # scripts prepare the model by accelerate
    peft_adapters = True

    def names(self) -> list[str]:
        return list(MODELS)

    def build(self, name: str, dtype: torch.dtype) -> nn.Module:
        import diffusers

        model = MODELS[name]
        module = getattr(diffusers, model.class_name)(**model.config).to(dtype)
        module.metapeak_model = model
        return module

    def batch(self, module: nn.Module, spec: BatchSpec) -> Inputs:
        import torch

        model, dtype = module.metapeak_model, next(module.parameters()).dtype
        size = spec.batch_size
        tensors = {
            "hidden_states": torch.zeros(size, *model.latent, dtype=dtype),
            "encoder_hidden_states": torch.zeros(size, *model.text, dtype=dtype),
            "timestep": torch.full((size,), 500),
            "target": torch.zeros(size, *model.latent, dtype=dtype),
        }
        if model.class_name.startswith("LTX"):
            tensors["encoder_attention_mask"] = torch.ones(size, model.text[0], dtype=torch.int64)
        elif model.config["use_rotary_positional_embeddings"]:
            frames, _, height, width = model.latent
            positions = frames * height * width // model.config["patch_size"] ** 2
            table = torch.zeros(positions, model.config["attention_head_dim"])
            tensors |= {"rotary_cos": table, "rotary_sin": table.clone()}
        return Inputs(tensors=tensors, notes=(f"a sample is {model.video}, latents and text embeddings precomputed",))

    def loss(self, name: str) -> LossFunction:
        return denoising_loss

    def notes(self, module: nn.Module) -> tuple[str, ...]:
        return ("VAE and text encoder are not on the device; the loss is a mean squared error in float32",)


def denoising_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    import torch

    inputs = {name: value for name, value in batch.items() if name not in ("target", "rotary_cos", "rotary_sin")}
    if "rotary_cos" in batch:
        inputs["image_rotary_emb"] = (batch["rotary_cos"], batch["rotary_sin"])
    if "encoder_attention_mask" in batch:  # LTX: rows of its grid of latents
        inputs |= {"num_frames": 7, "height": 16, "width": 24, "rope_interpolation_scale": (8 / 25, 32, 32)}
    prediction = model(**inputs, return_dict=False)[0]
    return torch.nn.functional.mse_loss(prediction.float(), batch["target"].float())


PACKAGE = Diffusers()
