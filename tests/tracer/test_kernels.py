"""Workspaces of kernels: numbers computed by hand from the sources, and sizes recorded on real GPUs.

Recorded: public allocator histories of Stanford CS336 language models (repositories named beside each number), whose
blocks were told apart by their sizes and order: a gradient of RMSNorm's weight [rows, features] -> [features] allocates
the result, the product, the staging buffer and its semaphores; the gradient of `weight[ids]` sorts the ids.
"""

import pytest
import torch
from torch import nn

from metapeak.tracer.capture import record_training_step
from metapeak.tracer.gpus import find_gpu
from metapeak.tracer.kernels import Device, KernelWorkspaces, device_of
from metapeak.tracer.kernels.attention import efficient_backward_workspace, flash_backward_workspace, num_splits
from metapeak.tracer.kernels.none import DECLARED_NONE
from metapeak.tracer.kernels.reductions import reduction_workspace
from metapeak.tracer.kernels.registry import RULES, Call, Tensor
from metapeak.tracer.kernels.sorting import radix_sort_bytes
from metapeak.tracer.liveness import Category, Phase
from tests.agreement.families import FAMILIES

A100 = Device()
F32 = 4


def dense(*shape, dtype="float32"):
    strides, step = [], 1
    for extent in reversed(shape):
        strides.insert(0, step)
        step *= extent
    return Tensor(tuple(shape), tuple(strides), dtype)


def blocks(op, *args, outputs=(), device=A100, **kwargs):
    """Sizes that the rule of `aten.<op>` gives, none left out."""
    call = Call(op=f"aten.{op}", args=args, kwargs=kwargs, outputs=outputs, device=device)
    return [nbytes for nbytes in RULES[op.split(".")[0]](call) if nbytes]


# -- reductions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "features", "recorded"),
    [
        # Wedsonlin/assignment2-systems 8630bcfe2d6f, medium model at 1024, 512, 256, 128 tokens, batch 4
        (4096, 1024, [33_554_432, 32]),
        (2048, 1024, [16_777_216, 32]),
        (1024, 1024, [8_388_608, 32]),
        (512, 1024, []),
        # LINYUNLinYun/CS336-assignment2-systems fa2c3e60b74e, xl model at 512 tokens
        (2048, 2560, [41_943_040, 80]),
        # sidsoc12/spring2024-assignment2-systems 12f3dcad1996, 2.7B model at 128 tokens, H100
        (512, 2560, []),
    ],
)
def test_a_sum_over_rows_stages_what_was_recorded(rows, features, recorded):
    assert reduction_workspace(dense(rows, features), [0], A100, F32) == recorded


def test_the_staging_of_a_bias_gradient_by_hand():
    """16,384 rows of 4,096: 4 outputs a thread, blocks of 32 x 4 threads, 4,096 values a thread, a grid of 32 blocks.
    An A100 holds 108 x 2048 / 128 = 1,728 blocks, so 54 blocks share an output (values / 16 = 256 would be more).
    """
    by_hand = [F32 * 4096 * 54 * 32 * 4, 4 * 32]
    assert reduction_workspace(dense(16384, 4096, dtype="bfloat16"), [0], A100, F32) == by_hand
    assert blocks("sum.dim_IntList", dense(4, 4096, 4096), [0, 1], outputs=[dense(4096)]) == by_hand


def test_a_sum_of_everything_by_hand():
    """2^20 floats to one: 512 threads of 2,048 values each; 128 blocks (values / 16) of the 432 that fit, one partial
    sum a block.
    """
    assert blocks("sum.default", dense(1 << 20), outputs=[dense()]) == [F32 * 128, 4]
    assert blocks("mean.default", dense(1000), outputs=[dense()]) == []


def test_rows_reduced_along_their_own_dimension_need_no_staging():
    assert blocks("mean.dim", dense(512, 2560), [-1], True, outputs=[dense(512, 1)]) == []


def test_a_sum_of_integers_casts_first():
    """bool is summed as int64: a copy of 8 bytes an element. Half precision to float32 is cast on the fly."""
    mask, count = dense(2, 100, dtype="bool"), [dense(dtype="int64")]
    assert blocks("sum.default", mask, outputs=count) == [1600]
    half = dense(64, 64, dtype="bfloat16")
    assert blocks("sum.dim_IntList", half, [1], dtype="float32", outputs=[dense(64)]) == []


def test_a_transposed_input_is_reduced_in_the_order_of_its_strides():
    """[features, rows] of a transposed view, summed over the last dimension, is the sum over rows above."""
    view = dense(4096, 1024).transposed(0, 1)
    assert reduction_workspace(view, [1], A100, F32) == [33_554_432, 32]


