"""A loss path against a published measurement: InternLM/xtuner, docs advanced_tutorial/loss.md.

A linear layer and cross-entropy, printed with two decimals. Whole models: see receipt_table.tsv.
"""

import torch

from metapeak.tracer.capture import record_training_step
from metapeak.tracer.simulation import RankResult


class HeadAndLoss(torch.nn.Module):
    """xtuner's script: the hidden state is an input that requires a gradient; cross entropy on bf16 logits."""

    def __init__(self):
        super().__init__()
        self.hidden = torch.nn.Parameter(torch.empty(32768, 4096, dtype=torch.bfloat16))
        self.lm_head = torch.nn.Linear(4096, 151936, bias=False, dtype=torch.bfloat16)

    def forward(self, labels):
        logits = self.lm_head(self.hidden)
        self.logits = logits  # held by the script
        return torch.nn.functional.cross_entropy(logits, labels)


def test_head_and_loss_of_xtuner():
    """Four copies of the logits: logits, log-probabilities and two gradients, and no cast to fp32."""
    with torch.device("meta"):
        model = HeadAndLoss()
    labels = torch.zeros(32768, dtype=torch.int64)
    graph, _ = record_training_step(model, (labels,), None, iterations=1)
    rank = RankResult(rank=0, count=1, coordinates={}, liveness=graph.liveness())
    printed, rounding = 38.53 * 2**30, 0.005 * 2**30
    hopper_workspace = 33_554_432  # the GPU is not named: from nothing to a Hopper's
    assert printed - rounding - hopper_workspace <= rank.requested_bytes <= printed + rounding
