"""The largest forward of an engine, traced: a prefill of its batch of tokens, and the sampler where it samples.

What it changes: nothing; the model runs on the phantom GPU without gradients and in evaluation mode.
Where each byte comes from: the recorded prefill's storages beside weights and the cache it leaves, with the kernels'
workspaces; the sampler is the torch program below, recorded as well.
Not modelled: an engine's fused kernels (they hold the same tensors at the peak of a gated feed-forward: its two halves
and their product), dummy images of a profile run, compiled buffers.
Sources: vllm v1/worker/gpu_model_runner.py (_dummy_run, _dummy_sampler_run), v1/sample/sampler.py,
v1/sample/ops/topk_topp_sampler.py for the order of the sampler's steps.

Note [Reference kernels of linear attention]
    Without their kernels' packages, transformers runs convolutions, scans and delta rules as reference programs, in
    chunks or token by token: 8,192 tokens would take minutes. Their tensors are a constant and a part a token, so two
    short prefills are traced and the line through them is used. It is an upper estimate of the fused kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from metapeak.strategies.serving.engines import EngineSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from metapeak.tracer.kernels import Device
    from metapeak.tracer.kv_cache import CacheLayout

# Tokens of a short prefill where the config names no chunk: the delta rule's chunk of transformers.
CHUNK_TOKENS = 64


def prefill_activation_bytes(
    model: torch.nn.Module,
    make_batch: Callable[[int, int], Mapping[str, torch.Tensor]],
    layout: CacheLayout,
    settings: EngineSettings,
    max_model_len: int,
    device: Device,
    rows: int,
) -> tuple[int, float, tuple[str, ...]]:
    """(bytes, FLOPs a token, notes) of the largest prefill: `settings.batched_tokens` tokens as sequences of at most
    `max_model_len`.

    `make_batch(sequences, tokens)` gives the forward's inputs, `rows` is how many positions get logits.
    """
    tokens = min(settings.batched_tokens, max_model_len)
    sequences = max(1, settings.batched_tokens // tokens)

    flops = [0.0]

    def trace(sequences: int, tokens: int) -> int:
        from metapeak.tracer.flops import operation_flops
        from metapeak.tracer.inference import record_inference

        keep = max(1, min(rows // sequences, tokens))
        run = record_inference(model, make_batch(sequences, tokens), decode_tokens=0, logits_rows=keep)
        flops[0] = float(operation_flops(run.graph).sum()) / (sequences * tokens)
        return run.activation_bytes(device)

    states = any(layer.state_bytes for layer in layout.layers)
    config = model.config.get_text_config(decoder=True)
    chunk = getattr(config, "chunk_size", None) or getattr(config, "mamba_chunk_size", None) or CHUNK_TOKENS
    if not states or sequences * tokens <= 2 * chunk:
        return trace(sequences, tokens), flops[0], (f"prefill traced at {sequences} x {tokens} tokens",)
    short, longer = trace(1, chunk), trace(1, 2 * chunk)
    total = round(longer + (longer - short) / chunk * (sequences * tokens - 2 * chunk))
    return (
        total,
        flops[0],
        (
            f"prefill of {sequences * tokens} tokens on the line through traced ones of {chunk} and "
            f"{2 * chunk}: without its kernels' packages transformers runs states as a reference program, "
            "which takes more than the engine's kernels",
        ),
    )


def sampler_bytes(rows: int, vocabulary: int, dtype: torch.dtype, device: Device, *, sorts: bool) -> int:
    """Most bytes while `rows` of logits over `vocabulary` are sampled with temperature, top-k and top-p."""
    import torch

    from metapeak.tracer.inference import record_forward

    class Sampler(torch.nn.Module):
        def forward(self, logits: Any, top_k: Any, top_p: Any) -> Any:
            logits = logits.to(torch.float32)
            greedy = logits.argmax(dim=-1)
            logits.div_(0.5)
            if sorts:
                ordered, order = logits.sort(dim=-1, descending=False)
                mask = ordered < ordered.gather(1, top_k)
                ordered.masked_fill_(mask, -float("inf"))
                probabilities = ordered.softmax(dim=-1)
                torch.cumsum(probabilities, dim=-1, out=probabilities)
                mask = probabilities <= 1 - top_p
                ordered.masked_fill_(mask, -float("inf"))
                logits = logits.scatter_(dim=-1, index=order, src=ordered)
                del ordered, order, mask, probabilities
            probabilities = logits.softmax(dim=-1, dtype=torch.float32)
            noise = torch.empty_like(probabilities).exponential_()
            drawn = probabilities.div_(noise).argmax(dim=-1)
            return greedy, drawn

    inputs = {
        "logits": torch.empty(rows, vocabulary, dtype=dtype, device="meta"),
        "top_k": torch.zeros(rows, 1, dtype=torch.int64),
        "top_p": torch.full((rows, 1), 0.9),
    }
    run = record_forward(Sampler(), inputs)
    return run.activation_bytes(device) + rows * vocabulary * dtype.itemsize
