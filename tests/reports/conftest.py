"""One traced step for the tests of this folder, and the same step as two ranks."""

import dataclasses
import json

import pytest

from metapeak.strategies import simulate
from metapeak.tracer import StepSpec
from metapeak.tracer.gpus import gpu_of_memory

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "torch_dtype": "bfloat16",
}


def trace_llama(folder, layers, batch_size=2, seq_len=64):
    """The Simulation of a small Llama of `layers` layers, judged for 24 MiB."""
    path = folder / f"llama-{layers}.json"
    path.write_text(json.dumps({**LLAMA, "num_hidden_layers": layers}))
    step = StepSpec(batch_size=batch_size, seq_len=seq_len)
    return simulate(str(path), step, gpu=gpu_of_memory("24MiB"))


@pytest.fixture(scope="session")
def traced(tmp_path_factory):
    return trace_llama(tmp_path_factory.mktemp("model"), 4)


@pytest.fixture(scope="session")
def two_ranks(traced):
    """Two pipeline stages; on the second one every storage is twice as large, so it is the worst."""
    (rank,) = traced.ranks
    doubled = dataclasses.replace(rank.liveness, nbytes=rank.liveness.nbytes * 2)
    first = dataclasses.replace(rank, count=3, coordinates={"pp": 0})
    second = dataclasses.replace(rank, rank=3, count=3, coordinates={"pp": 1}, liveness=doubled)
    return dataclasses.replace(traced, ranks=(first, second))
