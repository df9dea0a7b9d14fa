"""DeepSpeed on two real CPU processes: bytes that rank 0 holds between steps. Run as a script by its test.

usage: deepspeed_ranks.py CONFIG_FOLDER ZERO_CONFIG_JSON RANK PORT
"""

import gc
import json
import os
import sys


def held(torch) -> int:
    """Bytes of all storages that Python can reach, without numbers and flags, and without gradients of nothing."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.device.type == "cpu"]
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
    return sum(nbytes for nbytes in storages.values() if nbytes > 64)


def main(folder: str, zero: str, rank: str, port: str) -> None:
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch

    torch.set_num_threads(1)
    import deepspeed
    import deepspeed.comm.torch
    from transformers import AutoConfig, AutoModelForCausalLM

    deepspeed.comm.torch.build_shm_op = lambda: None  # a C++ extension that one machine's ranks talk through
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model.config.use_cache = False
    before = held(torch) - sum(parameter.numel() * 4 for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": json.loads(zero),
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    ids = torch.zeros(2, 16, dtype=torch.int64)
    seen = [held(torch) - before - 256]  # the batch
    for _ in range(2):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        seen.append(held(torch) - before - 256)
    if rank == "0":
        print("HELD", json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
