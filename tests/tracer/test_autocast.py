"""CUDA's autocast on the phantom GPU: its lists, its cache, and how models and programs speak to it."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.utils.generic import maybe_autocast

from metapeak.tracer import autocast
from metapeak.tracer.capture import record_training_step
from metapeak.tracer.errors import TraceError
from metapeak.tracer.liveness import Phase
from metapeak.tracer.training_loop import TrainingLoop
from tests.agreement.cuda_lists_on_cpu import lists_in_header

SIZE = 600
CAST = SIZE * SIZE * 2


def test_the_lists_are_those_of_the_header_that_torch_ships():
    header = lists_in_header()
    assert sorted(autocast.LOWER_PRECISION) == sorted(header["LOWER_PRECISION_FP"])
    assert sorted(autocast.FLOAT32) == sorted(header["FP32"])
    assert sorted(autocast.FLOAT32_RESULT) == sorted(header["FP32_SET_OPT_DTYPE"])
    assert sorted(autocast.WIDEST) == sorted(header["PROMOTE"])
    assert sorted(autocast.FLOAT32_APPENDED) == sorted(header["DIFFERENT_REDISPATCH_SIGNATURE"])
    assert len(header["FP32"]) > 50


class Net(nn.Module):
    """Four linears between two small ones, and a function of ours in place of the forward where a test wants one."""

    def __init__(self, use_reentrant=None, frozen=False):
        super().__init__()
        self.before = nn.Linear(4, SIZE, bias=False)
        self.linears = nn.ModuleList([nn.Linear(SIZE, SIZE, bias=False) for _ in range(4)])
        self.linears.requires_grad_(not frozen)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.before(x)
        for linear in self.linears:
            x = linear(x) if self.use_reentrant is None else checkpoint(linear, x, use_reentrant=self.use_reentrant)
        return x.float().pow(2).sum()


def record(model, **loop):
    batch = (torch.ones(2, 4),)
    return record_training_step(model, batch, None, iterations=1, loop=TrainingLoop(**loop))[0]


def freed_when_autocast_ends(graph):
    """Bytes of casts that go between the end of forward and backward's first operation."""
    liveness = graph.liveness()
    end = max(index for index in range(liveness.num_ops) if liveness.op_phase[index] == Phase.FORWARD)
    casts = [index for index, name in enumerate(liveness.op_names) if name == "aten._to_copy.default"]
    gone = (liveness.death > end) & (liveness.death <= end + 1) & (liveness.op[liveness.birth] == casts[0])
    return int(liveness.nbytes[gone & (liveness.nbytes == CAST)].sum())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_casts_of_checkpointed_weights_stay_until_autocast_ends(use_reentrant):
    """FRAMEWORKS.md M2: four copies are freed when the region ends; of frozen weights none."""
    with torch.device("meta"):
        trained, frozen = Net(use_reentrant), Net(use_reentrant, frozen=True)
    assert freed_when_autocast_ends(record(trained, autocast=torch.bfloat16)) == 4 * CAST
    assert freed_when_autocast_ends(record(frozen, autocast=torch.bfloat16)) == 0


def test_without_checkpointing_backward_keeps_the_casts():
    with torch.device("meta"):
        model = Net()
    assert freed_when_autocast_ends(record(model, autocast=torch.bfloat16)) == 0


def dtypes(function, **loop):
    """{what the function names: dtype}, from inside a recorded forward on a float32 model."""
    found = {}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(8, 8, device="meta"))

        def forward(self, x):
            found.update({name: tensor.dtype for name, tensor in function(x, self.weight).items()})
            return (x @ self.weight).float().sum()

    record_training_step(
        Model(), (torch.ones(2, 8),), None, iterations=1, loop=TrainingLoop(autocast=torch.bfloat16, **loop)
    )
    return found


def test_what_each_policy_does():
    def function(x, weight):
        low = x @ weight
        return {
            "lower": low,
            "float32": low.rsqrt(),
            "result": low.sum(),
            "given": torch.softmax(low, -1, dtype=torch.bfloat16),
            "softmax": torch.softmax(low, -1),
            "appended": low.norm(),
            "appended over a dimension": low.norm(dim=-1),
            "widest of low": torch.addcmul(low, low, low),
            "widest": torch.addcmul(low, low, x),
            "not on a list": low * 2,
            "double": x.double() @ weight.double(),
            "einsum, a list": torch.einsum("bi,ij->bj", x, weight),
        }

    low, single = torch.bfloat16, torch.float32
    assert dtypes(function) == {
        "lower": low,
        "float32": single,
        "result": single,
        "given": low,
        "softmax": single,
        "appended": single,
        "appended over a dimension": single,
        "widest of low": low,
        "widest": single,
        "not on a list": low,
        "double": torch.float64,
        "einsum, a list": low,
    }


def test_models_switch_it_off_and_ask_for_it_in_cuda_s_name():
    seen = {}

    def function(x, weight):
        seen["cuda"] = torch.is_autocast_enabled(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        made = {}
        with torch.autocast(device_type=x.device.type, enabled=False):
            made["off"] = x @ weight
        with maybe_autocast(device_type=x.device.type, enabled=False):
            made["maybe off"] = x @ weight
        with torch.autocast("cuda", enabled=False):
            made["cuda off"] = x @ weight
        with torch.amp.autocast("cuda", dtype=torch.float16):
            made["cuda fp16"] = x @ weight
        return made

    off = torch.float32
    assert dtypes(function) == {"off": off, "maybe off": off, "cuda off": off, "cuda fp16": torch.float16}
    assert seen["cuda"] == (True, True, torch.bfloat16)
    assert torch.is_autocast_enabled() is False and torch.get_autocast_dtype("cuda") is torch.float16


def test_a_custom_function_for_cuda_runs_in_the_region_s_dtype():
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.bfloat16)
        def forward(ctx, x, weight):
            return x * weight

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, gradient):
            return gradient, gradient

    found = dtypes(lambda x, weight: {"product": Product.apply(x[:1], weight[:1])})
    assert found == {"product": torch.bfloat16}


def test_what_is_cached():
    same = {}

    def function(x, weight):
        def cast_of(tensor):
            return autocast._cast(tensor, torch.bfloat16)

        leaf = cast_of(weight)
        same["leaf"] = cast_of(weight) is leaf
        same["view"] = cast_of(weight[:4]) is cast_of(weight[:4])
        same["no leaf"] = cast_of(weight * 1) is cast_of(weight * 1)
        same["input"] = cast_of(x) is cast_of(x)
        with torch.autocast("cuda", enabled=False):
            pass
        same["after a nested region"] = cast_of(weight) is leaf
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            same["cache off"] = cast_of(weight) is cast_of(weight)
        return {}

    dtypes(function)
    assert same == {
        "leaf": True,
        "view": False,
        "no leaf": False,
        "input": False,
        "after a nested region": True,
        "cache off": False,
    }
    assert not autocast._casts


def test_pytorch_refuses_what_it_refuses_on_cuda():
    def banned(x, weight):
        return {"loss": nn.functional.binary_cross_entropy(torch.sigmoid(x), x)}

    with pytest.raises(TraceError, match="unsafe to autocast"):
        dtypes(banned)

    def mixed(x, weight):
        return {"sum": torch.addcmul(x.half(), x.half(), x.half())}

    with pytest.raises(TraceError, match="Unexpected floating ScalarType"):
        dtypes(mixed)
