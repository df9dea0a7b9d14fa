"""Reads, sizes that depend on values and choices on the phantom GPU, against the same operators on real CPU tensors."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from metapeak.tracer.batches import make_batch
from metapeak.tracer.capture import record_training_step
from metapeak.tracer.errors import DataDependentError, TraceError
from metapeak.tracer.phantom import DEVICE, PhantomTensor, phantom_from_cpu
from metapeak.tracer.phantom_ops import BALANCED_CHOICES, HEALTHY_NUMBERS, RECURRENT_CELLS, SCALAR_READ, balanced
from metapeak.tracer.spec import BatchSpec


def unknown(*shape, dtype=torch.float32):
    """A tensor of the phantom GPU whose values nobody knows."""
    return torch.empty(shape, dtype=dtype, device=DEVICE)


# -- known values ------------------------------------------------------------------------------------------------------

IDS = torch.tensor([[5, 0, 7], [0, 0, 2]])
KNOWN = {
    "nonzero": lambda ids: ids.nonzero(),
    "nonzero as a tuple": lambda ids: ids.nonzero(as_tuple=True)[1],
    "where": lambda ids: torch.where(ids > 1)[0],
    "index with a mask": lambda ids: ids[ids > 1],
    "index with a mask of rows": lambda ids: ids[torch.tensor([True, False], device=ids.device)],
    "masked_select": lambda ids: ids.masked_select(ids < 6),
    "unique": lambda ids: torch.unique(ids),
    "unique with inverse": lambda ids: torch.unique(ids, return_inverse=True, return_counts=True)[1],
    "unique along a dimension": lambda ids: torch.unique(ids, dim=0),
    "unique_consecutive": lambda ids: torch.unique_consecutive(ids.view(-1)),
    "bincount": lambda ids: torch.bincount(ids.view(-1), minlength=10),
    "repeat_interleave": lambda ids: torch.arange(6, device=ids.device).repeat_interleave(ids.view(-1)),
    "one_hot": lambda ids: F.one_hot(ids),
    "sort": lambda ids: ids.view(-1).sort(stable=True)[1],
    "argmax": lambda ids: ids.argmax(-1),
    "topk": lambda ids: ids.topk(2)[1],
    "cumulative mask": lambda ids: (ids != 0).cumsum(-1) * (ids != 0),
    "masked assignment": lambda ids: ids.clone().index_put_((ids == 0,), torch.tensor(-100, device=ids.device)),
    "masked assignment of many": lambda ids: ids.clone().masked_scatter_(ids == 0, ids.view(-1) + 1),
    "histc": lambda ids: torch.histc(ids.float(), bins=4, min=0, max=8),
    "arange from a read": lambda ids: torch.arange(int(ids.max()), device=ids.device),
    "new tensor": lambda ids: torch.tensor([1, 2], device=ids.device) + ids[0, 0],
    "split by values": lambda ids: torch.arange(7, device=ids.device).split([*ids[0].tolist()[:1], 2])[1],
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_values_are_computed(mode, name):
    expected = KNOWN[name](IDS)
    result = KNOWN[name](phantom_from_cpu(IDS))
    assert type(result) is PhantomTensor
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert result.tolist() == expected.tolist()
    assert not mode.assumptions


def test_reads_of_known_values(mode):
    ids = phantom_from_cpu(IDS)
    assert f"expert_{ids[0, 2]}" == "expert_7"
    assert int(ids.sum()) == 14
    assert bool((ids >= 0).all())
    assert torch.equal(ids.cpu(), IDS)
    assert ids.numpy().tolist() == IDS.tolist()
    assert torch.equal(ids, phantom_from_cpu(IDS.clone()))


def test_tensor_from_a_list_of_device_numbers(mode):
    """Qwen2-VL's rotary positions: every number is read from the device."""
    ids = phantom_from_cpu(IDS)
    made = torch.tensor([ids[0].max(), ids[1].max()], device=DEVICE)
    assert (type(made), made.tolist()) == (PhantomTensor, [7, 2])
    with pytest.raises(DataDependentError):
        torch.tensor([unknown(3).long().max()], device=DEVICE)


def test_known_values_follow_views_and_writes(mode):
    ids = phantom_from_cpu(torch.zeros(2, 4, dtype=torch.int64))
    row = ids[1]
    row[2:] = 7
    ids += 1
    ids[:, 0].mul_(3)
    assert ids.tolist() == [[3, 1, 1, 1], [3, 1, 8, 8]]
    assert row.tolist() == [3, 1, 8, 8]


