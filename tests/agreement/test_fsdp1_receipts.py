"""FSDP1 against published measurements on two real GPUs.

Source: foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv (full fine-tuning, bf16 weights
without autocast, TRL on transformers 4.48.1, torch 2.4.1): two A100, FULL_SHARD over them, decoder layers as units,
checkpointing, flash attention 2, packed 4096 tokens, foreach AdamW. Peak and steady are torch's max_memory_allocated
and memory_allocated of rank 0. Between steps FSDP1 still holds the sharded gradients: `zero_grad(set_to_none=True)`
takes them from the parameters, and the flat parameter drops its own in the next forward.
"""

import pytest

from metapeak.strategies import simulate_options

# id -> micro-batch, max_memory_allocated, memory_allocated
RECEIPTS = {
    "fms-main-L011": (2, 36_225_939_968, 28_984_199_680),
    "fms-main-L013": (4, 36_226_136_576, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECEIPTS)
def test_peak_and_steady_bytes(name):
    batch_size, peak, steady = RECEIPTS[name]
    options = {"engine": "fsdp1", "dp_shard": 2, "weights_dtype": "bf16", "checkpointing": "full", "gpu": "a100-80gb"}
    options |= {"loss": "transformers-4.48", "attention": "flash2", "implementation": "foreach"}
    rank = simulate_options("mistralai/Mistral-7B-v0.1", {"batch_size": batch_size, "seq_len": 4096, **options}).worst
    assert abs(rank.allocated_bytes - peak) <= 1e-4 * peak
    if steady is not None:
        assert abs(rank.reservation.allocated_end - steady) <= 1e-4 * steady
