"""Optimizers against the real libraries: states and steps on the CPU, real classes on the phantom GPU."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metapeak.strategies.optimizers import optimizer_maker
from metapeak.tracer.capture import move_to_phantom, record_training_step
from metapeak.tracer.dispatch import PhantomMode
from metapeak.tracer.liveness import Category
from metapeak.tracer.optimizer_states import plain_tensors
from metapeak.tracer.spec import OptimizerSpec
from tests.agreement.cpu_oracle import run_on_cpu

# Each hits a rule: nothing to factor, below, at and above bitsandbytes' 4096, at and above its 1e5 of paging, not
# divisible by a block, three dimensions, a matrix.
SHAPES = [(1,), (4095,), (4096,), (4097,), (100_000,), (100_001,), (3, 64, 64), (96, 128)]
DTYPES = [torch.float32, torch.bfloat16]


class Bag(torch.nn.Module):
    """Parameters of given shapes, and an embedding (quantised by size, not by role)."""

    def __init__(self, shapes, dtype):
        super().__init__()
        self.all = torch.nn.ParameterList([torch.nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in shapes])
        self.embedding = torch.nn.Embedding(512, 16, dtype=dtype)


def mostly_slow(cases, quick):
    """All cases, those whose first word is not among `quick` marked as slow."""
    return [case if case[0] in quick else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


class Silent:
    def record(self, func, args, kwargs, outputs):
        pass

    def location(self):
        return 0, ""


def states_on_phantom(spec, shapes, dtype):
    """[(states of a parameter as sorted (shape, dtype, whether on the device))] after one step."""
    with torch.device("meta"):
        bag = Bag(shapes, dtype)
    move_to_phantom(bag)
    maker = optimizer_maker(spec, bag)
    with PhantomMode(Silent()), torch.no_grad():
        parameters = list(bag.parameters())
        optimizer = maker(parameters)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return [states_of(optimizer.state[parameter], "phantom") for parameter in parameters]


def states_on_cpu(make, shapes, dtype):
    bag = Bag(shapes, dtype)
    for parameter in bag.parameters():
        torch.nn.init.ones_(parameter)
        parameter.grad = torch.ones_like(parameter)
    optimizer = make(bag)
    optimizer.step()
    return [states_of(optimizer.state[parameter], "cpu") for parameter in bag.parameters()]


def states_of(state, device):
    """Shapes and dtypes of all states that have a dimension, and of the scalars that are on the device."""
    kept = []
    for name, value in state.items():
        for tensor in plain_tensors(value):
            if tensor.dim() or (device == "phantom" and tensor.device.type == "phantom" and name != "RMS"):
                kept.append((tuple(tensor.shape), str(tensor.dtype)))
    return sorted(kept)


TORCH = [
    ("adamw", "AdamW", {}),
    ("adam", "Adam", {}),
    ("sgd", "SGD", {}),
    ("sgd-momentum", "SGD", {"momentum": 0.9}),
    ("adagrad", "Adagrad", {}),
    ("rmsprop", "RMSprop", {}),
    ("adadelta", "Adadelta", {}),
    ("adamax", "Adamax", {}),
    ("nadam", "NAdam", {}),
    ("radam", "RAdam", {}),
    ("rprop", "Rprop", {}),
    ("torch.optim.Adafactor", "Adafactor", {}),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "class_name", "arguments"), mostly_slow(TORCH, {"adamw", "adagrad"}))
def test_states_of_torch_equal_the_cpu(name, class_name, arguments, dtype):
    real = states_on_cpu(lambda bag: getattr(torch.optim, class_name)(bag.parameters(), **arguments), SHAPES, dtype)
    assert states_on_phantom(OptimizerSpec(name=name), SHAPES, dtype) == real


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_of_adafactor_equal_the_cpu(dtype):
    from transformers.optimization import Adafactor

    real = states_on_cpu(
        lambda bag: Adafactor(bag.parameters(), lr=1e-3, scale_parameter=False, relative_step=False), SHAPES, dtype
    )
    assert states_on_phantom(OptimizerSpec(name="adafactor"), SHAPES, dtype) == real
    assert ((96,), "torch.float32") in real[7] and ((128,), "torch.float32") in real[7]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_of_lion_equal_the_cpu(dtype):
    lion_pytorch = pytest.importorskip("lion_pytorch")
    real = states_on_cpu(lambda bag: lion_pytorch.Lion(bag.parameters()), SHAPES, dtype)
    assert states_on_phantom(OptimizerSpec(name="lion"), SHAPES, dtype) == real


def test_step_counters_are_on_the_device_only_when_a_kernel_reads_them():
    counter = ((), "torch.float32")
    for spec, on_device in [
        (OptimizerSpec(name="adamw"), False),
        (OptimizerSpec(name="adamw", implementation="fused"), True),
        (OptimizerSpec(name="adamw", arguments={"capturable": True}), True),
        (OptimizerSpec(name="radam"), False),
    ]:
        assert (counter in states_on_phantom(spec, [(8,)], torch.float32)[0]) is on_device
    # ASGD keeps its step, eta and mu on the device always.
    assert states_on_phantom(OptimizerSpec(name="asgd"), [(8,)], torch.float32)[0].count(counter) == 3


# -- bitsandbytes ------------------------------------------------------------------------------------------------------

BITSANDBYTES = [
    ("adamw8bit", "AdamW8bit", {}),
    ("adam8bit", "Adam8bit", {}),
    ("adamw32bit", "AdamW32bit", {}),
    ("paged-adamw8bit", "PagedAdamW8bit", {}),
    ("paged-adamw", "PagedAdamW32bit", {}),
    ("lion8bit", "Lion8bit", {}),
    ("lion32bit", "Lion32bit", {}),
    ("ademamix8bit", "AdEMAMix8bit", {}),
    ("ademamix", "AdEMAMix", {}),
    ("sgd8bit", "SGD8bit", {"momentum": 0.9}),
    ("rmsprop8bit", "RMSprop8bit", {}),
    ("adagrad32bit", "Adagrad32bit", {}),
    ("lamb", "LAMB32bit", {}),
    ("lars", "LARS32bit", {"momentum": 0.9}),
]
_NO_BF16 = {"sgd8bit", "rmsprop8bit", "adagrad32bit", "lars"}  # in 32 bits, on CUDA


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "class_name", "arguments"),
    mostly_slow(BITSANDBYTES, {"adamw8bit", "paged-adamw", "lion8bit", "ademamix8bit", "lamb"}),
)
def test_states_of_bitsandbytes_equal_the_cpu(name, class_name, arguments, dtype):
    if dtype is torch.bfloat16 and name in _NO_BF16:
        pytest.skip("CUDA has no such kernel, and the estimate is refused")
    bitsandbytes = pytest.importorskip("bitsandbytes")
    optimizer_class = getattr(bitsandbytes.optim, class_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that paging does not exist on the CPU
        real = states_on_cpu(lambda bag: optimizer_class(bag.parameters(), lr=1e-3, **arguments), SHAPES, dtype)
    assert states_on_phantom(OptimizerSpec(name=name), SHAPES, dtype) == real


def test_embeddings_in_32_bits_equal_what_the_trainer_makes_of_bitsandbytes():
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def make(bag):
        optimizer = bitsandbytes.optim.AdamW8bit(bag.parameters())
        manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
        manager.register_module_override(bag.embedding, "weight", {"optim_bits": 32})
        return optimizer

    real = states_on_cpu(make, SHAPES, torch.float32)
    assert states_on_phantom(OptimizerSpec(name="adamw_bnb_8bit"), SHAPES, torch.float32) == real
    assert real[-1] == [((512, 16), "torch.float32")] * 2
    assert states_on_phantom(OptimizerSpec(name="adamw8bit"), SHAPES, torch.float32)[-1] != real[-1]


@pytest.mark.parametrize(("name", "class_name"), [("adamw8bit", "AdamW8bit"), ("lion8bit", "Lion8bit")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_of_bitsandbytes_equal_the_real_class_on_the_phantom_gpu(name, class_name, dtype):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    optimizer_class = getattr(bitsandbytes.optim, class_name)
    ours = phases(lambda: Tiny(dtype=dtype), optimizer_maker(OptimizerSpec(name=name)))
    real = phases(lambda: Tiny(dtype=dtype), lambda parameters: optimizer_class(parameters))
    assert ours == real


def test_lamb_takes_the_norm_of_an_fp32_copy():
    """In the margin: n bf16 gradients, their parameter's copy of 4 n bytes, and the norm."""
    n = 300
    measured = phases(lambda: Product([(n,)]).bfloat16(), optimizer_maker(OptimizerSpec(name="lamb")))
    peak, end = measured[2, "optimizer"]
    assert peak == end + 2 * n + 4 * n + 4


