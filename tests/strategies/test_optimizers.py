"""Names, refusals and roles of optimizers; their bytes are in tests/agreement/test_optimizers.py."""

import subprocess
import sys

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from metapeak.strategies import simulate
from metapeak.strategies.optimizers import ALIASES, OPTIMIZERS, check_optimizer, optimizer_maker
from metapeak.strategies.optimizers.registry import find
from metapeak.tracer import StepSpec
from metapeak.tracer.errors import InputError, MetapeakError, UnknownName
from metapeak.tracer.liveness import Category
from metapeak.tracer.spec import ModelSpec, OptimizerSpec

SMALL = StepSpec(batch_size=1, seq_len=16)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    config = GPT2Config(
        vocab_size=101, n_embd=32, n_layer=1, n_head=4, n_positions=64, architectures=["GPT2LMHeadModel"]
    )
    config.save_pretrained(folder)
    return str(folder)


def spec(name, implementation=None, state_dtype=None, **arguments):
    return OptimizerSpec(name=name, implementation=implementation, state_dtype=state_dtype, arguments=arguments)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "none"])
def test_every_name_can_be_made(name):
    assert optimizer_maker(spec(name)).implementation in OPTIMIZERS[name].implementations


@pytest.mark.parametrize("name", ALIASES)
def test_names_of_the_trainer_are_known(name):
    check_optimizer(spec(name.replace("-", "_")))


def test_every_name_of_the_trainer_is_known_or_refused_with_a_reason():
    from transformers.training_args import OptimizerNames

    refused = set()
    for name in OptimizerNames:
        try:
            check_optimizer(spec(name.value))
        except UnknownName:
            refused.add(name.value)
        except InputError:
            pass
    assert refused == {"adamw_torch_xla", "adamw_torch_npu_fused"}  # not for CUDA


def test_the_implementation_is_the_one_that_cuda_picks():
    for name, implementation in [
        ("adamw", "foreach"),
        ("adamw_torch_fused", "fused"),
        ("torch.optim.Adafactor", "for-loop"),
        ("torch.optim.NAdam", "foreach"),
        ("muon", "for-loop"),
        ("adamw8bit", "bitsandbytes"),
        ("adamw_torch_8bit", "torchao"),
        ("bitsandbytes.optim.PagedAdamW8bit", "bitsandbytes"),
        ("torchao.optim.AdamWFp8", "torchao"),
    ]:
        assert find(spec(name))[1] == implementation


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (spec("adamx"), "Unknown optimizer 'adamx'. Nearest known: adam"),
        (spec("adamw", "fast"), "Unknown optimizer implementation 'fast'"),
        (spec("rmsprop", "fused"), "has no fused implementation. It has: foreach, for-loop"),
        (spec("muon", "foreach"), "has no foreach implementation"),
        (spec("adamw_torch_fused", "for-loop"), "is the fused implementation"),
        (spec("torch.optim.LBFGS"), "needs a closure"),
        (spec("torch.optim.SparseAdam"), "sparse gradients only"),
        (spec("galore_adamw"), "not modelled: GaLore projects"),
        (spec("schedule_free_adamw"), "--optimizer schedulefree.AdamWScheduleFree"),
        (spec("bitsandbytes.optim.LAMB8bit"), "no blockwise 8-bit kernel"),
        (spec("lion", state_dtype="bfloat16"), "option of adam and adamw"),
        (spec("adamw", "foreach", "bfloat16"), "use fused or for-loop"),
        (spec("adamw", state_dtype="int3"), "Unknown state dtype"),
        (spec("adamw", fused=True), "use --implementation fused"),
    ],
)
def test_refused_before_torch_is_needed(asked, sentence):
    with pytest.raises(InputError, match=sentence.replace("(", r"\(")):
        check_optimizer(asked)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (spec("adamw", wd=1), "takes no argument 'wd'. It takes: lr, betas"),
        (spec("adamw8bit", block_wise=True), "takes no argument 'block_wise'"),
        (spec("adamw4bit", block_size="big"), "block_size is 'big'"),
        (spec("adamw4bit", amsgrad=True), "no maximum"),
        (spec("no_such_package.Adam"), "There is no Python module 'no_such_package'"),
        (spec("math.sqrt9"), "Unknown function 'sqrt9'"),
    ],
)
def test_refused_when_it_is_made(asked, sentence):
    with pytest.raises(MetapeakError, match=sentence):
        optimizer_maker(asked)


