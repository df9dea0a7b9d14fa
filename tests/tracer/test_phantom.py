"""The phantom GPU: what PyTorch does on it, and that it does what CUDA would."""

import gc
import subprocess
import sys
from importlib import resources

import pytest
import torch
import yaml
from torch.utils.checkpoint import checkpoint

from metapeak.tracer import composites, phantom, phantom_ops  # noqa: F401  (the latter two register operators)
from metapeak.tracer.capture import record_training_step
from metapeak.tracer.dispatch import PhantomMode
from metapeak.tracer.errors import TraceError
from metapeak.tracer.phantom import DEVICE, PhantomTensor
from tests.tracer.conftest import Log


def test_tensors_say_that_they_are_on_the_phantom_gpu(mode):
    x = torch.empty(2, 3, device=DEVICE, dtype=torch.bfloat16)
    assert isinstance(x, PhantomTensor) and x.device == DEVICE
    assert (x @ x.t()).shape == (2, 2) and (x @ x.t()).dtype == torch.bfloat16
    assert x.new_zeros(5).device == DEVICE and torch.ones_like(x).device == DEVICE
    assert torch.tensor([1, 2], device=DEVICE).device == DEVICE


def test_views_share_a_storage(mode):
    x = torch.empty(2, 3, device=DEVICE)
    for view in (x.view(3, 2), x.t(), x[0], x.detach(), x.expand(4, 2, 3)):
        assert view.untyped_storage() is x.untyped_storage()


def test_cached_answers_equal_fresh_ones(mode):
    def step():
        x = torch.empty(4, 6, device=DEVICE, requires_grad=True)
        y = torch.nn.functional.layer_norm(x, (6,)).to(torch.bfloat16).t().contiguous().softmax(0).split(2)
        return [(part.shape, part.stride(), part.dtype, part.untyped_storage().nbytes()) for part in y]

    assert step() == step() == step()


def test_a_cpu_tensor_is_refused_as_cuda_does(mode):
    with pytest.raises(TraceError, match="expected all tensors on the GPU"):
        torch.empty(3, device=DEVICE) + torch.ones(3)
    assert (torch.empty(3, device=DEVICE) + torch.tensor(2.0)).shape == (3,)  # a scalar on the CPU is allowed


def test_use_outside_the_mode_is_refused():
    with PhantomMode(Log()):
        x = torch.empty(3, device=DEVICE)
    with pytest.raises(TraceError, match="outside the traced step"):
        x + x


def test_operators_that_cuda_runs_whole_are_not_decomposed(mode):
    """native_functions.yaml, shipped with torch, names the operators with a composite definition beside a CUDA one."""
    path = resources.files("torchgen").joinpath("packaged/ATen/native/native_functions.yaml")
    functions = {
        entry["func"].split("(")[0]: entry
        for entry in yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    }

    def dispatch(entry):
        keys = {key.strip() for group in entry.get("dispatch") or {} for key in group.split(",")}
        if "structured_delegate" in entry:
            keys |= dispatch(functions[entry["structured_delegate"]])
        return keys

    whole = {name for name, entry in functions.items() if {"CompositeImplicitAutograd", "CUDA"} <= dispatch(entry)}
    assert whole == set(phantom.WHOLE_ON_CUDA)

    x = torch.empty(4, 8, device=DEVICE, requires_grad=True)
    torch.nn.functional.silu(x).sum().backward()
    assert "aten.silu_backward.default" in mode.observer.names
    assert "aten.sigmoid.default" not in mode.observer.names


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
@pytest.mark.parametrize(
    "dtype, copies", [(torch.float16, 0), (torch.bfloat16, 2)], ids=["fp16 in one kernel", "bf16 with a copy each way"]
)
def test_softmax_to_fp32_as_on_cuda(mode, function, dtype, copies):
    x = torch.empty(4, 8, device=DEVICE, dtype=dtype, requires_grad=True)
    result = function(x, -1, dtype=torch.float32)
    result.sum().backward()
    assert result.dtype == torch.float32 and x.grad.dtype == dtype
    assert mode.observer.names.count("aten._to_copy.default") == copies


