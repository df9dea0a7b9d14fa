"""The core of attention (scores, softmax, weighted values) as a region of its own.

It is no module in transformers but a function that every attention module gets from the AttentionInterface. Here that
door is used to see its calls, and to put a checkpoint around them, which is Megatron's selective recompute.
A core attention is named after its module: `model.layers.0.self_attn.core_attention`.

Source: transformers modeling_utils.py, AttentionInterface.get_interface. Models with attention code of their own (those
that do not ask the interface) have no such regions.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

SUFFIX = ".core_attention"
_OPTIONS = "_metapeak_core_attention_checkpoint"


@contextlib.contextmanager
def around_core_attention(wrap: Callable[[Callable], Callable]) -> Iterator[None]:
    """Inside, every attention function that transformers hands out is `wrap(function)`."""
    if "transformers" not in sys.modules:  # then no model of it runs
        yield
        return
    from transformers.modeling_utils import AttentionInterface

    original = AttentionInterface.get_interface
    AttentionInterface.get_interface = _wrapping(original, wrap)
    try:
        yield
    finally:
        AttentionInterface.get_interface = original


def checkpoint_core_attention(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Put `torch.utils.checkpoint` with these options around the core attention of an attention module, for good."""
    from transformers.modeling_utils import AttentionInterface

    setattr(module, _OPTIONS, dict(options))
    if not hasattr(AttentionInterface, _OPTIONS):
        AttentionInterface.get_interface = _wrapping(AttentionInterface.get_interface, _checkpointing)
        setattr(AttentionInterface, _OPTIONS, True)


def _wrapping(original: Callable, wrap: Callable[[Callable], Callable]) -> Callable:
    def get_interface(self, attn_implementation, default):
        return wrap(original(self, attn_implementation, default))

    return get_interface


def _checkpointing(function: Callable) -> Callable:
    def attend(module, *args, **kwargs):
        options = getattr(module, _OPTIONS, None)
        if options is None:
            return function(module, *args, **kwargs)
        from torch.utils.checkpoint import checkpoint

        return checkpoint(functools.partial(function, module, **kwargs), *args, **options)

    return attend
