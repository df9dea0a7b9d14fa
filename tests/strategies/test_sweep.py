"""The search for the largest value, on every threshold there is, with a made-up simulation."""

import json
import sys
from types import SimpleNamespace

import pytest

from metapeak.strategies.processes import results
from metapeak.strategies.settings import options_of, resolve
from metapeak.strategies.sweep import combinations, largest_that_fits, sweep
from metapeak.tracer.errors import InputError
from metapeak.tracer.simulation import Verdict
from tests.strategies.parallel.test_sharded_steps import CONFIG

ROOM = 10_000


def searched(needs, limit=None):
    """The search on a job that needs `needs(value)` bytes of ROOM."""
    asked = []

    def at(value):
        asked.append(value)
        if limit is not None and value > limit:
            raise InputError(f"at most {limit}")
        verdict = Verdict.FITS if needs(value) <= ROOM else Verdict.DOES_NOT_FIT
        fit = SimpleNamespace(verdict=verdict, device_range=(0, needs(value)), gpu=SimpleNamespace(usable_bytes=ROOM))
        simulation = SimpleNamespace(value=value, fit=fit)
        simulation.without_graph = lambda: simulation
        return simulation

    found = largest_that_fits("batch_size", at)
    assert len({*asked}) == len(asked), "a value is simulated once"
    return found, asked


@pytest.mark.parametrize(
    "needs",
    [
        lambda n: 100 + 7 * n,
        lambda n: 9_999 + n,
        lambda n: 3 * n * n,
        lambda n: 500 * (n // 37) + 10,
        lambda n: 2 * n + (8_000 if n > 500 else 0),
        lambda n: max(9_000, 11 * n),
        lambda n: 1 + n // 1000,
    ],
    ids=["affine", "one", "quadratic", "steps", "jump", "flat first", "huge"],
)
def test_the_value_fits_and_the_next_does_not(needs):
    truth = next(n for n in range(1, 10**8, 1) if needs(n + 1) > ROOM) if needs(10**7) > ROOM else 0
    found, asked = searched(needs)
    assert found.value == truth and found.simulation.value == truth and found.beyond.value == truth + 1
    assert found.tried[truth] and not found.tried[truth + 1]
    assert len(asked) <= 70


def test_affine_needs_few_simulations():
    found, asked = searched(lambda n: 100 + 7 * n)
    assert found.value == 1414 and len(asked) <= 6


def test_nothing_fits():
    found, asked = searched(lambda n: ROOM + n)
    assert (found.value, asked, found.beyond) == (0, [1], None)


def test_a_refused_value_is_the_end():
    found, asked = searched(lambda n: 100 + n // 10, limit=777)
    assert found.value == 777 and found.refused == "at most 777" and found.beyond is None
    assert len(asked) < 25


def test_what_is_refused_at_one_is_raised():
    with pytest.raises(InputError, match="at most 0"):
        searched(lambda n: n, limit=0)


def test_combinations():
    assert combinations({"a": (1, 2), "b": ("x", "y")}) == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]


@pytest.mark.parametrize("backend", [None, pytest.param("loky", marks=pytest.mark.slow), "dask"])
def test_processes_and_clusters_say_what_one_process_says(tmp_path, backend):
    """Two traces over two processes of this machine, of joblib's pool, of a local Dask cluster."""
    if backend is not None:
        pytest.importorskip("joblib", reason="joblib is not installed")
    if backend == "dask":
        pytest.importorskip("distributed", reason="dask and distributed are not installed")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    swept = {"method": ("full", "lora"), "checkpointing": ("none", "full"), "lora_rank": (None, 4)}

    def options(values):
        return resolve(options_of({**{k: v for k, v in values.items() if v is not None}, "seq_len": 16}, "call"))

    alone = sweep(str(path), swept, options)
    spread = sweep(str(path), swept, options, jobs=2, backend=backend)
    assert alone.traces == spread.traces
    for one, other in zip(alone.points, spread.points, strict=True):
        assert (one.values, one.refused) == (other.values, other.refused)
        if one.simulation is not None:
            assert one.simulation.worst.device_bytes == other.simulation.worst.device_bytes


def test_a_cluster_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "joblib", None)
    with pytest.raises(InputError, match=r"--backend dask needs joblib: pip install 'metapeak\[cluster\]'"):
        list(results(max, [(1, 2)], jobs=1, backend="dask"))