def test_inputs_beyond_32_bits_are_reduced_in_parts():
    """[2^18, 4096] of float32 is 4 GiB, its half ends 3 bytes below 2^31: 2^17 rows. Those are 32,768 values a thread,
    so 128 blocks an output keep them at 256; the 54 that fill the GPU would leave more.
    """
    assert reduction_workspace(dense(1 << 18, 4096), [0], A100, F32) == [F32 * 4096 * 128 * 128, 4 * 32]


def test_multiprocessors_decide_how_far_a_reduction_is_split():
    t4 = device_of(find_gpu("t4"))
    assert (t4.multiprocessors, t4.threads_per_multiprocessor) == (40, 1024)
    # 40 x 1024 / 128 = 320 blocks over a grid of 8: 40 an output, less than 1024 / 16
    assert reduction_workspace(dense(4096, 1024), [0], t4, F32) == [F32 * 1024 * 40 * 128, 32]


def test_foreach_norm_keeps_a_row_of_chunks_for_every_tensor():
    """Three tensors, the largest of 3 x 65,536 + 1 elements: four chunks each."""
    tensors = (dense(10), dense(3 * 65536 + 1), dense(5))
    assert blocks("_foreach_norm.Scalar", tensors, outputs=[dense()] * 3) == [3 * 4 * F32]


def test_a_variance_of_everything_stages_four_numbers():
    """2^20 floats: 2,048 values for each of 512 threads, 128 blocks; mean, sum of squares and two counts."""
    assert blocks("var.default", dense(1 << 20), True, outputs=[dense()]) == [16 * 128, 4]
    assert blocks("var.correction", dense(1 << 20), [0], correction=1, outputs=[dense()]) == [16 * 128, 4]


def test_a_maximum_of_two_tensors_is_elementwise():
    assert blocks("max.other", dense(1 << 20), dense(1 << 20), outputs=[dense(1 << 20)]) == []
    assert blocks("max.dim", dense(1 << 20), 0, outputs=[dense(), dense(dtype="int64")]) == [16 * 128, 4]


def test_logsumexp_holds_maxima_and_exponentials():
    assert blocks("logsumexp.default", dense(8, 100), [-1], outputs=[dense(8)]) == [32, 3200]


