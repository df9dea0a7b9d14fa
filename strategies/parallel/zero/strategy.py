"""DeepSpeed ZeRO, stages 0 to 3: partitions of optimizer states, gradients and parameters over `dp_shard` ranks.

What it changes: DeepSpeed's engine trains in place of the plain loop. Parameters are cast to bf16 or fp16, float32
partitions are kept and stepped, gradients go through buckets; stage 3 gathers parameters module by module.
Where each byte comes from: deepspeed.initialize, engine.backward and engine.step themselves run on the phantom GPU.
Not modelled: what initialisation needs for a moment and gives back; streams that delay the reuse of freed buffers;
NVMe; ZeRO++ (hpZ, quantised gathers), MiCS.
Source: deepspeed 0.19.8, see engine.py and accelerator.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from metapeak.strategies.base import NoOpStrategy
from metapeak.strategies.parallel.layout import NO_LAYOUT, Layout
from metapeak.strategies.parallel.zero.gathered import gathered_against_saved, size_of
from metapeak.tracer.errors import InputError
from metapeak.tracer.simulation import Option

if TYPE_CHECKING:
    import torch

    from metapeak.tracer.engine import Engine
    from metapeak.tracer.graph import StepGraph
    from metapeak.tracer.models import ResolvedModel
    from metapeak.tracer.spec import StepSpec

VERSION = "0.19.8"
# Options of zero_optimization by their name there and DeepSpeed's default (runtime/zero/config.py); None: by stage.
ZERO_DEFAULTS: Mapping[str, Any] = {
    "reduce_bucket_size": 500_000_000,
    "allgather_bucket_size": 500_000_000,
    "overlap_comm": None,
    "contiguous_gradients": True,
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_param_persistence_threshold": 100_000,
}
AUTO = "auto"
# "auto" in a configuration of the Hugging Face Trainer, from the hidden size: transformers 5.24
# integrations/deepspeed.py, HfTrainerDeepSpeedConfig.trainer_config_finalize.
AUTO_SIZES: Mapping[str, tuple[Callable[[int], int], str]] = {
    "reduce_bucket_size": (lambda hidden: hidden * hidden, "hidden_size^2"),
    "stage3_prefetch_bucket_size": (lambda hidden: int(0.9 * hidden * hidden), "0.9 x hidden_size^2"),
    "stage3_param_persistence_threshold": (lambda hidden: 10 * hidden, "10 x hidden_size"),
}
_BLOCKS = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, kw_only=True)
class DeepSpeed(NoOpStrategy):
    """`zero` are options of zero_optimization as (name, value) pairs; what is not there is DeepSpeed's default, and
    "auto" the Hugging Face Trainer's.

    `param_dtype` None is the weights' own. `fused_adam`: the optimizer is DeepSpeed's FusedAdam, else the one that the
    step names, handed to DeepSpeed. `offload_optimizer` and `offload_param` name a device: None or cpu.
    """

    layout: Layout = NO_LAYOUT
    stage: int = 0
    zero: tuple[tuple[str, Any], ...] = ()
    param_dtype: str | None = None
    grad_accum_dtype: str | None = None
    max_grad_norm: float | None = None
    fused_adam: bool = True
    offload_optimizer: str | None = None
    offload_param: str | None = None

    name = "deepspeed"
    imports = ("metapeak.strategies.parallel.zero.engine",)
    reduces_itself = True

    @property
    def casts_to(self) -> str | None:
        return self.param_dtype

    def check(self, model: ResolvedModel, step: StepSpec) -> None:
        if step.optimizer.name == "none":
            raise InputError("engine deepspeed needs an optimizer: its engine makes gradients and partitions for it.")

    def notes(self, module: torch.nn.Module) -> tuple[str, ...]:
        for name, parameter in module.named_parameters():
            if not parameter.is_floating_point():
                raise InputError(
                    f"engine deepspeed: {name} is {str(parameter.dtype).removeprefix('torch.')}; quantised weights "
                    "under DeepSpeed are not predicted. Use engine fsdp2."
                )
        auto = [
            f"{name} {value} = {rule}" for name, value, rule in _auto_sizes(self._given(), module) if value is not None
        ]
        return (f'"auto" is {", ".join(auto)}',) if auto else ()

    def resolved(self, module: torch.nn.Module) -> Mapping[str, Option]:
        source = f"deepspeed {VERSION} runtime/zero/config.py"
        found = {
            name: Option(value=str(value).lower() if isinstance(value, bool) else value, origin=source)
            for name, value in ZERO_DEFAULTS.items()
            if self._applies(name)
        }
        if self._applies("overlap_comm"):
            found["overlap_comm"] = Option(value=str(self.stage == 3).lower(), origin=source)
        if self.fused_adam:
            name = "DeepSpeedCPUAdam" if self.offload_optimizer else "FusedAdam"
            found["implementation"] = Option(value="fused", origin=f"DeepSpeed's {name}")
        return found

    def engine(
        self, module: torch.nn.Module, make_optimizer: Callable[[list], Any] | None, micro_batches: int
    ) -> AbstractContextManager[Engine]:
        from metapeak.strategies.parallel.zero.engine import deepspeed_rank

        config = self.config(module, micro_batches)
        return deepspeed_rank(module, None if self.fused_adam else make_optimizer, config)

    def config(self, module: torch.nn.Module, micro_batches: int = 1) -> dict[str, Any]:
        """DeepSpeed's configuration, as its JSON file would have it."""
        zero = self._given()
        zero.update((name, value) for name, value, _ in _auto_sizes(zero, module))
        for name in ("offload_optimizer", "offload_param"):
            if getattr(self, name) is not None:
                zero[name] = {"device": getattr(self, name)}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": micro_batches,
            "zero_optimization": {"stage": self.stage, **zero},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        block = _BLOCKS.get(self.param_dtype or _dtype_of(module))
        if block is not None:
            config[block] = {"enabled": True}
        if self.grad_accum_dtype is not None:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        if self.max_grad_norm is not None:
            config["gradient_clipping"] = self.max_grad_norm
        return config

    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in self.zero if self._applies(name)}

    def _applies(self, name: str) -> bool:
        """Whether a stage looks at an option: bucket sizes from 1 on, `stage3_` and sub_group_size in 3 only."""
        if name == "allgather_bucket_size":
            return self.stage in (1, 2)
        return self.stage == 3 if name.startswith("stage3_") or name == "sub_group_size" else self.stage > 0

    def assumptions(self) -> tuple[str, ...]:
        said = [
            f"DeepSpeed {version('deepspeed')} itself runs, ZeRO stage {self.stage}, one parameter group; what its "
            "initialisation needs for a moment is not counted, nor that its streams delay the reuse of freed buffers",
        ]
        if self.stage == 3:
            said.append(
                "DeepSpeed keeps parameters gathered that are used again within stage3_max_reuse_distance and "
                "prefetches ahead; FSDP2 (--engine fsdp2) gathers block by block and has no buckets: another answer"
            )
        return tuple(said)

    def remarks(self, graph: StepGraph) -> tuple[str, ...]:
        on_device = self.stage == 3 and self.offload_param is None
        said = gathered_against_saved(graph, self.layout.dp_shard) if on_device else ()
        if self.offload_optimizer or self.offload_param:
            said += (f"the host holds up to {size_of(graph.host_bytes)} for every rank (offload), which no GPU needs",)
        return said


def _auto_sizes(zero: Mapping[str, Any], module: torch.nn.Module) -> list[tuple[str, int, str]]:
    """(option, elements, rule) of every option that is "auto". Raises InputError where there is no hidden size."""
    names = [name for name, value in zero.items() if value == AUTO]
    if not names:
        return []
    config = getattr(module, "config", None)
    config = getattr(config, "text_config", config)
    hidden = getattr(config, "hidden_size", None)
    if hidden is None:
        raise InputError(f'{", ".join(names)}: "auto" goes by the model\'s hidden_size, and its config has none.')
    return [(name, AUTO_SIZES[name][0](hidden), AUTO_SIZES[name][1]) for name in names]


def _dtype_of(module: torch.nn.Module) -> str:
    """The dtype that DeepSpeed is configured for: 16 bits as soon as some parameters have them."""
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in module.parameters()}
    return next((dtype for dtype in _BLOCKS if dtype in dtypes), "float32")
