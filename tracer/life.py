"""What a job does between training steps, run on the phantom GPU: evaluation, generation, saving.

Note [Evaluation]
    The loop is that of the Hugging Face Trainer with its variables: losses, logits and labels of one batch stay until
    the next batch's take their names, and `EvalLoopContainer.add` concatenates what is kept with what comes (old, new
    and both together are there at once). Logits are kept only with `keep_logits`, which a Trainer does when it has
    `compute_metrics`; with several ranks every rank gathers those of all (`gather_for_metrics`), and
    `accumulation_steps` moves them to the host. Without it only the losses are kept, but the model's outputs live until
    the batch is done.
    Source: transformers 5.24 trainer.py (evaluation_loop, prediction_step), trainer_pt_utils.py (EvalLoopContainer).

Note [Generation]
    `generate` itself runs, with the model's own cache, greedily, and no sequence ends early. Of many new tokens the
    first two and the last two are run: between them the cache is put to the length that it has by then. Where a cache
    has no length (states alone, a class of the model's own, an encoder's beside the decoder's), every token is run.

Note [Saving]
    What is written goes to the host tensor by tensor; the device holds what gathering or merging makes.
    full, sharded: `get_model_state_dict` for modules of DTensors (accelerate's save_fsdp_model for FSDP2), the state
    dict types of FSDP1 (sharded: over a mesh, where a weight is cloned whole before it is cut); else the references
    that `state_dict()` returns. adapter: PEFT's `get_peft_model_state_dict`. merged: PEFT's `merge_and_unload`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from metapeak.tracer.capture import (
    batch_to_phantom,
    distributed,
    load_step,
    move_to_phantom,
    named_tensors,
    step_errors,
)
from metapeak.tracer.dispatch import unrecorded
from metapeak.tracer.errors import InputError
from metapeak.tracer.graph import StepGraph
from metapeak.tracer.liveness import Category, Phase
from metapeak.tracer.phantom import DEVICE, DEVICE_NAME
from metapeak.tracer.recorder import Recorder
from metapeak.tracer.training_loop import TrainingLoop, autocast_forward

# New tokens that are all run; of more the first and the last TOKENS_AT_AN_END.
TRACED_TOKENS, TOKENS_AT_AN_END = 8, 2
# New tokens at most of a model whose cache cannot be put to a length.
TRACED_ONE_BY_ONE = 256
# What a Trainer calls labels, and what it leaves out of a model's outputs.
_LABELS = ("labels",)
_IGNORED = ("past_key_values", "cache", "loss")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Note [Evaluation]: how many batches, whether logits are kept, and after how many they go to the host."""

    batches: int
    keep_logits: bool = False
    accumulation_steps: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """What follows the training steps; None is left out. `new_tokens` of Note [Generation], `save` of Note [Saving]:
    full, full-on-device, sharded, adapter or merged.
    """

    evaluation: Evaluation | None = None
    new_tokens: int | None = None
    save: str | None = None


