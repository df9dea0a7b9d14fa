"""Answers that were given before: `simulate_resolved` through the cache on disk, without importing torch on a hit.

The key of an answer is a hash of everything that it depends on: the config's contents and where it is from, every
option with its origin, the versions of all installed packages, this program's own code and data. What runs
code of the user's own (a model function, an optimizer class by path, remote code) is never kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from metapeak.strategies.request import gpu_of, model_spec, simulate_resolved
from metapeak.tracer.disk_cache import CacheProblem, DiskCache
from metapeak.tracer.errors import InputError
from metapeak.tracer.resolve import locate_model
from metapeak.tracer.simulation import Option, Simulation, Verdict


def answer(
    reference: str,
    options: Mapping[str, Option],
    *,
    cache: DiskCache | None,
    suggest: bool = False,
    whole_life: bool = False,
    progress: Callable[[str], None] = lambda what: None,
    warn: Callable[[str], None] = lambda problem: None,
) -> Simulation:
    """The simulation of `reference` under resolved options, from `cache` if it holds it (then without a graph).

    `suggest`: with suggestions if it does not fit. `whole_life`: with phases that were not asked for. `warn` is told
    when the answer cannot be kept. Raises what `simulate_resolved` raises.
    """
    key = answer_key(reference, options, whole_life=whole_life) if cache is not None else None
    known = _read(cache, key, options) if key is not None else None
    simulation = known or simulate_resolved(reference, options, whole_life=whole_life, progress=progress)
    if suggest and simulation.suggestions is None:
        simulation = with_suggestions(reference, simulation, options, progress)
    if key is not None and (known is None or simulation is not known):
        _keep(cache, key, simulation, warn)
    return simulation if suggest else replace(simulation, suggestions=None)


def with_suggestions(
    reference: str, simulation: Simulation, options: Mapping[str, Option], progress: Callable[[str], None]
) -> Simulation:
    """The simulation with what would make it fit, if it does not fit its GPU."""
    if simulation.fit is None or simulation.fit.verdict is Verdict.FITS:
        return simulation
    from metapeak.strategies.make_it_fit import make_it_fit, suggestions_record

    fit = make_it_fit(reference, simulation, options, progress=progress)
    return replace(simulation, suggestions=suggestions_record(fit))


def answer_key(reference: str, options: Mapping[str, Option], *, whole_life: bool = False) -> str | None:
    """The key of an answer, or None for what cannot be kept. Raises as `locate_model`, when there is no such model."""
    optimizer = str(options["optimizer"].value)
    if options["trust_remote_code"].value or "." in optimizer or ":" in optimizer:
        return None
    located = locate_model(model_spec(reference, options))
    if located.function is not None:
        return None
    given = {name: [repr(option.value), option.origin] for name, option in options.items()}
    parts = {
        "model": [located.id, located.source, located.revision, located.config_dict, list(located.notes)],
        "options": given,
        "whole_life": whole_life,
        "python": sys.version,
        "packages": installed_packages(),
        "code": own_code(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


@functools.cache
def own_code() -> str:
    """A hash of this program's modules and of the catalogue of GPUs."""
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for folder in ("tracer", "strategies", "reports"):
        files = sorted([*(root / folder).rglob("*.py"), *(root / folder).glob("catalogue/*.json")])
        for path in files:
            if path.name != "models.json":  # the config itself is part of the key
                digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def installed_packages() -> tuple[str, ...]:
    """Every installed distribution with its version, by the names of their folders of metadata (what
    importlib.metadata reads, in a tenth of its time): any of them may decide what is traced.
    """
    names = set()
    for folder in sys.path:
        with contextlib.suppress(OSError):
            names.update(name for name in os.listdir(folder or ".") if name.endswith((".dist-info", ".egg-info")))
    return tuple(sorted(names))


def _read(cache: DiskCache, key: str, options: Mapping[str, Option]) -> Simulation | None:
    content = cache.read(key)
    if content is None:
        return None
    from metapeak.tracer.simulation_file import simulation_from_bytes

    try:
        simulation = simulation_from_bytes(content, gpu_of(options))
    except InputError:
        raise
    except Exception:  # whole but of another make: computed and written anew
        return None
    return replace(simulation, how=replace(simulation.how, cached=True))


def _keep(cache: DiskCache, key: str, simulation: Simulation, warn: Callable[[str], Any]) -> None:
    from metapeak.tracer.simulation_file import simulation_to_bytes

    try:
        cache.write(key, simulation_to_bytes(simulation), _title(simulation))
    except CacheProblem as problem:
        warn(str(problem))
    except TypeError:
        return  # an option that is no plain value, from the user's own code


def _title(simulation: Simulation) -> str:
    """The model and the options that were not left as they are."""
    given = [
        f"{name}={option.value}"
        for name, option in simulation.options.items()
        if option.value is not None and option.origin in ("command line", "call")
    ]
    return " ".join([simulation.model.id, *given])
