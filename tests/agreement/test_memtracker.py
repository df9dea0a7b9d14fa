"""torch's own MemTracker as a second, independent oracle: the peak of a real CPU step."""

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from metapeak.tracer.capture import record_training_step
from tests.agreement.families import FAMILIES


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_peak_equals_memtracker(name):
    family = next(family for family in FAMILIES if family.name == name)

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)

    model, batch = family.build("cpu"), family.batch()
    optimizer = sgd(list(model.parameters()))
    tracker = MemTracker()
    tracker.track_external(model, optimizer, *batch.values())
    with tracker:
        for _ in range(2):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            tracker.reset_mod_stats()  # what it wants between iterations; the peak stays
    tracked = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]

    graph, _ = record_training_step(family.build("meta"), family.batch(), sgd)
    assert int(graph.liveness().live_bytes().max()) == tracked
