"""What a package gives: its models by name, and how its own training scripts train them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metapeak.tracer.errors import InputError, ModelConfigError, UnknownName

if TYPE_CHECKING:
    import torch
    from torch import nn

    from metapeak.tracer.spec import BatchSpec

LossFunction = Callable[["nn.Module", Any], "torch.Tensor"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """LoRA as it was asked for. `targets` None is the package's own default; names may be those of transformers."""

    rank: int
    alpha: float | None
    dropout: float
    targets: tuple[str, ...] | None

    @property
    def scale(self) -> float:
        """`alpha`, else 16, as the recipes of litgpt and torchtune have it. It scales numbers and costs no byte."""
        return 16 if self.alpha is None else self.alpha


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The batch of a package's training step: CPU tensors as its loss function takes them, and what was assumed."""

    tensors: Mapping[str, torch.Tensor]
    notes: tuple[str, ...] = ()


class Package:
    """One package. Subclasses say how; doors that a package has no code for refuse.

    `prefix` is how a reference names it, `modules` what is imported to use it, `default_dtype` the weights dtype of its
    scripts, `losses` the names that the option `loss` may have (the first is the default). `autocast_region` is where
    its scripts end autocast (training_loop.py). `peft_adapters`: its scripts train LoRA by PEFT. `bitsandbytes_0_42`:
    it asks for that version.
    """

    prefix: str
    modules: tuple[str, ...] = ()
    task = "causal-lm"
    default_dtype = "float32"
    losses: tuple[str, ...] = ("eager",)
    autocast_region = "loss"
    peft_adapters = False
    bitsandbytes_0_42 = False

    def load(self) -> None:
        for module in self.modules:
            importlib.import_module(module)

    # -- the model -----------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The names that `build` takes."""
        raise NotImplementedError

    def find(self, name: str) -> str:
        """The name as the package spells it; case, dots, dashes and underscores count alike. Raises UnknownName."""
        names = self.names()
        if name in names:
            return name
        same = [known for known in names if _plain(known) == _plain(name)]
        if len(same) != 1:
            raise UnknownName(f"{self.prefix} model", name, names)
        return same[0]

    def build(self, name: str, dtype: torch.dtype) -> nn.Module:
        """The module as the package's training script has it; called under torch.device("meta")."""
        raise NotImplementedError

    def prepare_for(self, module: nn.Module, batch: BatchSpec) -> None:
        """What the script changes once it knows the batch (tables of positions), in place."""

    def batch(self, module: nn.Module, spec: BatchSpec) -> Inputs:
        raise NotImplementedError

    def loss(self, name: str) -> LossFunction:
        """The loss of the package's training script, by its name in `losses`."""
        raise NotImplementedError

    def check_loss(self, name: str) -> str:
        """The name of the loss as `loss` takes it. Raises InputError for one that the package has not."""
        if name not in self.losses:
            raise InputError(
                f"loss {name} is not one that {self.prefix} computes; it has {', '.join(self.losses)}. Leave --loss "
                "out for the first."
            )
        return name

    def notes(self, module: nn.Module) -> tuple[str, ...]:
        """Sentences about what of the script is modelled, for the module that is trained."""
        return ()

    # -- methods -------------------------------------------------------------------------------------------------------

    def with_adapters(self, module: nn.Module, adapters: Adapters) -> nn.Module:
        """The module with the package's own LoRA, the base frozen. Raises InputError."""
        raise InputError(f"{self.prefix} has no LoRA of its own that is known here: give --method full.")

    def not_quantised(self, module: nn.Module) -> tuple[str, ...]:
        """Patterns of linear layers that stay as they are when the package quantises a base. Raises InputError."""
        raise InputError(f"{self.prefix} has no quantised base that is known here: give --method full or lora.")

    def after_quantisation(self, module: nn.Module) -> nn.Module:
        """The quantised model after what the script then does to it."""
        return module

    def adapter_notes(self, module: nn.Module, adapters: Adapters) -> tuple[str, ...]:
        """Sentences about the adapters of a module."""
        return ()

    def not_optimised(self, module: nn.Module) -> Iterable[nn.Parameter]:
        """Trainable parameters that the script leaves out of the optimizer: their gradients are never freed."""
        return ()


def _plain(name: str) -> str:
    return name.lower().replace(".", "-").replace("_", "-")


def tokens(spec: BatchSpec, vocab_size: int, most: int | None, what: str) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Token ids [B, S] of ordinary values, and what was assumed. Raises ModelConfigError beyond `most` positions."""
    import torch

    notes: tuple[str, ...] = ()
    length = spec.seq_len
    if length is None:
        length = min(spec.default_seq_len, most or spec.default_seq_len)
        notes = (f"seq_len is {length}: none was given",)
    elif most is not None and length > most:
        raise ModelConfigError(
            f"Asked for seq_len {length}, but {what} takes {most} tokens. Try seq_len {most} or less."
        )
    ids = torch.arange(spec.batch_size * length) % max(vocab_size - 1, 1)
    return ids.view(spec.batch_size, length), notes
