"""The dtype of everything that takes memory, with its bytes and where it came from."""

from __future__ import annotations

from typing import Any

import numpy as np

from metapeak.tracer.liveness import Category, Liveness, Phase
from metapeak.tracer.simulation import Simulation


def dtype_rows(simulation: Simulation) -> list[dict[str, Any]]:
    """Rows {"what", "bytes": {dtype: bytes}, "from"}, in order: weights, adapters, masters, gradients, optimizer
    states, activations saved for backward at the end of the last forward, logits (bytes None: they are among others).

    Bytes of a category are those at the instant at which it is largest, on the rank that needs most.
    """
    liveness, options = simulation.worst.liveness, simulation.options
    adapters = np.array(["lora_" in name for name in liveness.module_names], dtype=bool)[liveness.module]
    made_before = liveness.op_phase[liveness.birth] == Phase.LOAD
    parameter = liveness.category == Category.PARAMETER
    state = liveness.category == Category.OPTIMIZER_STATE
    masters = state & made_before & bool(_value(options, "master_weights"))
    gradient = liveness.category == Category.GRADIENT
    rows = [
        ("weights", parameter & ~adapters, _origin(options, "weights_dtype", "the model")),
        ("adapters", parameter & adapters, "PEFT, as it casts adapters"),
        ("master weights", masters, _origin(options, "master_weights", "")),
        ("gradients", gradient & ~made_before, "autograd: the dtype of what they belong to"),
        ("accumulated gradients", gradient & made_before, _origin(options, "grad_accum_dtype", "")),
        ("optimizer states", state & ~masters, f"{_value(options, 'optimizer') or 'the optimizer'}, as it makes them"),
    ]
    table = [{"what": what, "bytes": _largest(liveness, which), "from": origin} for what, which, origin in rows]
    table.append(
        {
            "what": "saved activations",
            "bytes": _by_dtype(liveness, _saved(liveness)),
            "from": _origin(options, "autocast", "the weights, traced"),
        }
    )
    table = [row for row in table if row["bytes"]]
    return table + _logits(simulation)


def _logits(simulation: Simulation) -> list[dict[str, Any]]:
    dtypes = simulation.graph.output_dtypes if simulation.graph is not None else {}
    made, returned = dtypes.get("head"), dtypes.get("logits")
    if not (made or returned):
        return []
    origin = "the model's head"
    if made and returned and made != returned:
        origin = f"{made} from the head, returned as {returned}"
    return [{"what": "logits", "bytes": {name: None for name in (made, returned) if name}, "from": origin}]


def _value(options, name: str) -> Any:
    return options[name].value if name in options else None


def _origin(options, name: str, otherwise: str) -> str:
    """Who set an option, in words; `otherwise` when nobody did."""
    return f"{name} ({options[name].origin})" if _value(options, name) else otherwise


def _saved(liveness: Liveness) -> np.ndarray:
    """Storages that are activations alive at the end of the last forward."""
    end = int(np.flatnonzero(liveness.op_phase == Phase.FORWARD)[-1]) + 1
    return (liveness.birth < end) & (liveness.death > end) & (liveness.category == Category.ACTIVATION)


def _largest(liveness: Liveness, which: np.ndarray) -> dict[str, int]:
    """Bytes by dtype of these storages when they are most."""
    change = np.zeros(liveness.num_ops + 2, dtype=np.int64)
    np.add.at(change, liveness.birth[which], liveness.nbytes[which])
    np.subtract.at(change, liveness.death[which], liveness.nbytes[which])
    at = int(np.argmax(np.cumsum(change)[: liveness.num_ops]))
    return _by_dtype(liveness, which & (liveness.birth <= at) & (at < liveness.death))


def _by_dtype(liveness: Liveness, which: np.ndarray) -> dict[str, int]:
    totals = np.zeros(len(liveness.dtype_names), dtype=np.int64)
    np.add.at(totals, liveness.dtype[which], liveness.nbytes[which])
    return {liveness.dtype_names[index]: int(totals[index]) for index in np.argsort(-totals) if totals[index]}
