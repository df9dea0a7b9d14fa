"""torchtune: `torchtune:NAME` with a builder of torchtune.models (llama3_2_3b); the single-device recipes' steps.

Where each byte comes from: torchtune's own classes and losses run in the trace. The builder runs under the default
dtype of the weights, as the recipes do; LoRA is placed by the `lora_` builder of the same name.
`torchtune-0.4:NAME` is the installed torchtune with the RMSNorm that it had up to 0.4: written out, it saves the input
in float32 and the normed one in the dtype of the weights; since 0.5 torch's rms_norm (float32 input, 16-bit weight: no
fused kernel) saves the input and the normed one in float32.
Not modelled: masks of packed batches (a batch is one causal sequence a row); `qlora_` builders (NF4 tensors of
torchao).
Sources: torchtune 0.6.1 modules/transformer.py, modules/loss/, modules/peft/; recipes
full_finetune_single_device.py, lora_finetune_single_device.py (_loss_step: labels are shifted once, logits deleted).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from typing import TYPE_CHECKING, Any

from metapeak.tracer.errors import InputError
from metapeak.tracer.packages.base import Adapters, Inputs, LossFunction, Package, tokens

if TYPE_CHECKING:
    import torch
    from torch import nn

    from metapeak.tracer.spec import BatchSpec

IGNORED = -100
ATTENTION = {
    "q_proj": "q_proj",
    "k_proj": "k_proj",
    "v_proj": "v_proj",
    "o_proj": "output_proj",
    "output_proj": "output_proj",
}
MLP = ("mlp", "gate_proj", "up_proj", "down_proj")
OUTPUT = ("output", "lm_head")
DEFAULT_TARGETS = ("q_proj", "v_proj", "output_proj", "mlp")  # of the shipped configs
CHUNKS = 8


class Torchtune(Package):
    prefix = "torchtune"
    modules = ("torchtune", "torchtune.models", "torchtune.modules.loss", "torchtune.modules.peft")
    default_dtype = "bfloat16"
    losses = ("eager", f"chunked-output:{CHUNKS}")  # the shipped configs name the second, as preset torchtune does

    def __init__(self):
        self._builders: dict[str, Any] = {}

    def names(self) -> list[str]:
        """Builders without required arguments that have a `lora_` builder beside them; of families that can be imported
        (those of images need torchvision)."""
        if not self._builders:
            import torchtune.models

            for found in pkgutil.iter_modules(torchtune.models.__path__):
                if found.ispkg:
                    try:
                        module = importlib.import_module(f"torchtune.models.{found.name}")
                    except ImportError:  # families of images need torchvision
                        continue
                    self._builders |= {name: module for name in dir(module) if _is_model(module, name)}
        return sorted(self._builders)

    def build(self, name: str, dtype: torch.dtype) -> nn.Module:
        module = self._call(name, dtype)
        module.torchtune_name = name
        return module

    def _call(self, name: str, dtype: torch.dtype, **options: Any) -> nn.Module:
        import torch

        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                module = getattr(self._builders[name.removeprefix("lora_")], name)(**options)
            for part in module.modules():
                if hasattr(part, "rope_init"):  # the recipes call it on the device; on meta it does nothing
                    with torch.device("cpu"):
                        part.rope_init()
                    part.to("meta")
            return self._as_released(module)
        finally:
            torch.set_default_dtype(before)

    def _as_released(self, module: nn.Module) -> nn.Module:
        return module

    def batch(self, module: nn.Module, spec: BatchSpec) -> Inputs:
        ids, notes = tokens(spec, module.tok_embeddings.num_embeddings, module.max_seq_len, "this torchtune model")
        return Inputs(tensors={"tokens": ids, "labels": ids.clone()}, notes=notes)

    def loss(self, name: str) -> LossFunction:
        return _Step(chunks=0 if name == "eager" else CHUNKS)

    def with_adapters(self, module: nn.Module, adapters: Adapters) -> nn.Module:
        from torchtune.modules.peft import get_adapter_params, set_trainable_params

        targets = _targets(adapters.targets)
        name, dtype = module.torchtune_name, module.tok_embeddings.weight.dtype
        options = {
            "lora_attn_modules": [found for target in targets if (found := ATTENTION.get(target))],
            "apply_lora_to_mlp": any(target in MLP for target in targets),
            "apply_lora_to_output": any(target in OUTPUT for target in targets),
            "lora_rank": adapters.rank,
            "lora_alpha": adapters.scale,
            "lora_dropout": adapters.dropout,
        }
        takes = inspect.signature(getattr(self._builders[name], f"lora_{name}")).parameters
        if options["apply_lora_to_output"] and "apply_lora_to_output" not in takes:
            raise InputError(f"lora targets: torchtune's lora_{name} puts no adapter on the output.")
        adapted = self._call(f"lora_{name}", dtype, **{key: value for key, value in options.items() if key in takes})
        adapted.torchtune_name = name
        set_trainable_params(adapted, get_adapter_params(adapted))
        return adapted

    def adapter_notes(self, module: nn.Module, adapters: Adapters) -> tuple[str, ...]:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        names = ", ".join(_targets(adapters.targets))
        dtypes = " and ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in trained}))
        count = sum(parameter.numel() for parameter in trained)
        return (f"LoRA by torchtune ({names}): {count:,} adapter parameters in {dtypes}, the base is frozen",)

    def not_quantised(self, module: nn.Module) -> tuple[str, ...]:
        raise InputError("torchtune quantises through torchao's NF4 tensors, which are not traced: give --method lora.")


class _Step:
    """`_loss_step` of the recipes; chunks 0 is a plain cross entropy on float32 logits."""

    def __init__(self, chunks: int):
        self.chunks = chunks

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        import torch
        from torchtune.modules.loss import CEWithChunkedOutputLoss

        tokens, labels = batch["tokens"], batch["labels"]
        model.num_output_chunks = self.chunks
        ignored = torch.full((labels.size(0), 1), IGNORED, device=labels.device, dtype=labels.dtype)
        logits = model(tokens)
        labels = torch.hstack((labels[..., 1:], ignored))
        if self.chunks:
            return CEWithChunkedOutputLoss(num_output_chunks=self.chunks)(logits, labels)
        labels, logits = labels.reshape(-1), logits.reshape(-1, logits.size(-1))
        return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED)


def _is_model(module: Any, name: str) -> bool:
    builder = getattr(module, name)
    if not callable(builder) or isinstance(builder, type) or not hasattr(module, f"lora_{name}"):
        return False
    return not any(item.default is item.empty for item in inspect.signature(builder).parameters.values())


def _targets(targets: tuple[str, ...] | None) -> tuple[str, ...]:
    if targets is None:
        return DEFAULT_TARGETS
    if targets == ("all-linear",):
        return ("q_proj", "k_proj", "v_proj", "output_proj", "mlp")
    unknown = [name for name in targets if name not in (*ATTENTION, *MLP, *OUTPUT)]
    if unknown:
        known = ", ".join((*ATTENTION, *MLP, *OUTPUT))
        raise InputError(f"lora targets {', '.join(unknown)}: torchtune adapts {known}, or all-linear.")
    return targets


class Torchtune04(Torchtune):
    prefix = "torchtune-0.4"

    def _as_released(self, module: nn.Module) -> nn.Module:
        from torchtune.modules import RMSNorm

        for part in module.modules():
            if isinstance(part, RMSNorm):
                part.forward = functools.partial(_rms_norm_of_0_4, part)
        return module


def _rms_norm_of_0_4(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    import torch

    wide = x.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    return (wide * inverse).type_as(x) * norm.scale


PACKAGE = Torchtune()
TORCHTUNE_0_4 = Torchtune04()
