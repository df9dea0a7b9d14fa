"""Which attention kernel runs, and what it saves, against rules and sizes that can be written down."""

import pytest
import torch

from metapeak.tracer.attention import AttentionChoice, AttentionKernel, attention_choice
from metapeak.tracer.capture import record_training_step
from metapeak.tracer.errors import InputError
from metapeak.tracer.flash_attention import flash_attn_func
from metapeak.tracer.liveness import Category

FLASH = "aten._scaled_dot_product_flash_attention.default"
EFFICIENT = "aten._scaled_dot_product_efficient_attention.default"
CUDNN = "aten._scaled_dot_product_cudnn_attention.default"
MATH = "aten.softmax.int"


class Attention(torch.nn.Module):
    """Attention over one projection of the input; shapes [batch, heads, length, head size]."""

    def __init__(self, heads=4, key_heads=4, head_dim=16, value_dim=None, mask=False, causal=True, length=32):
        super().__init__()
        value_dim = value_dim or head_dim
        self.shapes = [(heads, head_dim), (key_heads, head_dim), (key_heads, value_dim)]
        self.project = torch.nn.Linear(8, sum(count * size for count, size in self.shapes))
        self.causal, self.grouped = causal and not mask, heads != key_heads
        if mask:
            self.register_buffer("mask", torch.ones(1, 1, length, length, dtype=torch.bool))

    def forward(self, x):
        parts = self.project(x).split([count * size for count, size in self.shapes], dim=-1)
        query, key, value = (part.unflatten(-1, shape).transpose(1, 2) for part, shape in zip(parts, self.shapes))
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=getattr(self, "mask", None), is_causal=self.causal, enable_gqa=self.grouped
        ).sum()


def trace(choice=None, dtype=torch.bfloat16, length=32, **arguments):
    with torch.device("meta"):
        model = Attention(length=length, **arguments).to(dtype)
    with attention_choice(choice or AttentionChoice()):
        graph, _ = record_training_step(model, (torch.ones(2, length, 8, dtype=dtype),), None, iterations=1)
    return graph


def kernels(graph):
    return {name for name in graph.op_names if name in (FLASH, EFFICIENT, CUDNN, MATH)}


@pytest.mark.parametrize(
    "arguments, kernel",
    [
        ({}, FLASH),
        ({"key_heads": 2}, FLASH),
        ({"mask": True}, EFFICIENT),
        ({"dtype": torch.float32}, EFFICIENT),
        ({"value_dim": 8}, EFFICIENT),  # multi-head latent attention: q/k and v of different sizes
        ({"head_dim": 264}, EFFICIENT),
        ({"mask": True, "key_heads": 2}, MATH),
        ({"dtype": torch.float64}, MATH),
        ({"choice": AttentionChoice(compute_capability=(7, 5)), "dtype": torch.float16}, EFFICIENT),
        ({"choice": AttentionChoice(compute_capability=(7, 5))}, MATH),  # bf16 on Turing
        ({"choice": AttentionChoice(forced=AttentionKernel.MATH)}, MATH),
        ({"choice": AttentionChoice(forced=AttentionKernel.CUDNN)}, CUDNN),
    ],
)
def test_the_kernel_that_cuda_would_choose(arguments, kernel):
    assert kernels(trace(**arguments)) == {kernel}


def test_a_forced_kernel_that_cannot_run_is_refused():
    with pytest.raises(InputError, match="fp16 and bf16"):
        trace(AttentionChoice(forced=AttentionKernel.FLASH), dtype=torch.float32)


def saved(graph, op):
    """Bytes that `op` itself made and the backward keeps."""
    return sorted(
        graph.nbytes[row]
        for row, birth in enumerate(graph.birth)
        if graph.op_names[graph.op[birth]] == op and graph.category[row] == Category.ACTIVATION and graph.nbytes[row]
    )


def test_flash_saves_output_statistics_and_rng_state():
    """Source: flash_api.cpp: out like q; softmax_lse fp32 {B, H, Sq}; rng_state {2} and an unused scalar, uint64."""
    batch, heads, length, head_dim = 2, 4, 32, 16
    assert saved(trace(), FLASH) == [8, 16, batch * heads * length * 4, batch * heads * length * head_dim * 2]


def test_flash_pads_head_sizes_to_eight():
    graph = trace(head_dim=12)
    padded = 2 * 4 * 32 * 16 * 2
    assert max(saved(graph, FLASH)) == padded
    assert saved(graph, "aten.constant_pad_nd.default") == [padded] * 3  # copies of q, k and v


def test_efficient_rounds_statistics_to_32_rows():
    """Source: attention.cu: logsumexp fp32 {B, H, ceil32(M)}; out {B, M, H, Kv}."""
    graph = trace(dtype=torch.float32, length=40)
    assert saved(graph, EFFICIENT)[-2:] == [2 * 4 * 64 * 4, 2 * 4 * 40 * 16 * 4]


def test_efficient_pads_masks_to_16_columns():
    graph = trace(mask=True, length=40)
    # the boolean mask becomes a bf16 one of 40 x 40, padded to 40 x 48 for the kernel, which keeps it
    assert 40 * 48 * 2 in saved(graph, "aten.constant_pad_nd.default")


def test_math_keeps_the_probabilities():
    graph = trace(AttentionChoice(forced=AttentionKernel.MATH), dtype=torch.float32)
    probabilities = 2 * 4 * 32 * 32 * 4
    assert saved(graph, MATH) == [probabilities]
    # _safe_softmax is several operators on CUDA: it also looks for rows of -inf, one byte a score, and forgets them
    looked = graph.op_names.index("aten.isneginf.default")
    born = [row for row, birth in enumerate(graph.birth) if graph.op[birth] == looked]
    assert [(graph.nbytes[row], graph.category[row]) for row in born] == [(2 * 4 * 32 * 32, Category.TEMPORARY)]


def test_flash_attn_func_saves_what_sdpa_flash_saves():
    """Grouped heads are not repeated, and the saved set is that of the flash_attn package."""

    class Package(Attention):
        def forward(self, x):
            parts = self.project(x).split([count * size for count, size in self.shapes], dim=-1)
            query, key, value = (part.unflatten(-1, shape) for part, shape in zip(parts, self.shapes))
            return flash_attn_func(query, key, value, causal=True).sum()

    with torch.device("meta"):
        model = Package(key_heads=2).to(torch.bfloat16)
    graph, _ = record_training_step(model, (torch.ones(2, 32, 8, dtype=torch.bfloat16),), None, iterations=1)
    op = "aten._flash_attention_forward.default"
    assert saved(graph, op) == saved(trace(key_heads=2), FLASH)
