"""Random numbers that a model draws on the CPU (masks of speech models), the same in every recording."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """numpy's and Python's generators begin anew inside, and go on outside where they were."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    np.random.seed(0)
    random.seed(0)
    try:
        yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