def record_life(
    model: torch.nn.Module,
    life: Life,
    *,
    batch: Any,
    prompt: Mapping[str, torch.Tensor] | None,
    compute_loss: Callable[[torch.nn.Module, Any], torch.Tensor],
    distribute: Callable[[torch.nn.Module], torch.nn.Module] | None,
    loop: TrainingLoop,
    iteration: int,
    progress: Callable[[str], None] = lambda what: None,
) -> tuple[StepGraph, dict[str, int]]:
    """(what follows training on a model on meta, recorded as phases of `iteration`; assumptions of the answers).

    Arguments: the model as it is before training, what it goes through, the batch of an evaluation and the inputs of
    `generate` (both on the CPU), the loss function, what shards the module, the loop that it is trained by.
    Raises TraceError or InputError, as `record_training_step`.
    """
    move_to_phantom(model)
    if distribute is not None:
        model = distributed(model, distribute)
    model.eval()
    recorder = Recorder(model, outermost=record_life.__code__)
    load_step(recorder, model, {})
    with step_errors(recorder), recorder.recording(), contextlib.ExitStack() as around:
        around.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", FutureWarning)  # of what the libraries themselves call
        if loop.autocast is not None and loop.autocast_region == "forward":
            around.enter_context(autocast_forward(model, loop.autocast))
        if life.evaluation is not None:
            with recorder.phase(Phase.EVALUATION, iteration), _autocast_loss(loop):
                progress("evaluation")
                _evaluate(recorder, model, batch, compute_loss, life.evaluation)
        if life.new_tokens is not None:
            with recorder.phase(Phase.GENERATION, iteration), torch.no_grad():
                progress("generation")
                _generate(recorder, model, prompt, life.new_tokens)
        if life.save is not None:
            with recorder.phase(Phase.SAVE, iteration), torch.no_grad():
                progress("saving")
                _save(model, life.save)
        around.close()
        recorder.close()
    return recorder.finish(), dict(recorder.mode.assumptions)


def _autocast_loss(loop: TrainingLoop):
    inside = loop.autocast is not None and loop.autocast_region == "loss"
    return torch.autocast(DEVICE_NAME, dtype=loop.autocast) if inside else contextlib.nullcontext()


# -- evaluation --------------------------------------------------------------------------------------------------------


def _evaluate(recorder: Recorder, model, batch: Any, compute_loss: Callable, spec: Evaluation) -> None:
    from transformers.trainer_pt_utils import EvalLoopContainer

    all_losses, all_logits, all_labels = (EvalLoopContainer(padding_index=-100) for _ in range(3))
    kept = (all_losses, all_logits, all_labels)
    for step in range(spec.batches):
        inputs = _loaded(recorder, batch)
        losses, logits, labels = _prediction_step(model, inputs, compute_loss, spec.keep_logits)
        losses = _gathered(losses.repeat(_samples(inputs)))
        all_losses.add(losses)
        if logits is not None:
            logits = _gathered(logits)
            all_logits.add(logits)
        if labels is not None:
            labels = _gathered(labels)
            all_labels.add(labels)
        if spec.accumulation_steps is not None and (step + 1) % spec.accumulation_steps == 0:
            _to_host(recorder, kept)
            del losses, logits, labels, inputs
    _to_host(recorder, kept)


def _prediction_step(model, inputs: Any, compute_loss: Callable, keep_logits: bool) -> tuple[Any, Any, Any]:
    """(loss, logits, labels) as Trainer.prediction_step returns them; the outputs live until then."""
    outputs: list[Any] = []
    handle = model.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        with torch.no_grad():
            loss = compute_loss(model, inputs).detach().mean()
    finally:
        handle.remove()
    if not keep_logits or not outputs:
        return loss, None, None
    output = outputs.pop()
    if isinstance(output, Mapping):
        logits = tuple(value for name, value in output.items() if name not in _IGNORED)
    else:
        logits = tuple(output[1:]) if isinstance(output, (tuple, list)) else (output,)
    logits = tuple(value.detach() for value in logits if isinstance(value, torch.Tensor))
    labels = tuple(inputs[name].detach() for name in _LABELS if isinstance(inputs, Mapping) and name in inputs)
    return loss, _one_of(logits), _one_of(labels)


def _one_of(values: tuple) -> Any:
    return None if not values else values[0] if len(values) == 1 else values


def _loaded(recorder: Recorder, batch: Any) -> Any:
    """The batch on the device, from now on."""
    inputs = batch_to_phantom(batch)
    for name, tensor in named_tensors(inputs):
        recorder.load(tensor, name, Category.INPUT)
    return inputs


def _samples(inputs: Any) -> int:
    return next(tensor.shape[0] for _, tensor in named_tensors(inputs) if tensor.dim())


