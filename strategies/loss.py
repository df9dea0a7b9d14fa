"""The loss path: what happens between the last hidden state and the loss, as the option `loss` names it.

What it changes: the model's forward behind its backbone (losses/output_head.py), so that whatever wraps the model later
(PEFT, autocast, a trainer) still calls `model(**batch).loss`; and with `keep_outputs`, how long the outputs live.
Where each byte comes from: the path's own torch operators, run on the phantom GPU in the order and with the lifetimes
of the library that it is named after; kernels of Triton are operators that allocate nothing (losses/kernels.py).
Not modelled: label smoothing, padding (labels are full, so nothing is left out of the head), compiled losses.
Sources: in the file of each family, strategies/losses/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metapeak.strategies.base import NoOpStrategy
from metapeak.tracer.errors import InputError, UnknownName

if TYPE_CHECKING:
    import torch

    from metapeak.tracer.models import ResolvedModel
    from metapeak.tracer.spec import StepSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One way to get a loss: what a report says of it, and what the option takes after the colon."""

    sentence: str
    argument: str | None = None  # "chunks" or "tokens"
    # The training loop that this path belongs to keeps the logits in a variable of its own.
    holds_logits: bool = False


LOSSES: dict[str, Family] = {
    "eager": Family(sentence="the model's own loss, as the installed transformers computes it"),
    "transformers-4.48": Family(
        sentence="loss as transformers 4.48 computed it: fp32 copy of the logits and its shifted copy beside them"
    ),
    "transformers-4.45": Family(
        sentence="loss as transformers 4.45 computed it: logits upcast in the model, and a shifted copy"
    ),
    "chunked": Family(
        sentence="head and loss in {n} chunks along the sequence; log-probabilities of every chunk stay for backward "
        "(torchtune LinearCrossEntropyLoss)",
        argument="chunks",
    ),
    "chunked-output": Family(
        sentence="logits in {n} chunks, all held, the loss upcasts one at a time (torchtune CEWithChunkedOutputLoss)",
        argument="chunks",
    ),
    "chunked-tokens": Family(
        sentence="head and cross entropy in chunks of {n} tokens, without upcast, logits held by the training loop "
        "(litgpt with LoRA)",
        argument="tokens",
        holds_logits=True,
    ),
    "chunked-ce": Family(
        sentence="all logits, cross entropy in chunks of {n} tokens, without upcast, logits held by the training loop "
        "(litgpt full fine-tuning)",
        argument="tokens",
        holds_logits=True,
    ),
    "chunked-backward": Family(
        sentence="head, loss and their backward in {n} chunks, one at a time (torchtitan ChunkedLossWrapper)",
        argument="chunks",
    ),
    "fused-linear": Family(
        sentence="fused linear cross-entropy as Liger 0.8.5's: no full logits, gradients computed in forward; "
        "on a GPU of compute capability 8.0 or newer"
    ),
    "fused-linear-0.3": Family(
        sentence="fused linear cross-entropy as Liger 0.3's: chunks of logits in three dtypes, gradients in forward"
    ),
    "fused-head": Family(sentence="fused output head as TRL 1.16's: no full logits, computed again in backward"),
}
# Tasks whose models end in one linear head over the vocabulary.
_TASKS = ("causal-lm", "image-text-to-text")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSpec:
    """A value of the option `loss`: the family, and its chunks or tokens."""

    family: str = "eager"
    count: int | None = None

    @property
    def name(self) -> str:
        return self.family if self.count is None else f"{self.family}:{self.count}"


def parse_loss(text: str | None, chunk_tokens: int | None = None) -> LossSpec:
    """The loss that `text` names; `chunk_tokens` makes `chunked` one of chunks of so many tokens, as litgpt's.

    Raises UnknownName for an unknown loss, InputError for a missing, bad or unwanted number.

    >>> parse_loss("chunked:8").name
    'chunked:8'
    >>> parse_loss("chunked:4", chunk_tokens=128).name
    'chunked-tokens:128'
    """
    family, colon, argument = (text or "eager").partition(":")
    if family == "none":
        family = "eager"
    if family not in LOSSES:
        raise UnknownName("loss", family, LOSSES, "A number follows the chunked ones: chunked:8, chunked-tokens:128.")
    wanted = LOSSES[family].argument
    if chunk_tokens is not None:
        if family != "chunked":
            raise InputError(f"loss_chunk_tokens goes with loss chunked, not with {family}.")
        return LossSpec(family="chunked-tokens", count=_count(str(chunk_tokens), "loss_chunk_tokens", "tokens"))
    if wanted is None:
        if colon:
            raise InputError(f"loss {family} takes no number, but '{text}' gives one.")
        return LossSpec(family=family)
    return LossSpec(family=family, count=_count(argument, f"loss {text}", wanted))


