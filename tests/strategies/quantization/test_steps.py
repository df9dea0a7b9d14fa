"""What a packed layer allocates in forward and backward, operator by operator."""

import pytest
import torch
from torch import nn

from metapeak.strategies.quantization import Quantization
from metapeak.tracer.capture import record_training_step
from metapeak.tracer.liveness import Phase

B, T, IN, OUT = 2, 3, 64, 128
WEIGHT = IN * OUT


class Net(nn.Module):
    """A trained vector in front of a frozen layer and the sum after it."""

    def __init__(self, dtype=torch.bfloat16, bias=False):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(IN, dtype=dtype))
        self.layer = nn.Linear(IN, OUT, bias=bias, dtype=dtype).requires_grad_(False)

    def forward(self, x):
        return self.layer(x * self.scale).sum()


def trace(dtype=torch.bfloat16, bias=False, **options):
    with torch.device("meta"):
        model = Net(dtype, bias)
    model = Quantization(skip_modules=(), **options).prepare(model)
    graph, _ = record_training_step(model, (torch.zeros(B, T, IN, dtype=dtype),), None, iterations=1)
    return graph


def made(graph, phase):
    """(operator, bytes of the new storage) in order."""
    found = []
    for row, birth in enumerate(graph.birth):
        if graph.phase[birth] is phase:
            name = graph.op_names[graph.op[birth]].removesuffix(".default")
            found.append((name, graph.nbytes[row]))
    return found


def kept(graph):
    """Bytes of storages that forward makes and backward finds, without the input of the sum."""
    end = max(index for index, phase in enumerate(graph.phase) if phase is Phase.FORWARD) + 1
    rows = [row for row, birth in enumerate(graph.birth) if graph.phase[birth] is Phase.FORWARD]
    return sorted(graph.nbytes[row] for row in rows if graph.death[row] > end and graph.nbytes[row] > 4)


def test_nf4_dequantises_in_forward_and_again_in_backward():
    graph = trace(scheme="nf4", double_quant=True)
    blocks = WEIGHT // 64
    assert made(graph, Phase.FORWARD)[1:-1] == [
        ("bnb.dequantize_blockwise", 4 * blocks),
        ("aten.add.Tensor", 4 * blocks),
        ("bnb.dequantize_4bit", 2 * WEIGHT),
        ("aten.mm", 2 * B * T * OUT),
    ]
    backward = [entry for entry in made(graph, Phase.BACKWARD) if entry[0].startswith(("bnb", "aten.mm"))]
    assert backward == [
        ("bnb.dequantize_blockwise", 4 * blocks),
        ("bnb.dequantize_4bit", 2 * WEIGHT),
        ("aten.mm", 2 * B * T * IN),
    ]
    assert kept(graph) == []  # nothing is saved of a frozen layer


def test_nf4_backward_dequantises_to_the_dtype_of_the_weights_first():
    """quant_state.dtype, then a copy in the gradient's: two dequantised weights at once when they differ."""
    graph = trace(scheme="nf4", compute_dtype="fp32")
    assert ("bnb.dequantize_4bit", 4 * WEIGHT) in made(graph, Phase.FORWARD)
    backward = made(graph, Phase.BACKWARD)
    assert ("bnb.dequantize_4bit", 2 * WEIGHT) in backward and ("aten._to_copy", 4 * WEIGHT) in backward


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_int8_keeps_its_input(dtype):
    graph = trace(dtype, scheme="int8")
    forward = made(graph, Phase.FORWARD)
    assert ("bnb.int8_linear_matmul", 4 * B * T * OUT) in forward
    assert ("bnb.int8_mm_dequant", 2 * B * T * OUT) in forward
    assert ("bnb.int8_vectorwise_quant", B * T * IN) in forward
    assert kept(graph) == [2 * B * T * IN]
    assert ("aten._to_copy", 2 * WEIGHT) in made(graph, Phase.BACKWARD)


def test_gptq_saves_the_dequantised_weight_in_gptqmodel_and_not_in_autogptq():
    options = {"scheme": "gptq4", "group_size": 32}
    assert kept(trace(torch.float16, **options)) == [2 * WEIGHT]
    triton = trace(torch.float16, **options, gptq_kernel="triton-v2")
    assert kept(triton) == []
    assert [
        made(triton, phase).count(("gptq.dequantize", 2 * WEIGHT)) for phase in (Phase.FORWARD, Phase.BACKWARD)
    ] == [
        1,
        1,
    ]


def test_awq_saves_its_input_and_repeats_the_weight_for_each_sample():
    graph = trace(torch.float16, scheme="awq4", group_size=32, bias=True)
    assert kept(graph) == [2 * B * T * IN]
    assert ("awq.dequantize", 2 * WEIGHT) in made(graph, Phase.FORWARD)
    assert ("aten.repeat", 2 * B * WEIGHT) in made(graph, Phase.BACKWARD)


def test_an_input_without_gradient_runs_no_backward():
    with torch.device("meta"):
        model = Quantization(skip_modules=()).prepare(nn.Sequential(nn.Linear(IN, OUT, bias=False)))
        model.append(nn.Linear(OUT, 1))
    graph, _ = record_training_step(
        model, (torch.zeros(B, T, IN),), None, compute_loss=lambda model, batch: model(batch[0]).sum(), iterations=1
    )
    assert not [name for name, _ in made(graph, Phase.BACKWARD) if name.startswith("bnb")]
