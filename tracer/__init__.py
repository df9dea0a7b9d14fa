"""The step graph and everything computed on it; knows no strategy and no report.

    from metapeak.tracer import ModelSpec, StepSpec, resolve_model, build_model, record_training_step, Liveness

Names that need torch are imported when they are first used, so that reading a saved trace needs none.
"""

from __future__ import annotations

import importlib

from metapeak.tracer.errors import DataDependentError, InputError, MetapeakError, ModelNotFound, TraceError, UnknownName
from metapeak.tracer.graph import StepGraph
from metapeak.tracer.liveness import Category, Liveness, Phase
from metapeak.tracer.simulation import RankResult, Simulation, Verdict
from metapeak.tracer.spec import BatchSpec, ModelSpec, OptimizerSpec, StepSpec

_WITH_TORCH = {
    "build_model": "metapeak.tracer.models",
    "make_batch": "metapeak.tracer.batches",
    "record_training_step": "metapeak.tracer.capture",
    "resolve_model": "metapeak.tracer.models",
}

__all__ = [
    "BatchSpec",
    "Category",
    "DataDependentError",
    "InputError",
    "Liveness",
    "MetapeakError",
    "ModelNotFound",
    "ModelSpec",
    "OptimizerSpec",
    "Phase",
    "RankResult",
    "Simulation",
    "StepGraph",
    "StepSpec",
    "TraceError",
    "UnknownName",
    "Verdict",
    *sorted(_WITH_TORCH),
]


def __getattr__(name: str):
    if name in _WITH_TORCH:
        return getattr(importlib.import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
