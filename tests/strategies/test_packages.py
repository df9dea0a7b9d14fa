"""Models of other packages: the interface with a tiny package made here, and the real ones where they are installed."""

import importlib.util
import textwrap
from dataclasses import replace

import pytest

from metapeak.reports.receipts import Receipt
from metapeak.reports.validation import predict
from metapeak.strategies import simulate_options
from metapeak.strategies.request import simulate_resolved, step_spec
from metapeak.strategies.settings import options_of, resolve
from metapeak.tracer.errors import InputError, ModelNotFound, UnknownName
from metapeak.tracer.packages import registry, split_reference

FAKE = textwrap.dedent(
    """
    import torch
    from metapeak.tracer.packages.base import Inputs, Package


    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(64, 32)
            self.layers = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 32))
                for _ in range(4)
            )
            self.head = torch.nn.Linear(32, 64)

        def forward(self, ids):
            hidden = self.embed(ids)
            for layer in self.layers:
                hidden = hidden + layer(hidden)
            return self.head(hidden)


    def loss(model, batch):
        logits = model(batch["ids"])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


    class Fake(Package):
        prefix = "fake"

        def names(self):
            return ["Tiny_1.0", "other"]

        def build(self, name, dtype):
            module = Model().to(dtype)
            module.script_forgets_embedding = name == "other"
            return module

        def batch(self, module, spec):
            ids = torch.zeros(spec.batch_size, spec.seq_len or 128, dtype=torch.int64)
            return Inputs(tensors={"ids": ids, "labels": ids.clone()}, notes=("a note of fake",))

        def loss(self, name):
            return loss

        def not_optimised(self, module):
            return list(module.embed.parameters()) if module.script_forgets_embedding else ()


    def user_function():
        batch = PACKAGE.batch(None, type("Spec", (), {"batch_size": 8, "seq_len": 128}))
        return Model(), dict(batch.tensors), loss


    PACKAGE = Fake()
    """
)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    (tmp_path / "fake_builder.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = registry.Entry(file="fake_builder", requires=("fake_builder",))
    monkeypatch.setitem(registry.PACKAGES, "fake", entry)


def test_a_reference_names_a_package_only_by_its_prefix():
    assert split_reference("litgpt:phi-1_5") == ("litgpt", "phi-1_5")
    assert split_reference("torchtune:llama3_2_3b") == ("torchtune", "llama3_2_3b")
    assert split_reference("mymodule:make") is None and split_reference("make.py:litgpt") is None


def test_an_absent_package_is_one_clear_message(monkeypatch):
    monkeypatch.setattr(registry, "_is_importable", lambda name: False)
    with pytest.raises(ModelNotFound, match=r"litgpt is not installed: pip install 'metapeak\[litgpt\]'"):
        simulate_options("litgpt:phi-1_5", {})
    monkeypatch.setattr(registry, "_is_importable", lambda name: name != "lightning")
    with pytest.raises(ModelNotFound, match=r"missing: lightning"):
        simulate_options("litgpt:phi-1_5", {})


def test_a_receipt_of_an_absent_package_is_listed_with_that_message(monkeypatch):
    monkeypatch.setattr(registry, "_is_importable", lambda name: False)
    fields = {"definition_key": "phi-1_5", "options": {"batch_size": 1, "seq_len": 64, "weights_dtype": "bf16"}}
    receipt = Receipt(
        id="x", model="microsoft/phi-1_5", definition="package:litgpt", metric="max_allocated", rank="rank0",
        measured_bytes=1, rounding_bytes=0, gpu=None, mechanisms=(), source="", tier="A", fields=fields,
    )  # fmt: skip
    assert "litgpt is not installed" in predict([receipt])[0].refused


def test_a_package_that_cannot_be_imported_says_why(tmp_path, monkeypatch):
    (tmp_path / "broken_builder.py").write_text("raise RuntimeError('wants another torch')")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = registry.Entry(file="broken_builder", requires=("json",), extra="json")
    monkeypatch.setitem(registry.PACKAGES, "broken", entry)
    with pytest.raises(
        InputError, match="broken is installed but cannot be imported: RuntimeError: wants another torch"
    ):
        simulate_options("broken:any", {})


def test_the_step_is_the_packages_own(fake):
    """The same module, batch and loss by way of a user's function: every byte of it."""
    ours = simulate_options("fake:tiny-1-0", {"batch_size": 8, "seq_len": 128})
    oracle = simulate_options("fake_builder:user_function", {})
    assert ours.model.architecture == "Model" and ours.model.parameters == oracle.model.parameters
    assert ours.worst.allocated_bytes == oracle.worst.allocated_bytes
    assert ours.worst.steady_bytes == oracle.worst.steady_bytes
    assert "a note of fake" in ours.how.assumptions


def test_what_the_script_does_not_optimise_keeps_its_gradient_and_has_no_state(fake):
    with_states = simulate_options("fake:other", {"batch_size": 8}).worst.steady_bytes
    parameters = simulate_options("fake:other", {"batch_size": 8}).model.parameters
    embedding = 64 * 32
    # float32 weights, two states for all but the embedding (and a step counter a tensor), the embedding's gradient.
    expected = 4 * parameters + 8 * (parameters - embedding) + 4 * embedding
    assert expected <= with_states <= expected + 64 * 1024


def test_checkpointing_full_covers_the_blocks(fake):
    plain = simulate_options("fake:other", {"batch_size": 64})
    full = simulate_options("fake:other", {"batch_size": 64, "checkpointing": "full"})
    assert full.worst.allocated_bytes < plain.worst.allocated_bytes
    assert any("as the package applies it" in sentence for sentence in full.how.assumptions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "lora"}, "fake has no LoRA of its own"),
        ({"method": "qlora"}, "fake has no"),
        ({"loss": "fused-linear"}, "not one that fake computes; it has eager"),
        ({"method": "lora", "lora_dora": True}, "dora: fake's own LoRA has no such option"),
        ({"method": "qlora", "kbit_prepare": True}, "kbit_prepare is PEFT's"),
        ({"task": "masked-lm"}, "is trained as causal-lm by fake"),
    ],
)
def test_what_a_package_has_not_is_refused(fake, options, message):
    with pytest.raises(InputError, match=message):
        simulate_options("fake:other", options)


