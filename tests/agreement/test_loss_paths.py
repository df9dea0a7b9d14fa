"""Loss paths against the libraries they are named after, run for real on the CPU: bytes alive, to the byte.

Triton kernels do not run there: they are replaced by launches that do nothing, as they allocate nothing. Checks for
`cuda` in the libraries' own code are turned to `cpu`, so that their CUDA branch is the one that runs.
"""

import functools
import importlib
import importlib.util
import types
from pathlib import Path

import pytest
import torch
import transformers as hf

from metapeak.strategies.loss import Loss, install_loss, parse_loss
from metapeak.tracer.capture import default_loss, record_training_step
from tests.agreement.cpu_oracle import run_on_cpu

DTYPES = [torch.float32, torch.bfloat16]
VOCABULARY, TOKENS = 199, 48
PLAIN_PATHS = [
    "transformers-4.48",
    "transformers-4.45",
    "chunked:8",
    "chunked:5",
    "chunked-output:8",
    "chunked-tokens:16",
    "chunked-ce:16",
    "chunked-backward:4",
]


def build(device, dtype, **changes):
    config = hf.LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "use_cache": False,
            "attn_implementation": "eager",
            **changes,
        }
    )
    torch.manual_seed(0)
    with torch.device(device):
        return hf.LlamaForCausalLM(config).to(dtype).train()


def batch(rows=2):
    ids = torch.arange(rows * TOKENS).view(rows, TOKENS) % 101
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def foreach_adamw(parameters):
    return torch.optim.AdamW(parameters, foreach=True)


def predicted(loss, dtype, inputs, prepare=lambda model: None, **changes):
    model = build("meta", dtype, **changes)
    install_loss(model, parse_loss(loss))
    prepare(model)
    graph, _ = record_training_step(model, inputs, foreach_adamw, compute_loss=default_loss)
    return {(phase.iteration, phase.phase): phase for phase in graph.liveness().phases() if phase.iteration}


def assert_same(cpu, phases):
    assert {key: phase.end_bytes for key, phase in phases.items()} == cpu.ends
    assert {key: phase.peak_bytes for key, phase in phases.items()} == {key: cpu.peak(key) for key in phases}