def test_unknown_writes_are_forgotten_in_every_view(mode):
    ids = phantom_from_cpu(torch.zeros(2, 4, dtype=torch.int64))
    first, second = ids[0], ids[1]
    second.copy_(unknown(4, dtype=torch.int64))
    for tensor in (ids, first, second, ids.view(-1)):
        with pytest.raises(DataDependentError):
            tensor.tolist()


@pytest.mark.parametrize(
    "write",
    [
        lambda mask, values: mask.masked_fill_(values > 0, 1),
        lambda mask, values: mask.masked_fill_(values > 0, torch.tensor(1)),
        lambda mask, values: mask.index_put_((values > 0,), torch.ones((), dtype=torch.int64, device=mask.device)),
        lambda mask, values: mask.add_(values.long()),
        lambda mask, values: mask.scatter_(0, values.long(), 1),
        lambda mask, values: mask.__setitem__(values > 0, 1),
    ],
)
def test_a_write_that_depends_on_unknown_values_is_forgotten(mode, write):
    mask = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    assert mask.tolist() == [0, 0, 0, 0]
    write(mask, unknown(4))
    with pytest.raises(DataDependentError):
        mask.tolist()


def test_filled_like_an_unknown_tensor(mode):
    scores = unknown(2, 4)
    mask = torch.zeros_like(scores, dtype=torch.bool)
    mask.scatter_(1, torch.tensor([[1], [3]], device=DEVICE), True)
    assert mask.nonzero().tolist() == [[0, 1], [1, 3]]
    assert scores.new_full((2,), 3).tolist() == [3.0, 3.0]
    assert scores.new_ones(2, dtype=torch.int32).tolist() == [1, 1]
    assert torch.zeros_like(scores, device="cpu").device.type == "cpu"


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSED = {
    "nonzero": lambda x: (x > 0).nonzero(),
    "where": lambda x: torch.where(x > 0),
    "index with a mask": lambda x: x[x > 0],
    "index with a mask of rows": lambda x: x[x[:, 0] > 0],
    "many values at a mask": lambda x: x.index_put_((x > 0,), x.view(-1)),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.long().view(-1).bincount(),
    "repeat_interleave": lambda x: torch.repeat_interleave(x.long().view(-1)),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu() + 1,
    "bool": lambda x: bool((x > 0).all()),
    "int": lambda x: int(x.long().sum()),
    "equal": lambda x: torch.equal(x, x + 1),
}


def test_unknown_values_may_go_to_the_host_and_back(mode):
    there = unknown(3, 4).t().to("cpu")
    assert there.device.type == "cpu" and there.shape == (4, 3)
    back = there.to(DEVICE)
    assert back.device == DEVICE and back.shape == (4, 3) and back.stride() == (1, 4) and back.known is None
    for read in (there.tolist, there.numpy, there.sum, lambda: bool(there[0, 0])):
        with pytest.raises(DataDependentError):
            read()


@pytest.mark.parametrize("name", REFUSED)
def test_unknown_values_are_refused_with_op_and_module(mode, name):
    with pytest.raises(DataDependentError) as caught:
        REFUSED[name](unknown(3, 4))
    assert caught.value.op.startswith("aten.")
    assert caught.value.module == "layers.3.mlp"
    assert caught.value.op_index > 0


def test_a_number_read_from_the_device_is_an_assumption(mode):
    assert unknown(3).sum().item() == 1.0
    assert mode.assumptions == {SCALAR_READ: 1}


def test_a_mask_of_the_wrong_shape_fails_as_on_the_cpu(mode):
    with pytest.raises(IndexError):
        torch.zeros(4)[torch.tensor([True, False])]
    with pytest.raises(IndexError):
        unknown(4)[torch.tensor([True, False], device=DEVICE)]


# -- masks with unknown tensors ----------------------------------------------------------------------------------------


def test_known_mask_on_unknown_values_gives_the_size(mode):
    hidden = unknown(2, 3, 5).requires_grad_()
    mask = torch.tensor([[True, False, True], [False, False, True]], device=DEVICE)
    chosen = hidden[mask]
    assert chosen.shape == (3, 5)
    assert hidden.masked_select(mask[..., None]).shape == (15,)
    chosen.sum().backward()
    assert hidden.grad.shape == hidden.shape


def test_one_value_at_an_unknown_mask_needs_no_size(mode):
    hidden = unknown(3, 4)
    storage = hidden.untyped_storage()._cdata
    hidden[hidden > 0] = 0.0
    assert hidden.untyped_storage()._cdata == storage
    copied = torch.ops.aten.index_put(hidden, [hidden > 0], torch.zeros((), device=DEVICE))
    assert copied.shape == (3, 4)
    assert copied.untyped_storage()._cdata != storage


