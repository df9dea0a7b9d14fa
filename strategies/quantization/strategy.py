"""A base with quantised weights, as bitsandbytes, GPTQ or AWQ load it: frozen, packed, dequantised layer by layer.

What it changes: linear layers become layers with the packed storages of the real library (linear4bit.py, linear8bit.py,
gptq.py, awq.py), which dequantise in forward and backward as the real ones do; optionally PEFT's k-bit preparation.
Where each byte comes from: see the file of each scheme.
Not modelled: the transient of loading and quantising; merging of adapters; quantised optimizers (another strategy).
Sources: transformers 5.24 integrations/bitsandbytes.py, quantizers/; PEFT 0.21 utils/other.py
prepare_model_for_kbit_training; the libraries named in each file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from metapeak.strategies.base import NoOpStrategy
from metapeak.strategies.quantization.schemes import (
    DEFAULT_GROUP_SIZE,
    DTYPES,
    SCHEMES,
    STORAGE_DTYPES,
    check_scheme,
)
from metapeak.tracer.errors import InputError
from metapeak.tracer.simulation import Option

if TYPE_CHECKING:
    from torch import nn

    from metapeak.strategies.base import Strategy
    from metapeak.tracer.models import ResolvedModel
    from metapeak.tracer.spec import StepSpec


_ORIGINS = {
    "method qlora": "what method qlora takes unless told otherwise",
    "checkpoint": "from the checkpoint's quantization_config",
}


@dataclass(frozen=True, kw_only=True)
class Quantization(NoOpStrategy):
    """Weights of the linear layers quantised by `scheme` (a name in SCHEMES).

    `double_quant` quantises the statistics of nf4 and fp4 again. `compute_dtype` is what 4-bit layers compute in (None:
    the dtype of the weights that were quantised). `quant_storage` is the dtype that 4-bit weights are packed into.
    `group_size` is that of GPTQ and AWQ (-1: one group a layer), `gptq_kernel` who dequantises (see gptq.py).
    `skip_modules` are patterns of modules that stay as they are; None leaves out what transformers leaves out (the
    output embeddings, tied weights). `kbit_prepare` runs PEFT's prepare_model_for_kbit_training, `kbit_cast_back` casts
    embeddings and head to bfloat16 after it, as TRL before 1.0 does.
    `origin` says where the scheme comes from, for the report, `named` the options that were given by name.

        >>> Quantization(scheme="nf4", double_quant=True).bits
        4
    """

    scheme: str = "nf4"
    double_quant: bool = False
    compute_dtype: str | None = None
    quant_storage: str = "uint8"
    group_size: int = DEFAULT_GROUP_SIZE
    gptq_kernel: str = "torch"
    skip_modules: tuple[str, ...] | None = None
    kbit_prepare: bool = False
    kbit_cast_back: bool = False
    origin: str = "option"
    named: tuple[str, ...] = field(default=(), compare=False)

    name = "quantization"

    def __post_init__(self) -> None:
        check_scheme(
            self.scheme,
            double_quant=self.double_quant,
            compute_dtype=self.compute_dtype,
            quant_storage=self.quant_storage,
            group_size=self.group_size,
            gptq_kernel=self.gptq_kernel,
        )
        if self.kbit_cast_back and not self.kbit_prepare:
            raise InputError("kbit_cast_back undoes a part of kbit_prepare: give kbit_prepare, too.")

    @property
    def bits(self) -> int:
        return SCHEMES[self.scheme].bits

    @property
    def method(self) -> str:
        return SCHEMES[self.scheme].method

    def check(self, model: ResolvedModel, step: StepSpec) -> None:
        there = (model.config_dict or {}).get("quantization_config")
        if there and self.origin == "option":
            method = there.get("quant_method", "unnamed")
            raise InputError(
                f"{model.id} is quantised already ({method}); {self.scheme} was asked for on top. Leave --quantization "
                "out to use the checkpoint as it is, or name the repository that it was made from."
            )

    def prepare(self, module: nn.Module) -> nn.Module:
        """Quantise the linear layers of a module on meta, in place. Raises InputError where there are none."""
        from metapeak.strategies.quantization.kbit import cast_back, prepare_for_kbit_training
        from metapeak.strategies.quantization.replace import replace_layers

        left_out = self._left_out(module)
        replaced = replace_layers(module, left_out, self._layer_maker())
        if not replaced:
            raise InputError(
                f"{type(module).__name__} has no linear layer that {self.scheme} could quantise"
                + (f" outside {', '.join(sorted(left_out))}" if left_out else "")
                + ". Leave --quantization out."
            )
        module.is_quantized = True
        module.quantization_method = self.method
        module.is_loaded_in_4bit = self.method == "bitsandbytes" and self.bits == 4
        module.is_loaded_in_8bit = self.method == "bitsandbytes" and self.bits == 8
        if self.kbit_prepare:
            prepare_for_kbit_training(module)
        if self.kbit_cast_back:
            cast_back(module)
        return module

    def _left_out(self, module: nn.Module) -> list:
        from metapeak.strategies.quantization.replace import modules_left_out

        return modules_left_out(module, self.skip_modules, add_default=self.method == "awq")

    def _layer_maker(self) -> Callable[[nn.Module, int, int], nn.Module]:
        import torch

        compute_dtype = self.compute_dtype and getattr(torch, DTYPES[self.compute_dtype])
        if self.method == "gptq":
            from metapeak.strategies.quantization.gptq import GptqLinear

            return lambda source, inputs, outputs: GptqLinear(
                source,
                inputs,
                outputs,
                bits=self.bits,
                group_size=self.group_size,
                kernel=self.gptq_kernel,
                dtype=compute_dtype or torch.float16,
                seen_as=None if self.quant_storage == "uint8" else getattr(torch, STORAGE_DTYPES[self.quant_storage]),
            )
        if self.method == "awq":
            from metapeak.strategies.quantization.awq import AwqLinear

            return lambda source, inputs, outputs: AwqLinear(
                source, inputs, outputs, bits=self.bits, group_size=self.group_size
            )
        if self.bits == 8:
            from metapeak.strategies.quantization.linear8bit import Linear8bitLt

            return Linear8bitLt
        layer_class = self._linear4bit()
        return lambda source, inputs, outputs: layer_class(
            source,
            inputs,
            outputs,
            quant_type=self.scheme,
            compress_statistics=self.double_quant,
            compute_dtype=compute_dtype or source.weight.dtype,
            quant_storage=getattr(torch, STORAGE_DTYPES[self.quant_storage]),
        )

    def _linear4bit(self) -> type[nn.Module]:
        from metapeak.strategies.quantization.linear4bit import Linear4bit

        return Linear4bit

    def resolved(self, module: nn.Module) -> Mapping[str, Option]:
        from metapeak.strategies.quantization.replace import quantized_layers

        values = {"quantization": self.scheme, "kbit_prepare": self.kbit_prepare}
        if self.method == "bitsandbytes" and self.bits == 4:
            values |= {"double_quant": self.double_quant, "quant_storage": self.quant_storage}
            computes = next(iter(quantized_layers(module).values())).compute_dtype
            values["compute_dtype"] = next(name for name, full in DTYPES.items() if full == str(computes)[6:])
        elif self.method in ("gptq", "awq"):
            values["group_size"] = self.group_size
        origin = {"checkpoint": "model config", "method qlora": "method qlora"}.get(self.origin, "default")
        return {name: Option(value=value, origin=origin) for name, value in values.items() if value is not None}

    def notes(self, module: nn.Module) -> tuple[str, ...]:
        from metapeak.strategies.quantization.replace import quantized_layers

        layers = quantized_layers(module)
        packed, nbytes = (
            sum(getattr(part, name) for part in layers.values()) for name in ("weight_numel", "weight_nbytes")
        )
        sentences = [
            f"{self._described()} on {len(layers)} linear layers: {packed:,} weights in {nbytes:,} bytes "
            f"({nbytes / packed:.4f} a weight); " + _ORIGINS.get(self.origin, "as asked")
        ]
        experts = {id(item): item.numel() for item in module.parameters() if item.dim() >= 3 and not item.requires_grad}
        if experts:
            sentences.append(
                f"{sum(experts.values()):,} weights are in parameters of three dimensions (fused experts) and stay as "
                "they are: bitsandbytes in transformers 5 quantises linear layers alone; packed experts of GPTQ and "
                "AWQ checkpoints are not counted"
            )
        return tuple(sentences)

    def _described(self) -> str:
        return f"{self.scheme} with double quantisation" if self.double_quant else self.scheme

    def assumptions(self) -> tuple[str, ...]:
        sentences = []
        if self.method == "bitsandbytes" and self.bits == 4:
            if self.compute_dtype is None:
                sentences.append(
                    "4-bit layers compute in the dtype of the weights (bnb_4bit_compute_dtype as TRL and axolotl set "
                    "it; BitsAndBytesConfig alone would take float32)"
                )
            sentences.append(
                "4-bit layers dequantise in forward also where bitsandbytes >= 0.49 may run its fused kernel (at most "
                "1,536 tokens)"
            )
        if self.scheme == "int8":
            sentences.append("int8 layers: no column of the inputs is taken to hold outliers above the threshold")
        if self.method == "gptq" and self.gptq_kernel == "torch":
            sentences.append(
                "GPTQ layers train as in GPTQModel: the dequantised weight is saved for backward (--gptq-kernel "
                "triton-v2 for AutoGPTQ, which dequantises again)"
            )
        if self.method == "bitsandbytes":
            sentences.append(
                "PEFT's prepare_model_for_kbit_training ran: norms are float32, embeddings and head "
                + ("bfloat16 again (TRL before 1.0)" if self.kbit_cast_back else "too")
                if self.kbit_prepare
                else "PEFT's prepare_model_for_kbit_training is taken not to run, as in TRL >= 1.0: norms, embeddings "
                "and head keep their dtype (--kbit-prepare for their float32 copies)"
            )
        return tuple(sentences)


# Strategies that train something beside a frozen base.
_TRAIN_BESIDE = ("lora", "frozen-base")


@dataclass(frozen=True, kw_only=True)
class NotQuantized(NoOpStrategy):
    """`quantization none`: a checkpoint that comes packed contradicts it."""

    name = "not-quantized"

    def check(self, model: ResolvedModel, step: StepSpec) -> None:
        from metapeak.strategies.quantization.from_config import checkpoint_quantization

        own = checkpoint_quantization(model.config_dict)
        if own is not None:
            raise InputError(
                f"{model.id} is quantised already ({own.scheme}), and quantization none was asked for. Name the "
                "repository that it was made from."
            )


def check_base_is_frozen(model: ResolvedModel, strategies: Sequence[Strategy]) -> None:
    """Raise InputError when a quantised base is to be trained itself, or is quantised after the adapters were made."""
    names = [strategy.name for strategy in strategies]
    quantised = next((strategy for strategy in strategies if isinstance(strategy, Quantization)), None)
    if quantised is None:
        return
    if not any(name in _TRAIN_BESIDE for name in names):
        raise InputError(
            f"{model.id}: {quantised.scheme} weights cannot be trained: use --method qlora"
            + (", or name the repository that it was made from." if quantised.origin == "checkpoint" else ".")
        )
    if any(name in _TRAIN_BESIDE for name in names[: names.index(quantised.name)]):
        raise InputError("The base is quantised when it is loaded, before it gets adapters: put Quantization first.")
