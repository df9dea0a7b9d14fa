"""Tensor parallelism by transformers itself: the model's own plan or a given one, DTensor parameters, real collectives.

What it changes: linear layers, embeddings and experts that the plan names are cut over `tp` ranks; what it does not
name stays whole on every rank, and so do activations between layers, unless `sequence_parallel` cuts them along the
sequence. With `loss_parallel` logits stay cut over the vocabulary and so does the loss.
Where each byte comes from: transformers' `apply_tensor_parallelism` or, with sequence_parallel, torch's
`parallelize_module` (sequence_parallel.py) runs on the phantom GPU, as one rank of the world.
Not modelled: plans outside transformers' styles, asynchronous tensor parallelism.
Sources: transformers/distributed/tensor_parallel.py, `base_model_tp_plan` of each config class;
torch/distributed/tensor/parallel/loss.py.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metapeak.strategies.base import NoOpStrategy, Strategy
from metapeak.strategies.optimizers.on_shards import check_on_shards
from metapeak.strategies.parallel.layout import NO_LAYOUT, Layout
from metapeak.strategies.parallel.meshes import layout_mesh
from metapeak.strategies.parallel.plans import parallel_plans, paths
from metapeak.strategies.parallel.unshared import replicated_note
from metapeak.tracer.errors import InputError

if TYPE_CHECKING:
    import torch

    from metapeak.tracer.models import ResolvedModel
    from metapeak.tracer.spec import StepSpec


@dataclass(frozen=True, kw_only=True)
class TensorParallel(NoOpStrategy):
    """`plan` holds PATH=STYLE (`*` for layer numbers, styles of transformers) and goes before the model's own rules for
    the same paths; the others stay, as transformers has it (style replicate takes one away). None: the model's own.
    """

    layout: Layout = NO_LAYOUT
    plan: tuple[str, ...] | None = None
    sequence_parallel: bool = False
    loss_parallel: bool = False

    name = "tensor parallel"

    def check(self, model: ResolvedModel, step: StepSpec) -> None:
        if self.layout.tp == 1:
            return
        check_on_shards(step.optimizer, "tp")
        if self.sequence_parallel and step.seq_len is not None:
            check_sequence(step.seq_len, self.layout)
        if self.loss_parallel and model.task != "causal-lm":
            raise InputError(f"loss_parallel shards the logits of causal language models; {model.id} is none.")

    def prepare(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module as it is. Raises InputError for no plan, a wrong one, and sizes that tp does not divide."""
        if self.layout.tp == 1:
            return module
        plan = self._resolved_plan(module)
        _check_sizes(module, plan, self.layout.tp, even=self.sequence_parallel)
        if self.loss_parallel:
            self._check_loss(module)
        return module

    def distribute(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module, which is on the device, cut in place."""
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        from metapeak.strategies.parallel.sequence_parallel import (
            apply_loss_parallelism,
            apply_sequence_parallelism,
            pass_parts_between_stages,
        )
        from metapeak.strategies.parallel.stages import Passed

        if self.layout.tp == 1:
            return module
        plan, mesh = self._resolved_plan(module), layout_mesh(self.layout)["tp"]
        elsewhere = {name for name, part in module.named_modules() if isinstance(part, Passed)}
        plan = {name: style for name, style in plan.items() if name not in elsewhere}
        tied = _separate_tied(module)
        head = _head_name(module) if self.loss_parallel else None
        if self.sequence_parallel:
            apply_sequence_parallelism(module, mesh, plan, sharded_logits=head)
            if elsewhere:  # a stage of a pipeline
                pass_parts_between_stages(module, mesh)
        else:
            styles = {name: style for name, style in plan.items() if head is None or not _is_within(name, head)}
            apply_tensor_parallelism(module, mesh, styles)
            if head is not None:
                apply_loss_parallelism(module, mesh, head)
        for owner, name, source_owner, source_name in tied:
            owner._parameters[name] = source_owner._parameters[source_name]
        return module

    def loss_function(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """`inner`, which refuses a batch whose sequence cannot be cut."""
        if self.layout.tp == 1 or not self.sequence_parallel:
            return inner

        def compute(model: torch.nn.Module, batch: Any) -> torch.Tensor:
            if isinstance(batch, Mapping) and "input_ids" in batch:
                check_sequence(batch["input_ids"].shape[1] * self.layout.cp, self.layout)
            return inner(model, batch)

        return compute

    def running(self) -> AbstractContextManager[Any]:
        if self.layout.tp == 1 or not self.loss_parallel:
            return contextlib.nullcontext()
        return _loss_operators()

    def notes(self, module: torch.nn.Module) -> tuple[str, ...]:
        """What every rank has whole, and sizes of which the last rank has less."""
        tp = self.layout.tp
        if tp == 1:
            return ()
        plan = self._resolved_plan(module, experts=True)
        whole = {id(one) for name, one in module.named_parameters() if not _is_cut(name, plan)}
        said = list(replicated_note(module, whole, tp))
        size = getattr(module.config.get_text_config(), "intermediate_size", None)
        if isinstance(size, int) and size % tp:
            said.append(
                f"intermediate_size {size} / tp {tp} = {size / tp:.2f}: transformers gives the last rank a shorter "
                "part; all are counted as the first, which has the longest"
            )
        return tuple(said)

    def assumptions(self) -> tuple[str, ...]:
        if self.layout.tp == 1:
            return ()
        said = []
        if self.sequence_parallel:
            said.append(
                f"tensor parallelism is torch's with sequence parallelism as torchtitan places it: activations between "
                f"blocks are 1/{self.layout.tp} of the sequence"
                + (", and as plain tensors so they go between stages" if self.layout.pp > 1 else "")
            )
        if self.loss_parallel:
            said.append(f"logits and loss are cut over the vocabulary (1/{self.layout.tp} on a rank, loss_parallel)")
        return tuple(said)

    def _resolved_plan(self, module: torch.nn.Module, *, experts: bool = False) -> dict[str, str]:
        """Styles by concrete path of a module or parameter, with those of expert parallelism if asked for."""
        tp, kind = self.layout.tp, type(module).__name__
        if not hasattr(module, "_resolve_parallel_plans") or hasattr(module, "get_base_model"):
            raise InputError(
                f"tp {tp}: {kind} is no model of transformers with a tp plan (adapters and other packages have none)."
            )
        given = dict(one.split("=", 1) for one in self.plan) if self.plan else None
        if given:
            _check_plan(module, given)
        try:
            plan, spread = parallel_plans(module, self.layout, given)
        except ValueError as error:
            raise InputError(f"tp {tp}: {error}") from error
        return plan | spread if experts else plan

    def _check_loss(self, module: torch.nn.Module) -> None:
        head = _head_name(module)
        if head is None:
            raise InputError(f"loss_parallel: {type(module).__name__} has no output head that is one linear layer.")
        config = module.config.get_text_config()
        if getattr(config, "final_logit_softcapping", None) is not None:
            raise InputError("loss_parallel: logits that are capped (final_logit_softcapping) are not predicted.")


@contextlib.contextmanager
def _loss_operators() -> Iterator[None]:
    """torch's `loss_parallel`, which does not end when an error leaves it."""
    from torch.distributed.tensor.parallel import loss

    loss._enable_custom_loss_ops()
    try:
        yield
    finally:
        loss._disable_custom_loss_ops()


def tp_plan_of(text: str) -> tuple[str, ...]:
    """PATH=STYLE of a JSON or YAML file that maps paths to styles, or those of a text. Raises InputError.

    >>> tp_plan_of("model.layers.*.mlp.up_proj=colwise,model.layers.*.mlp.down_proj=rowwise")
    ('model.layers.*.mlp.up_proj=colwise', 'model.layers.*.mlp.down_proj=rowwise')
    """
    if "=" in text:
        return tuple(one for one in text.split(",") if one)
    path = Path(text)
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"tp_plan {text}: {error.strerror or error}.") from error
    import yaml

    try:
        plan = json.loads(content) if path.suffix == ".json" else yaml.safe_load(content)
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(f"tp_plan {text} cannot be read: {error}") from error
    if not isinstance(plan, Mapping) or not plan or not all(isinstance(style, str) for style in plan.values()):
        raise InputError(
            f"tp_plan {text} has to map paths of modules to styles, as model.layers.*.mlp.up_proj: colwise."
        )
    return tuple(f"{name}={style}" for name, style in plan.items())


