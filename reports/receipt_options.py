"""The options of a receipt: what has to be simulated so that the number it measured is the one that is predicted.

Whatever of it cannot be run here is refused with the reason, never left out.
"""

from __future__ import annotations

import atexit
import functools
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from metapeak.reports.receipts import Receipt, Refused
from metapeak.tracer.packages.diffusers import name_of
from metapeak.tracer.packages.registry import PACKAGES

SYNTHETIC, SYNTHETIC_PROGRAMS = "synthetic", ("lm-head-loss",)
# Layers of Qwen's and Baichuan's own code -> those of the native class beside it.
_SPLIT = {"c_attn": ("q_proj", "k_proj", "v_proj"), "W_pack": ("q_proj", "k_proj", "v_proj")}
_CHECKPOINTING = {"selective:op": "selective:torchtitan"}
# Names of the receipts that the catalogue spells otherwise.
_GPUS = {
    "a10g-24gb": "a10g",
    "rtx4070tis-16gb": "rtx-4070ti-super",
    "v100-16gb": "v100-16gb-sxm2",
    "h100-96gb": "h100-sxm",
    "rtx4090-24gb": "rtx-4090",
    "rtx3090-24gb": "rtx-3090",
    "a800-80gb": "a800-80gb-sxm",
    "a40-48gb": "a40",
    "a6000-48gb": "rtx-a6000",
    "t4-16gb": "t4",
}
# Every litgpt row was measured before October 2024 (see tracer/packages/litgpt.py, Note [StableEmbedding]); torchtune's
# table is of the time of 0.4.
_MEASURED_VERSIONS = {"litgpt": "litgpt-0.4", "torchtune": "torchtune-0.4"}
# litgpt's scripts have this dropout unless they are told otherwise (finetune/lora.py at the rows' commits).
_LITGPT_DROPOUT = 0.05
# Loss path of transformers up to a version (exclusive); see strategies/losses/transformers_versions.py.
_LOSS_OF_VERSION = (((4, 46), "transformers-4.45"), ((4, 49), "transformers-4.48"))
# Versions that a source pins in a file of its own, where the receipt leaves them out: text in `source` -> versions.
# fms-acceleration: scripts/benchmarks/refs/requirements_granite.txt. ms-swift's benchmark and BERT-large: before 5.
_VERSIONS_OF_SOURCE = (("refs/a100_80gb_granite.csv", {"transformers": "4.45.2", "peft": "0.12.0"}),)
# Presets whose trainers call transformers' gradient_checkpointing_enable, and the version from which that no longer
# takes the reentrant kind by default (modeling_utils.py: use_reentrant True up to 4.57, False from 5.0).
_TRAINERS, _NOT_REENTRANT_FROM = ("trl", "hf-trainer"), (5, 0)
# Version of transformers from which a layer checkpoints its own forward, inside the unit that FSDP makes of it
# (modeling_layers.py, GradientCheckpointingLayer); before, the model checkpointed the call of the layer, the unit's.
_CHECKPOINTS_INSIDE_UNITS_FROM = (4, 52)


def options_of_receipt(receipt: Receipt) -> dict[str, Any]:
    """The options of the step that was measured, by name. Raises Refused with what is missing here."""
    _check_definition(receipt)
    package = package_of(receipt)
    options, versions = receipt.options, _versions(receipt)
    parallel = dict(_parallel(options, versions))
    found = {name: options[name] for name in ("batch_size", "seq_len", "image_size") if options.get(name)}
    if options.get("attention"):
        found["attention"] = _attention(options["attention"], receipt.model, versions)
    found |= dict(_training(options, versions))
    found |= dict(_method(options, receipt.source))
    if not receipt.runs_as_twin:  # with the class's own loss
        found |= dict(_package_loss(package, options) if package else _loss(options, versions))
    if package:
        _leave_to_package(package, found)
    found |= parallel
    if receipt.definition == "transformers-remote-code":
        _as_look_alike(receipt, found)
    if receipt.gpu:
        found["gpu"] = _GPUS.get(receipt.gpu, receipt.gpu)
    return found