def test_an_unknown_name_lists_the_packages_own(fake):
    with pytest.raises(UnknownName, match=r"Unknown fake model 'Tiny_2\.0'\. Nearest known: Tiny_1\.0"):
        simulate_options("fake:Tiny_2.0", {})


def test_linear4bit_of_0_42_holds_its_input_until_the_graph_dies():
    import torch

    from metapeak.strategies.quantization.linear4bit_0_42 import Linear4bitOf042

    layer = Linear4bitOf042(torch.nn.Linear(64, 32, device="meta", dtype=torch.bfloat16), 64, 32)
    x = torch.zeros(2, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    layer.compute_dtype = torch.bfloat16
    assert layer.quant_dtype is torch.float16  # what Lightning casts weights to before it quantises them
    output = layer(x)
    node = output.grad_fn if hasattr(output.grad_fn, "input") else output.grad_fn.next_functions[0][0]
    assert node.input is not None and node.input.shape == x.shape
    output.sum().backward()
    assert node.input is not None  # an attribute, not a saved tensor: backward does not free it


# -- the real packages -------------------------------------------------------------------------------------------------


@pytest.fixture
def litgpt():
    pytest.importorskip("lightning")
    return pytest.importorskip("litgpt")


def test_litgpt_lora_trains_what_litgpt_says(litgpt):
    from litgpt.lora import GPT, mark_only_lora_as_trainable
    from litgpt.utils import num_parameters

    real = GPT.from_name("pythia-14m", lora_r=4, lora_query=True, lora_value=True, lora_mlp=True)
    mark_only_lora_as_trainable(real)
    options = {"method": "lora", "lora_rank": 4, "lora_targets": "q_proj,v_proj,fc1", "seq_len": 64}
    ours = simulate_options("litgpt:pythia-14m", options)
    assert ours.model.trainable_parameters == num_parameters(real, requires_grad=True)
    assert ours.model.parameters == num_parameters(real)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "measured"),
    [
        # litgpt config_hub/finetune/README.md at 5895df1: max_memory_allocated in decimal GB, two decimals.
        ({"method": "lora", "batch_size": 1}, 4.49e9),
        ({"method": "qlora", "batch_size": 2, "optimizer": "paged-adamw", "double_quant": False}, 5.53e9),
    ],
)
def test_litgpt_llama_3_2_1b_as_measured(litgpt, options, measured):
    options |= {"seq_len": 512, "weights_dtype": "bf16", "lora_rank": 32, "lora_dropout": 0.05, "gpu": "a10g"}
    predicted = simulate_options("litgpt-0.4:Llama-3.2-1B", options | {"grad_accum": 4}).worst.allocated_bytes
    assert predicted == pytest.approx(measured, rel=0.003)


