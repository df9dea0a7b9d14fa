"""Context parallelism of torch: every rank has a part of the sequence, keys and values travel around a ring.

What it changes: each of `cp` ranks has seq_len / cp tokens of each sample, two chunks of the 2 x cp that balance causal
masks. Attention runs cp times on parts, merged in float32; keys and values of the others are gathered (or passed on),
and in backward so are their gradients. Parameters are sharded over dp_shard x cp ranks.
Where each byte comes from: torch's own ring attention (`context_parallel` and its `_templated_ring_attention`) runs on
the phantom GPU. The batch is prepared as the Hugging Face Trainer does: shifted labels and global position ids, all
cut along the sequence; accelerate's hooks take the mask off. The whole batch of token ids stays on every rank.
Not modelled: Ulysses and ring attention of other packages, `flex_attention`.
Sources: torch/distributed/tensor/experimental/_context_parallel/_attention.py; transformers trainer.py
(_prepare_context_parallel_inputs); accelerate 1.15 big_modeling.py (_attach_context_parallel_hooks).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metapeak.strategies.base import NoOpStrategy
from metapeak.strategies.parallel.layout import NO_LAYOUT, Layout
from metapeak.strategies.parallel.meshes import layout_mesh
from metapeak.tracer.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from metapeak.tracer.models import ResolvedModel
    from metapeak.tracer.spec import StepSpec

# How keys and values get to the other ranks: all at once (torch's and accelerate's default), or one rank on at a time.
ROTATIONS = ("allgather", "alltoall")


@dataclass(frozen=True, kw_only=True)
class ContextParallel(NoOpStrategy):
    """`rotation` is that of torch's `set_rotate_method`."""

    layout: Layout = NO_LAYOUT
    rotation: str = "allgather"

    name = "context parallel"
    imports = ("accelerate",)

    @property
    def ranks_by_sequence_part(self) -> bool:
        """Whether ranks differ by their place in the ring: they attend to other parts of the sequence."""
        return self.layout.cp > 1

    def check(self, model: ResolvedModel, step: StepSpec) -> None:
        if self.layout.cp == 1:
            return
        if model.package is not None or model.factory is not None or model.task != "causal-lm":
            raise InputError(
                f"cp {self.layout.cp}: torch's ring attention balances causal masks, so the model has to be a causal "
                f"language model of transformers; {model.id} is used for {model.task or 'a task of its own'}."
            )
        if step.seq_len is not None:
            check_length(step.seq_len, self.layout)

    def prepare(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module with accelerate's hooks. Raises InputError for attention that the ring does not cover."""
        if self.layout.cp == 1:
            return module
        from accelerate.big_modeling import _attach_context_parallel_hooks

        implementation = getattr(module.config, "_attn_implementation", None)
        if implementation != "sdpa":
            raise InputError(
                f"cp {self.layout.cp} with attention {implementation}: torch's ring attention replaces "
                "scaled_dot_product_attention. Use --attention sdpa, or leave it out."
            )
        taken = inspect.signature(getattr(module, "get_base_model", lambda: module)().forward).parameters
        if "position_ids" not in taken or all(one.kind is not one.VAR_KEYWORD for one in taken.values()):
            raise InputError(
                f"cp {self.layout.cp}: {type(module).__name__} takes no position_ids or shift_labels, so its parts of "
                "the sequence would not know their places."
            )
        try:
            _attach_context_parallel_hooks(module)
        except ValueError as error:
            raise InputError(f"cp {self.layout.cp}: {error}") from error
        return module

    def loss_function(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """`inner` on this rank's part of the batch."""
        if self.layout.cp == 1:
            return inner
        return lambda model, batch: inner(model, self._part_of(batch))

    def running(self) -> AbstractContextManager[Any]:
        return _ring(layout_mesh(self.layout)["cp"], self.rotation) if self.layout.cp > 1 else contextlib.nullcontext()

    def assumptions(self) -> tuple[str, ...]:
        if self.layout.cp == 1:
            return ()
        return (
            f"context parallelism is torch's ring attention ({self.rotation}), each rank with two of "
            f"{2 * self.layout.cp} chunks of the sequence",
        )

    def _part_of(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's tokens of every tensor (B, S) of the batch, with shifted labels and global positions."""
        import torch
        from torch.distributed.tensor.experimental._context_parallel import _attention

        ids = batch["input_ids"]
        length = ids.shape[1]
        check_length(length, self.layout)
        whole = dict(batch)
        whole["shift_labels"] = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
        if "position_ids" not in whole:
            whole["position_ids"] = torch.arange(length, device=ids.device).expand(ids.shape[0], -1)
        cut = {name: tensor for name, tensor in whole.items() if tensor.dim() == 2 and tensor.shape[1] == length}
        mesh = layout_mesh(self.layout)["cp"]
        balancer = _attention._create_default_load_balancer(length, self.layout.cp, ids.device)
        parts = _attention._context_parallel_buffers(mesh, list(cut.values()), [1] * len(cut), balancer)
        return {**whole, **dict(zip(cut, parts, strict=True))}


def check_length(length: int, layout: Layout) -> None:
    """Raise InputError, with the equation, for a sequence that cannot be cut into the chunks of all ranks."""
    chunks = 2 * layout.cp
    if length % chunks:
        raise InputError(
            f"seq_len {length} / (2 x cp {layout.cp}) = {length / chunks:.2f} is no whole number of tokens. "
            f"The next that divide: {length // chunks * chunks or chunks} and {-(-length // chunks) * chunks}."
        )


@contextlib.contextmanager
def _ring(mesh: DeviceMesh, rotation: str) -> Iterator[None]:
    """Inside, scaled_dot_product_attention is torch's ring attention: what `context_parallel` does besides cutting
    buffers, which it does in place, for one step.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention

    before = _attention._cp_options.rotate_method, _attention._cp_options.enable_load_balance
    _attention.set_rotate_method(rotation)
    _attention._cp_options.enable_load_balance = True
    _attention._dispatch_mode = _attention._DispatchMode.MONKEY_PATCH
    _attention._enable_context_parallel_dispatcher_impl(seq_dim=2, mesh=mesh)
    try:
        yield
    finally:
        _attention._disable_context_parallel_dispatcher_impl()
        _attention._cp_options.rotate_method, _attention._cp_options.enable_load_balance = before