# -- sorting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "recorded"),
    [
        (512, 1),  # sidsoc12/spring2024-assignment2-systems 12f3dcad1996
        (2048, 1),  # LINYUNLinYun/CS336-assignment2-systems fa2c3e60b74e
        (4096, 72_191),  # Wedsonlin/assignment2-systems 8630bcfe2d6f
        (8192, 138_751),  # MAGMA27/assignment2-systems 15883f2b1d6b
    ],
)
def test_the_gradient_of_indexing_sorts_as_recorded(count, recorded):
    """Indices into 10,000 rows: the linear index, sorted, original positions, their range, and cub's storage."""
    table, indices = dense(10_000, 64), dense(4, count // 4, dtype="int64")
    grad = dense(4, count // 4, 64)
    assert blocks("index_put.default", table, (indices,), grad, True, outputs=[table]) == [8 * count] * 4 + [recorded]


def test_cubs_storage_by_hand():
    """10,000 keys of 64 bits: 8 histograms of 256 counts of 8 bytes, 3 blocks of 3,840 with 256 states of 4 bytes, keys
    and values again, 8 counters in 256 bytes, and 255 bytes to align.
    """
    again = 80_000 + 128  # rounded up to 256 bytes
    assert radix_sort_bytes(10_000, 8, 8, 64) == 8 * 256 * 8 + 3 * 1024 + 2 * again + 256 + 255


def test_a_small_embedding_gradient_needs_nothing():
    grad, indices = dense(2, 1536, 64), dense(2, 1536, dtype="int64")
    assert blocks("embedding_dense_backward.default", grad, indices, 500, -1, False) == []


def test_a_large_embedding_gradient_by_hand():
    """4,000 indices into 500 rows: at most 500 distinct, 400 + 500 parts; positions twice, three arrays a distinct
    row, one a part, two counters, and the parts' sums in float32.
    """
    grad, indices = dense(2, 2000, 64, dtype="bfloat16"), dense(2, 2000, dtype="int64")
    by_hand = [32_000, 32_000, 4000, 4000, 4000, 7200, 8, 8, 900 * 64 * F32]
    assert blocks("embedding_dense_backward.default", grad, indices, 500, -1, False) == by_hand


def test_a_mask_becomes_int64_indices():
    table, mask = dense(4, 8, 16), dense(4, 8, dtype="bool")
    assert blocks("index.Tensor", table, (mask,), outputs=[dense(5, 16)]) == [5 * 2 * 8]
    assert blocks("index.Tensor", table, (dense(3, dtype="int64"),), outputs=[dense(3, 8, 16)]) == []


def test_masked_scatter_counts_every_element_in_int64():
    tensor, mask = dense(2, 10, 8), dense(2, 10, 8, dtype="bool")
    assert blocks("masked_scatter.default", tensor, mask, dense(80))[0] == 160 * 8


def test_only_long_rows_need_memory_to_be_sorted():
    values = [dense(4, 4096), dense(4, 4096, dtype="int64")]
    assert blocks("sort.default", dense(4, 4096), -1, outputs=values) == []
    storage = radix_sort_bytes(4 * 5000, 4, 8, 32)
    expected = [4 * 5000 * 8] * 2 + [4 * 5000 * 4, storage]
    assert blocks("sort.default", dense(4, 5000), -1, outputs=values) == expected


# -- attention ---------------------------------------------------------------------------------------------------------


def test_flash_backward_by_hand():
    """Mistral-7B, batch 4 x 4096: 32 heads over 8, head size 128."""
    softmax_d, dq = 4 * 32 * 4096 * F32, 4 * 4096 * 32 * 128 * F32
    expanded = 4 * 4096 * 32 * 128 * 2
    assert flash_backward_workspace(4, 4096, 4096, 32, 8, 128) == [softmax_d, dq, expanded, expanded]
    # 100 queries are 128, a head size of 40 is 64, one of 136 is 192
    assert flash_backward_workspace(1, 100, 100, 2, 2, 40) == [2 * 128 * F32, 128 * 2 * 64 * F32]
    assert flash_backward_workspace(1, 100, 100, 2, 2, 136)[1] == 128 * 2 * 192 * F32


def test_a_gradient_in_another_layout_is_copied():
    """[B, H, S, D] dense is strided as [B, S, H, D], which the kernel wants dense."""
    dense_bhsd = dense(1, 2, 128, 64, dtype="bfloat16")
    as_kernel = dense(1, 128, 2, 64, dtype="bfloat16").transposed(1, 2)
    sizes = flash_backward_workspace(1, 128, 128, 2, 2, 64)
    name = "_scaled_dot_product_flash_attention_backward.default"
    assert blocks(name, as_kernel, as_kernel, as_kernel, as_kernel, as_kernel) == sizes
    assert blocks(name, dense_bhsd, as_kernel, as_kernel, as_kernel, as_kernel) == [2 * 128 * 64 * 2, *sizes]


def test_packed_sequences_have_128_rows_of_room_each():
    query, starts = dense(300, 4, 64, dtype="bfloat16"), dense(4, dtype="int32")
    sizes = blocks(
        "_flash_attention_backward.default", query, query, query, query, query, dense(4, 300), starts, starts, 100, 100
    )
    assert sizes == [3 * 4 * 128 * F32, (300 + 128 * 3) * 4 * 64 * F32]


def test_few_queries_are_split_over_keys():
    """12 heads x 2 blocks of queries on 108 x 2 places; 2,048 keys are 8 blocks of 256. Efficiencies of 1, 2, 4, 8
    splits: 24, 48, 96, 192 of 216 places; 8 is the only one within 85 % of the best.
    """
    assert num_splits(1, 12, 128, 2048, 64, 108) == 8
    assert num_splits(1, 12, 2048, 2048, 64, 108) == 1  # 384 blocks fill the GPU
    query, key = dense(1, 12, 128, 64, dtype="bfloat16"), dense(1, 12, 2048, 64, dtype="bfloat16")
    rows = 8 * 12 * 128 * F32
    name = "_scaled_dot_product_flash_attention.default"
    assert blocks(name, query, key, key, 0.0, True) == [rows, rows * 64]
    assert blocks(name, query, key, key, 0.1, True) == []


def test_efficient_backward_by_hand():
    """Head size 64 in half precision: tiles of 64 x 64 floats with 16 bytes of locks, 32 for 2,048 queries."""
    half = efficient_backward_workspace(2, 2048, 2048, 4, 64, 64, half=True, device=A100)
    assert half == [2 * 4 * 2048 * F32, 2 * 4 * 32 * (64 * 64 + 4) * F32]
    # head size 128 on compute capability 8.0: 128 x 128
    larger = efficient_backward_workspace(1, 1000, 1000, 1, 128, 128, half=True, device=A100)
    assert larger == [1000 * F32, 8 * (128 * 128 + 4) * F32]
    # head size 192 leaves registers: gradients of keys and values, [splits, keys rounded to 64, 256] each
    spilled = efficient_backward_workspace(1, 128, 128, 4, 192, 192, half=True, device=A100)
    elements = 1 * 3 * (128 * 64 + 4) + 2 * 128 * (256 + 256)
    assert spilled == [4 * 128 * F32, 4 * elements * F32]
    # float32: delta is summed from a product as large as the output, and then the accumulators are smaller
    single = efficient_backward_workspace(1, 64, 64, 8, 64, 64, half=False, device=A100)
    assert single == [8 * 64 * F32, 8 * (64 * 64 + 4) * F32]


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_layer_norm_sums_parts_only_for_many_rows_of_few_features():
    """M above 65,536 and N / 32 below half of 108 multiprocessors: 3,125 rows of partial sums for 100,000."""
    mask = [True, True, True]

    def sizes(rows, features):
        tensor = dense(rows, features)
        arguments = (tensor, tensor, [features], dense(rows), dense(rows), dense(features), dense(features), mask)
        return blocks("native_layer_norm_backward.default", *arguments)

    assert sizes(65_536, 256) == sizes(100_000, 2048) == []
    staging = reduction_workspace(dense(3125, 256), [0], A100, F32)
    assert sizes(100_000, 256) == [3125 * 256 * F32] * 2 + [256 * F32] * 2 + staging


def test_group_norm_backward_keeps_channel_sums():
    tensor = dense(2, 32, 8, 8, dtype="bfloat16")
    sizes = blocks(
        "native_group_norm_backward.default", tensor, tensor, dense(2, 4), dense(2, 4), dense(32), 2, 32, 64, 4
    )
    assert sizes == [2 * 32 * F32] * 3 + [2 * 4 * F32] * 2


def test_softmax_copies_a_strided_input():
    assert blocks("_softmax.default", dense(8, 8).transposed(0, 1), -1, False) == [256]
    assert blocks("_softmax.default", dense(8, 8), -1, False) == []


def test_ctc_backward_holds_log_beta():
    alpha = dense(2, 50, 21)
    sizes = blocks(
        "_ctc_loss_backward.default", dense(2), dense(50, 2, 32), dense(2, 10), [50, 50], [10, 10], dense(2), alpha
    )
    assert sizes == [alpha.nbytes]


def test_no_operator_is_in_both_lists():
    assert not set(RULES) & set(DECLARED_NONE)


@pytest.mark.parametrize("family", FAMILIES, ids=[family.name.split(",")[0] for family in FAMILIES])
def test_every_operator_of_the_families_is_known(family):
    graph, _ = record_training_step(family.build("meta"), family.batch(), torch.optim.SGD, iterations=1)
    workspaces = KernelWorkspaces.of(graph, A100)
    assert workspaces.unknown == ()
    workspaces.added_to(graph.liveness()).lint()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(1000, 64)
        self.head = nn.Linear(64, 64)

    def forward(self, ids):
        return self.head(self.table(ids)).sum()


def test_a_workspace_lives_during_its_operation_and_no_longer():
    with torch.device("meta"):
        model = Net()
    graph, _ = record_training_step(model, (torch.zeros(4, 1024, dtype=torch.long),), None, iterations=1)
    plain = graph.liveness()
    full = KernelWorkspaces.of(graph, A100).added_to(plain)
    (at,) = [index for index in range(plain.num_ops) if "embedding_dense_backward" in plain.op_names[plain.op[index]]]
    assert plain.op_phase[at] == Phase.BACKWARD
    parts = 4096 // 10 + 1000
    by_hand = 2 * 4096 * 8 + 3 * 1000 * 8 + parts * 8 + 16 + parts * 64 * F32
    cublas = 2 * 8_519_680
    assert full.live_bytes()[at] - plain.live_bytes()[at] == by_hand + cublas
    assert full.live_bytes()[at + 1] - plain.live_bytes()[at + 1] == cublas
    assert full.breakdown(at)[Category.WORKSPACE] == by_hand + cublas


def test_an_operator_that_nobody_looked_at_is_named():
    class Inverse(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self, scale):
            return torch.linalg.inv(self.weight * scale).sum()

    graph, _ = record_training_step(Inverse().to("meta"), (torch.ones(()),), None, iterations=1)
    workspaces = KernelWorkspaces.of(graph, A100)
    assert "aten.linalg_inv_ex" in workspaces.unknown
    assert "aten.linalg_inv_ex" in workspaces.not_modelled()[0]


def test_convolutions_state_their_assumption_with_a_bound():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(0)).to("meta")
    graph, _ = record_training_step(
        model, (torch.ones(2, 3, 16, 16),), None, compute_loss=lambda net, batch: net(*batch).sum(), iterations=1
    )
    workspaces = KernelWorkspaces.of(graph, A100)
    # the backward's tensors: gradient, input (no gradient wanted), weight and the weight's gradient
    gradient, images, weight = 2 * 8 * 256 * F32, 2 * 3 * 256 * F32, 8 * 3 * 9 * F32
    assert workspaces.convolution_bound_bytes == gradient + images + 2 * weight
    assert "cuDNN's convolutions, taken as none" in workspaces.not_modelled()[-1]
