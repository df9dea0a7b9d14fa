"""The options of `parallel`: which engine spreads the job over how many GPUs, and what it does with precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from metapeak.strategies.base import Strategy
from metapeak.strategies.parallel.context_parallel import ContextParallel
from metapeak.strategies.parallel.ddp import DDP
from metapeak.strategies.parallel.expert_parallel import ExpertParallel
from metapeak.strategies.parallel.fsdp1 import FSDP1
from metapeak.strategies.parallel.fsdp2 import FSDP2
from metapeak.strategies.parallel.layout import Layout
from metapeak.strategies.parallel.megatron import Megatron
from metapeak.strategies.parallel.pipeline import PipelineParallel
from metapeak.strategies.parallel.schedules import DEFAULT_SCHEDULE, parse_schedule
from metapeak.strategies.parallel.tensor_parallel import TensorParallel
from metapeak.strategies.parallel.zero.options import (
    check_zero_options,
    deepspeed_strategy,
    with_own_precision,
)
from metapeak.tracer.errors import InputError
from metapeak.tracer.simulation import Option

ENGINES = ("none", "ddp", "fsdp1", "fsdp2", "deepspeed", "megatron")
SHARDED_ENGINES = ("fsdp1", "fsdp2")
# Engines that reduce and step by themselves.
OWN_LOOP_ENGINES = ("deepspeed", "megatron")
DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")
_FSDP_OPTIONS = ("param_dtype", "reduce_dtype", "output_dtype", "fsdp_upcast", "reshard_after_forward", "wrap")
_LONG = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# ZeRO stage -> when FSDP reshards parameters for the same sharding: 3 after forward, 2 never before backward.
_FSDP_OF_STAGE = {2: "never", 3: "default"}
_ACCELERATE = "accelerate 1.15"


def parse_reshard(text: str) -> bool | int | None:
    """`reshard_after_forward` of a text: default (all units but the root), always, never, or a number of ranks.

    >>> parse_reshard("never"), parse_reshard("4"), parse_reshard("default")
    (False, 4, None)
    """
    named = {"default": None, "always": True, "true": True, "never": False, "false": False}
    if text.lower() in named:
        return named[text.lower()]
    if text.isdigit():
        return int(text)
    raise InputError(f"reshard_after_forward is {text!r}, but has to be default, always, never or a number of ranks.")


def with_engine(options: Mapping[str, Option]) -> dict[str, Option]:
    """`options` with the engine that the degrees stand for.

    Raises InputError for degrees that no engine uses and for a stage that contradicts it.
    """
    options = dict(options)
    _choose_engine(options)
    _spread_over_all_gpus(options)
    _check_degrees(options)
    return options


def with_parallel_precision(options: Mapping[str, Option]) -> dict[str, Option]:
    """`options` with what their engine makes of a mixed precision. Raises InputError for another engine's options."""
    options = dict(options)
    _check_loss_and_kernels(options)
    engine = options["engine"].value
    given = [name for name in _FSDP_OPTIONS if options[name].value is not None]
    own = {"deepspeed": ("param_dtype",), "megatron": ("param_dtype", "reduce_dtype")}.get(engine, ())
    given = [name for name in given if name not in own]
    if given and engine not in SHARDED_ENGINES:
        raise InputError(f"{', '.join(given)} belongs to engines {' and '.join(SHARDED_ENGINES)}, not to {engine}.")
    if options["cpu_offload"].value:
        _check_offload(options)
    for name in ("bucket_cap_mb", "gradient_as_bucket_view"):
        if options[name].value and engine != "ddp":
            raise InputError(f"{name} belongs to engine ddp, not to {engine}.")
    if options["bucket_cap_mb"].value is not None and options["bucket_cap_mb"].value < 1:
        raise InputError(f"bucket_cap_mb is {options['bucket_cap_mb'].value}, but a bucket has a MiB at least.")
    if options["sync_each_batch"].value and engine == "none":
        raise InputError("sync_each_batch belongs to engines that reduce gradients: ddp, fsdp1 and fsdp2.")
    if engine != "fsdp1" and options["checkpoint_around_units"].value:
        raise InputError(f"checkpoint_around_units belongs to engine fsdp1, not to {engine}.")
    if options["checkpoint_around_units"].value and options["checkpointing"].value in (None, "none"):
        raise InputError("checkpoint_around_units: there are no checkpoints; add checkpointing full or another policy.")
    if engine == "fsdp1" and options["output_dtype"].value is not None:
        raise InputError("output_dtype is FSDP2's; FSDP1 returns what the model returns.")
    if engine in SHARDED_ENGINES and "fused-lora" in (options["kernels"].value or ()):
        raise InputError(
            f"kernels fused-lora with engine {engine}: the fused product reads adapters that no unit has gathered, "
            "because their own modules are not called; sources that run it keep adapters out of FSDP, which is not "
            "predicted."
        )
    check_zero_options(options)
    if engine in SHARDED_ENGINES:
        _mixed_precision(options)
    elif engine in OWN_LOOP_ENGINES:
        options = with_own_precision(options)
    _pipeline_options(options)
    return options


