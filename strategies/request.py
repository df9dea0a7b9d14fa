"""From resolved options to what `simulate` takes: the model, the step, the strategies, the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from metapeak.strategies.base import Strategy
from metapeak.strategies.checkpoint_policies import parse_policy
from metapeak.strategies.compose import simulate
from metapeak.strategies.gradient_checkpointing import strategy_for
from metapeak.strategies.kernels import Kernels
from metapeak.strategies.lifecycle import LIFECYCLE, Lifecycle
from metapeak.strategies.loss import loss_strategy
from metapeak.strategies.methods import method_strategies
from metapeak.strategies.optimizers import parse_arguments
from metapeak.strategies.parallel.options import OWN_LOOP_ENGINES, parallel_strategies
from metapeak.strategies.quantization.options import quantization_strategies
from metapeak.strategies.settings import DTYPES, options_of, resolve
from metapeak.tracer.device.allocator_config import AllocatorConfig, parse_allocator_config
from metapeak.tracer.errors import InputError
from metapeak.tracer.gpus import Gpu, gpu_of_memory
from metapeak.tracer.mig import find_gpu_or_slice
from metapeak.tracer.simulation import Option, Simulation
from metapeak.tracer.spec import ModelSpec, OptimizerSpec, StepSpec


def simulate_options(
    reference: str,
    values: Mapping[str, Any] | None = None,
    *,
    whole_life: bool = False,
    progress: Callable[[str], None] = lambda what: None,
) -> Simulation:
    """`simulate` with options by name, as the command line and files have them; `whole_life` as there.

    Raises InputError or UnknownName for options that cannot be used, and what `simulate` raises.

        >>> from metapeak.strategies import simulate_options
        >>> result = simulate_options("openai-community/gpt2", {"seq_len": 64, "method": "lora", "lora": {"rank": 8}})
        >>> result.model.trainable_parameters
        294912
    """
    return simulate_resolved(
        reference, resolve(options_of(values or {}, "call")), whole_life=whole_life, progress=progress
    )


def simulate_resolved(
    reference: str,
    options: Mapping[str, Option],
    *,
    step: StepSpec | None = None,
    whole_life: bool = False,
    progress: Callable[[str], None] = lambda what: None,
) -> Simulation:
    """`simulate` with resolved options; `step` in place of the one that they make. Raises as `simulate`."""
    return simulate(
        model_spec(reference, options),
        step or step_spec(options),
        strategies_of(options),
        gpu=gpu_of(options),
        allocator=allocator_of(options),
        options=options,
        lifecycle=lifecycle_of(options),
        whole_life=whole_life,
        progress=progress,
    )


def lifecycle_of(options: Mapping[str, Option]) -> Lifecycle:
    """What of the job's life is asked for beside its training steps."""
    values = {name: options[name].value for name in LIFECYCLE if options[name].value is not None}
    return Lifecycle(**values)


def model_spec(reference: str, options: Mapping[str, Option]) -> ModelSpec:
    dtype = options["weights_dtype"].value
    return ModelSpec(
        reference=reference,
        task=options["task"].value,
        trust_remote_code=options["trust_remote_code"].value,
        dtype=DTYPES[dtype] if dtype else None,
    )


def step_spec(options: Mapping[str, Option]) -> StepSpec:
    names = ("batch_size", "seq_len", "target_len", "image_size", "num_images", "attention", "autocast_region")
    names += ("grad_accum", "max_grad_norm", "full_trace")
    dtypes = {name: DTYPES.get(options[name].value) for name in ("autocast", "grad_accum_dtype")}
    if options["engine"].value in OWN_LOOP_ENGINES:
        dtypes["grad_accum_dtype"] = None  # the engine's own matter
    return StepSpec(
        **{name: options[name].value for name in names},
        **dtypes,
        sync_each_batch=bool(options["sync_each_batch"].value),
        optimizer=optimizer_spec(options),
    )


def optimizer_spec(options: Mapping[str, Option]) -> OptimizerSpec:
    """The optimizer that the options name. Raises InputError for arguments that cannot be read."""
    dtype = options["state_dtype"].value
    return OptimizerSpec(
        name=options["optimizer"].value,
        implementation=options["implementation"].value,
        state_dtype=DTYPES[dtype] if dtype else None,
        arguments=parse_arguments(options["optimizer_args"].value),
        master_weights=options["master_weights"].value,
    )


def strategies_of(options: Mapping[str, Option]) -> list[Strategy]:
    """The strategies that the options ask for, in order. Raises InputError for a policy that does not exist."""
    strategy = strategy_for(parse_policy(options["checkpointing"].value))
    values = {name: option.value for name, option in options.items()}
    # Adapters first: a trainer switches checkpointing on for the model that it trains, and shards what comes of it.
    return [*model_strategies(options), *([strategy] if strategy is not None else []), *parallel_strategies(values)]


def model_strategies(options: Mapping[str, Option]) -> list[Strategy]:
    """The strategies that change what is traced, without the checkpointing policy. Raises InputError."""
    values = {name: option.value for name, option in options.items()}
    loss = loss_strategy(values["loss"], values["loss_chunk_tokens"], values["keep_outputs"])
    kernels = [Kernels(names=values["kernels"])] if values["kernels"] else []
    # The base is loaded quantised, its loss path chosen; then it gets adapters, and kernels replace what there is.
    return [
        *quantization_strategies(values),
        *([loss] if loss is not None else []),
        *method_strategies(values),
        *kernels,
    ]


def allocator_of(options: Mapping[str, Option]) -> AllocatorConfig:
    """The allocator's settings. Raises InputError or UnknownName for those that PyTorch has not or that need a GPU."""
    config = parse_allocator_config(options["allocator_config"].value or "")
    if config.memory_fraction < 1:
        raise InputError(
            f"per_process_memory_fraction:{config.memory_fraction:g} only lowers what the job may use. "
            "Leave it out and give that size as --gpu-memory."
        )
    return config


def memory_of(text: str) -> int:
    """Bytes of a size as 24GiB, 80GB or 24564MiB. Raises InputError."""
    return gpu_of_memory(text).usable_bytes


def gpu_of(options: Mapping[str, Option]) -> Gpu | None:
    """The GPU that was named, or one of the given memory, or None. Raises UnknownName or InputError."""
    name, memory = options["gpu"].value, options["gpu_memory"].value
    if name is not None and memory is not None:
        raise InputError("Give either --gpu or --gpu-memory, not both.")
    if name is not None:
        return find_gpu_or_slice(name)
    return gpu_of_memory(memory) if memory is not None else None
