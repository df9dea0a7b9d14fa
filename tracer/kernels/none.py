"""Operators that take nothing beside their results, in groups with the reason."""

from __future__ import annotations

# Reason -> operators. Names as base_name() makes them: no overload, no trailing underscore.
NO_WORKSPACE = {
    "no kernel runs: a view, an alias, a size, or memory that is only reserved": """
        alias detach view _unsafe_view reshape _reshape_alias expand permute transpose t slice select split
        split_with_sizes unbind unsqueeze squeeze as_strided diagonal unfold narrow chunk swapaxes movedim view_as_real
        view_as_complex view_as lift_fresh empty empty_like empty_strided new_empty new_empty_strided resize set
        empty_permuted _local_scalar_dense item is_same_size sym_size _conj conj real imag positive expand_as
        result_type numel load unsafe_chunk unsafe_split unsafe_split_with_sizes _foreach_view mT mH numpy_T flatten
        unflatten record_stream _version""",
    "one elementwise kernel, in and out in registers (TensorIterator, gpu_kernel)": """
        add sub rsub mul div true_divide floor_divide remainder fmod pow square sqrt rsqrt exp expm1 exp2 log log2 log10
        log1p sin cos tan asin acos atan atan2 sinh cosh tanh erf erfc erfinv lgamma digamma sigmoid logit neg abs sign
        sgn floor ceil round trunc frac reciprocal clamp clamp_min clamp_max minimum maximum fmin fmax hypot heaviside
        nan_to_num addcmul addcdiv lerp gelu silu mish relu relu6 leaky_relu elu celu selu hardtanh hardswish
        hardsigmoid softplus threshold softshrink hardshrink log_sigmoid_forward glu prelu _prelu_kernel rrelu
        eq ne lt le gt ge logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
        bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ isnan isinf isfinite
        isneginf isposinf signbit where masked_fill copysign xlogy special_xlog1py sinc polar complex view_copy angle
        logaddexp log_sigmoid special_expit gcd lcm fill zero copy clone _to_copy contiguous to fill_diagonal""",
    "the gradient of an elementwise operator, one elementwise kernel": """
        tanh_backward sigmoid_backward gelu_backward silu_backward mish_backward threshold_backward
        leaky_relu_backward elu_backward hardtanh_backward hardswish_backward hardsigmoid_backward softplus_backward
        log_sigmoid_backward glu_backward _prelu_kernel_backward native_dropout_backward logit_backward
        mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward
        softshrink_backward hardshrink_backward rrelu_with_noise_backward""",
    "a kernel that fills its result": """
        zeros zeros_like ones ones_like full full_like new_zeros new_ones new_full arange linspace logspace eye
        scalar_tensor tril triu tril_indices triu_indices one_hot bernoulli uniform normal exponential log_normal
        cauchy geometric random rand rand_like randn randn_like randint randint_like native_dropout
        _fused_dropout _masked_scale rrelu_with_noise poisson""",
    "a kernel that moves elements; metadata of lists goes in kernel arguments": """
        cat stack constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d pad roll flip
        repeat gather index_select take take_along_dim index_copy index_fill scatter slice_scatter select_scatter
        diagonal_scatter as_strided_scatter embedding slice_backward select_backward diagonal_backward
        unfold_backward im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle rot90 diag_embed diagonal_copy
        meshgrid split_copy tile constant_pad narrow_copy reflection_pad1d_backward
        reflection_pad2d_backward replication_pad1d_backward replication_pad2d_backward""",
    "atomic additions into the result (without deterministic algorithms)": """
        index_add scatter_add scatter_reduce index_reduce bincount histc bucketize searchsorted""",
    "a matrix product of cuBLAS or cuBLASLt: its workspace is kept, see cublas.py": """
        mm addmm bmm baddbmm addbmm mv addmv dot vdot addr _addmm_activation _scaled_mm matmul linear _int_mm
        linear_backward""",
    "a grouped product: tables of pointers, a few KiB (cuda/GroupMM.cu)": "_grouped_mm _scaled_grouped_mm",
    "one block a row, or a few, sums in registers and shared memory": """
        nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward multi_margin_loss topk kthvalue
        median mode cummax cummin _weight_norm_interface _weight_norm_interface_backward renorm norm_except_dim
        _cdist_forward embedding_renorm dist _ctc_loss equal""",
    "lists of tensors, elementwise, chunk by chunk": """
        _foreach_add _foreach_sub _foreach_mul _foreach_div _foreach_pow _foreach_sqrt _foreach_rsqrt _foreach_exp
        _foreach_log _foreach_abs _foreach_neg _foreach_sign _foreach_reciprocal _foreach_zero _foreach_copy
        _foreach_lerp _foreach_addcmul _foreach_addcdiv _foreach_maximum _foreach_minimum _foreach_clamp_min
        _foreach_clamp_max _foreach_round _foreach_floor _foreach_ceil _foreach_tanh _foreach_sigmoid
        _fused_adam _fused_adamw _fused_sgd _fused_adagrad _amp_foreach_non_finite_check_and_unscale
        _amp_update_scale""",
    "statistics and gradients a channel, in the kernel (cuda/Normalization.cu); cuDNN's variant has its reserve as a \
result": """
        native_batch_norm native_batch_norm_backward _native_batch_norm_legit batch_norm_stats batch_norm_elemt
        _batch_norm_with_update cudnn_batch_norm cudnn_batch_norm_backward batch_norm_backward
        batch_norm_gather_stats batch_norm_backward_reduce batch_norm_backward_elemt _native_batch_norm_legit_functional
        _native_batch_norm_legit_no_training""",
    "pooling and resizing, one thread a result": """
        max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward avg_pool1d
        avg_pool3d avg_pool3d_backward max_pool3d_with_indices max_pool3d_with_indices_backward _adaptive_avg_pool2d
        _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward adaptive_max_pool2d
        adaptive_max_pool2d_backward upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d
        upsample_bicubic2d upsample_linear1d upsample_trilinear3d upsample_nearest2d_backward
        upsample_bilinear2d_backward upsample_bicubic2d_backward upsample_nearest1d_backward
        upsample_linear1d_backward _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_bilinear2d_aa_backward
        _upsample_bicubic2d_aa_backward grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d""",
    "cells of recurrent layers: what they keep is a result": """
        _thnn_fused_gru_cell _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward
        _thnn_fused_lstm_cell_backward_impl""",
    "cuDNN's fused forward: the statistics are a result": "_scaled_dot_product_cudnn_attention",
    "a collective in place: NCCL's channels are the communicator's, see device/overheads.py": """
        allreduce _allgather_base _reduce_scatter_base broadcast all_reduce all_gather_into_tensor
        reduce_scatter_tensor wait_tensor all_to_all_single alltoall_base _wrap_tensor_autograd send recv""",
    "no operation: it says where an action begins": "pipeline",
    "FSDP2's packing: copies of lists into buffers that are given (cuda/Fsdp kernels of split and cat)": """
        all_gather_copy_in split_with_sizes_copy chunk_cat _chunk_cat""",
    "storage made larger: the memory is its own": "storage.resize",
    "a transfer that this program makes for itself": "_copy_from copy_to_host",
}

DECLARED_NONE = {name: reason for reason, names in NO_WORKSPACE.items() for name in names.split()}
