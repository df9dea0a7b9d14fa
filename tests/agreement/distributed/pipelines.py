"""Pipelines of tiny models, said once for the real processes and for metapeak."""

from dataclasses import dataclass

import torch
import transformers as hf

TOKENS = 12


def llama(device: str, blocks: int) -> torch.nn.Module:
    config = hf.LlamaConfig(
        vocab_size=101,
        hidden_size=36,
        num_hidden_layers=blocks,
        num_attention_heads=3,
        num_key_value_heads=3,
        intermediate_size=70,
        use_cache=False,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    with torch.device(device):
        return hf.LlamaForCausalLM(config).train()


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """`sizes` are the blocks of each stage, `schedule` metapeak's name and `class_name` torch's."""

    name: str
    schedule: str
    class_name: str
    sizes: tuple[int, ...]
    microbatches: int
    batch_size: int = 2
    sharded: bool = False

    def batch(self) -> dict[str, torch.Tensor]:
        samples = self.microbatches * self.batch_size
        ids = torch.arange(samples * TOKENS).view(samples, TOKENS) % 101
        return {"input_ids": ids, "labels": ids.clone()}


_TWO = (
    ("gpipe", "gpipe", "GPipe", (2, 1), 3),
    ("1f1b", "1f1b", "1F1B", (1, 2), 4),
    ("interleaved", "interleaved-1f1b:2", "Interleaved1F1B", (1, 1, 2, 1), 4),
    ("looped-bfs", "looped-bfs:2", "LoopedBFS", (1, 1, 1, 1), 3),
    ("zero bubble", "interleaved-zero-bubble:2", "InterleavedZeroBubble", (1, 1, 1, 1), 4),
    ("zbv", "zbv", "ZBVZeroBubble", (1, 2, 1, 1), 4),
    ("dualpipev", "dualpipev", "DualPipeV", (1, 1, 1, 1), 5),
)
_FOUR = (
    ("gpipe", "gpipe", "GPipe", (1, 2, 1, 1), 3),
    ("1f1b", "1f1b", "1F1B", (1, 1, 1, 1), 6),
    ("interleaved", "interleaved-1f1b:2", "Interleaved1F1B", (1,) * 8, 8),
    ("zbv", "zbv", "ZBVZeroBubble", (1,) * 8, 8),
)
PIPELINES = {
    f"{ranks} ranks, {name}": Pipelined(
        name=name, schedule=schedule, class_name=kind, sizes=sizes, microbatches=microbatches
    )
    for ranks, cases in ((2, _TWO), (4, _FOUR))
    for name, schedule, kind, sizes, microbatches in cases
}
PIPELINES |= {
    f"4 ranks, {name}, sharded": Pipelined(
        name=name, schedule=schedule, class_name=kind, sizes=sizes, microbatches=microbatches, sharded=True
    )
    for name, schedule, kind, sizes, microbatches in _TWO[:3]
}
