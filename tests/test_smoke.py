"""The spine in one test: a tiny model, two steps, a graph that holds together."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from metapeak.tracer.capture import record_training_step
from metapeak.tracer.liveness import Category


def test_records_a_training_step():
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=101, use_cache=False))
    ids = torch.arange(2 * 16).view(2, 16) % 101
    graph, assumptions = record_training_step(
        model, {"input_ids": ids, "labels": ids.clone()}, lambda parameters: torch.optim.AdamW(parameters, foreach=True)
    )
    graph.lint()
    liveness = graph.liveness()
    parameters = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert liveness.breakdown(liveness.num_ops - 1)[Category.PARAMETER] == parameters
    assert liveness.breakdown(liveness.num_ops - 1)[Category.OPTIMIZER_STATE] == 2 * parameters
    assert [(phase.iteration, phase.phase) for phase in liveness.phases()] == [
        (0, "load"),
        *[(iteration, phase) for iteration in (1, 2) for phase in ("forward", "backward", "optimizer")],
    ]
    assert not assumptions
