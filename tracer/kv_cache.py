"""What a sequence keeps between two tokens: read off the storages of the model's own cache after a real generation.

Note [How a layer is measured]
    The model prefills PROBE_TOKENS tokens and decodes two more on the phantom GPU. A tensor of a cache layer whose
    storage grows with the token holds tokens; so does one of a sliding layer, which keeps the last `sliding_window`.
    Its bytes over the tokens that it holds are the bytes a token. Everything else (convolution and recurrent states) is
    state: the same for any length. Cross-attention's keys and values hold the encoder's positions and grow no more.
    A layer that follows none of these rules is refused, not rounded.

Note [Storages of sliding layers]
    transformers keeps the last `sliding_window - 1` tokens as a view into keys and values of one forward: after
    decoding a token the storage holds `min(tokens, sliding_window)` tokens, after a long prefill all of them until the
    next token. What is counted here is the state between two decoded tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metapeak.tracer.errors import InputError

if TYPE_CHECKING:
    import torch

PROBE_TOKENS = 3
# Dimension of a cache layer's tensors that counts tokens, from the end; those not named here are states.
# Source: transformers/cache_utils.py, DynamicLayer ([B, heads, tokens, size]), DynamicIndexedLayer ([B, tokens, size]).
_TOKENS_DIM = -2


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheLayer:
    """What one layer keeps of one sequence.

    `token_bytes` a token kept, `window` the most tokens kept (None: all), `state_bytes` whatever the length, `kind`
    the name of transformers' class, `cross` whether the tokens are the encoder's, `heads` of keys and values (1 where
    all heads share them, as in multi-head latent attention).
    """

    kind: str
    token_bytes: int = 0
    window: int | None = None
    state_bytes: int = 0
    cross: bool = False
    heads: int = 1

    def bytes_at(self, tokens: int) -> int:
        """Bytes for a sequence of so many tokens (of the encoder, for cross-attention)."""
        return self.token_bytes * min(tokens, self.window or tokens) + self.state_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheLayout:
    """All layers of a model's cache, with the dtype of keys and values and the cache's class name.

    >>> layer = CacheLayer(kind="DynamicLayer", token_bytes=4096)
    >>> slides = CacheLayer(kind="DynamicSlidingWindowLayer", token_bytes=4096, window=1024)
    >>> layout = CacheLayout(layers=(layer, slides), dtype="bfloat16", kind="DynamicCache")
    >>> layout.bytes_per_token, layout.bytes_at(1024), layout.bytes_at(4096)
    (8192, 8388608, 20971520)
    """

    layers: tuple[CacheLayer, ...]
    dtype: str
    kind: str

    @property
    def own(self) -> tuple[CacheLayer, ...]:
        """The layers that hold the sequence itself."""
        return tuple(layer for layer in self.layers if not layer.cross)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one more token of a sequence that is shorter than every window."""
        return sum(layer.token_bytes for layer in self.own)

    @property
    def bytes_per_token_past_windows(self) -> int:
        """Bytes of one more token of a sequence that is longer than every window."""
        return sum(layer.token_bytes for layer in self.own if layer.window is None)

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence whatever its length."""
        return sum(layer.state_bytes for layer in self.layers)

    @property
    def cross_bytes_per_token(self) -> int:
        """Bytes of one position of the encoder."""
        return sum(layer.token_bytes for layer in self.layers if layer.cross)

    @property
    def windows(self) -> tuple[int, ...]:
        """The distinct windows of sliding layers, shortest first."""
        return tuple(sorted({layer.window for layer in self.own if layer.window is not None}))

    def bytes_at(self, tokens: int, encoder_tokens: int = 0) -> int:
        """Bytes of one sequence of `tokens` tokens, with so many positions of the encoder."""
        return sum(layer.bytes_at(encoder_tokens if layer.cross else tokens) for layer in self.layers)

    def on_ranks(self, tp: int, blocks: range | None = None) -> CacheLayout:
        """What one of `tp` ranks keeps: its heads' keys and values, at least one head; states cut evenly. `blocks` are
        the layers of its pipeline stage (None: all).
        """
        from dataclasses import replace

        own = [layer for number, layer in enumerate(self.own) if blocks is None or number in blocks]
        cross = [layer for layer in self.layers if layer.cross]
        layers = tuple(
            replace(
                layer,
                token_bytes=layer.token_bytes // layer.heads * max(layer.heads // tp, 1),
                state_bytes=-(-layer.state_bytes // tp),
                heads=max(layer.heads // tp, 1),
            )
            for layer in (*own, *cross)
        )
        return replace(self, layers=layers)

    def in_dtype(self, itemsize: float, own_itemsize: int) -> CacheLayout:
        """This layout with keys and values of another size an element; states keep theirs."""
        from dataclasses import replace

        layers = tuple(
            replace(layer, token_bytes=round(layer.token_bytes * itemsize / own_itemsize)) for layer in self.layers
        )
        return replace(self, layers=layers)


def measure_cache(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> CacheLayout:
    """The layout of the model's cache for the sequences of `batch`. See Note [How a layer is measured].

    Arguments: a model on meta or on the phantom GPU (it is moved there), and the prefill's inputs: sequences of
    PROBE_TOKENS tokens, on the CPU. Raises TraceError, or InputError where a layer's cache is of an unknown kind.
    """
    from metapeak.tracer.inference import record_inference

    text = batch["decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"]
    sequences, tokens = text.shape
    seen: list[list[list[int]]] = []
    run = record_inference(model, batch, decode_tokens=2, after_token=lambda cache: seen.append(_sizes(cache)))
    before, _ = seen
    layers = [
        _layer(layer, sizes, tokens + 2, sequences, cross)
        for (cross, layer), sizes in zip(_layers(run.cache), before, strict=True)
    ]
    if not any(layer.token_bytes or layer.state_bytes for layer in layers):
        raise InputError(f"{type(model).__name__} keeps nothing between two tokens: its cache is empty.")
    return CacheLayout(layers=tuple(layers), dtype=_dtype_of(run.cache), kind=type(run.cache).__name__)


def _layers(cache: Any) -> list[tuple[bool, Any]]:
    """(of cross-attention?, layer) of a cache, or of the two inside an encoder-decoder's."""
    if hasattr(cache, "cross_attention_cache"):
        own, cross = cache.self_attention_cache.layers, cache.cross_attention_cache.layers
        return [*((False, layer) for layer in own), *((True, layer) for layer in cross)]
    if not hasattr(cache, "layers"):
        raise InputError(f"a cache of class {type(cache).__name__} has no layers that could be read.")
    return [(False, layer) for layer in cache.layers]