def parallel_strategies(values: Mapping[str, Any]) -> list[Strategy]:
    """The strategies of the options, in order: what is cut inside layers first, then data parallelism around it.

    Raises InputError for what cannot be run.
    """
    engine, layout = values["engine"], layout_of_options(values)
    if engine == "none" and layout.world_size == 1:
        return []
    strategies: list[Strategy] = [_pipeline(layout, values)] if layout.pp > 1 else []
    if layout.tp > 1:
        strategies.append(
            TensorParallel(
                layout=layout,
                plan=values["tp_plan"],
                sequence_parallel=bool(values["sequence_parallel"]),
                loss_parallel=bool(values["loss_parallel"]),
            )
        )
    if layout.ep > 1:
        strategies.append(ExpertParallel(layout=layout, load_skew=values["expert_load_skew"] or 1.0))
    if layout.cp > 1:
        strategies.append(ContextParallel(layout=layout, rotation=values["cp_rotation"] or "allgather"))
    if engine == "ddp":
        strategies.append(
            DDP(
                layout=layout,
                bucket_cap_mb=values["bucket_cap_mb"],
                gradient_as_bucket_view=bool(values["gradient_as_bucket_view"]),
            )
        )
    elif engine in SHARDED_ENGINES:
        strategies.append(_fsdp(engine, layout, values))
    elif engine == "deepspeed":
        strategies.append(deepspeed_strategy(layout, values))
    elif engine == "megatron":
        dtypes = {name: _LONG.get(values[name]) for name in ("param_dtype", "reduce_dtype")}
        strategies.append(Megatron(layout=layout, max_grad_norm=values["max_grad_norm"], **dtypes))
    return strategies


def layout_of_options(values: Mapping[str, Any]) -> Layout:
    """The layout of the options' degrees. Raises InputError when they do not multiply to `gpus`."""
    degrees = {name: values[name] or 1 for name in DEGREES}
    layout = Layout(**degrees)
    if values["engine"] == "ddp" and layout.dp_shard > 1:  # replicas, whatever their axis is called
        layout = replace(layout, dp_replicate=layout.dp_replicate * layout.dp_shard, dp_shard=1)
    if values["engine"] in OWN_LOOP_ENGINES and layout.dp_shard == 1:  # partitions, whatever their axis is called
        layout = replace(layout, dp_replicate=1, dp_shard=layout.dp_replicate)
    if values["gpus"] is not None:
        layout.check_world(values["gpus"])
    return layout


def _is_given(options: Mapping[str, Option], name: str) -> bool:
    return options[name].origin != "default"


def _choose_engine(options: dict[str, Option]) -> None:
    """The engine that nobody named: ZeRO stages ask for DeepSpeed, sharding for FSDP2, replicas for DDP."""
    stage = options["zero_stage"].value
    engine = options["engine"].value
    if stage is not None and not 0 <= stage <= 3:
        raise InputError(f"zero_stage is {stage}, but DeepSpeed's stages are 0, 1, 2 and 3.")
    if engine is None:
        shard, replicate, cp = ((options[name].value or 1) for name in ("dp_shard", "dp_replicate", "cp"))
        if stage is not None:
            engine, why = "deepspeed", f"zero_stage {stage}"
        elif _is_given(options, "dp_shard") and options["dp_shard"].value is not None:
            engine, why = "fsdp2", f"dp_shard {shard}"
        elif cp > 1:
            engine, why = "fsdp2", f"cp {cp}"
        elif replicate > 1:
            engine, why = "ddp", f"dp_replicate {replicate}"
        else:
            engine, why = "none", None
        options["engine"] = Option(value=engine, origin=f"{why} asks for it" if why else "default")
    elif stage is not None and engine != "deepspeed":
        equivalent = _FSDP_OF_STAGE.get(stage)
        same = f" What FSDP does as stage {stage} is --reshard-after-forward {equivalent}." if equivalent else ""
        raise InputError(f"zero_stage {stage} belongs to engine deepspeed, but the engine is {engine}.{same}")


def _spread_over_all_gpus(options: dict[str, Option]) -> None:
    """Without a degree, engines that only have data parallelism take all GPUs for it."""
    gpus, engine = options["gpus"].value, options["engine"].value
    if engine in OWN_LOOP_ENGINES and gpus and all(options[name].value is None for name in DEGREES):
        options["dp_shard"] = Option(value=gpus, origin=f"gpus {gpus}, all of them data-parallel")


