"""The set of checkpointed regions with the least recompute that stays under a budget.

A mixed-integer linear program over the table of checkpoint_table.py, one binary variable a candidate:

    minimise   sum of recompute FLOPs of chosen candidates
    subject to plain + change @ chosen <= budget                   at every instant of the step
               plain + change @ chosen <= budget + M (1 - chosen)  at every instant of a candidate's recompute

solved by HiGHS through scipy.optimize.milp.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from metapeak.strategies.checkpoint_table import CheckpointTable

# Costs are scaled to this, so that the solver's tolerances mean the same for every model.
_COST_SCALE = 1e3


def least_recompute(table: CheckpointTable, flops: np.ndarray, budget_bytes: int) -> np.ndarray | None:
    """Which candidates to checkpoint, booleans of shape [candidates]; None when no choice stays under the budget.

    `flops` [candidates]: what recomputing each costs.
    """
    most = table.plain + np.maximum(table.change, 0).sum(axis=0)
    tight = most > budget_bytes  # the others hold whatever is chosen
    if not tight.any():
        return np.zeros(len(table.names), dtype=bool)
    matrix, bound = _rows(table, tight, budget_bytes, most)
    # A free candidate is preferred unchosen.
    cost = flops / max(flops.max(), 1) * _COST_SCALE + 1e-3
    solution = milp(
        cost,
        constraints=LinearConstraint(csr_array(matrix), ub=bound),
        integrality=np.ones(len(cost)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-4},
    )
    return None if solution.x is None else solution.x > 0.5


def least_peak(table: CheckpointTable) -> np.ndarray:
    """The choice with the lowest peak of all: the same program with the peak as the cost."""
    most = table.plain + np.maximum(table.change, 0).sum(axis=0)
    floor = float(np.max(np.where(table.needs < 0, table.plain + np.minimum(table.change, 0).sum(axis=0), 0)))
    matrix, bound = _rows(table, most > floor, floor, most)
    unit = max(most.max() - floor, 1.0)
    matrix = np.hstack([matrix, np.full((len(matrix), 1), -unit)])  # the last variable: peak above the floor, in units
    solution = milp(
        np.concatenate([np.full(len(table.names), 1e-6), [1.0]]),
        constraints=LinearConstraint(csr_array(matrix), ub=bound),
        integrality=np.concatenate([np.ones(len(table.names)), [0]]),
        bounds=Bounds(0, 1),
    )
    return solution.x[:-1] > 0.5


def _rows(table: CheckpointTable, tight: np.ndarray, budget: float, most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(coefficients, upper bounds) of the instants that can exceed the budget, equal rows merged."""
    matrix = table.change[:, tight].T.copy()
    bound = budget - table.plain[tight].astype(np.float64)
    needs = table.needs[tight]
    own = np.flatnonzero(needs >= 0)
    slack = most[tight][own] - budget
    matrix[own, needs[own]] += slack
    bound[own] += slack
    unique, group = np.unique(matrix, axis=0, return_inverse=True)
    lowest = np.full(len(unique), np.inf)
    np.minimum.at(lowest, group.ravel(), bound)
    return unique, lowest
