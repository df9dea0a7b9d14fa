"""Pipelines of tiny models, said once for the real processes and for metapeak."""

from dataclasses import dataclass

import torch

from tests.agreement.distributed.cases import (
    experts,
    for_context_parallel,
    for_sequence_parallel,
    llama,
)

# Model and tokens by what the two ranks of a stage share; key "": nothing, or their shards.
_MODELS = {"": llama, "tp": for_sequence_parallel, "cp": for_context_parallel, "ep": experts}
_TOKENS = {"cp": 128}  # four chunks of 32 tokens


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """`sizes` are the blocks of each stage, `schedule` metapeak's name and `class_name` torch's.

    `inside`: two ranks hold each stage, its shards alone (dp_shard) or cut by tp with the sequence and the loss, by cp
    or by ep.
    """

    name: str
    schedule: str
    class_name: str
    sizes: tuple[int, ...]
    microbatches: int
    batch_size: int = 2
    inside: str = ""

    def build(self, device: str) -> torch.nn.Module:
        return _MODELS.get(self.inside, llama)(device, num_hidden_layers=sum(self.sizes))

    @property
    def tokens(self) -> int:
        return _TOKENS.get(self.inside, 12)

    def batch(self) -> dict[str, torch.Tensor]:
        samples = self.microbatches * self.batch_size
        ids = torch.arange(samples * self.tokens).view(samples, self.tokens) % 101
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
        name=name, schedule=schedule, class_name=kind, sizes=sizes, microbatches=microbatches, inside="dp_shard"
    )
    for name, schedule, kind, sizes, microbatches in _TWO[:3]
}
PIPELINES |= {
    f"4 ranks, {name}, {inside}": Pipelined(
        name=name, schedule=schedule, class_name=kind, sizes=sizes, microbatches=microbatches, inside=inside
    )
    for name, schedule, kind, sizes, microbatches in _TWO[1:3]
    for inside in ("tp", "cp", "ep")
}