def _gathered(tensors: Any) -> Any:
    """Those of all ranks, as accelerate's `_gpu_gather` makes them: one new tensor each."""
    group = torch.distributed
    if not group.is_initialized() or group.get_world_size() == 1:
        return tensors
    if isinstance(tensors, tuple):
        return tuple([_gathered(tensor) for tensor in tensors])
    tensor = tensors.contiguous()
    ranks = group.get_world_size()
    whole = torch.empty(ranks * tensor.numel(), dtype=tensor.dtype, device=DEVICE)
    group.all_gather_into_tensor(whole, tensor)
    return whole.view(-1, *tensor.size()[1:])


def _to_host(recorder: Recorder, containers: Sequence[Any]) -> None:
    """`to_cpu_and_numpy` without the arrays, whose bytes are noted: copies to the host take nothing of the device.
    NumPy has no bfloat16: those become float32 (nested_numpify).
    """
    for container in containers:
        for tensor in tree_leaves(container.tensors):
            if isinstance(tensor, torch.Tensor):
                itemsize = 4 if tensor.dtype is torch.bfloat16 else tensor.element_size()
                recorder.graph.host_bytes += tensor.numel() * itemsize
        container.tensors = None


# -- generation --------------------------------------------------------------------------------------------------------


def _generate(recorder: Recorder, model, prompt: Mapping[str, torch.Tensor], new_tokens: int) -> None:
    with _whole_for_generation(model) as inner:
        inputs = _loaded(recorder, prompt)  # a caller holds them until all is generated
        if new_tokens <= TRACED_TOKENS or not _cache_has_a_length(inner, prompt):
            if new_tokens > TRACED_ONE_BY_ONE:
                raise InputError(
                    f"generate {new_tokens}: the cache of {type(inner).__name__} cannot be put to a length, so every "
                    f"token is run, and at most {TRACED_ONE_BY_ONE} are."
                )
            _call_generate(inner, inputs, new_tokens)
            return
        _call_generate(inner, inputs, TOKENS_AT_AN_END)
        tokens = prompt["input_ids"].shape[1] + new_tokens - TOKENS_AT_AN_END
        ids = torch.cat([prompt["input_ids"], prompt["input_ids"][:, -1:].expand(-1, new_tokens)], dim=1)[:, :tokens]
        longer = {"input_ids": ids.contiguous()}
        if "attention_mask" in prompt:
            longer["attention_mask"] = torch.ones_like(longer["input_ids"])
        cache = _cache_after(recorder, inner, longer)
        _call_generate(inner, _loaded(recorder, longer), TOKENS_AT_AN_END, cache=cache)


def _call_generate(model, inputs: Mapping[str, Any], new_tokens: int, **more: Any) -> None:
    model.generate(
        **inputs, **more, max_new_tokens=new_tokens, do_sample=False, num_beams=1, eos_token_id=None, pad_token_id=0,
        use_cache=True,
    )  # fmt: skip


def _cache_after(recorder: Recorder, model, inputs: Mapping[str, torch.Tensor]) -> Any:
    """The cache as it is before the last of these tokens; two single tokens bring windows to their decoding size."""
    from metapeak.tracer.inference import cache_arguments, tensors_in

    ids = batch_to_phantom(inputs["input_ids"])
    cache = cache_arguments(model)["cache"]
    cut = ids.shape[1] - 1
    with unrecorded():
        for piece in (ids[:, : cut - 2], ids[:, cut - 2 : cut - 1], ids[:, cut - 1 : cut]):
            model(input_ids=piece, cache=cache, use_cache=True, **_last_logits(model))
    for number, tensor in enumerate(tensors_in(cache)):
        recorder.load(tensor, f"cache.{number}", Category.ACTIVATION)
    return cache


