"""Fused linear cross-entropy: the output head and the loss without all logits at once.

What it changes: the model's forward behind its last hidden state.
Where each byte comes from: an autograd function that allocates what the library's does:
* Liger (`fused-linear`): gradients are computed in forward. One buffer of chunk x V in the dtype of the hidden state
  (rows: see `chunk_rows`), the gradients of the hidden state and, where the head is trained, of its weight: both live
  until backward. Rows are those of the whole batch.
* Liger up to 0.3 (`fused-linear-0.3`): a chunk of logits, its fp32 copy, that copy in the compute dtype and its scaled
  copy live at once; the hidden state is shifted, so copied.
* TRL (`fused-head`): forward keeps statistics of each row only; backward computes the logits again, in tiles of 4,096
  tokens x 32,768 words, and adds gradients up in fp32 before it casts them.
Not modelled: label smoothing, z-loss, class weights, token scaling; Liger's CuTe kernels; Liger's accum_dtype.
Sources: liger_kernel 0.8.5 and 0.3.1 ops/fused_linear_cross_entropy.py, transformers/model/; fms-acceleration's copy of
0.3 (plugins/fused-ops-and-kernels); trl 1.16 trainer/utils.py (add_fused_lm_head) and kernels/chunked_logprob.py.
"""

from __future__ import annotations

import torch

from metapeak.strategies.losses.kernels import kernel
from metapeak.strategies.losses.output_head import output_head

IGNORED = -100
# trl 1.16: trainer/utils.py _CHUNKED_LOGPROB_CHUNK_SIZE and kernels/chunked_logprob.py TOKEN_CHUNK_SIZE.
TRL_TILE_WORDS = 32768
TRL_TILE_TOKENS = 4096