def _versions(receipt: Receipt) -> Mapping[str, str]:
    """Versions of the frameworks that ran: the receipt's, and those that its source pins elsewhere."""
    known = {}
    for text, versions in _VERSIONS_OF_SOURCE:
        if text in receipt.source:
            known |= versions
    return known | dict(receipt.options.get("framework_versions") or {})


def package_of(receipt: Receipt) -> str | None:
    """The prefix of the package whose classes were measured, None for models of transformers."""
    if receipt.definition == SYNTHETIC:
        return SYNTHETIC
    if receipt.runs_as_twin:
        return None
    name = receipt.definition.removeprefix("package:")
    return name if name in PACKAGES and receipt.definition != name else None


@functools.cache
def _folder_of(config: str) -> str:
    """A folder with this config, kept until the program ends."""
    folder = tempfile.TemporaryDirectory(prefix="metapeak-lookalike-")
    atexit.register(folder.cleanup)
    (Path(folder.name) / "config.json").write_text(config, encoding="utf-8")
    return folder.name


def _as_look_alike(receipt: Receipt, found: dict[str, Any]) -> None:
    """The receipt's options for the native class: its task, and adapters on what the fused layer is there."""
    found["task"] = receipt.fields["task"]
    if isinstance(found.get("lora_targets"), list):
        found["lora_targets"] = [name for target in found["lora_targets"] for name in _SPLIT.get(target, (target,))]


def reference_of(receipt: Receipt) -> str:
    """The model reference that runs the code which was measured."""
    package = package_of(receipt)
    if "lookalike" in receipt.fields:
        return _folder_of(json.dumps(receipt.fields["lookalike"]["config"], sort_keys=True))
    if package is None:
        return receipt.fields["twin"] if receipt.runs_as_twin else receipt.model
    name = receipt.fields["definition_key"]
    if package == "diffusers":
        name = name_of(name, receipt.fields["definition_facts"]["config"])
    if package == "torchtune":  # adapters come with the method
        name = name.removeprefix("qlora_").removeprefix("lora_")
    if package == "timm":
        name += f"@{receipt.fields['definition_facts']['num_classes']}"
    return f"{_MEASURED_VERSIONS.get(package, package)}:{name}"


