"""Fixtures of tests that run operators on the phantom GPU."""

import pytest
import torch

from metapeak.tracer.dispatch import PhantomMode


class Log:
    """An observer that keeps the names of the operators that ran, and says that all of them ran in one module."""

    def __init__(self):
        self.names = []

    def record(self, func, args, kwargs, outputs):
        self.names.append(str(func))

    def location(self):
        return len(self.names), "layers.3.mlp"


@pytest.fixture
def mode():
    with PhantomMode(Log()) as mode, torch.autograd.set_multithreading_enabled(False):
        yield mode