def chunk_rows(tokens: int, hidden_size: int, vocab_size: int) -> int:
    """Rows of Liger's chunk of logits: about as many bytes as the hidden state, a power of two.

    >>> chunk_rows(16384, 4096, 32000)
    2048
    >>> chunk_rows(10, 4096, 32000)
    2
    """
    factor = -(-vocab_size // hidden_size)
    return min(_next_power_of_two(-(-tokens // factor)), tokens)


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def liger(model, hidden, labels):
    """LigerForCausalLMLoss of 0.8.5: labels are shifted, the hidden state is taken as it is."""
    padded = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)  # held until there is a loss
    moved = padded[..., 1:].contiguous()
    head = output_head(model)
    return _Liger.apply(hidden.view(-1, hidden.size(-1)), head.weight, moved.view(-1), head.bias), None


class _Liger(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, target, bias):
        loss, *gradients = _liger_forward(hidden, weight, target, bias)
        ctx.save_for_backward(*(None if gradient is None else gradient.detach() for gradient in gradients))
        return loss

    @staticmethod
    def backward(ctx, grad_output):
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        # Liger compares the gradient with a one on the device; it is one when the loss is the last word.
        torch.ones((), device=grad_output.device)
        return grad_hidden, grad_weight, None, grad_bias


def _liger_forward(hidden, weight, target, bias):
    tokens, hidden_size = hidden.shape
    rows = chunk_rows(tokens, hidden_size, weight.shape[0])
    grad_hidden = torch.zeros_like(hidden)
    wants_gradient = hidden.requires_grad
    grad_weight = torch.zeros_like(weight) if wants_gradient and weight.requires_grad else None
    grad_bias = torch.zeros_like(bias) if wants_gradient and bias is not None else None
    losses = torch.zeros(tokens, dtype=torch.float32, device=hidden.device)
    asked = target != IGNORED
    asked.sum().item()
    # `out=` knows no autocast: the buffer is used only where the product's dtype is the hidden state's.
    buffer = None
    if _product_dtype(hidden) == hidden.dtype == weight.dtype and (bias is None or bias.dtype == hidden.dtype):
        buffer = torch.empty((rows, weight.shape[0]), dtype=hidden.dtype, device=hidden.device)
    for start, end in _ranges(tokens, rows):
        chunk = hidden[start:end]
        logits = _liger_logits(chunk, weight, bias, buffer)
        kernel.liger_cross_entropy(logits, target[start:end], losses[start:end])
        if wants_gradient:
            _product_into(grad_hidden[start:end], logits, weight, buffer is not None)
            if grad_weight is not None:
                _add_product(grad_weight, logits, chunk)
            if grad_bias is not None:
                torch.add(grad_bias, logits.sum(dim=0), out=grad_bias)
        del logits, chunk
    del buffer
    loss = torch.sum(losses)
    return loss, grad_hidden, grad_weight, grad_bias


def _product_dtype(hidden):
    """The dtype of a matrix product with this tensor: autocast's where it is on."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _liger_logits(chunk, weight, bias, buffer):
    if buffer is None:
        logits = chunk @ weight.t()
        return logits if bias is None else logits + bias
    logits = buffer[: chunk.shape[0]]
    torch.mm(chunk, weight.t(), out=logits)
    return logits if bias is None else logits.add_(bias)


def _product_into(gradient, logits, weight, without_autocast):
    if without_autocast and logits.dtype == gradient.dtype:
        torch.mm(logits, weight, out=gradient)
    else:
        gradient.copy_(logits @ weight)


def _add_product(grad_weight, logits, chunk):
    """grad_weight += logits.T @ chunk: in place, or for fp32 logits through a product of the weight's size."""
    if logits.dtype not in (torch.float16, torch.bfloat16) or grad_weight.dtype not in (logits.dtype, torch.float32):
        grad_weight += torch.mm(logits.t(), chunk).float()
        return
    chunk = chunk if chunk.dtype == logits.dtype else chunk.to(logits.dtype)
    if grad_weight.dtype == logits.dtype:
        torch.addmm(grad_weight, logits.t(), chunk, out=grad_weight)
    else:
        torch.addmm(grad_weight, logits.t(), chunk, out_dtype=torch.float32, out=grad_weight)


def liger_0_3(model, hidden, labels):
    """lce_forward of 0.3: the hidden state is shifted, so copied, and the logits take three dtypes."""
    shift_hidden = hidden[..., :-1, :].contiguous()
    shift_labels = labels[..., 1:].contiguous()
    shift_hidden = shift_hidden.view(-1, shift_hidden.size(-1))
    shift_labels = shift_labels.view(-1)
    return _Liger03.apply(shift_hidden, output_head(model).weight, shift_labels), None


class _Liger03(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, target):
        loss, grad_hidden, grad_weight = _liger_0_3_forward(hidden, weight, target)
        ctx.save_for_backward(grad_hidden.detach(), None if grad_weight is None else grad_weight.detach())
        return loss

    @staticmethod
    def backward(ctx, grad_output):
        grad_hidden, grad_weight = ctx.saved_tensors
        torch.ones((), device=grad_output.device)
        return grad_hidden, grad_weight, None


def _liger_0_3_forward(hidden, weight, target):
    dtype = _product_dtype(hidden)
    tokens, hidden_size = hidden.shape
    rows = _next_power_of_two(-(-tokens // -(-weight.shape[0] // hidden_size)))
    grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
    grad_hidden = torch.zeros_like(hidden)
    losses = torch.zeros(tokens, dtype=torch.float32, device=hidden.device)
    total = (target != IGNORED).sum()
    for start, end in _ranges(tokens, rows):
        chunk = hidden[start:end]
        # The names are the library's: each holds its tensor until the next chunk's takes it.
        logits_chunk = chunk @ weight.t()
        target_chunk = target[start:end]
        loss_chunk = losses[start:end]
        count = (target_chunk != IGNORED).sum().item()
        logits_chunk = logits_chunk.float()
        kernel.liger_cross_entropy(logits_chunk, target_chunk, loss_chunk)
        logits_chunk = logits_chunk.to(dtype)
        alpha = count / total if total > 0 else 0.0
        losses[start:end] = loss_chunk * alpha
        grad_logits_chunk = logits_chunk * alpha
        grad_hidden[start:end] = grad_logits_chunk @ weight
        if grad_weight is not None:
            torch.addmm(grad_weight, logits_chunk.t(), chunk, out=grad_weight, alpha=alpha, beta=1.0)
    return torch.sum(losses), grad_hidden, grad_weight


def trl_head(model, hidden, labels):
    """add_fused_lm_head of trl 1.16 as SFTTrainer asks for it: only positions that have a label are projected."""
    hidden = hidden[:, :-1]
    labels = labels[:, 1:]
    mask = labels != IGNORED
    head = output_head(model)
    per_token = _TrlHead.apply(hidden[mask], head.weight, head.bias, labels[mask])
    per_token = tuple(values.new_zeros(mask.shape).masked_scatter(mask, values) for values in per_token)
    log_probs, entropy, is_top1 = per_token
    # The output carries a few bytes a token instead of logits.
    return -log_probs.sum() / mask.sum().clamp(min=1), (log_probs, entropy, is_top1, mask)


class _TrlHead(torch.autograd.Function):
    """(log-probability, entropy, whether the label is the likeliest) of each token: loss and metrics of SFTTrainer."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets):
        ctx.set_materialize_grads(False)
        dtype = _product_dtype(hidden)
        tokens = hidden.shape[0]
        running_max, sum_exp, x_sum_exp, sq_sum_exp, z_sum, max_before_target, target_logit = (
            torch.zeros((tokens,), device=hidden.device, dtype=torch.float32) for _ in range(7)
        )
        statistics = (running_max, sum_exp, x_sum_exp, sq_sum_exp, z_sum, max_before_target, target_logit)
        buffer = torch.empty((min(tokens, TRL_TILE_TOKENS), TRL_TILE_WORDS), device=hidden.device, dtype=dtype)
        for start, end in _ranges(tokens, TRL_TILE_TOKENS):
            chunk = hidden[start:end].to(dtype)
            for first, last in _ranges(weight.shape[0], TRL_TILE_WORDS):
                tile = buffer[: end - start, : last - first]
                torch.mm(chunk, weight[first:last].to(dtype).t(), out=tile)
                if bias is not None:
                    tile.add_(bias[first:last].to(dtype))
                kernel.trl_fold_tile(tile, targets[start:end], [statistic[start:end] for statistic in statistics])
        log_z = running_max + torch.log(sum_exp)
        log_probs = target_logit - log_z
        entropy = log_z - x_sum_exp / sum_exp
        is_top1 = (target_logit >= running_max) & (target_logit > max_before_target)
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropy)
        ctx.dtype = dtype
        ctx.mark_non_differentiable(is_top1)
        return log_probs, entropy, is_top1

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy, _):
        hidden, weight, bias, targets, log_z, _entropy = ctx.saved_tensors
        dtype = ctx.dtype
        grad_hidden, grad_weight, grad_bias = (
            torch.zeros(tensor.shape, device=hidden.device, dtype=torch.float32) if needed else None
            for tensor, needed in zip((hidden, weight, bias), ctx.needs_input_grad)
        )
        tokens = hidden.shape[0]
        buffer = torch.empty((min(tokens, TRL_TILE_TOKENS), TRL_TILE_WORDS), device=hidden.device, dtype=dtype)
        grad_log_probs = grad_log_probs.float().contiguous()
        for start, end in _ranges(tokens, TRL_TILE_TOKENS):
            chunk = hidden[start:end].to(dtype)
            for first, last in _ranges(weight.shape[0], TRL_TILE_WORDS):
                part = weight[first:last].to(dtype)
                tile = buffer[: end - start, : last - first]
                torch.mm(chunk, part.t(), out=tile)
                if bias is not None:
                    tile.add_(bias[first:last].to(dtype))
                kernel.trl_gradient_of_tile(tile, targets[start:end], log_z[start:end], grad_log_probs[start:end])
                if grad_hidden is not None:
                    _add_fp32(grad_hidden[start:end], tile, part)
                if grad_weight is not None:
                    _add_fp32(grad_weight[first:last], tile.t(), chunk)
                if grad_bias is not None:
                    grad_bias[first:last] += tile.sum(dim=0, dtype=torch.float32)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
        )


def _ranges(length, step):
    """(first, behind the last) of each chunk of so many, in order."""
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def _add_fp32(sums, left, right):
    """sums += left @ right in fp32, without a product of its own where CUDA's kernel takes half precision."""
    if left.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(sums, left, right, out_dtype=torch.float32, out=sums)
    else:
        sums.addmm_(left.float(), right.float())
