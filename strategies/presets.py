"""Presets: what a training framework does when its user says nothing, as options with a source each.

A preset only fills in what nobody gave; the report says which option came from it. Some values depend on others (the
adapters' dtype on the quantisation, a loss on the method): `when` names those, and rows are read in order, so that a
later row sees what an earlier one filled in.

Sources are named as package version: file:symbol. They were read in those versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from metapeak.tracer.errors import InputError, UnknownName
from metapeak.tracer.simulation import Option

_ALWAYS: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
_QUANTISED = ("nf4", "fp4", "int8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fill:
    """One option's value in a framework, where it comes from, and which values other options must have for it."""

    option: str
    value: Any
    source: str
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: _ALWAYS)

    def applies(self, options: Mapping[str, Option]) -> bool:
        return all(name in options and options[name].value in values for name, values in self.when.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Options that the framework cannot run together, and why."""

    when: Mapping[str, tuple[Any, ...]]
    reason: str

    def applies(self, options: Mapping[str, Option]) -> bool:
        return all(name in options and options[name].value in values for name, values in self.when.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A framework at a version. `notes` say what it does with a model of transformers that no option says."""

    name: str
    fills: tuple[Fill, ...]
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()


def _fill(option: str, value: Any, source: str, **when: tuple[Any, ...]) -> Fill:
    return Fill(option=option, value=value, source=source, when=when)


_TRAINER = "transformers 5.24 training_args.py:TrainingArguments"
_UNITS = "accelerate 1.15 utils/fsdp_utils.py:fsdp2_prepare_model"
_PEFT = "peft 0.21 tuners/lora/config.py:LoraConfig"

_TRAINER_ZERO = "transformers 5.24 integrations/deepspeed.py:trainer_config_finalize (auto)"
_ZERO_SIZES = (
    _fill("reduce_bucket_size", "auto", _TRAINER_ZERO, engine=("deepspeed",)),
    _fill("stage3_prefetch_bucket_size", "auto", _TRAINER_ZERO, engine=("deepspeed",), zero_stage=(3,)),
    _fill("stage3_param_persistence_threshold", "auto", _TRAINER_ZERO, engine=("deepspeed",), zero_stage=(3,)),
)

HF_TRAINER = Preset(
    name="hf-trainer",
    fills=(
        _fill("batch_size", 8, f"{_TRAINER}.per_device_train_batch_size"),
        _fill("optimizer", "adamw", f"{_TRAINER}.optim (adamw_torch_fused)"),
        _fill("implementation", "fused", f"{_TRAINER}.optim (adamw_torch_fused)", optimizer=("adamw", "adam")),
        _fill("max_grad_norm", 1.0, f"{_TRAINER}.max_grad_norm"),
        _fill("autocast_region", "forward", "accelerate 1.15 accelerator.py:prepare_model", autocast=("bf16", "fp16")),
        _fill("lora_rank", 8, _PEFT, method=("lora", "qlora")),
        _fill("wrap", ("accelerate",), _UNITS, engine=("fsdp2",)),
        *_ZERO_SIZES,
    ),
)

_SFT = "trl 1.16 trainer/sft_config.py:SFTConfig"
_SCRIPT = "trl 1.16 trainer/model_config.py:ModelConfig"

TRL = Preset(
    name="trl",
    fills=(
        _fill("batch_size", 8, f"{_TRAINER}.per_device_train_batch_size"),
        _fill("seq_len", 1024, f"{_SFT}.max_length"),
        _fill("weights_dtype", "fp32", f"{_SCRIPT}.dtype"),
        _fill("autocast", "bf16", f"{_SFT}.bf16"),
        _fill("autocast_region", "forward", "accelerate 1.15 accelerator.py:prepare_model", autocast=("bf16", "fp16")),
        _fill("optimizer", "adamw", f"{_TRAINER}.optim (adamw_torch_fused)"),
        _fill("implementation", "fused", f"{_TRAINER}.optim (adamw_torch_fused)", optimizer=("adamw", "adam")),
        _fill("max_grad_norm", 1.0, f"{_TRAINER}.max_grad_norm"),
        _fill("wrap", ("accelerate",), _UNITS, engine=("fsdp2",)),
        *_ZERO_SIZES,
        _fill("checkpointing", "full", f"{_SFT}.gradient_checkpointing"),
        _fill("loss", "fused-head", "trl 1.16 trainer/utils.py:add_fused_lm_head"),
        _fill("lora_rank", 16, f"{_SCRIPT}.lora_r", method=("lora", "qlora")),
        _fill("lora_alpha", 32.0, f"{_SCRIPT}.lora_alpha", method=("lora", "qlora")),
        _fill("lora_dropout", 0.05, f"{_SCRIPT}.lora_dropout", method=("lora", "qlora")),
        _fill("quantization", "nf4", f"{_SCRIPT}.bnb_4bit_quant_type", method=("qlora",)),
        _fill("double_quant", False, f"{_SCRIPT}.use_bnb_nested_quant", quantization=("nf4", "fp4")),
        _fill("kbit_prepare", False, "trl 1.16 trainer/sft_trainer.py:SFTTrainer.__init__", quantization=_QUANTISED),
        _fill("adapter_dtype", "bf16", "trl 1.16 trainer/sft_trainer.py:SFTTrainer.__init__", quantization=_QUANTISED),
    ),
)

_TUNE_FULL = "torchtune 0.6.1 recipes/configs/llama3_1/8B_full.yaml"
_TUNE_SYNC = "torchtune 0.6.1 recipes/full_finetune_distributed.py (no no_sync)"
_TUNE_LORA = "torchtune 0.6.1 recipes/configs/llama3_1/8B_lora_single_device.yaml"
# lora_attn_modules q_proj, v_proj, output_proj and apply_lora_to_mlp.
_TUNE_TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

TORCHTUNE = Preset(
    name="torchtune",
    fills=(
        _fill("batch_size", 2, _TUNE_FULL),
        _fill("weights_dtype", "bf16", f"{_TUNE_FULL} (dtype)"),
        _fill("optimizer", "adamw", _TUNE_FULL),
        _fill("implementation", "fused", _TUNE_FULL, optimizer=("adamw", "adam")),
        _fill(
            "sync_each_batch",
            True,
            "torchtune 0.6.1 recipes/full_finetune_distributed.py (no no_sync)",
            engine=("ddp", "fsdp1", "fsdp2"),
        ),
        _fill("checkpointing", "full", f"{_TUNE_FULL} (enable_activation_checkpointing)"),
        _fill("loss", "chunked-output:8", f"{_TUNE_FULL} (CEWithChunkedOutputLoss)"),
        _fill("lora_rank", 8, _TUNE_LORA, method=("lora", "qlora")),
        _fill("lora_alpha", 16.0, _TUNE_LORA, method=("lora", "qlora")),
        _fill("lora_dropout", 0.0, _TUNE_LORA, method=("lora", "qlora")),
        _fill("lora_targets", _TUNE_TARGETS, f"{_TUNE_LORA}, in transformers' names", method=("lora", "qlora")),
        _fill("adapter_dtype", "bf16", "torchtune 0.6.1 modules/peft/lora.py:LoRALinear", method=("lora", "qlora")),
        _fill("quantization", "nf4", "torchtune 0.6.1 modules/low_precision/nf4_linear.py", method=("qlora",)),
        _fill("double_quant", True, "torchao quantization nf4tensor.py:to_nf4", quantization=("nf4",)),
    ),
    refusals=(
        Refusal(
            when={"quantization": ("fp4", "int8", "gptq4", "gptq8", "awq4")},
            reason="torchtune trains adapters on NF4 bases only (modules/low_precision/nf4_linear.py)",
        ),
        Refusal(
            when={"autocast": ("bf16", "fp16")}, reason="torchtune's recipes use no autocast: dtype is bf16 or fp32"
        ),
    ),
    notes=("torchtune trains its own model classes; those of transformers save other tensors between layers",),
)

_LITGPT_FULL = "litgpt 0.5.13 finetune/full.py"
_LITGPT_PRECISION = "litgpt 0.5.13 utils.py:get_default_supported_precision"
_FABRIC = "lightning 2.6 fabric/wrappers.py:_FabricModule"
_LITGPT_LORA = "litgpt 0.5.13 finetune/lora.py"

LITGPT = Preset(
    name="litgpt",
    fills=(
        _fill("quantization", "nf4", "litgpt's tutorials/quantize.md (bnb.nf4)", method=("qlora",)),
        _fill("double_quant", False, "litgpt's tutorials/quantize.md (bnb.nf4, not bnb.nf4-dq)", method=("qlora",)),
        _fill("batch_size", 1, "litgpt 0.5.13 args.py:TrainArgs.micro_batch_size"),
        _fill("weights_dtype", "fp32", _LITGPT_PRECISION, quantization=("none", None)),
        _fill("autocast", "bf16", _LITGPT_PRECISION, quantization=("none", None)),
        _fill("weights_dtype", "bf16", "litgpt refuses mixed precision with quantisation", quantization=_QUANTISED),
        _fill("autocast_region", "forward", _FABRIC, autocast=("bf16", "fp16")),
        _fill("optimizer", "adamw", _LITGPT_FULL),
        _fill("implementation", "foreach", f"{_LITGPT_FULL} (no flag is passed)", optimizer=("adamw",)),
        _fill("loss", "chunked-ce:128", "litgpt 0.5.13 utils.py:chunked_cross_entropy", method=("full",)),
        _fill("loss", "chunked-tokens:128", f"{_LITGPT_LORA} (lm_head_chunk_size)", method=("lora", "qlora")),
        _fill("lora_rank", 8, _LITGPT_LORA, method=("lora", "qlora")),
        _fill("lora_alpha", 16.0, _LITGPT_LORA, method=("lora", "qlora")),
        _fill("lora_dropout", 0.05, _LITGPT_LORA, method=("lora", "qlora")),
        _fill("adapter_dtype", "weights", "litgpt 0.5.13 lora.py:LoRALinear", method=("lora", "qlora")),
    ),
    refusals=(
        Refusal(
            when={"quantization": ("nf4", "fp4", "int8"), "autocast": ("bf16", "fp16")},
            reason="litgpt refuses quantised bases under mixed precision (finetune/lora.py: 'Quantization and mixed "
            "precision is not supported.'); its precision for them is bf16-true, --precision bf16",
        ),
        Refusal(
            when={"quantization": ("gptq4", "gptq8", "awq4")},
            reason="litgpt quantises with bitsandbytes only (nf4, fp4, int8)",
        ),
    ),
    notes=("litgpt trains its own model class; that of transformers saves other tensors between layers",),
)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {preset.name: preset for preset in (HF_TRAINER, TRL, TORCHTUNE, LITGPT)}
)


