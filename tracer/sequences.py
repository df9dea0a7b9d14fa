"""Token ids and lengths that a model can take: its vocabulary, its special tokens, its tables of positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from metapeak.tracer.errors import ModelConfigError
from metapeak.tracer.prepare import nested_configs

# -- token ids ---------------------------------------------------------------------------------------------------------


def vocabulary_size(model: nn.Module) -> int:
    """How many token ids the model takes and predicts: the rows of its embedding, or of its head if those are less."""
    sizes = []
    for get in ("get_input_embeddings", "get_output_embeddings"):
        try:
            table = getattr(model, get)()
        except (NotImplementedError, AttributeError):
            continue
        if isinstance(table, (nn.Embedding, nn.Linear)):
            sizes.append(table.weight.size(0))
    if sizes:
        return min(sizes)
    for config in nested_configs(model.config.get_text_config()):
        if isinstance(getattr(config, "vocab_size", None), int):
            return config.vocab_size
    if model.config.model_type == "canine":
        return 0x110000  # Unicode code points, which the model hashes
    raise ModelConfigError(f"{type(model).__name__} has no token embedding and its config no vocab_size.")


def special_token_ids(config) -> frozenset[int]:
    """Every token id that `config` or a config inside it gives a meaning."""
    found = set()
    for part in nested_configs(config):
        for name, value in vars(part).items():
            if name.endswith(("token_id", "token_index", "token_ids")):
                found.update(item for item in (value if isinstance(value, (list, tuple)) else [value]))
    return frozenset(item for item in found if isinstance(item, int))


def ordinary_token_ids(model: nn.Module, batch_size: int, length: int) -> Tensor:
    """Token ids of shape [B, S], int64: the vocabulary in order and again, special tokens left out."""
    size = vocabulary_size(model)
    special = special_token_ids(model.config)
    # Ids to draw from: no more than the batch needs, so that a vocabulary of 256,000 costs nothing.
    ordinary = []
    for token in range(size):
        if token not in special:
            ordinary.append(token)
            if len(ordinary) == batch_size * length:
                break
    ids = torch.tensor(ordinary or [0], dtype=torch.int64)
    return ids[torch.arange(batch_size * length) % len(ids)].view(batch_size, length)


# -- how long a sequence may be ----------------------------------------------------------------------------------------

# Names of tables of learned or precomputed absolute positions: a position past their end is an index error on a device.
_POSITION_TABLES = frozenset({
    "position_embeddings", "position_embedding", "positions_embed", "embed_positions", "wpe", "pos_encoding",
    "embed_position", "pos_embeddings", "pos_embedding",
})  # fmt: skip
_NOT_TEXT = ("vision", "visual", "image", "audio", "speech", "perceiver", "entity", "pixel", "video", "qformer")
_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_seq_length", "seq_length", "n_ctx")


def most_positions(model: nn.Module) -> int | None:
    """The longest sequence that the model's tables of absolute positions allow; None when it has none."""
    limits = []
    for name, module in model.named_modules():
        path = name.split(".")
        if any(word in part for part in path for word in _NOT_TEXT):
            continue
        if isinstance(module, nn.Embedding) and path[-1] in _POSITION_TABLES:
            # BART's tables start at `offset`, RoBERTa's behind the padding token's row.
            padding = 0 if module.padding_idx is None else module.padding_idx + 1
            limits.append(module.num_embeddings - (getattr(module, "offset", 0) or padding))
        for key in _POSITION_TABLES:
            table = module._buffers.get(key)
            if table is not None and table.dim() == 2:
                limits.append(table.size(0))
    return min(limits, default=None)


def trained_length(config) -> int | None:
    """The number of positions that the config names, whatever the model does past it."""
    text = config.get_text_config()
    for part in (text, config):
        for name in _LENGTH_FIELDS:
            value = getattr(part, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def exact_length(model: nn.Module) -> tuple[int, str] | None:
    """(length, rule) for models that train on sequences of one length only."""
    config = model.config
    if config.model_type == "reformer" and config.axial_pos_embds:
        return math.prod(config.axial_pos_shape), f"the product of axial_pos_shape {tuple(config.axial_pos_shape)}"
    if config.model_type == "perceiver":
        return config.max_position_embeddings, "max_position_embeddings, which the tokenizer always fills"
    return None
