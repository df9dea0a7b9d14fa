"""Packed weights have the tensors of the real library: same shapes, dtypes, bytes."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from metapeak.strategies.quantization.awq import AwqLinear
from metapeak.strategies.quantization.gptq import GptqLinear
from metapeak.strategies.quantization.linear4bit import Linear4bit
from metapeak.strategies.quantization.linear8bit import Linear8bitLt
from metapeak.tracer.errors import InputError

# (in_features, out_features): multiples of every block, of none, odd products, one block and less, statistics of a
# second block and more than one second-level block.
SHAPES = [(64, 64), (128, 96), (65, 3), (33, 17), (8, 8), (1, 1), (100, 331), (512, 700), (129, 257)]


def tensors_of_state(state):
    """The real QuantState's tensors under our names."""
    found = {"absmax": state.absmax, "code": state.code, "offset": state.offset}
    if state.state2 is not None:
        found |= {"nested_absmax": state.state2.absmax, "nested_code": state.state2.code}
    return found


def described(tensor):
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype)


def on_meta(layer):
    return layer.to("meta")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_4bit_storage_is_that_of_bitsandbytes(shape, nested, quant_type):
    bnb = pytest.importorskip("bitsandbytes")
    for storage in (torch.uint8, torch.bfloat16):
        if shape[0] * shape[1] % 4 and storage is not torch.uint8:
            continue
        real = bnb.nn.Linear4bit(
            *shape, bias=True, compute_dtype=torch.bfloat16, compress_statistics=nested, quant_type=quant_type,
            quant_storage=storage,
        )  # fmt: skip
        real = real.to(torch.bfloat16).to("cpu")
        ours = Linear4bit(
            on_meta(nn.Linear(*shape, dtype=torch.bfloat16)), *shape, quant_type=quant_type, compress_statistics=nested,
            quant_storage=storage,
        )  # fmt: skip
        assert described(ours.weight) == described(real.weight)
        expected = tensors_of_state(real.weight.quant_state)
        for name in ("absmax", "code", "offset", "nested_absmax", "nested_code"):
            assert described(getattr(ours, name)) == described(expected.get(name)), name
        total = real.weight.nbytes + sum(tensor.nbytes for tensor in expected.values() if tensor is not None)
        assert ours.weight_nbytes == total
        assert described(ours.bias) == described(real.bias)
        assert ours.weight.requires_grad is real.weight.requires_grad is False


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_storage_is_that_of_bitsandbytes(shape):
    bnb = pytest.importorskip("bitsandbytes")
    real = bnb.nn.Linear8bitLt(*shape, has_fp16_weights=False, threshold=6.0).to("cpu")
    ours = Linear8bitLt(on_meta(nn.Linear(*shape)), *shape)
    assert described(ours.weight) == described(real.weight)
    assert described(ours.SCB) == described(real.weight.SCB)
    assert ours.weight_nbytes == real.weight.nbytes + real.weight.SCB.nbytes


def test_a_conv1d_is_packed_like_the_linear_layer_of_its_transpose():
    ours = Linear4bit(on_meta(Conv1D(96, 32)), 32, 96)
    assert (ours.in_features, ours.out_features) == (32, 96)
    assert described(ours.bias) == ((96,), torch.float32)
    assert ours.weight.numel() == 32 * 96 // 2


@pytest.mark.parametrize(
    "bits, group_size, expected",
    [
        # qweight, qzeros, scales as files of 4096 x 14336 layers hold them (TheBloke/Mistral-7B-v0.1-GPTQ: up_proj)
        (4, 128, [(512, 14336), (32, 1792), (32, 14336)]),
        (4, -1, [(512, 14336), (1, 1792), (1, 14336)]),
        (8, 128, [(1024, 14336), (32, 3584), (32, 14336)]),
    ],
)
def test_gptq_storage(bits, group_size, expected):
    source = nn.Linear(4096, 14336, bias=False, device="meta", dtype=torch.float16)
    ours = GptqLinear(source, 4096, 14336, bits=bits, group_size=group_size)
    assert [tuple(getattr(ours, name).shape) for name in ("qweight", "qzeros", "scales")] == expected
    assert [getattr(ours, name).dtype for name in ("qweight", "qzeros", "scales", "g_idx")] == [
        torch.int32, torch.int32, torch.float16, torch.int32,
    ]  # fmt: skip
    assert tuple(ours.g_idx.shape) == (4096,)
    groups = 1 if group_size == -1 else 4096 // group_size
    assert ours.weight_nbytes == 4096 * 14336 * bits // 8 + groups * 14336 * (bits / 8 + 2) + 4096 * 4


def test_awq_storage():
    source = nn.Linear(4096, 14336, bias=True, device="meta", dtype=torch.float16)
    ours = AwqLinear(source, 4096, 14336, bits=4, group_size=64)
    assert [described(getattr(ours, name)) for name in ("qweight", "qzeros", "scales", "bias")] == [
        ((4096, 1792), torch.int32), ((64, 1792), torch.int32), ((64, 14336), torch.float16), ((14336,), torch.float16),
    ]  # fmt: skip


@pytest.mark.parametrize("layer, options", [(GptqLinear, {}), (AwqLinear, {"group_size": 32})])
def test_layers_that_cannot_be_packed_are_refused(layer, options):
    with pytest.raises(InputError, match="found one of 40 inputs and 64 outputs"):
        layer(nn.Linear(40, 64, device="meta"), 40, 64, **options)