def test_masked_fill_takes_its_value_from_the_cpu(mode):
    ids, mask = phantom_from_cpu(torch.arange(3)), torch.tensor([True, False, True], device=DEVICE)
    mode.observer.names.clear()
    filled = ids.masked_fill(mask, torch.tensor(-100))
    ids.masked_fill_(mask, torch.tensor(7))
    assert (filled.tolist(), ids.tolist()) == ([-100, 1, -100], [7, 1, 7])
    assert mode.observer.names[:2] == ["aten.masked_fill.Tensor", "aten.masked_fill_.Tensor"]
    assert unknown(3).masked_fill(mask, torch.tensor(0.0)).shape == (3,)


def test_a_mask_that_is_repeated_stays_known_at_any_size(mode):
    """transformers expands a mask of image tokens over the hidden dimension: 2 of 4 rows here."""
    mask = torch.tensor([True, False, False, True], device=DEVICE)[:, None].expand(4, 8_000_000)
    assert unknown(4, 8_000_000)[mask].shape == (16_000_000,)


# -- balanced choices --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "choices", "candidates"), [(24, 2, 8), (128, 8, 60), (7, 3, 5), (1, 4, 16), (5, 1, 1)]
)
def test_balanced(rows, choices, candidates):
    indices = balanced(rows, choices, candidates)
    counts = torch.bincount(indices.view(-1), minlength=candidates)
    assert counts.max() - counts.min() <= 1
    assert all(len(set(row)) == len(row) for row in indices.tolist())  # a token takes an expert once


def test_topk_routes_every_expert_equally(mode):
    scores = unknown(24, 8).softmax(-1)
    weights, experts = scores.topk(2, dim=-1)
    assert (weights.shape, experts.shape, experts.dtype) == ((24, 2), (24, 2), torch.int64)
    assert torch.bincount(experts.view(-1), minlength=8).tolist() == [6] * 8
    one_hot = F.one_hot(experts, 8).permute(2, 1, 0)
    assert [len(torch.where(one_hot[expert])[1].tolist()) for expert in range(8)] == [6] * 8
    assert experts.view(-1).argsort(stable=True).tolist() == experts.cpu().view(-1).argsort(stable=True).tolist()
    assert mode.assumptions == {BALANCED_CHOICES: 1}


def test_topk_along_another_dimension(mode):
    experts = unknown(8, 24).topk(2, dim=0)[1]
    assert torch.bincount(experts.view(-1), minlength=8).tolist() == [6] * 8
    assert all(len(set(column)) == 2 for column in experts.t().tolist())


def test_realistic_mixture_stays_known(mode):
    """8,192 tokens, 8 of 128 experts: 8,192 * 8 / 128 = 512 tokens an expert."""
    experts = unknown(8192, 128).topk(8)[1]
    assert F.one_hot(experts, 128).sum(dim=(0, 1)).tolist() == [512] * 128


def test_other_choices(mode):
    scores = unknown(6, 3)
    assert scores.argmax(-1).tolist() == [0, 1, 2, 0, 1, 2]
    assert scores.max(-1)[1].tolist() == [0, 1, 2, 0, 1, 2]
    assert scores.argmax(-1, keepdim=True).shape == (6, 1)
    assert scores.argmax().tolist() == 0
    assert scores.sort(-1)[1].tolist() == [[0, 1, 2]] * 6
    assert scores.argsort(0).tolist() == [[row] * 3 for row in range(6)]
    assert scores.softmax(-1).multinomial(1).tolist() == [[0], [1], [2], [0], [1], [2]]


def test_eager_experts_of_a_model_get_equal_loads():
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM._from_config(config, experts_implementation="eager").train()
    batch = make_batch(model, "causal-lm", BatchSpec(batch_size=2, seq_len=16))
    graph, assumptions = record_training_step(model, batch.tensors, None, iterations=1)
    # 2 * 16 tokens, 2 of 4 experts each: 16 tokens an expert, so its gate and up projections are [16, 2 * 24].
    outputs = [
        graph.value_shape[value]
        for value, node in enumerate(graph.value_node)
        if graph.op_names[graph.op[node]] == "aten.mm.default" and graph.phase[node] == 1
    ]
    assert outputs.count((16, 48)) == 4
    assert BALANCED_CHOICES in assumptions


# -- healthy numbers ---------------------------------------------------------------------------------------------------


def test_no_activation_is_nan(mode):
    hidden = unknown(3, 4)
    assert not hidden.isnan().any()
    assert not torch.isinf(hidden).any()
    assert hidden.isnan().sum() == 0
    assert set(mode.assumptions) == {HEALTHY_NUMBERS}


def test_writes_into_the_answer_are_not_lost(mode):
    flags = unknown(3, 4).isnan()
    flags[1, 2] = True
    with pytest.raises(DataDependentError):
        bool(flags.any())


# -- shape rules -------------------------------------------------------------------------------------------------------