def _sizes(cache: Any) -> list[list[int]]:
    """Bytes of the storages of every layer's tensors."""
    from metapeak.tracer.inference import tensors_in

    return [[tensor.untyped_storage().nbytes() for tensor in tensors_in(layer)] for _, layer in _layers(cache)]


def _layer(layer: Any, before: Sequence[int], tokens: int, sequences: int, cross: bool) -> CacheLayer:
    from metapeak.tracer.inference import tensors_in

    kind = type(layer).__name__
    window = getattr(layer, "sliding_window", None) if getattr(layer, "is_sliding", False) else None
    token_bytes = state_bytes = 0
    for old, tensor in zip(before, tensors_in(layer), strict=True):
        size, grown = tensor.untyped_storage().nbytes(), tensor.untyped_storage().nbytes() - old
        keys_or_values = any(tensor is getattr(layer, name, None) for name in ("keys", "values"))
        if cross:
            held = tensor.shape[_TOKENS_DIM]
        elif grown or (window is not None and keys_or_values):
            held = min(tokens, window or tokens)
        elif keys_or_values and size:
            raise InputError(f"keys and values of {kind} neither grow nor slide, so what it keeps is not known.")
        else:
            state_bytes += _divided(size, sequences, kind)
            continue
        each = _divided(size, held * sequences, kind)
        if grown not in (0, each * sequences):
            raise InputError(f"{kind} grew by {grown} bytes a token where {each * sequences} were expected.")
        token_bytes += each
    keys = getattr(layer, "keys", None)
    return CacheLayer(
        kind=kind,
        token_bytes=token_bytes,
        window=window,
        state_bytes=state_bytes,
        cross=cross,
        heads=keys.shape[1] if keys is not None and keys.dim() == 4 else 1,
    )


def _divided(size: int, parts: int, kind: str) -> int:
    each, rest = divmod(size, parts)
    if rest:
        raise InputError(f"{kind} keeps {size} bytes, which are no multiple of its {parts} tokens.")
    return each


def _dtype_of(cache: Any) -> str:
    from metapeak.tracer.inference import tensors_in

    tensors: Sequence[Any] = tensors_in(cache)
    return str(tensors[0].dtype).removeprefix("torch.")