def _check_own_loop(engine: str, values: Mapping[str, Any]) -> None:
    """Raise InputError for degrees beside the one that these engines partition over."""
    if (values["tp"] or 1) > 1:
        raise InputError(f"engine {engine} with tp {values['tp']} is not predicted: only data parallelism is.")
    if (values["dp_replicate"] or 1) > 1 and (values["dp_shard"] or 1) > 1:
        raise InputError(
            f"engine {engine} partitions over all data-parallel ranks, so dp_replicate {values['dp_replicate']} x "
            f"dp_shard {values['dp_shard']} is one degree: give dp_shard {values['dp_replicate'] * values['dp_shard']}."
        )


def _check_degrees(options: Mapping[str, Option]) -> None:
    engine = options["engine"].value
    values = {name: options[name].value for name in DEGREES}
    for name, value in values.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise InputError(f"{name} is {value!r}, but a degree is a whole number from 1 on.")
    if (values["pp"] or 1) > 1 and engine not in ("none", "fsdp2"):
        raise InputError(
            f"pp {values['pp']} with engine {engine} is not predicted; stages are sharded by engine fsdp2."
        )
    if engine in OWN_LOOP_ENGINES:
        _check_own_loop(engine, values)
    data = max(values["dp_shard"] or 1, values["dp_replicate"] or 1)
    if engine == "none" and data > 1:
        raise InputError(
            f"dp_shard {values['dp_shard'] or 1} x dp_replicate {values['dp_replicate'] or 1} ranks with engine none: "
            "name the engine that spreads the data, ddp, fsdp1 or fsdp2."
        )
    if engine == "fsdp1" and (values["tp"] or 1) > 1:
        raise InputError("engine fsdp1 with tp: flat parameters hold no DTensors. Use engine fsdp2.")
    if engine != "fsdp2" and (values["cp"] or 1) > 1:
        raise InputError(
            f"engine {engine} with cp {values['cp']}: gradients of the parts of a sequence are summed by FSDP2, which "
            "shards over dp_shard x cp ranks (accelerate and torchtitan take no other). Use engine fsdp2."
        )
    if engine == "ddp" and (values["tp"] or 1) > 1:
        raise InputError(
            "engine ddp with tp: DistributedDataParallel takes no DTensors (torchtitan refuses it, too). Use engine "
            "fsdp2, which replicates shards with dp_replicate."
        )
    if engine not in ("none", "fsdp2") and (values["ep"] or 1) > 1:
        raise InputError(f"engine {engine} with ep {values['ep']}: transformers shards spread experts by FSDP2 alone.")
    _check_inner_options(options, values)


# Option -> the degree that it belongs to.
_INNER_OPTIONS = {
    "tp_plan": "tp",
    "sequence_parallel": "tp",
    "loss_parallel": "tp",
    "cp_rotation": "cp",
    "expert_load_skew": "ep",
}


def _check_inner_options(options: Mapping[str, Option], degrees: Mapping[str, int | None]) -> None:
    """Raise InputError for an option of a degree that nobody gave: nothing would read it. Degree 1 was given."""
    for name, degree in _INNER_OPTIONS.items():
        if options[name].value and degrees[degree] is None:
            raise InputError(f"{name} belongs to {degree}; add {degree} and its degree.")


def _check_loss_and_kernels(options: Mapping[str, Option]) -> None:
    """Raise InputError for a loss or kernels that would get DTensors, or labels without their neighbours."""
    for name, degree in (("sequence_parallel", "tp"), ("loss_parallel", "tp"), ("cp", "cp")):
        if not options[name].value or (options[degree].value or 1) == 1:
            continue
        for other in ("loss", "kernels"):
            given = options[other].value
            if given:
                given = given if isinstance(given, str) else ",".join(given)
                raise InputError(f"{name} with {other} {given}: predicted with the model's own loss and kernels alone.")


def _mixed_precision(options: dict[str, Option]) -> None:
    """What accelerate makes of a mixed precision: FSDP casts parameters itself, and trains float32 shards.

    FSDP2 then has no autocast region; FSDP1 has both. Sources: accelerate 1.15 accelerator.py (_prepare_fsdp2,
    prepare_model), utils/dataclasses.py (set_mixed_precision), utils/fsdp_utils.py (fsdp2_prepare_model).
    """
    autocast = options["autocast"].value
    if autocast is None:
        return
    names = ["param_dtype", "reduce_dtype"] + (["output_dtype"] if options["engine"].value == "fsdp2" else [])
    for name in names:
        _fill(options, name, autocast, f"{_ACCELERATE} utils/dataclasses.py:set_mixed_precision")
    _fill(options, "fsdp_upcast", "trainable", f"{_ACCELERATE} utils/fsdp_utils.py:fsdp2_prepare_model")
    if options["engine"].value == "fsdp2":
        options["autocast"] = Option(
            value=None,
            origin=f"{options['autocast'].origin}; FSDP2 casts parameters itself, {_ACCELERATE} "
            "accelerator.py:_prepare_fsdp2 adds no autocast",
        )