def test_paged_states_are_outside_the_device():
    """In the margin: 2 states of 1,000 x 100 elements at 4 bytes; 999 x 100 stay on the device, as do all scales."""
    for spec, paged in [(OptimizerSpec(name="paged-adamw"), 8), (OptimizerSpec(name="paged-adamw8bit"), 2)]:
        maker = optimizer_maker(spec)
        graph, _ = record_training_step(Product([(1000, 100), (999, 100)]).to("meta"), {}, maker)
        liveness = graph.liveness()
        on_device = liveness.nbytes[liveness.category == Category.OPTIMIZER_STATE].sum()
        scales = 0 if paged == 8 else 2 * 4 * (-(-100_000 // 256) + -(-99_900 // 256)) + 2 * 256 * 4
        assert on_device == paged * 99_900 + scales
        assert f"{paged * 100_000:,} bytes" in maker.remarks()[0]


# -- torchao -----------------------------------------------------------------------------------------------------------

TORCHAO = [
    (OptimizerSpec(name="adamw8bit", implementation="torchao"), "AdamW8bit", {}),
    (OptimizerSpec(name="adamw4bit"), "AdamW4bit", {}),
    (OptimizerSpec(name="adamw_torch_4bit"), "AdamW4bit", {"block_size": 256}),
    (OptimizerSpec(name="adam4bit"), "Adam4bit", {}),
    (OptimizerSpec(name="adamw-fp8"), "AdamWFp8", {}),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("spec", "class_name", "arguments"), TORCHAO, ids=[name for _, name, _ in TORCHAO])
def test_states_of_torchao_equal_the_cpu(spec, class_name, arguments, dtype, monkeypatch):
    optim = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # the states are made outside
    real = states_on_cpu(lambda bag: getattr(optim, class_name)(bag.parameters(), **arguments), SHAPES, dtype)
    assert states_on_phantom(spec, SHAPES, dtype) == real


def test_wrapped_states_are_marked_as_states(monkeypatch):
    """torchao's own class on the phantom GPU: codes and scales inside its tensor subclass are optimizer states."""
    optim = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    totals = []
    for make in (optimizer_maker(OptimizerSpec(name="adamw8bit", implementation="torchao")), optim.AdamW8bit):
        graph, _ = record_training_step(Tiny().to("meta"), {}, make)
        liveness = graph.liveness()
        totals.append(int(liveness.nbytes[liveness.category == Category.OPTIMIZER_STATE].sum()))
    assert totals[0] == totals[1] > 0


# -- steps -------------------------------------------------------------------------------------------------------------


class Tiny(torch.nn.Module):
    """An embedding, two matrices, biases and a head, with a loss that needs no batch."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embedding = torch.nn.Embedding(128, 64, dtype=dtype)
        self.up = torch.nn.Linear(64, 96, dtype=dtype)
        self.down = torch.nn.Linear(96, 64, bias=False, dtype=dtype)
        self.scale = torch.nn.Parameter(torch.ones(64, dtype=dtype))
        self.lm_head = torch.nn.Linear(64, 128, bias=False, dtype=dtype)

    def forward(self):
        hidden = self.scale * self.down(torch.relu(self.up(self.embedding.weight)))
        return SimpleNamespace(loss=self.lm_head(hidden).sum())


class Product(torch.nn.Module):
    def __init__(self, shapes):
        super().__init__()
        self.all = torch.nn.ParameterList([torch.nn.Parameter(torch.empty(shape)) for shape in shapes])

    def forward(self):
        return SimpleNamespace(loss=sum(parameter.sum() for parameter in self.all))


def phases(build, make_optimizer, scalars=True):
    """{(iteration, phase): (peak, end)} of two steps on the phantom GPU; `scalars` False: without those of the step."""
    with torch.device("meta"):
        model = build()
    graph, _ = record_training_step(model, {}, make_optimizer)
    liveness = graph.liveness()
    if not scalars:
        is_scalar = np.array([shape == () for shape in liveness.shapes])
        in_step = np.isin(liveness.op_phase[liveness.birth], [3]) & is_scalar
        liveness.nbytes[in_step] = 0
    return {
        (phase.iteration, phase.phase): (phase.peak_bytes, phase.end_bytes)
        for phase in liveness.phases()
        if phase.iteration
    }


def phases_on_cpu(build, make_optimizer):
    torch.manual_seed(0)
    run = run_on_cpu(build(), {}, make_optimizer)
    return {key: (run.peak(key), run.ends[key]) for key in run.ends}


STEPS = [
    *[(name, implementation) for name, *_ in TORCH for implementation in ("foreach", "for-loop")],
    ("asgd", "foreach"),
    ("asgd", "for-loop"),
    ("adafactor", "for-loop"),
    ("lion", "for-loop"),
    ("muon", "for-loop"),
]


@pytest.mark.parametrize(("name", "implementation"), mostly_slow(STEPS, {"adamw", "adafactor", "lion", "muon"}))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_equal_a_real_cpu_run(name, implementation, dtype):
    """The same class on the CPU. Scalars are left out: there a number on the device looks like one on the host."""
    spec = OptimizerSpec(name=name, implementation=implementation)
    model = Tiny(dtype=dtype)
    real = phases_on_cpu(lambda: model, optimizer_maker(spec, model))
    with torch.device("meta"):
        model = Tiny(dtype=dtype)
    assert phases(lambda: model, optimizer_maker(spec, model), scalars=False) == real


def test_steps_of_lion_equal_the_package_on_the_cpu():
    lion_pytorch = pytest.importorskip("lion_pytorch")
    real = phases_on_cpu(Tiny, lion_pytorch.Lion)
    assert phases(Tiny, optimizer_maker(OptimizerSpec(name="lion")), scalars=False) == real


def test_fused_steps_have_no_temporaries():
    for spec in (
        OptimizerSpec(name="adamw", implementation="fused"),
        OptimizerSpec(name="lion", implementation="fused"),
        OptimizerSpec(name="adamw", implementation="fused", state_dtype="bfloat16"),
        OptimizerSpec(name="adamw8bit"),
    ):
        measured = phases(Tiny, optimizer_maker(spec))
        gradients = sum(parameter.numel() for parameter in Tiny().parameters()) * 4
        peak, end = measured[2, "optimizer"]
        assert peak == end + gradients


def test_moments_in_bf16_of_a_for_loop():
    """In the margin: n fp32 parameters and gradients, 2 n bf16 moments; at the peak of the second parameter of m
    elements the square root of bf16 and its quotient, and the first one's denominator of bf16, which still lives.
    """
    n, m = 40, 60
    measured = phases(
        lambda: Product([(n,), (m,)]), optimizer_maker(OptimizerSpec(name="adamw", state_dtype="bfloat16"))
    )
    peak, end = measured[2, "optimizer"]
    assert end == (n + m) * (4 + 2 * 2) + 4  # the loss, too
    assert peak == end + (n + m) * 4 + 2 * m + 2 * m + 2 * n


@settings(derandomize=True, max_examples=10, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=2), min_size=1, max_size=4),
    st.sampled_from(["adamw", "adam", "lion", "ademamix", "paged-adamw"]),
    st.sampled_from(DTYPES),
)
def test_8bit_states_are_below_32bit_states(shapes, name, dtype):
    def state_bytes(spec):
        states = states_on_phantom(spec, shapes, dtype)
        tables = {state for each in states for state in each if state[0] == (256,)}
        each = sum(np.prod(s, dtype=int) * (1 if "uint8" in d else 4) for one in states for s, d in one if s != (256,))
        return each + 1024 * len(tables)

    eight = state_bytes(OptimizerSpec(name=f"{name}8bit"))
    assert eight < state_bytes(OptimizerSpec(name=f"{name}32bit"))  # the embedding of 8192 elements is quantised