@pytest.mark.slow
def test_torchtune_builders_are_found():
    pytest.importorskip("torchtune")
    simulation = simulate_options("torchtune:llama3_2_1b", {"seq_len": 64, "method": "lora", "lora_rank": 8})
    assert simulation.model.parameters > 1.2e9


@pytest.mark.slow
def test_diffusers_ltx_video_after_an_epoch_as_measured():
    pytest.importorskip("diffusers")
    # finetrainers docs/training/ltx_video.md at 41dd338: 10.769 GiB allocated after an epoch of full fine-tuning.
    simulation = simulate_options("diffusers:LTX-Video", {"weights_dtype": "bf16", "checkpointing": "full"})
    assert simulation.worst.steady_bytes == pytest.approx(11_563_125_703, rel=0.003)


def test_timm_trains_the_classes_that_the_name_asks_for():
    if not all(importlib.util.find_spec(name) for name in ("timm", "torchvision")):
        pytest.skip("timm is not installed")
    simulation = simulate_options("timm:vit_tiny_patch16_224@45", {"batch_size": 2})
    # timm's own count of vit_tiny_patch16_224 with 1,000 classes is 5,717,416
    assert simulation.model.parameters == 5_717_416 - (1000 - 45) * (192 + 1)


@pytest.mark.slow
def test_torchtitan_checkpoints_and_shards_its_own_blocks():
    pytest.importorskip("torchtitan")
    pytest.importorskip("tensorboard")
    options = {"weights_dtype": "fp32", "autocast": "bf16", "batch_size": 8, "seq_len": 1024}
    plain = simulate_options("torchtitan:llama3:debugmodel", options)
    checkpointed = simulate_options("torchtitan:llama3:debugmodel", options | {"checkpointing": "full"})
    assert checkpointed.worst.allocated_bytes < plain.worst.allocated_bytes


def test_the_loss_of_xtuner_holds_four_copies_of_the_logits():
    """The published script holds 38.53 GiB: logits, log-probabilities and two gradients beside head and input."""
    options = {"seq_len": 32768, "weights_dtype": "bf16", "optimizer": "none"}
    step = replace(step_spec(resolve(options_of(options, "test"))), iterations=1)
    simulation = simulate_resolved("synthetic:lm-head-loss", resolve(options_of(options, "test")), step=step)
    hidden, head, logits, workspace = 32768 * 4096 * 2, 4096 * 151936 * 2, 32768 * 151936 * 2, 8_519_680
    assert simulation.worst.allocated_bytes == pytest.approx(hidden + head + 4 * logits + workspace, abs=2 * 2**20)