def preset_notes(options: Mapping[str, Option]) -> tuple[str, ...]:
    """What the preset among `options`, if any, does beside its options."""
    preset = options["preset"].value if "preset" in options else None
    return PRESETS[preset].notes if preset is not None else ()


def filled_in(options: Mapping[str, Option], name: str) -> dict[str, Option]:
    """`options` with what the preset says where nobody gave a value (origin "default").

    Raises UnknownName for a preset that does not exist, InputError for options that the framework cannot run together.

    >>> given = {"batch_size": Option(value=1, origin="default"), "seq_len": Option(value=512, origin="command line")}
    >>> {name: option.value for name, option in filled_in(given, "trl").items() if name in given}
    {'batch_size': 8, 'seq_len': 512}
    """
    if name not in PRESETS:
        raise UnknownName("preset", name, PRESETS)
    filled = dict(options)
    for fill in PRESETS[name].fills:
        free = fill.option in filled and filled[fill.option].origin == "default"
        if free and fill.applies(filled):
            filled[fill.option] = Option(value=fill.value, origin=f"preset {name}: {fill.source}")
    for refusal in PRESETS[name].refusals:
        if refusal.applies(filled):
            asked = ", ".join(f"{option} {filled[option].value}" for option in refusal.when)
            raise InputError(f"Preset {name} with {asked}: {refusal.reason}.")
    return filled
