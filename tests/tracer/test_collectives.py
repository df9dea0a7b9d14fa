"""Counts that ranks exchange: what peers send the traced rank."""

import pytest
import torch

from metapeak.tracer.collectives import load_skew
from metapeak.tracer.dispatch import unrecorded
from metapeak.tracer.distributed import one_rank_of
from metapeak.tracer.phantom import phantom_from_cpu


@pytest.mark.parametrize(
    ("rank", "skew", "counts"), [(0, 1, [[5, 4]] * 2), (1, 1, [[4, 3]] * 2), (0, 1.5, [[8, 6]] * 2)]
)
def test_peers_send_what_a_rank_keeps_times_the_skew(rank, skew, counts):
    with one_rank_of(2, rank), load_skew(skew), unrecorded() as mode:
        sent = phantom_from_cpu(torch.tensor([[5, 4], [4, 3]]))
        received = torch.empty_like(sent)
        torch.distributed.all_to_all_single(received, sent)
        assert received.tolist() == counts
    assert ("times the load skew 1.5" in " ".join(mode.assumptions)) == (skew == 1.5)


def test_tensors_without_values_have_shapes_alone():
    with one_rank_of(2, 0), unrecorded() as mode:
        sent = phantom_from_cpu(torch.zeros(4, 2)).float() * 1
        sent.known = None
        received = torch.empty_like(sent)
        torch.distributed.all_to_all_single(received, sent)
    assert received.shape == (4, 2) and not mode.assumptions
