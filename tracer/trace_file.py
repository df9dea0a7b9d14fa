"""A StepGraph in a file: gzipped JSON, read back without torch.

Columns are lists; inside arguments Values are written as {"%": row}, Symbols as {"$": text}, tuples as {"t": [...]}.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from metapeak.tracer.errors import InputError
from metapeak.tracer.graph import SavedTensors, StepGraph, Symbol, Value

FORMAT = "metapeak step graph"
VERSION = 2

_TUPLE_COLUMNS = ("value_shape", "value_stride")
_SET_COLUMNS = ("unsharded", "whole")
_TUPLE_COLUMNS_OF_SAVES = ("call_inputs", "call_keywords")


def save_graph(graph: StepGraph, path: str | Path) -> None:
    """Write the graph to `path`, whole or not at all. Raises OSError as writing does."""
    columns = {column.name: getattr(graph, column.name) for column in fields(graph)}
    columns["args"] = [_encode(list(args)) for args in graph.args]
    columns["kwargs"] = [{name: _encode(value) for name, value in kwargs.items()} for kwargs in graph.kwargs]
    columns["load_names"] = {str(node): name for node, name in graph.load_names.items()}
    columns |= {name: sorted(columns[name]) for name in _SET_COLUMNS}
    columns["saved"] = asdict(graph.saved) if graph.saved is not None else None
    text = json.dumps({"format": FORMAT, "version": VERSION, "columns": columns}, separators=(",", ":"))
    target = Path(path)
    temporary = target.with_name(f".{target.name}.partial")
    try:
        temporary.write_bytes(gzip.compress(text.encode(), compresslevel=4, mtime=0))
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def load_graph(path: str | Path) -> StepGraph:
    """The graph in `path`, equal to the one that was saved. Raises InputError when the file holds none."""
    try:
        document = json.loads(gzip.decompress(Path(path).read_bytes()))
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"Cannot read a trace from {path}: {error}.") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT or document.get("version") != VERSION:
        raise InputError(f"{path} holds no trace of version {VERSION}. Trace the step again.")
    columns: dict[str, Any] = document["columns"]
    columns["args"] = [tuple(_decode(args)) for args in columns["args"]]
    columns["kwargs"] = [{name: _decode(value) for name, value in kwargs.items()} for kwargs in columns["kwargs"]]
    columns["load_names"] = {int(node): name for node, name in columns["load_names"].items()}
    for name in _TUPLE_COLUMNS:
        columns[name] = [tuple(row) for row in columns[name]]
    columns |= {name: set(columns[name]) for name in _SET_COLUMNS}
    if columns["saved"] is not None:
        for name in _TUPLE_COLUMNS_OF_SAVES:
            columns["saved"][name] = [tuple(row) for row in columns["saved"][name]]
        columns["saved"] = SavedTensors(**columns["saved"])
    return StepGraph(**columns)


def _encode(argument: Any) -> Any:
    kind = type(argument)
    if kind is Value:
        return {"%": int(argument)}
    if kind is Symbol:
        return {"$": str(argument)}
    if kind is tuple:
        return {"t": [_encode(item) for item in argument]}
    if kind is list:
        return [_encode(item) for item in argument]
    return argument


def _decode(argument: Any) -> Any:
    if isinstance(argument, list):
        return [_decode(item) for item in argument]
    if isinstance(argument, dict):
        ((tag, content),) = argument.items()
        if tag == "%":
            return Value(content)
        return Symbol(content) if tag == "$" else tuple(_decode(item) for item in content)
    return argument
