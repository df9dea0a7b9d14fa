"""DeepSpeed's own JSON configuration as options.

Keys that decide no memory are left out by name; keys that nothing here knows are refused, never dropped.
Source: deepspeed 0.19.8 runtime/config.py, runtime/zero/config.py; "auto" as the Hugging Face Trainer fills it in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metapeak.strategies.parallel.zero.strategy import AUTO, AUTO_SIZES, ZERO_DEFAULTS
from metapeak.tracer.errors import InputError

# Sections and keys that change no byte on the device.
_NO_MEMORY = {
    "train_batch_size", "steps_per_print", "wall_clock_breakdown", "scheduler", "prescale_gradients",
    "gradient_predivide_factor", "dump_state", "tensorboard", "csv_monitor", "wandb", "comms_logger",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
}  # fmt: skip
_ZERO_NO_MEMORY = {
    "stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save", "reduce_scatter",
    "allgather_partitions", "ignore_unused_parameters", "load_from_fp32_weights", "round_robin_gradients",
}  # fmt: skip
_OPTIMIZERS = {"adam": "adam", "adamw": "adamw"}


def is_deepspeed_config(values: Mapping[str, Any]) -> bool:
    """Whether a file's mapping is DeepSpeed's: it has its section."""
    return isinstance(values.get("zero_optimization"), Mapping)


def options_of_config(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Option values by name. Raises InputError for keys that are not known, and for what is not predicted."""
    rest = {key: value for key, value in values.items() if key not in _NO_MEMORY}
    found = _zero_options(rest.pop("zero_optimization"), where)
    found["engine"] = "deepspeed"
    for key, name in (
        ("train_micro_batch_size_per_gpu", "batch_size"),
        ("gradient_accumulation_steps", "grad_accum"),
        ("gradient_clipping", "max_grad_norm"),
    ):
        value = rest.pop(key, None)
        if value not in (None, AUTO, 0, 0.0):
            found[name] = value
    for block in ("bf16", "fp16"):
        if (rest.pop(block, None) or {}).get("enabled") is True:
            found["param_dtype"] = block
    accumulation = (rest.pop("data_types", None) or {}).get("grad_accum_dtype")
    if accumulation == "fp32":
        found["grad_accum_dtype"] = "fp32"
    optimizer = rest.pop("optimizer", None)
    if optimizer is not None and optimizer.get("type") != AUTO:
        kind = str(optimizer.get("type"))
        if kind.lower() not in _OPTIMIZERS:
            raise InputError(f"{where}: optimizer {kind} of DeepSpeed is not predicted; Adam and AdamW are.")
        found["optimizer"] = _OPTIMIZERS[kind.lower()]
    if rest:
        raise InputError(f"{where}: {', '.join(sorted(rest))}: not known of DeepSpeed's configuration. Leave it out.")
    return found


def _zero_options(zero: Mapping[str, Any], where: str) -> dict[str, Any]:
    found: dict[str, Any] = {"zero_stage": zero.get("stage", 0)}
    for key, value in zero.items():
        name = f"stage3_{key}" if f"stage3_{key}" in ZERO_DEFAULTS else key
        if key in ("offload_optimizer", "offload_param"):
            device = (value or {}).get("device", "none")
            if device not in ("none", "cpu"):
                raise InputError(f"{where}: {key} to {device} is not predicted; cpu is.")
            if device == "cpu":
                found[key] = device
        elif name in ZERO_DEFAULTS:
            if value == AUTO and name not in AUTO_SIZES:
                continue  # the Trainer leaves DeepSpeed's default
            if not (name.startswith("stage3_") and found["zero_stage"] != 3):
                found[name] = value
        elif key != "stage" and key not in _ZERO_NO_MEMORY:
            raise InputError(f"{where}: zero_optimization.{key} is not predicted. Leave it out.")
    return found
