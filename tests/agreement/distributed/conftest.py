"""Processes that stand for ranks, a set a file: they cost seconds to start."""

import pytest

from tests.agreement.distributed.real_ranks import Ranks


def _ranks(world_size):
    ranks = Ranks(world_size)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def two_ranks():
    yield from _ranks(2)


@pytest.fixture(scope="module")
def three_ranks():
    yield from _ranks(3)


@pytest.fixture(scope="module")
def four_ranks():
    yield from _ranks(4)