def check_sequence(length: int, layout: Layout) -> None:
    """Raise InputError, with the equation, for a sequence that tp ranks (each with its part of cp) cannot share."""
    parts = layout.tp * layout.cp
    if length % parts:
        ranks = f"tp {layout.tp}" + (f" x cp {layout.cp}" if layout.cp > 1 else "")
        raise InputError(
            f"sequence_parallel: seq_len {length} / {ranks} = {length / parts:.2f} is no whole number of tokens."
        )


def _check_plan(module: torch.nn.Module, plan: Mapping[str, str]) -> None:
    """Raise InputError for paths that name nothing and styles that transformers does not have."""
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    there_are = paths(module)
    unknown = [name for name in plan if name not in there_are]
    if unknown:
        there = ", ".join(f"{name} ({kind})" for name, kind in there_are.items() if kind is not None)
        raise InputError(
            f"tp_plan: {', '.join(unknown)} names no module of {type(module).__name__}. There are: {there}."
        )
    wrong = {style for style in plan.values() if style not in ALL_PARALLEL_STYLES}
    if wrong:
        raise InputError(f"tp_plan: no style {', '.join(sorted(wrong))}. Styles: {', '.join(ALL_PARALLEL_STYLES)}.")


def _check_sizes(module: torch.nn.Module, plan: Mapping[str, str], tp: int, *, even: bool) -> None:
    """Raise InputError, with the equation, for sizes that tp does not divide where the plan cuts them.

    `even`: also for the width of feed-forward layers, of which transformers gives the last rank less.
    """
    config = module.config.get_text_config()
    suffixes = {name.rpartition(".")[2] for name, style in plan.items() if style != "replicated_with_grad_allreduce"}
    cut = ["num_attention_heads", "num_key_value_heads"] if suffixes & _OF_ATTENTION else []
    if suffixes & _OF_FEED_FORWARD:
        cut += ["moe_intermediate_size", *(["intermediate_size"] if even else [])]
    for name in cut:
        size = getattr(config, name, None)
        if isinstance(size, int) and size % tp:
            what = "heads" if "heads" in name else "channels"
            divisors = [str(n) for n in range(1, size + 1) if size % n == 0]
            raise InputError(
                f"{name} {size} / tp {tp} = {size / tp:.2f} is no whole number of {what}. "
                f"Degrees that divide it: {', '.join(divisors[:16])}{', ...' if len(divisors) > 16 else ''}."
            )


