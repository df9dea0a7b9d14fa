"""What every layer with packed weights has: names for the report, sizes, and the weight as PEFT's DoRA asks for it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn


class QuantizedLayer:
    """A mix-in of linear layers whose weight is stored packed.

    `weight_storage` names the parameters and buffers that together hold the weight: a report counts them as
    parameters. `weight_numel` is the number of weights that they stand for.
    """

    weight_storage: ClassVar[tuple[str, ...]] = ()
    in_features: int
    out_features: int

    @property
    def infeatures(self) -> int:  # what PEFT asks a QuantLinear for
        return self.in_features

    @property
    def outfeatures(self) -> int:
        return self.out_features

    @property
    def weight_numel(self) -> int:
        return self.in_features * self.out_features

    @property
    def weight_nbytes(self) -> int:
        """Bytes of everything that the weight is stored in."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.storages())

    def storages(self) -> list[torch.Tensor]:
        """The tensors that `weight_storage` names, those that there are."""
        return [tensor for name in self.weight_storage if (tensor := getattr(self, name)) is not None]

    def dequantize(self) -> torch.Tensor:
        """The weight, of shape (out_features, in_features), as merging and DoRA compute it."""
        raise NotImplementedError

    @property
    def W_q(self) -> torch.Tensor:
        """PEFT's `dequantize_module_weight` calls `dequantize()` of layers that have this attribute.

        For real bitsandbytes layers it looks at the class of the weight, which a tensor of the phantom GPU has not.
        """
        return getattr(self, self.weight_storage[0])


def hold(module: nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Give a module a buffer on meta that no checkpoint is asked for."""
    module.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"), persistent=False)


def hold_bias(module: nn.Module, source: nn.Module, dtype: torch.dtype) -> None:
    """Give a module a buffer for the bias of the layer that it replaces, or None."""
    module.register_buffer("bias", None)
    if source.bias is not None:
        hold(module, "bias", tuple(source.bias.shape), dtype)


def move_bias(target: nn.Module, source: nn.Module) -> None:
    """Give `target` the bias of the layer that it replaces, frozen."""
    bias = source.bias
    target.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