def test_values_that_a_class_refuses(tiny):
    with pytest.raises(InputError, match="AdamW cannot be made: Invalid learning rate"):
        simulate(tiny, StepSpec(seq_len=16, optimizer=spec("adamw", lr=-1.0)))


def test_a_bf16_model_has_no_32bit_kernel_of_rmsprop(tiny):
    model = ModelSpec(reference=tiny, dtype="bfloat16")
    with pytest.raises(InputError, match="no 32-bit kernel for bf16"):
        simulate(model, StepSpec(seq_len=16, optimizer=spec("rmsprop8bit")))


def test_muon_gets_the_hidden_matrices_only():
    config = GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    model = GPT2LMHeadModel(config)
    optimizer = optimizer_maker(spec("muon"), model)(model.parameters())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    muon, adamw = ({names[id(p)] for p in each.param_groups[0]["params"]} for each in optimizer.optimizers)
    assert muon == {
        f"transformer.h.{i}.{m}.weight"
        for i in (0, 1)
        for m in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert {"transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight"} <= adamw
    assert muon | adamw == set(names.values()) and not muon & adamw


def test_names_stand_for_master_weights_too():
    model = torch.nn.Sequential()
    model.add_module("embedding", torch.nn.Embedding(128, 64))
    master = torch.nn.Parameter(torch.zeros(128, 64))
    optimizer = optimizer_maker(spec("muon"), model)([("embedding.weight", master)])
    assert type(optimizer) is torch.optim.AdamW


def test_a_class_of_a_file_is_traced(tiny, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Signed(torch.optim.Optimizer):\n"
        "    def __init__(self, params, lr, momentum=0.5):\n"
        "        super().__init__(params, {'lr': lr, 'momentum': momentum})\n"
        "    @torch.no_grad()\n"
        "    def step(self):\n"
        "        for p in self.param_groups[0]['params']:\n"
        "            kept = self.state[p].setdefault('deep', [{'buffer': torch.zeros_like(p)}])\n"
        "            p.sub_(kept[0]['buffer'].lerp_(p.grad, 0.5).sign())\n"
        "class Reads(Signed):\n"
        "    def step(self):\n"
        "        for p in self.param_groups[0]['params']:\n"
        "            if (p.grad > 0).any():\n"
        "                pass\n"
        "class Closure(Signed):\n"
        "    def step(self, closure): ...\n"
    )
    parameters = simulate(tiny, SMALL).model.parameters
    for name in ("Signed", "Reads", "Closure"):
        step = StepSpec(seq_len=16, optimizer=spec(f"{tmp_path}/mine.py:{name}", momentum=0.1))
        if name == "Signed":
            result = simulate(tiny, step)
            assert result.ranks[0].breakdown[Category.OPTIMIZER_STATE] == 4 * parameters
        else:
            with pytest.raises(MetapeakError, match=r"_local_scalar_dense.*torch\.bool value|needs a closure"):
                simulate(tiny, step)


@pytest.mark.parametrize(
    "more", [{"implementation": "fused"}, {"arguments": {"lr": 0.1}}, {"master_weights": True}], ids=str
)
def test_none_takes_nothing_that_belongs_to_an_optimizer(more):
    with pytest.raises(InputError, match="optimizer none makes no step"):
        find(OptimizerSpec(name="none", **more))


def test_none_makes_no_step(tiny):
    result = simulate(tiny, StepSpec(seq_len=16, optimizer=spec("none")))
    assert result.ranks[0].liveness.nbytes[result.ranks[0].liveness.category == 2].sum() == 0


def test_the_report_names_implementation_and_assumptions(tiny):
    result = simulate(tiny, StepSpec(seq_len=16, optimizer=spec("adamw4bit")))
    assert result.options["implementation"].value == "torchao"
    assert any("16 bytes an element" in sentence for sentence in result.how.assumptions)


def test_names_are_checked_without_torch():
    code = (
        "import sys, metapeak.strategies.optimizers as o\n"
        "from metapeak.tracer.spec import OptimizerSpec\n"
        "o.check_optimizer(OptimizerSpec(name='paged-adamw8bit'))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