# Last names of what plans cut along heads, and along the width between two layers.
_OF_ATTENTION = {"q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "q_b_proj", "kv_b_proj", "c_attn"}
_OF_FEED_FORWARD = {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "fc1", "fc2", "c_fc"}


# Styles of modules whose parameters every rank has whole.
_WHOLE = {"replicated_with_grad_allreduce", "sequence_parallel", "replicate", "mla_kv_a_proj", "all_reduce"}


def _is_cut(parameter: str, plan: Mapping[str, str]) -> bool:
    """Whether the plan cuts a parameter: it names it in a style that does; a row-wise bias is added once, whole."""
    style = plan.get(parameter)
    return (
        style is not None and style not in _WHOLE and not (style.startswith("rowwise") and parameter.endswith("bias"))
    )


def _head_name(module: torch.nn.Module) -> str | None:
    import torch

    head = getattr(module, "get_output_embeddings", lambda: None)()
    if not isinstance(head, torch.nn.Linear):
        return None
    return next(name for name, part in module.named_modules() if part is head)


def _is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def _separate_tied(module: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Module, str]]:
    """Give every further owner of a tied parameter one of its own, as it is before a checkpoint is loaded.

    Returns (owner, name, first owner, its name) to tie them again.
    """
    import torch

    first: dict[int, tuple[torch.nn.Module, str]] = {}
    separated = []
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in first:
                first[id(parameter)] = (part, name)
            else:
                separated.append((part, name, *first[id(parameter)]))
                part._parameters[name] = torch.nn.Parameter(
                    torch.empty_like(parameter), requires_grad=parameter.requires_grad
                )
    return separated


def logits_parts(strategies: Sequence[Strategy]) -> int:
    """Ranks over which logits stay cut along the vocabulary."""
    return max([s.layout.tp for s in strategies if isinstance(s, TensorParallel) and s.loss_parallel], default=1)


def sharded_and_whole_apart(make: Callable[[list], Any]) -> Callable[[list], Any]:
    """`make`, with an optimizer of its own for each kind of parameters: whole ones and DTensors of each mesh.

    foreach and fused kernels take lists of one kind ("got mixed torch.Tensor and DTensor", "different device meshes").
    """

    def make_apart(parameters: Sequence[Any]) -> Any:
        from torch.distributed.tensor import DTensor

        from metapeak.strategies.optimizers.several import SeveralOptimizers

        kinds: dict[Any, list] = {}
        for given in parameters:
            parameter = given[1] if isinstance(given, tuple) else given
            kinds.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(given)
        if len(kinds) <= 1:
            return make(list(parameters))
        return SeveralOptimizers([make(group) for group in kinds.values()])

    return make_apart