def _count(text: str, what: str, wanted: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"{what}: a whole number of {wanted} from 1 was expected, as in chunked:8, not '{text}'.")
    return int(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss(NoOpStrategy):
    """The loss path of a causal language model, and whether the caller keeps the model's outputs.

    With `keep_outputs` the outputs (logits) live through backward and the optimizer step until those of the next
    iteration take their name, as in a loop that says `outputs = model(**batch)`.
    """

    spec: LossSpec = LossSpec()
    keep_outputs: bool = False

    @property
    def name(self) -> str:
        return f"loss {self.spec.name}"

    def check(self, model: ResolvedModel, step: StepSpec) -> None:
        task = model.task
        if self.spec.family != "eager" and task is not None and task not in _TASKS:
            raise InputError(
                f"loss {self.spec.name} is for models with an output head over the vocabulary "
                f"({', '.join(_TASKS)}), but {model.id} is traced as {task}. Leave --loss out."
            )

    def prepare(self, module: torch.nn.Module) -> torch.nn.Module:
        if self.spec.family != "eager":
            install_loss(module, self.spec)
        return module

    def loss_function(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """`inner`, or a function of (model, batch) like it that keeps the model's outputs.

        Raises InputError when the user's own function computes the loss: it decides what lives how long.
        """
        from metapeak.tracer.capture import default_loss

        if inner is not default_loss:
            raise InputError(
                f"loss {self.spec.name} changes the loss that the model computes, but here a function of its own "
                "computes it. Leave --loss and --keep-outputs out, or return (module, batch) without a loss function."
            )
        return HeldOutputs() if self.keep_outputs else inner

    def assumptions(self) -> tuple[str, ...]:
        family = LOSSES[self.spec.family]
        sentences = [f"loss path {self.spec.name}: {family.sentence.format(n=self.spec.count)}"]
        if self.keep_outputs:
            sentences.append("the training loop holds the model's outputs until the next iteration's take their name")
        return tuple(sentences)


class HeldOutputs:
    """A loss function that keeps what the model returned until the next call has its own."""

    def __init__(self):
        self.outputs: Any = None

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        from metapeak.tracer.capture import loss_of, run_model

        self.outputs = run_model(model, batch)
        return loss_of(model, self.outputs)


def install_loss(module: torch.nn.Module, spec: LossSpec) -> None:
    """Put a loss path behind the last hidden state of a causal language model, in place; PEFT may wrap it.

    Raises InputError when the model has no such place (no output head, a LoRA on it, a head that is not linear).
    """
    from metapeak.strategies.losses import chunked, fused_linear, output_head, transformers_versions

    model = output_head.causal_lm(module)
    check = output_head.check_weight_reader if spec.family.startswith("fused") else output_head.check_head
    check(model, spec.name)
    if spec.family.startswith("transformers-"):
        version = spec.family.removeprefix("transformers-")
        kind = type(model).__name__
        held = transformers_versions.cache_of_version(kind)
        output_head.replace_loss(model, transformers_versions.path_of_version(version, kind), held)
        return
    if spec.family in ("fused-linear", "fused-linear-0.3", "fused-head"):
        paths = {
            "fused-linear": fused_linear.liger,
            "fused-linear-0.3": fused_linear.liger_0_3,
            "fused-head": fused_linear.trl_head,
        }
        output_head.replace_loss(model, paths[spec.family])
        return
    if spec.family in ("chunked", "chunked-backward"):
        make = chunked.head_in_chunks if spec.family == "chunked" else chunked.backward_in_chunks
        output_head.replace_loss(model, make(spec.count))
        return
    heads = {
        "chunked-output": chunked.logits_in_chunks,
        "chunked-tokens": chunked.token_chunks,
        "chunked-ce": chunked.cross_entropy_in_token_chunks,
    }
    output_head.replace_head(model, *heads[spec.family](spec.count), held=LOSSES[spec.family].holds_logits)


def loss_strategy(text: str | None, chunk_tokens: int | None = None, keep_outputs: bool = False) -> Loss | None:
    """The strategy for the options, or None where they ask for nothing. Raises as `parse_loss`."""
    spec = parse_loss(text, chunk_tokens)
    return None if spec == LossSpec() and not keep_outputs else Loss(spec=spec, keep_outputs=keep_outputs)
