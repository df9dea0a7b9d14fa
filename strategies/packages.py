"""Models of other packages (litgpt:phi-1_5): strategies as those packages apply them, in place of transformers' ways.

What it changes: LoRA is placed by the package's own code where it has some, a quantised base leaves out what the
package leaves out, the option `loss` names a loss of the package, and `checkpointing full` is a checkpoint (not
reentrant) around each block. Where each byte comes from: the package's code runs in the trace (tracer/packages/);
checkpointing is the rewrite of gradient_checkpointing.py.
Not modelled: options of PEFT that a package's LoRA has not (they are refused).
Sources: in each file of tracer/packages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metapeak.strategies.base import NoOpStrategy, Strategy
from metapeak.strategies.checkpoint_policies import EveryBlock
from metapeak.strategies.gradient_checkpointing import CheckpointEveryBlock, GradientCheckpointing
from metapeak.strategies.lora import LoRA
from metapeak.strategies.loss import Loss
from metapeak.strategies.parallel.fsdp1 import FSDP1
from metapeak.strategies.quantization.strategy import Quantization
from metapeak.tracer.errors import InputError
from metapeak.tracer.packages.base import Adapters
from metapeak.tracer.simulation import Option

if TYPE_CHECKING:
    import torch
    from torch import nn

    from metapeak.tracer.models import ResolvedModel
    from metapeak.tracer.packages.base import Package
    from metapeak.tracer.spec import StepSpec

# Options of LoRA that are PEFT's alone.
_ONLY_PEFT = ("exclude", "dora", "rslora", "modules_to_save", "bias", "target_parameters", "layers", "rank_pattern")


def for_package(resolved: ResolvedModel, strategies: Sequence[Strategy]) -> list[Strategy]:
    """The strategies as the package of a model applies them; unchanged for every other model. Raises InputError."""
    package = resolved.package
    return list(strategies) if package is None else [_translated(package, strategy) for strategy in strategies]


def _translated(package: Package, strategy: Strategy) -> Strategy:
    if isinstance(strategy, LoRA):
        return strategy if package.peft_adapters else PackageLoRA.of(package, strategy)
    if isinstance(strategy, Quantization):
        return PackageQuantization.of(package, strategy)
    if isinstance(strategy, Loss):
        return PackageLoss.of(package, strategy)
    if isinstance(strategy, FSDP1):  # the packages' scripts name the blocks alone (litgpt: auto_wrap_policy={Block})
        return dataclasses.replace(strategy, trained_units=False)
    if isinstance(strategy, (CheckpointEveryBlock, GradientCheckpointing)):
        policy = EveryBlock() if isinstance(strategy, CheckpointEveryBlock) else strategy.policy
        return PackageCheckpointing(policy=policy)
    return strategy


def optimised_only(package: Package | None, make_optimizer: Callable, module: nn.Module) -> Callable:
    """`make_optimizer` without the parameters that the package's script leaves out of the optimizer."""
    if package is None or make_optimizer is None or not list(package.not_optimised(module)):
        return make_optimizer

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        left_out = {id(parameter) for parameter in package.not_optimised(module)}
        return make_optimizer([parameter for parameter in parameters if id(parameter) not in left_out])

    return make


@dataclass(frozen=True, kw_only=True)
class PackageLoRA(NoOpStrategy):
    """LoRA by the package's own code; the base is frozen."""

    name = "lora"
    package: Package
    adapters: Adapters

    @classmethod
    def of(cls, package: Package, lora: LoRA) -> PackageLoRA:
        """Raises InputError for options that only PEFT has."""
        defaults = {field.name: field for field in dataclasses.fields(LoRA)}
        given = [name for name in _ONLY_PEFT if getattr(lora, name) != _default_of(defaults[name])]
        if given:
            raise InputError(f"{', '.join(given)}: {package.prefix}'s own LoRA has no such option (PEFT's has).")
        targets = (lora.targets,) if isinstance(lora.targets, str) else lora.targets
        adapters = Adapters(
            rank=lora.rank,
            alpha=lora.alpha,
            dropout=lora.dropout,
            targets=None if targets is None else tuple(targets),
        )
        return cls(package=package, adapters=adapters)

    def prepare(self, module: nn.Module) -> nn.Module:
        return self.package.with_adapters(module, self.adapters).train()

    def notes(self, module: nn.Module) -> tuple[str, ...]:
        return self.package.adapter_notes(module, self.adapters)

    def resolved(self, module: nn.Module) -> Mapping[str, Option]:
        values = {"method": "lora", "lora_rank": self.adapters.rank, "lora_dropout": float(self.adapters.dropout)}
        return {name: Option(value=value, origin="default") for name, value in values.items()}


def _default_of(field: dataclasses.Field) -> Any:
    return field.default_factory() if field.default is dataclasses.MISSING else field.default


@dataclass(frozen=True, kw_only=True)
class PackageQuantization(Quantization):
    """A base quantised as the package does: which layers, and what its script changes afterwards."""

    package: Package

    @classmethod
    def of(cls, package: Package, asked: Quantization) -> PackageQuantization:
        if asked.kbit_prepare:
            raise InputError(f"kbit_prepare is PEFT's; {package.prefix} does not call it.")
        given = {field.name: getattr(asked, field.name) for field in dataclasses.fields(asked)}
        return cls(package=package, **given)

    def prepare(self, module: nn.Module) -> nn.Module:
        return self.package.after_quantisation(super().prepare(module))

    def _left_out(self, module: nn.Module) -> list:
        return list(self.skip_modules if self.skip_modules is not None else self.package.not_quantised(module))

    def _linear4bit(self) -> type[nn.Module]:
        if self.package.bitsandbytes_0_42:
            from metapeak.strategies.quantization.linear4bit_0_42 import Linear4bitOf042

            return Linear4bitOf042
        return super()._linear4bit()

    def assumptions(self) -> tuple[str, ...]:
        return tuple(sentence for sentence in super().assumptions() if "prepare_model_for_kbit" not in sentence)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageLoss(NoOpStrategy):
    """One of the losses that the package itself computes."""

    package: Package
    loss: str

    @classmethod
    def of(cls, package: Package, asked: Loss) -> PackageLoss:
        if asked.keep_outputs:
            raise InputError(f"keep_outputs: {package.prefix}'s own loop decides what it holds. Leave it out.")
        return cls(package=package, loss=package.check_loss(asked.spec.name))

    @property
    def name(self) -> str:
        return f"loss {self.loss}"

    def loss_function(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        return self.package.loss(self.loss)

    def assumptions(self) -> tuple[str, ...]:
        return (f"loss path {self.loss}, by {self.package.prefix}'s own code",)


@dataclass(frozen=True, kw_only=True)
class PackageCheckpointing(GradientCheckpointing):
    """A policy on the blocks of a package's model: nothing of transformers' switch (input embeddings) happens."""

    def check(self, model: ResolvedModel, step: StepSpec) -> None:
        pass

    def prepare(self, module: nn.Module) -> nn.Module:
        return module

    def notes(self, module: nn.Module) -> tuple[str, ...]:
        return ()

    def assumptions(self) -> tuple[str, ...]:
        return (f"checkpointing {self.policy.name}: torch.utils.checkpoint, not reentrant, as the package applies it",)
