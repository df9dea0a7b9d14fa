"""timm: `timm:vit_huge_patch14_224` and every other classifier of timm, trained on images with cross entropy.

Where each byte comes from: timm's own class runs in the trace; the classes of the head are NUM_CLASSES unless the name
says otherwise (`timm:NAME@45` has 45). The loss is computed inside autocast, as torchao's benchmark and timm's train.py
do.
Not modelled: mixup, drop path and dropout rates other than the model's defaults, torch.compile.

Note [Operators of torchvision]
    timm imports torchvision for its transforms and one norm. Where torchvision's compiled operators do not load beside
    this torch (a CPU build of one and a CUDA build of the other), its import ends at two operators that its Python
    files register themselves for. Then those two get their schema here, without a kernel: no model of timm calls them.

Sources: timm 1.0.31 models/vision_transformer.py, train.py; pytorch/ao benchmarks/benchmark_low_bit_adam.py.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from metapeak.tracer.errors import InputError
from metapeak.tracer.packages.base import Inputs, LossFunction, Package

if TYPE_CHECKING:
    import torch
    from torch import nn

    from metapeak.tracer.spec import BatchSpec

NUM_CLASSES = 1000
_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_libraries: list[torch.library.Library] = []  # schemas live as long as their library


class Timm(Package):
    prefix = "timm"
    modules = ("timm",)
    task = "image-classification"
    default_dtype = "float32"

    def load(self) -> None:
        _import_torchvision()
        super().load()

    def names(self) -> list[str]:
        import timm

        return timm.list_models()

    def find(self, name: str) -> str:
        """A model, with or without the tag of its weights and `@` and its number of classes."""
        model, at, classes = name.partition("@")
        if at and not (classes.isdigit() and int(classes)):
            raise InputError(f"timm:{name}: after @ comes the number of classes, as in timm:{model}@45.")
        architecture, dot, tag = model.partition(".")
        return super().find(architecture) + dot + tag + at + classes

    def build(self, name: str, dtype: torch.dtype) -> nn.Module:
        import timm
        import torch

        model, _, classes = name.partition("@")
        with torch.device("meta"):
            module = timm.create_model(model, pretrained=False, num_classes=int(classes or NUM_CLASSES))
        return module.to(dtype).train()

    def batch(self, module: nn.Module, spec: BatchSpec) -> Inputs:
        import torch

        channels, height, width = module.pretrained_cfg["input_size"]
        if spec.image_size:
            height = width = spec.image_size
        images = torch.zeros(spec.batch_size, channels, height, width, dtype=next(module.parameters()).dtype)
        return Inputs(tensors={"images": images, "labels": torch.zeros(spec.batch_size, dtype=torch.int64)})

    def loss(self, name: str) -> LossFunction:
        return classification_loss


def classification_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    import torch

    return torch.nn.functional.cross_entropy(model(batch["images"]), batch["labels"])


def _import_torchvision() -> None:
    """Import torchvision, see Note [Operators of torchvision]."""
    import torch

    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(operator + _BOXES)
        _libraries.append(library)
        import torchvision  # noqa: F401


PACKAGE = Timm()
