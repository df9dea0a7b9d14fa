"""The whole life of a job: load, training steps, evaluation, generation, save, on the device and beside it on the host.

What it changes: nothing in the training steps. What follows them is run on the model built anew and put behind the
recorded steps, where parameters, buffers, optimizer states and the last batch are still alive (tracer/life.py).
Where each byte comes from: the Hugging Face Trainer's evaluation loop, `generate` with the model's own cache, the state
dicts of torch, FSDP and PEFT, all run on the phantom GPU. Bytes of the host: rules below and in loading.py.
Not modelled: optimizer states in a checkpoint (each is copied to the host alone), metrics, beams, sampling.
Sources: transformers 5.24 trainer.py; training_args.py for defaults; torch serialization.py (_save copies a storage to
the host, writes it and lets it go); safetensors 0.8 torch.py (save_file holds all tensors of a file on the host).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from metapeak.strategies.loading import WAYS, Loading
from metapeak.tracer.errors import InputError, UnknownName
from metapeak.tracer.joined import followed_by
from metapeak.tracer.liveness import Category, Phase

if TYPE_CHECKING:
    import torch

    from metapeak.strategies.base import Strategy
    from metapeak.strategies.parallel.layout import Layout
    from metapeak.tracer.graph import StepGraph
    from metapeak.tracer.kernels import KernelWorkspaces
    from metapeak.tracer.life import Life
    from metapeak.tracer.liveness import Liveness

# per_device_eval_batch_size of transformers' TrainingArguments.
EVAL_BATCH_SIZE = 8
# Batches of an evaluation: what is kept of one and added to the next shows from the second on.
EVAL_BATCHES = 2
# The options that make a Lifecycle.
LIFECYCLE = (
    "evaluate", "eval_batch_size", "eval_batches", "eval_logits", "eval_accumulation_steps", "generate", "prompt_len",
    "save", "load",
)  # fmt: skip
SAVES = ("full", "full-on-device", "sharded", "adapter", "merged")
_TEXTS, _IMAGES = ("input_ids", "decoder_input_ids", "labels"), ("pixel_values", "pixel_values_videos")
# Tensors of one file at most: max_shard_size of save_pretrained, 50 GB.
SHARD_BYTES = 50 * 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Lifecycle:
    """What of a job's life is asked for beside its training steps.

    `evaluate` with `eval_batch_size` samples, `eval_batches` of them; `eval_logits`: they are kept for metrics, and go
    to the host every `eval_accumulation_steps`. `generate` new tokens after `prompt_len` (None: seq_len) of as many
    sequences as an evaluation has. `save`: one of SAVES. `load`: how weights come, one of loading.WAYS (None:
    as `way_of` says).
    """

    evaluate: bool = False
    eval_batch_size: int | None = None
    eval_batches: int | None = None
    eval_logits: bool = False
    eval_accumulation_steps: int | None = None
    generate: int | None = None
    prompt_len: int | None = None
    save: str | None = None
    load: str | None = None

    @property
    def after_training(self) -> bool:
        """Whether anything follows the training steps."""
        return self.evaluates or self.generate is not None or self.save is not None

    @property
    def is_training_alone(self) -> bool:
        """Whether nothing but training steps is asked for."""
        return not self.after_training and self.load is None

    @property
    def evaluates(self) -> bool:
        return self.evaluate or self.eval_logits or self.eval_accumulation_steps is not None or bool(self.eval_batches)

    @property
    def sequences(self) -> int:
        return self.eval_batch_size or EVAL_BATCH_SIZE

    def life(self) -> Life:
        from metapeak.tracer.life import Evaluation, Life

        evaluation = Evaluation(
            batches=batches_of(self),
            keep_logits=self.eval_logits,
            accumulation_steps=self.eval_accumulation_steps,
        )
        return Life(evaluation=evaluation if self.evaluates else None, new_tokens=self.generate, save=self.save)

    def prompt(self, built: Any, resolved: Any, batch: Any) -> Mapping[str, Any] | None:
        """The inputs of `generate`, on the CPU; None without. Raises InputError for a model without tokens."""
        if self.generate is None:
            return None
        from metapeak.tracer.inference import check_generates, generation_batch

        if built.batch is not None or built.package is not None or not isinstance(batch, Mapping):
            raise InputError(f"generate: {resolved.id} is no model of transformers whose prompt is known.")
        check_generates(built.module, resolved.id)
        if "input_features" in batch:
            raise InputError(
                f"generate: {type(built.module).__name__} decodes speech by rules on the tokens' values, which are not "
                "known here. Leave --generate out."
            )
        if any(name in batch for name in _IMAGES):  # their places are in the batch's own tokens
            if self.prompt_len is not None:
                raise InputError("prompt_len: the prompt of a model with images is the batch's (--seq-len).")
            return {name: tensor for name, tensor in batch.items() if name != "labels"}
        return generation_batch(built.module, resolved.task, self.sequences, self.tokens_before(batch))

    def tokens_before(self, batch: Any) -> int:
        """Tokens of a generation's prompt: as asked, else as many as the batch's text has."""
        return self.prompt_len or next(batch[name].shape[-1] for name in _TEXTS if name in batch)


def check_lifecycle(life: Lifecycle, strategies: Sequence[Strategy]) -> None:
    """Raise InputError or UnknownName for what cannot be asked, or for options that nothing would read."""
    names = ("eval_batch_size", "eval_batches", "eval_accumulation_steps", "generate", "prompt_len")
    for name in names:
        value = getattr(life, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 24):
            raise InputError(f"{name} is {value!r}, but has to be a whole number from 1 to {1 << 24}.")
    if life.save is not None and life.save not in SAVES:
        raise UnknownName("save", life.save, SAVES)
    if life.load is not None and life.load not in WAYS:
        raise UnknownName("load", life.load, WAYS)
    if life.eval_batch_size is not None and not life.evaluates and life.generate is None:
        raise InputError("eval_batch_size is read by an evaluation or a generation: give --evaluate or --generate N.")
    if life.eval_accumulation_steps is not None and not life.eval_logits:
        raise InputError("eval_accumulation_steps moves kept logits to the host: give --eval-logits too.")
    if life.prompt_len is not None and life.generate is None:
        raise InputError("prompt_len is read by a generation: give --generate N.")
    adapters = any(strategy.name in ("lora", "qlora") for strategy in strategies)
    sharded = next((strategy.name for strategy in strategies if strategy.layout is not None), None)
    if life.save in ("adapter", "merged") and not adapters:
        raise InputError(f"save {life.save}: there are no adapters; give --method lora or qlora.")
    if life.save == "merged" and sharded is not None:
        raise InputError(f"save merged: PEFT merges into whole layers, which {sharded} has not on one rank.")
    scheme = next((strategy.scheme for strategy in strategies if hasattr(strategy, "scheme")), None)
    if life.save == "merged" and scheme is not None:
        raise InputError(
            f"save merged: a merge into {scheme} layers unpacks and packs them with kernels of their library, "
            "which are not run here. Give --save adapter."
        )
    if life.save in ("sharded", "full-on-device") and sharded in (None, "ddp"):
        raise InputError(f"save {life.save}: nothing is sharded here; give --save full.")


def notes_of(life: Lifecycle, batch: Any, *, own_batch: bool) -> list[str]:
    """Sentences on what was assumed; `batch` is the training step's, `own_batch` whether it is the user's."""
    said = []
    if life.evaluates:
        size = "" if life.eval_batch_size else ", the Hugging Face Trainer's default"
        of = "of the function's own" if own_batch else f"of {life.sequences}{size}"
        kept = (
            "their logits kept for metrics"
            + (
                f", on the host every {life.eval_accumulation_steps} batches"
                if life.eval_accumulation_steps
                else " on the GPU until the end: more batches keep more (--eval-batches, --eval-accumulation-steps)"
            )
            if life.eval_logits
            else "only losses kept (prediction_loss_only; --eval-logits keeps logits)"
        )
        said.append(
            "evaluation between steps as the Hugging Face Trainer's evaluation_loop: "
            f"{batches_of(life)} batches {of}, {kept}"
        )
    if life.generate is not None:
        said.append(
            f"generation of {life.generate} tokens after {life.tokens_before(batch)} by generate, {life.sequences} "
            "sequences, greedy, none ends early"
        )
    if life.save is not None:
        said.append(f"save {life.save}: tensors go to the host one by one; optimizer states each alone")
    return said


def lived_on(
    liveness: Liveness, later: StepGraph, strategies: Sequence[Strategy], workspaces: KernelWorkspaces | None = None
) -> Liveness:
    """The training steps, and behind them what was recorded after them. Raises InputError where they do not meet.

    FSDP1 with `use_orig_params` keeps a unit's sharded gradient in `flat_param.grad` until a forward or a state dict
    begins (torch/distributed/fsdp/_flat_param.py, _reset_flat_param_grad_info_if_needed).
    """
    recorded = later.liveness()
    if workspaces is not None:
        recorded = workspaces.inside_kernels(recorded)
    fsdp1 = any(strategy.name == "fsdp1" for strategy in strategies)
    try:
        return followed_by(liveness, recorded, drops_gradients=fsdp1)
    except ValueError as error:
        raise InputError(f"Evaluation, generation and saving are not known for this step: {error}.") from error


def batches_of(life: Lifecycle) -> int:
    return life.eval_batches or EVAL_BATCHES


def way_of(life: Lifecycle, layout: Layout | None) -> str:
    """How weights come: as asked, else to the host first where FSDP shards them, else straight to the device."""
    return life.load or ("cpu" if layout is not None and layout.dp_shard > 1 else "device")


def load_peak_bytes(loading: Loading, way: str, layout: Layout | None) -> int:
    """Most bytes of a device while weights come; 0 where shards are all that ever comes to it."""
    sharded = layout is not None and (layout.tp > 1 or (layout.dp_shard > 1 and way == "cpu"))
    return 0 if sharded else loading.device_peak_bytes


def with_loading(liveness: Liveness, peak_bytes: int) -> Liveness:
    """The liveness with what lies beside the weights while they come, at the last operation of loading."""
    last = int(np.flatnonzero(liveness.op_phase == Phase.LOAD)[-1])
    beside = peak_bytes - int(liveness.live_bytes()[last])
    if beside <= 0:
        return liveness
    return liveness.with_storages(
        birth=[last], death=[last + 1], nbytes=[beside], category=Category.TEMPORARY, module=[0], shapes=[(beside,)],
        dtype="uint8",
    )  # fmt: skip


def written_bytes(life: Lifecycle, module: torch.nn.Module) -> int:
    """Bytes of what is saved of the prepared module, by all ranks."""
    parameters = {id(tensor): tensor for tensor in module.parameters()}.values()
    adapters = life.save == "adapter"
    return sum(tensor.numel() * tensor.element_size() for tensor in parameters if tensor.requires_grad or not adapters)


def host_memory(
    life: Lifecycle,
    loading: Loading,
    liveness: Liveness,
    written: int,
    kept: int,
    layout: Layout | None,
    offloaded: int = 0,
) -> dict[str, dict[str, Any]]:
    """Bytes on the host by phase: `host_bytes`, `pinned_bytes` of them pinned, and `why`.

    `offloaded`: what a strategy keeps there of shards and states while it trains.
    """
    inputs = liveness.category == Category.INPUT
    batch_bytes = int(liveness.nbytes[inputs & (liveness.op_phase[liveness.birth] == Phase.LOAD)].sum())
    sharded = layout is not None and layout.dp_shard > 1
    rule = loading.rule + (
        " (of rank 0: cpu_ram_efficient_loading)" if way_of(life, layout) == "cpu" and sharded else ""
    )
    found = {"load": _host(loading.host_bytes, 0, rule)}
    why = "the next batch in pinned memory (dataloader_pin_memory)"
    offloads = " and what is offloaded, how much of it pinned is the engine's" if offloaded else ""
    found["training"] = _host(batch_bytes + offloaded, batch_bytes, why + offloads)
    if life.evaluates:
        # A second portion is concatenated to the first: both and the result are there at once.
        joins = life.eval_accumulation_steps is not None and life.eval_accumulation_steps < batches_of(life)
        why = "losses, logits and labels of the evaluation as arrays" + (", and their concatenation" if joins else "")
        found["evaluation"] = _host(kept * (2 if joins else 1), 0, why)
    if life.save is not None:
        if sharded and life.save == "full":
            why = "the whole state dict on the host of rank 0 (offload to CPU, rank0_only)"
            found["save"] = _host(written, 0, why)
        elif life.save != "full-on-device":
            why = "the tensors of one file, at most 50 GB (max_shard_size), on the host while it is written"
            found["save"] = _host(min(written, SHARD_BYTES), 0, why)
    return found


def _host(nbytes: int, pinned: int, why: str) -> dict[str, Any]:
    return {"host_bytes": nbytes, "pinned_bytes": pinned, "why": why}