def _package_loss(package: str, options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The package's own loss; litgpt has one for each method, which it takes by itself."""
    loss = options.get("loss") or "eager"
    if package == "torchtune":  # its chunked loss of that time
        yield "loss", loss.replace("chunked:", "chunked-output:")
    if package == SYNTHETIC:
        yield "loss", loss


def _leave_to_package(package: str, found: dict[str, Any]) -> None:
    """What the package's own LoRA decides: adapters have the dtype of the weights, dropout is that of its script."""
    if package == "litgpt" and found["method"] in ("lora", "qlora"):
        found.setdefault("lora_dropout", _LITGPT_DROPOUT)
    if package == "diffusers" and found["method"] == "lora":
        found.setdefault("adapter_dtype", "weights")  # add_adapter casts nothing
        return
    dtype = found.pop("adapter_dtype", None)
    if dtype not in (None, found.get("weights_dtype")):
        raise Refused(
            f"adapters in {dtype} beside weights in {found.get('weights_dtype')}: {package}'s own have the same"
        )


def _check_definition(receipt: Receipt) -> None:
    definition = receipt.definition
    if definition == "transformers":
        return
    if definition.startswith("package:"):
        name = definition.removeprefix("package:")
        if name not in PACKAGES:
            raise Refused(f"the model's code is {name}'s own, which is not built here")
        return
    if definition == "transformers-remote-code":
        if "lookalike" not in receipt.fields:
            raise Refused("the model's code lies in its Hub repository, which cannot be had here")
        return
    if definition == SYNTHETIC and receipt.fields["definition_key"] in SYNTHETIC_PROGRAMS:
        return
    raise Refused(f"the measured program is of another kind ({definition})")


def _training(options: Mapping[str, Any], versions: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    if options.get("weights_dtype"):
        yield "weights_dtype", options["weights_dtype"]
    if options.get("autocast"):
        yield "autocast", options["autocast"]
    if options.get("grad_accum", 1) > 1:
        yield "grad_accum", options["grad_accum"]
    if options.get("grad_clip"):
        yield "max_grad_norm", float(options["grad_clip"])
    checkpointing = options.get("checkpointing")
    if checkpointing:
        yield "checkpointing", _checkpointing(checkpointing, options.get("preset"), versions)
    optimizer = options.get("optimizer") or {}
    if optimizer.get("implementation") == "cpu-offload":
        raise Refused("the optimizer runs on the host, which is not modelled")
    if optimizer.get("name"):
        yield "optimizer", optimizer["name"]
        if optimizer.get("implementation"):
            yield "implementation", optimizer["implementation"]


def _parallel(options: Mapping[str, Any], versions: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Engine and degrees. Raises Refused for an engine that is not predicted, or a degree of a kind that is not."""
    parallel = options.get("parallel") or {}
    engine = parallel.get("engine", "none")
    if engine == "megatron":
        raise Refused(f"runs on several GPUs ({engine}), to whose options receipts are not mapped yet")
    pp, cp, ep = (parallel.get(name) or 1 for name in ("pp", "cp", "ep"))
    if ep > 1 or (pp > 1 and cp > 1):
        what = f"ep {ep}" if ep > 1 else f"pp {pp} and cp {cp} together"
        raise Refused(f"runs with {what}, to which receipts are not mapped yet")
    if engine == "none":
        return
    yield "engine", engine
    if engine == "deepspeed":
        yield from _deepspeed(parallel)
        return
    precision = options.get("mixed_precision") or {}
    yield from ((f"{name}_dtype", precision[name]) for name in ("param", "reduce") if precision.get(name))
    degrees = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
    yield from ((name, parallel[name]) for name in degrees if (parallel.get(name) or 1) > 1)
    yield from _inside_and_between(parallel, options)
    if parallel.get("cpu_offload"):
        yield "cpu_offload", True
    version = _version(versions.get("transformers"))
    around = options.get("preset") in _TRAINERS and (version is None or version < _CHECKPOINTS_INSIDE_UNITS_FROM)
    if engine == "fsdp1" and around and options.get("checkpointing") not in (None, "none"):
        yield "checkpoint_around_units", True


def _deepspeed(parallel: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Its stage over all data-parallel ranks, and what lies on the host."""
    if any((parallel.get(name) or 1) > 1 for name in ("tp", "pp", "cp")):
        raise Refused(
            "runs with tensor, pipeline or context parallelism under DeepSpeed, to which receipts are not mapped yet"
        )
    yield "zero_stage", parallel["zero_stage"]
    yield "gpus", (parallel.get("dp_replicate") or 1) * (parallel.get("dp_shard") or 1)
    offloads = {None: (), "optimizer": ("optimizer",), "all": ("optimizer", "param")}
    if parallel.get("cpu_offload") not in offloads:
        what = parallel["cpu_offload"]
        raise Refused(f"runs on several GPUs (deepspeed, {what} on the host), to which receipts are not mapped yet")
    yield from ((f"offload_{what}", "cpu") for what in offloads[parallel.get("cpu_offload")])


def _inside_and_between(parallel: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What torchtitan does by default beside the degrees: the loss is cut with tp; the batch of a rank, which is that
    of its whole step, is cut into as many microbatches as there are ranks in the pipeline; a schedule with several
    stages a rank has two.

    Source: torchtitan at 9dec370, torchtitan/parallelisms/pipelining_utils.py (build_pipeline_schedule,
    generate_split_points), parallel_dims.py (loss_parallel_enabled).
    """
    if parallel.get("sequence_parallel"):
        yield "sequence_parallel", True
        yield "loss_parallel", True
    pp = parallel.get("pp") or 1
    if pp == 1:
        return
    schedule = parallel["schedule"]
    yield "schedule", schedule if ":" in schedule or schedule == "1f1b" else f"{schedule}:2"
    count = parallel.get("microbatches") or pp
    if options["batch_size"] % count:
        raise Refused(f"batch_size {options['batch_size']} / {count} microbatches is no whole number of samples")
    yield "microbatches", count
    yield "batch_size", options["batch_size"] // count


def _attention(name: str, model: str, versions: Mapping[str, str]) -> str:
    """Mistral's flash attention repeated keys and values before 4.48 (modeling_mistral.py, MistralFlashAttention2)."""
    version = _version(versions.get("transformers"))
    repeats = name == "flash2" and version is not None and version < (4, 48) and "mistral" in model.lower()
    return "flash2-repeat-kv" if repeats else name


def _checkpointing(policy: str, preset: str | None, versions: Mapping[str, str]) -> str:
    policy = _CHECKPOINTING.get(policy, policy)
    version = _version(versions.get("transformers"))
    reentrant = preset in _TRAINERS and (version is None or version < _NOT_REENTRANT_FROM)
    return f"reentrant:{policy}" if reentrant and policy == "full" else policy


def _method(options: Mapping[str, Any], source: str) -> Iterator[tuple[str, Any]]:
    yield "method", options.get("method", "full")
    if options.get("trainable"):
        yield "trainable", list(options["trainable"])
    lora = dict(options.get("lora") or {})
    names = {"targets": "lora_targets", "modules_to_save": "lora_modules_to_save", "dora": "lora_dora"}
    names |= {"rank": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout", "adapter_dtype": "adapter_dtype"}
    for name, value in lora.items():
        if value is None or value is False:
            continue
        if name == "targets" and "all-linear" in value:
            value = "all-linear"
        yield names[name], value
    quantization = dict(options.get("quantization") or {})
    names = {"type": "quantization", "double_quant": "double_quant", "compute_dtype": "compute_dtype"}
    names |= {"kbit_prepare": "kbit_prepare", "quant_storage": "quant_storage", "group_size": "group_size"}
    for name, value in quantization.items():
        if name not in names:
            raise Refused(f"quantization.{name} is not an option here")
        # GPTQ and AWQ layers compute in the dtype of their scales, the weights dtype.
        only_4bit = name in ("double_quant", "compute_dtype") and quantization["type"] not in ("nf4", "fp4")
        if value is not None and not only_4bit:
            yield names[name], value
    if quantization.get("type", "").startswith("gptq") and "fms-acceleration" in source:
        yield "gptq_kernel", "triton-v2"  # the plugin's AutoGPTQ layers (plugins/accelerated-peft)
    packed = quantization.get("type") in ("nf4", "fp4", "gptq4", "gptq8")
    if packed and not quantization.get("quant_storage") and _is_flat(options):
        # Flat parameters take floating point alone; fms-acceleration stores in the weights' (framework_plugin_bnb.py)
        # or sees the integers as that (framework_plugin_autogptq.py).
        yield "quant_storage", options["weights_dtype"]
    if _kbit_cast_back(options):
        yield "kbit_cast_back", True


def _is_flat(options: Mapping[str, Any]) -> bool:
    return (options.get("parallel") or {}).get("engine") == "fsdp1"


def _kbit_cast_back(options: Mapping[str, Any]) -> bool:
    """TRL before 1.0 casts embeddings and head back after PEFT's k-bit preparation (SFTTrainer.__init__)."""
    prepared = (options.get("quantization") or {}).get("kbit_prepare")
    return bool(prepared) and options.get("preset") == "trl" and (_major_of_trl(options) or 0) < 1


def _major_of_trl(options: Mapping[str, Any]) -> int | None:
    version = _version((options.get("framework_versions") or {}).get("trl"))
    return version[0] if version else None


def _loss(options: Mapping[str, Any], versions: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    loss = options.get("loss") or "eager"
    version = _version(versions.get("transformers"))
    if options.get("kernels"):
        yield "kernels", list(options["kernels"])
    if options.get("loss_chunk_tokens"):
        yield "loss", "chunked"
        yield "loss_chunk_tokens", options["loss_chunk_tokens"]
    elif loss == "fused-linear":
        yield "loss", "fused-linear-0.3" if version and version < (4, 46) else "fused-linear"
    elif loss == "eager" and version:
        path = next((path for limit, path in _LOSS_OF_VERSION if version < limit), "eager")
        yield "loss", path
    else:
        yield "loss", loss


def _version(text: str | None) -> tuple[int, int] | None:
    parts = (text or "").split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) >= 2 and parts[0].isdigit() and parts[1].isdigit() else None