def _cache_has_a_length(model, prompt: Mapping[str, torch.Tensor]) -> bool:
    """Whether the model's cache is transformers' own and counts the tokens that it was given."""
    from metapeak.tracer.inference import cache_arguments

    cache = cache_arguments(model).get("cache")
    if cache is None or model.config.is_encoder_decoder:
        return False
    with unrecorded():
        ids = batch_to_phantom(prompt["input_ids"][:, :2])
        model(input_ids=ids, cache=cache, use_cache=True, **_last_logits(model))
    try:
        return cache.get_seq_length() == ids.shape[1]
    except ValueError:  # raised by a cache of states alone
        return False


def _last_logits(model) -> dict[str, int]:
    import inspect

    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


@contextlib.contextmanager
def _whole_for_generation(model) -> Iterator[Any]:
    """The module whose `generate` a script calls: inside DDP's wrapper; FSDP1's parameters gathered, as the
    Seq2SeqTrainer does (FSDP.summon_full_params).
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            yield model.module
    elif isinstance(model, torch.nn.parallel.DistributedDataParallel):
        yield model.module
    else:
        yield model


# -- saving ------------------------------------------------------------------------------------------------------------


def _save(model, how: str) -> None:
    if how == "merged":
        merged = _unwrapped(model).merge_and_unload()
        _write(merged.state_dict())
    elif how == "adapter":
        import peft

        with _fsdp1_state_dicts(model, full=True, offload=True):
            _write(peft.get_peft_model_state_dict(_unwrapped(model)))
    else:
        _write(_state_dict(model, how))


def _unwrapped(model):
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def _state_dict(model, how: str) -> Mapping[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel

    full, offload = how != "sharded", how != "full-on-device"
    if isinstance(model, FullyShardedDataParallel):
        with _fsdp1_state_dicts(model, full=full, offload=offload):
            return model.state_dict()
    if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=full, cpu_offload=offload))
    return _unwrapped(model).state_dict()


@contextlib.contextmanager
def _fsdp1_state_dicts(model, *, full: bool, offload: bool) -> Iterator[None]:
    """State dicts of a module under FSDP1 are of that kind, as accelerate's save_fsdp_model asks for them, adapters'
    too; those of other modules are as they are.
    """
    from torch.distributed import fsdp

    if not isinstance(model, fsdp.FullyShardedDataParallel):
        yield
        return
    if full:
        kind, config = fsdp.StateDictType.FULL_STATE_DICT, fsdp.FullStateDictConfig(offload, rank0_only=offload)
    else:
        kind, config = fsdp.StateDictType.SHARDED_STATE_DICT, fsdp.ShardedStateDictConfig(offload_to_cpu=True)
    with _flat_parameters_on_host(), fsdp.FullyShardedDataParallel.state_dict_type(model, kind, config):
        yield


@contextlib.contextmanager
def _flat_parameters_on_host() -> Iterator[None]:
    """FSDP1 puts the CPU's copy of a gathered unit under the device's parameter, which a phantom one cannot take: here
    the gathered storage is given up while the real one would be on the host, and taken again after. A clone of what
    was given up is one on the host, too.

    Source: torch/distributed/fsdp/_flat_param.py, FlatParamHandle.to_cpu.
    """
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    @contextlib.contextmanager
    def to_cpu(handle):
        handle._free_unsharded_flat_param()
        try:
            yield
        finally:
            handle._use_unsharded_flat_param(handle._alloc_padded_unsharded_flat_param())

    def clone(tensor, *args, **kwargs):
        return real_clone(tensor, *args, **kwargs) if tensor.untyped_storage().nbytes() else tensor

    original, real_clone = FlatParamHandle.to_cpu, torch.Tensor.clone
    FlatParamHandle.to_cpu, torch.Tensor.clone = to_cpu, clone
    try:
        yield
    finally:
        FlatParamHandle.to_cpu = original
        del torch.Tensor.clone  # the C base class has it


def _write(state: Mapping[str, Any]) -> None:
    """Copied to the host tensor by tensor, as torch.save and safetensors do with tensors of a GPU."""
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value = value.full_tensor() if hasattr(value, "full_tensor") and value.device.type != "cpu" else value
            value.cpu()
