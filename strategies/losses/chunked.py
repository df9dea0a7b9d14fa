"""Losses computed chunk by chunk along the sequence.

What it changes: the model's forward behind its last hidden state. Where each byte comes from: ordinary torch operators
on chunks, as the libraries arrange them:
* `chunked`: the head runs on one chunk at a time, inside the loss; every chunk's fp32 log-probabilities stay for
  backward (5.0 bytes a logit at bf16 and eight chunks). torchtune's LinearCrossEntropyLoss.
* `chunked-output`: all chunks of logits first, then their losses; 6.5 bytes. torchtune's CEWithChunkedOutputLoss.
* `chunked-tokens`: chunks of so many tokens, logits and log-probabilities in the model's dtype, all held. litgpt's
  finetuning with LoRA (lm_head_chunk_size); `chunked-ce`: all logits at once, cross entropy in chunks. litgpt's full
  fine-tuning.
* `chunked-backward`: forward and backward of one chunk at a time; fp32 gradient of the hidden state beside it.
  torchtitan's ChunkedLossWrapper.
Chunks that do not run backward at once save transients, not the log-probabilities.
Not modelled: compiled losses (torchtune and torchtitan compile theirs when asked to).
Sources: torchtune 0.6.1 modules/loss/ce_chunked_output_loss.py, modules/transformer.py (chunked_output) and, on its
main branch, cross_entropy_loss.py; litgpt 0.5.12 utils.py (chunked_cross_entropy), model.py, finetune/full.py, lora.py;
torchtitan 0.3.0 components/loss.py.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from metapeak.strategies.losses.output_head import Head, LossOfLogits, LossPath, project, shifted
from metapeak.tracer.errors import InputError

IGNORED = -100


def head_in_chunks(num_chunks: int) -> LossPath:
    """Head and cross entropy of one chunk at a time, on the positions that have a label."""

    def of_chunk(model, hidden, labels):
        asked = labels != IGNORED
        labels = labels[asked]
        hidden = hidden[asked]
        logits = project(model, hidden)
        return cross_entropy(logits.float(), labels, reduction="sum")

    def path(model, hidden, labels):
        labels = shifted(labels)
        count = (labels != IGNORED).sum()
        hidden_chunks = hidden.tensor_split(num_chunks, dim=1)
        label_chunks = labels.tensor_split(num_chunks, dim=1)
        total = 0.0
        for index in range(len(hidden_chunks)):
            total += of_chunk(model, hidden_chunks[index], label_chunks[index])
        return total / count, None

    return path


def logits_in_chunks(num_chunks: int) -> tuple[Head, LossOfLogits]:
    """All chunks of logits, then the loss of each: only one chunk at a time is upcast."""

    def head(model, hidden):
        return [project(model, chunk) for chunk in hidden.chunk(num_chunks, dim=1)]

    def of_chunk(logits, labels):
        return cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")

    def loss_of(logits, labels):
        moved = shifted(labels)  # held by the recipe
        count = (moved != IGNORED).sum()
        labels = [chunk.reshape(-1) for chunk in moved.chunk(num_chunks, dim=1)]
        logits = [chunk.reshape(-1, chunk.size(-1)) for chunk in logits]
        total = 0.0
        for chunk, chunk_labels in zip(logits, labels):
            total += of_chunk(chunk, chunk_labels)
        return total / count

    return head, loss_of


def token_chunks(chunk_tokens: int) -> tuple[Head, LossOfLogits]:
    """Logits in chunks of so many tokens a row, then cross entropy of each. The training loop holds the logits."""

    def head(model, hidden):
        return [project(model, chunk) for chunk in hidden.split(chunk_tokens, dim=1)]

    def loss_of(logits, labels):
        logits[-1] = logits[-1][..., :-1, :]
        labels = labels[..., 1:]
        chunks = [chunk.reshape(-1, chunk.size(-1)) for chunk in logits]
        chunk_labels = [chunk.reshape(-1) for chunk in labels.split(logits[0].size(1), dim=1)]
        return _mean_of_chunks(chunks, chunk_labels, labels)

    return head, loss_of


def cross_entropy_in_token_chunks(chunk_tokens: int) -> tuple[Head, LossOfLogits]:
    """All logits at once, cross entropy in chunks of so many tokens. The training loop holds the logits."""

    def of_shifted(logits, labels):
        logits = logits.reshape(-1, logits.size(-1))
        labels = labels.reshape(-1)
        return _mean_of_chunks(logits.split(chunk_tokens), labels.split(chunk_tokens), labels)

    def loss_of(logits, labels):
        return of_shifted(logits[..., :-1, :], labels[..., 1:])

    return project, loss_of


def _mean_of_chunks(logits, labels, all_labels):
    losses = [
        cross_entropy(chunk, chunk_labels, ignore_index=IGNORED, reduction="none")
        for chunk, chunk_labels in zip(logits, labels)
    ]
    count = (all_labels != IGNORED).sum()
    return torch.cat(losses).sum() / count.maximum(torch.ones_like(count))


def backward_in_chunks(num_chunks: int) -> LossPath:
    """Head, loss and their backward of one chunk at a time; the rest of the model runs backward from the sum.

    Raises InputError when the sequence does not divide by the chunks.
    """

    def chunks_of(tensor):
        length = tensor.shape[1]
        if length % num_chunks:
            raise InputError(
                f"loss chunked-backward:{num_chunks} needs a sequence that divides by its chunks: {length} % "
                f"{num_chunks} = {length % num_chunks}. Give another --seq-len or number of chunks."
            )
        return tuple(chunk.contiguous() for chunk in torch.split(tensor, [length // num_chunks] * num_chunks, dim=1))

    def of_chunk(logits, labels, count):
        loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum", ignore_index=IGNORED)
        return loss / count

    def path(model, hidden, labels):
        if not hidden.requires_grad:
            raise InputError(
                "loss chunked-backward runs the head's backward by itself and then that of the layers below it, but "
                "none of those is trained. Use another loss."
            )
        labels = shifted(labels)
        count = (labels != IGNORED).sum()
        hidden_chunks = [chunk.detach().requires_grad_() for chunk in chunks_of(hidden)]
        label_chunks = list(chunks_of(labels))
        gradient = torch.zeros_like(hidden, dtype=torch.float32)
        total = hidden.new_zeros((), dtype=torch.float32)
        start = 0
        # The names are the library's: each holds its tensor until the next chunk's takes it.
        for chunk, chunk_labels in zip(hidden_chunks, label_chunks):
            logits = project(model, chunk)
            loss = of_chunk(logits, chunk_labels, count)
            total = total + loss.detach()
            loss.backward()
            add(gradient, start, chunk.grad)
            chunk.grad = None
            start += chunk.shape[1]
        return _Backward.apply(hidden, gradient.to(hidden.dtype), total), None

    def add(gradient, start, chunk_gradient):
        chunk_gradient = chunk_gradient.to(gradient.dtype)
        gradient[:, start : start + chunk_gradient.shape[1]] = chunk_gradient

    return path


class _Backward(torch.autograd.Function):
    """The loss, with a gradient for the hidden state that is already there."""

    @staticmethod
    def forward(ctx, hidden, gradient, loss):
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx, grad_output):
        (gradient,) = ctx.saved_tensors
        return gradient, None, None
