"""Run a model on the phantom GPU as generation does: a prefill, then tokens one by one, with its real cache.

The model, its own cache class and `no_grad` are real. What is held between two forwards is then read off the cache's
storages (kv_cache.py), what a forward needs beside it off the recorded graph.

Note [What generate does]
    `generate` makes the cache (GenerationMixin._prepare_cache_for_generation): a DynamicCache of the decoder's config,
    an EncoderDecoderCache of two for encoder-decoder models, none where the class brings its own. It asks for logits of
    the last position only where the forward takes `logits_to_keep`. Encoders run once, before the first token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from metapeak.tracer import (  # noqa: F401  (they register their operators)
    attention,
    collectives,
    composites,
    phantom_ops,
)
from metapeak.tracer.batches import make_batch
from metapeak.tracer.capture import batch_to_phantom, forget_recording, load_step, move_to_phantom, step_errors
from metapeak.tracer.errors import InputError
from metapeak.tracer.graph import StepGraph
from metapeak.tracer.kernels import Device, KernelWorkspaces
from metapeak.tracer.liveness import Category, Phase
from metapeak.tracer.phantom import PhantomTensor, local_tensor
from metapeak.tracer.recorder import Recorder
from metapeak.tracer.sequences import ordinary_token_ids
from metapeak.tracer.spec import BatchSpec

# Not what a forward needs: it is there before and after.
_RESIDENT = (Category.PARAMETER, Category.BUFFER, Category.INPUT)


@dataclass(frozen=True, kw_only=True, eq=False)
class Inference:
    """A recorded generation: the graph (iteration 1 is the prefill, later ones are tokens), the cache after it, and the
    rows of the storages that the cache held after the prefill.
    """

    graph: StepGraph
    cache: Any
    cache_rows: frozenset[int]
    assumptions: Mapping[str, int]

    def activation_bytes(self, device: Device | None = None) -> int:
        """Most bytes that the prefill holds beside weights, buffers, inputs and the cache that it leaves; with the
        workspaces of its kernels on `device` (None: without).
        """
        liveness = self.graph.liveness()
        if device is not None:
            liveness = KernelWorkspaces.of(self.graph, device).added_to(liveness)
        counted = ~np.isin(liveness.category, [int(category) for category in _RESIDENT])
        counted[list(self.cache_rows)] = False
        deltas = np.zeros(liveness.num_ops + 2, dtype=np.int64)
        np.add.at(deltas, liveness.birth[counted], liveness.nbytes[counted])
        np.add.at(deltas, liveness.death[counted], -liveness.nbytes[counted])
        live = np.cumsum(deltas)[: liveness.num_ops]
        prefill = live[liveness.op_iteration == 1]
        return int(prefill.max()) if len(prefill) else 0


def check_generates(model: torch.nn.Module, name: str) -> None:
    """Raise InputError for a model that generates no tokens."""
    can_generate = getattr(model, "can_generate", None)
    if can_generate is None or not can_generate():
        raise InputError(
            f"{name} is a {type(model).__name__}, which generates no tokens: it has no cache of keys and values. Serve "
            "a decoder or an encoder-decoder (task causal-lm, seq2seq-lm, image-text-to-text, speech-seq2seq)."
        )


def record_inference(
    model: torch.nn.Module,
    batch: Mapping[str, torch.Tensor],
    *,
    decode_tokens: int = 1,
    logits_rows: int = 1,
    after_token: Callable[[Any], None] = lambda cache: None,
) -> Inference:
    """Prefill the batch and decode `decode_tokens` tokens, recorded, without gradients.

    Arguments: a model on meta or already on the phantom GPU, keyword arguments of its forward on the CPU (no labels),
    how many last positions of the prefill get logits where the forward can leave the others out, and what looks at
    the cache after each decoded token.
    Raises TraceError where it cannot run, InputError where the model has no cache.
    """
    if not isinstance(local_tensor(next(model.parameters())), PhantomTensor):
        move_to_phantom(model)
    forget_recording(model)
    model.eval()
    on_device = batch_to_phantom(batch)
    recorder = Recorder(model, outermost=_generate.__code__)
    load_step(recorder, model, on_device)
    with step_errors(recorder), recorder.recording(), torch.no_grad():
        cache, rows = _generate(recorder, model, on_device, decode_tokens, logits_rows, after_token)
        recorder.close()
    return Inference(graph=recorder.finish(), cache=cache, cache_rows=rows, assumptions=dict(recorder.mode.assumptions))


def record_forward(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> Inference:
    """One forward of any module without gradients, recorded; there is no cache. Raises as `record_inference`."""
    move_to_phantom(module)
    on_device = batch_to_phantom(inputs)
    recorder = Recorder(module, outermost=record_forward.__code__)
    load_step(recorder, module, on_device)
    with step_errors(recorder), recorder.recording(), torch.no_grad():
        with recorder.phase(Phase.FORWARD, 1):
            output = module(**on_device)
        del output
        recorder.close()
    return Inference(
        graph=recorder.finish(), cache=None, cache_rows=frozenset(), assumptions=dict(recorder.mode.assumptions)
    )


def generation_batch(model: torch.nn.Module, task: str | None, sequences: int, tokens: int) -> dict[str, torch.Tensor]:
    """Inputs of a generation's first forward: [sequences, tokens] ids without labels, on the CPU.

    An encoder-decoder gets `tokens` in its decoder, and its own input besides (`tokens` too where that is text).
    """
    takes = inspect.signature(model.forward).parameters
    ids = ordinary_token_ids(model, sequences, tokens)
    if not model.config.is_encoder_decoder:
        batch = {"input_ids": ids}
        return batch | ({"attention_mask": torch.ones_like(ids)} if "attention_mask" in takes else {})
    batch = make_batch(model, task or "seq2seq-lm", BatchSpec(batch_size=sequences, seq_len=tokens, target_len=tokens))
    tensors = {name: tensor for name, tensor in batch.tensors.items() if name != "labels"}
    return tensors | {"decoder_input_ids": ids}


def _generate(recorder: Recorder, model, batch: Mapping[str, Any], decode_tokens: int, logits_rows: int, look):
    """(cache, rows of its storages after the prefill)."""
    takes = inspect.signature(model.forward).parameters
    inputs = dict(batch) | {"use_cache": True} | cache_arguments(model)
    if "logits_to_keep" in takes:
        inputs["logits_to_keep"] = logits_rows
    with recorder.phase(Phase.FORWARD, 1):
        output = model(**inputs)
    cache = _cache_of(output, model)
    rows = frozenset(
        row for tensor in tensors_in(cache) if (row := tensor.untyped_storage().__dict__.get("row")) is not None
    )
    encoded = getattr(output, "encoder_last_hidden_state", None)
    del output, inputs
    for number in range(decode_tokens):
        with recorder.phase(Phase.FORWARD, 2 + number):
            model(**_next_token(batch, encoded, number), use_cache=True, cache=cache)
        look(cache)
    return cache, rows


def cache_arguments(model) -> dict[str, Any]:
    """See Note [What generate does]."""
    from transformers import DynamicCache, EncoderDecoderCache

    if not model._supports_default_dynamic_cache():
        return {}
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, DynamicCache(config=config))
    return {"cache": cache}


def _cache_of(output: Any, model) -> Any:
    cache = getattr(output, "cache", None)
    if cache is None:
        raise InputError(
            f"{type(model).__name__} returned no cache of transformers' kind, so what a sequence keeps is not known."
        )
    return cache


def _next_token(batch: Mapping[str, Any], encoded: torch.Tensor | None, number: int) -> dict[str, Any]:
    """The forward's arguments for one more token; the encoder's output is kept, as generate keeps it."""
    text = "decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"
    token = batch[text][:, -1:]
    inputs = {text: token}
    mask = batch.get("attention_mask")
    if encoded is not None:
        from transformers.modeling_outputs import BaseModelOutput

        inputs["encoder_outputs"] = BaseModelOutput(last_hidden_state=encoded)
        if mask is not None:
            inputs["attention_mask"] = mask
    elif mask is not None:
        inputs["attention_mask"] = torch.cat([mask, mask.new_ones(mask.size(0), 1 + number)], dim=-1)
    return inputs


def tensors_in(cache: Any) -> list[torch.Tensor]:
    """Every tensor of one or more dimensions that a cache holds, in its layers, their lists and mappings."""
    from transformers import cache_utils

    parts = (cache_utils.Cache, cache_utils.CacheLayerMixin, cache_utils.LinearAttentionCacheLayerMixin)
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    # A loop, not a function that calls itself: that would be a cycle which keeps the tensors alive in a recording,
    # where the garbage collector is off.
    left = [cache]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.dim():  # numbers (a window as a tensor, a length) are bookkeeping of a few bytes
                found.append(value)
        elif isinstance(value, Mapping):
            left += reversed(list(value.values()))
        elif isinstance(value, (list, tuple)):
            left += reversed(value)
        elif isinstance(value, parts):
            left += reversed(list(vars(value).values()))
    return found