def _check_offload(options: Mapping[str, Option]) -> None:
    engine = options["engine"].value
    if engine != "fsdp2":
        raise InputError(f"cpu_offload with engine {engine} is not predicted; engine fsdp2 is.")
    if options["sync_each_batch"].value and (options["grad_accum"].value or 1) > 1:
        raise InputError("cpu_offload with sync_each_batch: gradients that are added on the host are not predicted.")
    if options["implementation"].value == "in-backward":
        raise InputError("cpu_offload with an optimizer in backward: it would wait for the host in every hook.")


def _pipeline_options(options: dict[str, Option]) -> None:
    """What a pipeline decides about others, and the number of its microbatches. Raises InputError without one.

    Parameters that are gathered for a forward stay so until all microbatches went backward: resharded, they would be
    gathered again for each. Source: torchtitan distributed/fsdp.py, get_fsdp_reshard_after_forward_policy (default:
    not pp_enabled).
    """
    if (options["pp"].value or 1) == 1:
        given = [name for name in ("schedule", "microbatches", "pp_split") if options[name].value is not None]
        if given:
            raise InputError(f"{', '.join(given)} belongs to a pipeline; give its degree, pp 2 or more.")
        return
    if options["engine"].value == "fsdp2" and not _is_given(options, "reshard_after_forward"):
        why = "torchtitan distributed/fsdp.py: not with a pipeline, or every microbatch would gather again"
        options["reshard_after_forward"] = Option(value="never", origin=why)
    for name in ("loss", "keep_outputs"):
        if options[name].value:
            raise InputError(
                f"{name} with pp {options['pp'].value}: the last stage returns logits to torch's schedule."
            )
    values = {name: option.value for name, option in options.items()}
    pipeline = _pipeline(layout_of_options(values), values)
    if options["schedule"].value is None:
        options["schedule"] = Option(value=pipeline.schedule.name, origin="default")
    if options["microbatches"].value is None:
        options["microbatches"] = Option(value=pipeline.count, origin="default: as many as stages")


def _pipeline(layout: Layout, values: Mapping[str, Any]) -> PipelineParallel:
    """Raises InputError or UnknownName for a schedule and cuts that cannot be."""
    schedule = parse_schedule(values["schedule"] or DEFAULT_SCHEDULE)
    microbatches, split = values["microbatches"], values["pp_split"]
    if microbatches is not None and microbatches < 1:
        raise InputError(f"microbatches is {microbatches}, but has to be a whole number from 1 on.")
    stages = layout.pp * schedule.virtual
    if split and len(split) + 1 != stages:
        virtual = (len(split) + 1) / layout.pp
        whole = f" = {virtual:g} a rank" + ("" if virtual == int(virtual) else ", no whole number")
        raise InputError(
            f"pp_split has {len(split)} cuts, {len(split) + 1} stages / pp {layout.pp}{whole}, but schedule "
            f"{schedule.name} has {schedule.virtual} a rank; cuts = pp x virtual stages - 1 = {stages - 1}."
        )
    return PipelineParallel(layout=layout, schedule=schedule, microbatches=microbatches, split=split)


def _fill(options: dict[str, Option], name: str, value: Any, origin: str) -> None:
    if options[name].value is None and not _is_given(options, name):
        options[name] = Option(value=value, origin=origin)


def _fsdp(engine: str, layout: Layout, values: Mapping[str, Any]) -> Strategy:
    dtypes = {name: _LONG.get(values[name]) for name in ("param_dtype", "reduce_dtype")}
    shared: dict[str, Any] = {"layout": layout, "wrap": values["wrap"] or ("blocks",), **dtypes}
    shared["upcast"] = values["fsdp_upcast"] or "none"
    reshard = parse_reshard(values["reshard_after_forward"] or "default")
    if engine == "fsdp2":
        return FSDP2(
            **shared,
            reshard_after_forward=reshard,
            output_dtype=_LONG.get(values["output_dtype"]),
            cpu_offload=bool(values["cpu_offload"]),
        )
    if isinstance(reshard, int) and not isinstance(reshard, bool):
        raise InputError(f"reshard_after_forward {reshard} ranks is FSDP2's; FSDP1 takes always or never.")
    return FSDP1(
        **shared,
        buffer_dtype=dtypes["param_dtype"],
        sharding="SHARD_GRAD_OP" if reshard is False else "FULL_SHARD",
        checkpoint_around_units=bool(values["checkpoint_around_units"]),
    )