@pytest.mark.parametrize(
    "run, op, decomposed",
    [
        (lambda x: torch.nn.functional.rms_norm(x, (8,)), "aten._fused_rms_norm.default", "aten.mean.dim"),
        (lambda x: torch._weight_norm(x, x[:, :1]), "aten._weight_norm_interface.default", "aten.div.Tensor"),
        (lambda x: torch.nn.functional.layer_norm(x, (8,)), "aten.native_layer_norm.default", "aten.rsqrt.default"),
        (torch.nn.functional.mish, "aten.mish_backward.default", "aten.tanh.default"),
    ],
    ids=["rms_norm", "weight_norm", "layer_norm", "mish"],
)
def test_composite_operators_are_fused_as_on_cuda(mode, run, op, decomposed):
    run(torch.empty(4, 8, device=DEVICE, requires_grad=True)).sum().backward()
    assert op in mode.observer.names
    assert decomposed not in mode.observer.names


def test_an_out_argument_that_comes_empty_is_allocated_by_its_operator():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(4, 8))

        def forward(self):
            sums = torch.empty(0, device=self.weight.device)
            torch.sum(self.weight.detach(), -1, out=sums)
            return (self.weight * sums.unsqueeze(1)).sum()

    with torch.device("meta"):
        model = Model()
    graph, _ = record_training_step(model, (), None, iterations=1)
    graph.lint()
    node = next(
        node for node in range(graph.num_ops) if graph.op_names[graph.op[node]].startswith("aten.sum.IntList_out")
    )
    assert [graph.nbytes[row] for row, birth in enumerate(graph.birth) if birth == node] == [4 * 4]


def test_fused_dropout_as_on_cuda(mode):
    torch.nn.functional.dropout(torch.empty(8, device=DEVICE, requires_grad=True), 0.1)
    assert "aten.native_dropout.default" in mode.observer.names


def test_nothing_waits_for_the_garbage_collector():
    """Storages die with their last reference: a cycle anywhere in the machinery would keep them alive."""
    gc.collect()
    gc.disable()
    try:
        deaths = []
        with PhantomMode(Log()), torch.autograd.set_multithreading_enabled(False):
            weight = torch.empty(16, 16, device=DEVICE, requires_grad=True)
            for _ in range(3):  # the first fills the cache of answers, the others use it
                hidden = torch.relu(torch.empty(4, 16, device=DEVICE) @ weight)
                torch.utils.weak.weakref.finalize(hidden.untyped_storage(), deaths.append, True)
                hidden.square().sum().backward()
                assert not deaths
                del hidden
                assert deaths.pop()
    finally:
        gc.enable()


class Failing(torch.nn.Module):
    def __init__(self, error, recompute):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.error, self.recompute, self.calls = error, recompute, 0

    def body(self, x):
        self.calls += 1
        if self.recompute and self.calls == 2:
            raise self.error
        return self.linear(x).tanh()

    def forward(self, x):
        if self.recompute:
            return checkpoint(self.body, x, use_reentrant=False).sum()
        hidden = self.body(x)
        hidden.register_hook(self.fail)
        return hidden.sum()

    def fail(self, gradient):
        raise self.error


@pytest.mark.parametrize("recompute", [False, True], ids=["in backward", "in recompute"])
@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()], ids=["an error", "Ctrl-C"])
def test_what_fails_in_backward_is_reported_and_does_not_abort(error, recompute):
    with torch.device("meta"):
        model = Failing(error, recompute)
    with pytest.raises((TraceError, KeyboardInterrupt)) as caught:
        record_training_step(model, (torch.ones(2, 8),), None)
    if isinstance(error, KeyboardInterrupt):
        assert caught.value is error
    else:
        assert "ValueError: boom" in str(caught.value) and caught.value.__cause__ is error


def test_errors_name_the_op_and_the_module():
    class Block(torch.nn.Module):
        def forward(self, x):
            return torch.mm(x, x)

    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), Block())
    with pytest.raises(TraceError, match=r"aten\.mm\.default in module '1'") as caught:
        record_training_step(model, (torch.ones(2, 8),), None)
    assert caught.value.op == "aten.mm.default" and caught.value.module == "1"


def test_nothing_that_keeps_frames_is_imported_inside_a_step():
    program = "import sys, metapeak.tracer.capture; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "True"
