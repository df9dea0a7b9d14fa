"""The report of `metapeak footprints`: one row a case, as text and as a record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from metapeak.reports.data import SCHEMA_VERSION, model_record, record_of
from metapeak.reports.sizes import gib
from metapeak.reports.summary import NARROW, describe_step, print_sentences
from metapeak.strategies.footprints import PRETRAINING_SEQ_LEN, Case, Footprint
from metapeak.strategies.request import simulate_resolved, step_spec
from metapeak.strategies.settings import options_of, resolve
from metapeak.tracer.errors import InputError
from metapeak.tracer.simulation import Option, Simulation


def parse_case(text: str) -> Case:
    """A case of the user's: `NAME:option=value;option=value`. Raises InputError.

    >>> case = parse_case("8-bit Adam:optimizer=adamw8bit;precision=bf16")
    >>> case.name, dict(case.options)
    ('8-bit Adam', {'optimizer': 'adamw8bit', 'precision': 'bf16'})
    """
    name, colon, rest = text.partition(":")
    pairs = [part.partition("=") for part in rest.split(";") if part]
    if not name.strip() or not colon or not pairs or not all(option and equals for option, equals, _ in pairs):
        raise InputError(f"Case '{text}' is not of the form NAME:option=value;option=value.")
    options = {option.strip().replace("-", "_"): value.strip() for option, _, value in pairs}
    return Case(name=name.strip(), options=options)


def simulate_case(
    model: str, case: Case, given: Sequence[Mapping[str, Option]], progress: Callable[[str], None]
) -> Simulation:
    """One case, its options over the given ones. Raises as `simulate`."""
    options = resolve(*given, options_of(case.options, f"case {case.name}"))
    step = step_spec(options)
    if case.long:
        step = replace(step, default_seq_len=PRETRAINING_SEQ_LEN)
    return simulate_resolved(model, options, step=step, progress=lambda what: progress(f"{case.name}: {what}"))


def footprints_record(results: Sequence[Footprint]) -> dict[str, Any]:
    """The JSON-able record: the model once, and a record of an estimate per case (or why there is none)."""
    simulated = [result for result in results if result.simulation is not None]
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model_record(simulated[0].simulation) if simulated else None,
        "footprints": [_record(result) for result in results],
    }


def _record(result: Footprint) -> dict[str, Any]:
    if result.simulation is None:
        return {"case": result.case.name, "options": dict(result.case.options), "refused": result.refused}
    worst = result.simulation.worst
    return {
        "case": result.case.name,
        "peak_bytes": worst.allocated_bytes,
        "states_bytes": result.states_bytes,
        "activation_bytes": result.activation_bytes,
        "steady_bytes": worst.steady_bytes,
        "smallest_gpu": result.smallest_gpu.id if result.smallest_gpu else None,
        "estimate": record_of(result.simulation),
    }


def print_footprints(results: Sequence[Footprint], console: Console) -> None:
    """Print the table, then what each case stands for and what was assumed."""
    first = next((result.simulation for result in results if result.simulation is not None), None)
    if first is not None:
        console.print(Text.assemble((first.model.id, "bold"), f"   {first.model.architecture}"))
        console.print()
    table = Table(box=None, pad_edge=False)
    narrow = console.width < NARROW
    table.add_column("GiB", no_wrap=True)
    columns = ["peak", "states", "activations"] + ([] if narrow else ["between steps", "trained"])
    for name in columns:
        table.add_column(name, justify="right")
    table.add_column("peak at")
    table.add_column("smallest GPU that fits")
    for result in results:
        table.add_row(*_row(result, narrow))
    console.print(table)
    console.print()
    for result in results:
        if result.simulation is not None:
            console.print(
                Text.assemble(
                    (result.case.name, "bold"), f": {describe_step(result.simulation, result.simulation.worst)}"
                )
            )
        else:
            console.print(Text.assemble((result.case.name, "bold"), ": refused. ", str(result.refused)))
    simulated = [result.simulation for result in results if result.simulation is not None]
    print_sentences("Assumed", dict.fromkeys(said for one in simulated for said in one.how.assumptions), console)
    print_sentences("Not modelled", dict.fromkeys(said for one in simulated for said in one.how.not_modelled), console)


def _row(result: Footprint, narrow: bool) -> list[str]:
    if result.simulation is None:
        return [result.case.name, "-", "-", "-", *([] if narrow else ["-", "-"]), "refused, see below", ""]
    worst, at = result.simulation.worst, result.simulation.worst.peak_at
    model = result.simulation.model
    more = [gib(worst.steady_bytes), f"{100 * model.trainable_parameters / max(model.parameters, 1):.3g} %"]
    return [
        result.case.name,
        gib(worst.allocated_bytes),
        gib(result.states_bytes),
        gib(result.activation_bytes),
        *([] if narrow else more),
        f"{at.phase} of {at.iteration}",
        result.smallest_gpu.id if result.smallest_gpu else "none of the catalogue",
    ]