class NoLaunch:
    """A Triton kernel that is launched as `kernel[grid](...)` and does nothing."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


def module_with(name, changes):
    """A fresh copy of an installed module with parts of its source replaced; each has to be there."""
    source = Path(importlib.util.find_spec(name).origin).read_text()
    for old, new in changes.items():
        assert old in source, f"{name} has no {old}"
        source = source.replace(old, new)
    module = types.ModuleType(name)
    module.__package__ = name.rpartition(".")[0]
    exec(compile(source, name, "exec"), module.__dict__)
    return module


# One row, and half precision: other copies are made.
@pytest.mark.parametrize(
    "rows, dtype", [(2, torch.bfloat16), *[pytest.param(1, dtype, marks=pytest.mark.slow) for dtype in DTYPES]]
)
@pytest.mark.parametrize(
    "loss",
    PLAIN_PATHS,
)
def test_plain_paths_equal_their_run_on_the_cpu(loss, rows, dtype):
    model = build("cpu", dtype)
    install_loss(model, parse_loss(loss))
    assert_same(run_on_cpu(model, batch(rows), foreach_adamw), predicted(loss, dtype, batch(rows)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunked_output_equals_torchtune(dtype):
    spec = importlib.util.find_spec("torchtune")
    if spec is None:
        pytest.skip("torchtune is not installed")
    path = Path(spec.origin).parent / "modules" / "loss" / "ce_chunked_output_loss.py"  # alone: it wants no torchao
    spec = importlib.util.spec_from_file_location("ce_chunked_output_loss", path)
    torchtune_loss = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(torchtune_loss)
    loss_fn = torchtune_loss.CEWithChunkedOutputLoss(num_output_chunks=8)
    model = build("cpu", dtype)

    def logits_of(**inputs):  # TransformerDecoder.chunked_output
        hidden = model.model(**inputs).last_hidden_state
        return [model.lm_head(chunk) for chunk in hidden.chunk(8, dim=1)]

    def forward(labels, **inputs):  # _loss_step of the recipe
        logits = logits_of(**inputs)
        labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return types.SimpleNamespace(loss=loss_fn(logits, labels))

    model.forward = forward
    assert_same(run_on_cpu(model, batch(), foreach_adamw), predicted("chunked-output:8", dtype, batch()))


@pytest.mark.parametrize("head", ["trained", "frozen", "tied to the embedding"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_linear_equals_liger(dtype, head, monkeypatch):
    pytest.importorskip("liger_kernel")
    ops = module_with(
        "liger_kernel.ops.fused_linear_cross_entropy",
        {
            '.device.type != "cuda"': '.device.type != "cpu"',
            '.device.type == "cuda"': '.device.type == "cpu"',
            "torch.cuda.get_device_capability(grad_weight.device)[0] >= 8": "True",
            'torch.get_autocast_dtype("cuda")': 'torch.get_autocast_dtype("cpu")',
        },
    )
    ops.liger_cross_entropy_kernel = ops.element_mul_kernel = NoLaunch()
    functional = importlib.import_module("liger_kernel.transformers.functional")
    from liger_kernel.transformers.model.llama import lce_forward

    monkeypatch.setattr(functional, "LigerFusedLinearCrossEntropyFunction", ops.LigerFusedLinearCrossEntropyFunction)

    def freeze(model):
        model.lm_head.requires_grad_(head != "frozen")

    changes = {"tie_word_embeddings": head == "tied to the embedding"}
    model = build("cpu", dtype, **changes)
    freeze(model)
    model.forward = types.MethodType(lce_forward, model)
    cpu = run_on_cpu(model, batch(), foreach_adamw)
    assert_same(cpu, predicted("fused-linear", dtype, batch(), freeze, **changes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_head_equals_trl(dtype, monkeypatch):
    pytest.importorskip("trl", minversion="1.16")
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    monkeypatch.setattr(chunked_logprob, "_use_triton", lambda device: True)
    monkeypatch.setattr(utils, "_use_triton", lambda device: True)
    monkeypatch.setattr(chunked_logprob, "_forward_kernel", NoLaunch())
    monkeypatch.setattr(chunked_logprob, "_backward_kernel", NoLaunch())
    monkeypatch.setattr(chunked_logprob, "_addmm_fp32", lambda sums, left, right: None)  # CUDA's adds in place
    model = build("cpu", dtype)
    utils.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    model.forward = functools.partial(model.forward, fused_lm_head=True)
    assert_same(run_on_cpu(model, batch(), foreach_adamw), predicted("fused-head", dtype, batch()))


# FRAMEWORKS: bytes a logit at the peak, bf16, measured on the CPU with nothing but head and loss, 512 tokens, 8,000
# words, hidden size 8. Two rows: with one, the shifted copy of older versions is no copy.
BYTES_A_LOGIT = {
    ("eager", False): 12,
    ("eager", True): 14,
    ("transformers-4.48", False): 14,
    ("transformers-4.45", False): 12,
    ("transformers-4.45", True): 16,
    ("chunked-output:8", False): 6.5,
    ("chunked:8", False): 5.0,
    ("chunked-ce:128", False): 6.0,
    ("chunked-tokens:128", False): 5.0,
    # 12 of one chunk in eight, and its bf16 logits, which the wrapper's loop holds during the chunk's backward.
    ("chunked-backward:8", False): 14 / 8,
    ("fused-linear", False): 0,
    ("fused-head", False): 0,
}


@pytest.mark.parametrize("loss, keep", BYTES_A_LOGIT)
def test_bytes_a_logit(loss, keep):
    rows = 2 if loss.startswith("transformers") else 1
    ids = torch.arange(512).view(rows, -1) % 101
    small = {"vocab_size": 8000, "hidden_size": 8, "num_hidden_layers": 0, "attn_implementation": "sdpa"}
    model = build("meta", torch.bfloat16, **small)
    strategy = Loss(spec=parse_loss(loss), keep_outputs=keep)
    strategy.prepare(model)
    graph, _ = record_training_step(
        model, {"input_ids": ids, "labels": ids.clone()}, None, compute_loss=strategy.loss_function(default_loss)
    )
    phases = graph.liveness().phases()
    # A first step: nothing is held from the one before it.
    peak = max(phase.peak_bytes for phase in phases if phase.iteration == 1) - phases[0].end_bytes
    logits = 512 * 8000
    buffer = 512 * 32768 * 2 if loss == "fused-head" else 0
    gradients = 8000 * 8 * (4 + 2)  # of the head, in fp32 and cast
    assert BYTES_A_LOGIT[loss, keep] * logits == pytest.approx(peak - buffer, abs=gradients + 0.01 * logits)