def test_ctc_loss(mode):
    log_probs = torch.zeros(12, 2, 5).log_softmax(-1)
    targets, times, lengths = torch.tensor([1, 2, 3, 1, 2]), torch.tensor([12, 12]), torch.tensor([3, 2])
    expected = torch.ops.aten._ctc_loss(log_probs, targets, times, lengths)
    phantom = unknown(12, 2, 5).requires_grad_()
    on_device = [tensor.to(DEVICE) for tensor in (targets, times, lengths)]
    results = torch.ops.aten._ctc_loss(phantom, *on_device)
    assert [result.shape for result in results] == [result.shape for result in expected]
    F.ctc_loss(phantom.log_softmax(-1), *on_device).backward()
    assert phantom.grad.shape == (12, 2, 5)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_recurrent_layers(mode, kind):
    with torch.device("meta"):
        layer = kind(8, 4, num_layers=2, batch_first=True, bidirectional=True)
    for part in layer.modules():
        for name, parameter in part._parameters.items():
            setattr(part, name, nn.Parameter(unknown(*parameter.shape)))
    output = layer(unknown(3, 5, 8))[0]
    assert output.shape == (3, 5, 8)
    output.sum().backward()
    assert all(parameter.grad.shape == parameter.shape for parameter in layer.parameters())
    assert RECURRENT_CELLS in mode.assumptions


def test_gru_cell_workspace(mode):
    """RNN.cu: the workspace of a GRU cell has five times the hidden size."""
    gates = unknown(3, 12)
    hidden, workspace = torch.ops.aten._thnn_fused_gru_cell(gates, gates, unknown(3, 4))
    assert (hidden.shape, workspace.shape) == ((3, 4), (3, 20))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_grouped_products_of_every_dtype(mode, dtype):
    tokens, experts = unknown(16, 32, dtype=dtype).requires_grad_(), unknown(2, 32, 8, dtype=dtype).requires_grad_()
    ends = torch.tensor([8, 16], dtype=torch.int32, device=DEVICE)
    product = F.grouped_mm(tokens, experts, offs=ends)
    assert (product.shape, product.dtype) == ((16, 8), dtype)
    product.backward(unknown(16, 8, dtype=dtype))
    assert tokens.grad.shape == tokens.shape
    assert experts.grad.shape == experts.shape


@pytest.mark.parametrize("op", ["rms_norm", "mish", "silu"])
def test_operators_that_cuda_runs_whole(mode, op):
    """One operator forward and one backward, as CUDA's own kernels."""
    hidden = unknown(3, 8).requires_grad_()
    options = {"normalized_shape": (8,)} if op == "rms_norm" else {}
    output = getattr(F, op)(hidden, **options)
    mode.observer.names.clear()
    output.backward(unknown(3, 8))
    backward = [name for name in mode.observer.names if not name.startswith(("aten.detach", "aten.empty"))]
    assert len(backward) == 1
    assert backward[0].startswith(("aten._fused_rms_norm_backward", "aten.mish_backward", "aten.silu_backward"))


# -- storages that are exchanged ---------------------------------------------------------------------------------------


class Converts(nn.Module):
    """As Switch Transformers' router: converts its classifier in forward."""

    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        self.classifier = self.classifier.to(torch.float64)
        return self.classifier(x.double()).sum()


def test_parameters_that_are_converted_in_forward():
    with torch.device("meta"):
        model = Converts()
    graph, _ = record_training_step(
        model, {"x": torch.ones(2, 4)}, None, compute_loss=lambda model, batch: model(**batch), iterations=1
    )
    graph.lint()
    parameter_bytes = [nbytes for nbytes, category in zip(graph.nbytes, graph.category) if category == 0]
    assert parameter_bytes == [4 * 4 * 4, 4 * 4 * 8]  # float32 before, float64 after


def test_unknown_values_outside_the_step_are_refused():
    with pytest.raises(TraceError):
        phantom_from_cpu(torch.zeros(2)).sum()


def test_large_fillings_are_known_by_one_element_until_they_are_written():
    """Optimizer states: thousands of them, which nobody reads, must not take the host's memory."""
    from metapeak.tracer.dispatch import unrecorded
    from metapeak.tracer.phantom import phantom_from_meta

    with unrecorded() as mode:
        like = phantom_from_meta(torch.empty(1 << 18, device="meta"))
        zeros = torch.zeros_like(like)
        assert zeros.known.untyped_storage().nbytes() == 4 and bool((zeros == 0).all())
        zeros[0] = 1.0
        assert mode.values(zeros) is None
        small = torch.zeros_like(like[:8])
        small[0] = 1.0
        assert mode.values(small).tolist() == [1.0] + [0.0] * 7
