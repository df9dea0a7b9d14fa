"""Attention projections with LoRA on an nf4 base as one autograd function, as Unsloth's.

What it changes: where q, k and v all have adapters they are computed together, and so is o with its own.
Where each byte comes from: forward dequantises the weight and adds the adapter's product to its result; it saves the
input and, for each projection, the input after dropout. Backward multiplies in the order below and writes the input's
gradient into the input (q, k, v) or into a product (o); dropout is undone by a mask of the saved input.
Not modelled: the fused function of the feed-forward layers (adapters there keep PEFT's forward), GPTQ bases.
Source: fms-acceleration, plugins/fused-ops-and-kernels, fused_ops/unsloth_lora/bnb/fast_lora.py (LoRA_QKV, LoRA_W),
utils.py (matmul_lora, fast_dequantize), models/utils.py (_build_fused_forwards).
"""

from __future__ import annotations

import types
from typing import Any

import torch

from metapeak.strategies.quantization.linear4bit import Linear4bit

_QKV = ("q_proj", "k_proj", "v_proj")


class _Projections(torch.autograd.Function):
    """Results of one or several projections of the same input; `tensors` are lora_A and lora_B of each."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, x, layers, *tensors):
        results, dropped = [], []
        for layer, a, b in zip(layers, tensors[::2], tensors[1::2]):
            inputs = x.view(-1, x.shape[-1])
            out = torch.matmul(inputs, layer.base_layer.dequantize().t())
            inputs = _dropout(layer)(inputs)
            dropped.append(inputs)
            out += (inputs @ a.t().to(x.dtype)) @ (_scale(layer) * b.t().to(x.dtype))
            if layer.base_layer.bias is not None:
                out += layer.base_layer.bias
            results.append(out.view(*x.shape[:-1], -1))
        ctx.layers = layers
        ctx.save_for_backward(x, *tensors, *dropped)
        return tuple(results)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, *grads):
        layers, (x, *saved) = ctx.layers, ctx.saved_tensors
        tensors, dropped = saved[: 2 * len(layers)], saved[2 * len(layers) :]
        grads = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        of_adapters = []
        for layer, grad, inputs, a, b in zip(layers, grads, dropped, tensors[::2], tensors[1::2]):
            of_adapters += _adapter_gradients(layer, grad, inputs, a.t(), b.t())
        grad_x = None
        for layer, grad, inputs, a, b in zip(layers, grads, dropped, tensors[::2], tensors[1::2]):
            weight = layer.base_layer.dequantize()
            if grad_x is not None:
                grad_x += grad @ weight
            elif len(layers) > 1:
                grad_x = torch.matmul(grad, weight, out=x)
            else:
                grad_x = grad @ weight
            del weight
            grad_x += (inputs != 0) * (grad @ b.to(x.dtype) @ (_scale(layer) * a.to(x.dtype)))
        return grad_x.view(shape), None, *of_adapters


def _adapter_gradients(layer, grad, inputs, a, b):
    """Gradients of lora_A and lora_B; `a` and `b` are transposed."""
    of_a = inputs.t() @ (grad @ b.t())
    of_b = (a.t() @ inputs.t()) @ grad
    of_a *= _scale(layer)
    of_b *= _scale(layer)
    return of_a.t(), of_b.t()


def _adapter(layer) -> str:
    return layer.active_adapters[0]


def _scale(layer) -> float:
    return layer.scaling[_adapter(layer)]


def _dropout(layer) -> torch.nn.Module:
    return layer.lora_dropout[_adapter(layer)]


def _apply(x, layers) -> tuple[torch.Tensor, ...]:
    pairs = [(layer.lora_A[_adapter(layer)].weight, layer.lora_B[_adapter(layer)].weight) for layer in layers]
    return _Projections.apply(x, tuple(layers), *(tensor for pair in pairs for tensor in pair))


def places(model: torch.nn.Module) -> list[list[torch.nn.Module]]:
    """Projections that are computed together: q, k and v where all have adapters on nf4; o by itself."""
    found = []
    for part in model.modules():
        for names in (_QKV, ("o_proj",)):
            projections = [getattr(part, name, None) for name in names]
            if all(_is_quantized_lora(layer) for layer in projections):
                found.append(projections)
    return found


def _is_quantized_lora(layer: Any) -> bool:
    return hasattr(layer, "lora_A") and isinstance(getattr(layer, "base_layer", None), Linear4bit)


def use(projections: list[torch.nn.Module]) -> None:
    """Let the first of the projections that is called compute all of them; each takes its result away."""
    results: dict[int, torch.Tensor] = {}

    def forward(self, x):
        if not results:
            results.update(zip(map(id, projections), _apply(x, projections)))
        return results.pop(id(self))

    for projection in projections:
        projection.forward = types.MethodType(forward, projection)
