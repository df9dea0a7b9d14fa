"""Options on the command line and in --config files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metapeak.strategies.parallel.zero.config_file import is_deepspeed_config, options_of_config
from metapeak.strategies.settings import SETTINGS, Setting, options_of, resolve
from metapeak.tracer.errors import InputError
from metapeak.tracer.simulation import Option


class Several(tuple):
    """Values of one option that were given together, in order: a sweep."""


# Options whose one value may hold commas: several are separated by semicolons. So are the lists (with `parse`).
_WITH_COMMAS = frozenset({"optimizer_args", "allocator_config"})


def values_of(setting: Setting, text: str) -> Any:
    """The value of a text on the command line, or Several. Raises ValueError for one that is not of the setting's type.

    Several values have commas between them, or semicolons where one may hold commas itself.
    """
    if ";" in text:
        parts = text.split(";")
    elif setting.parse is not None or setting.name in _WITH_COMMAS:
        parts = [text]
    else:
        parts = _policies(text) if setting.name == "checkpointing" else text.split(",")
    values = [setting.kind(part.strip()) for part in parts]
    return values[0] if len(values) == 1 else Several(dict.fromkeys(values))


def _policies(text: str) -> list[str]:
    """Policies with commas between them; one policy with commas in it (layers:0-3,7) is whole."""
    from metapeak.strategies.checkpoint_policies import parse_policy

    parts = text.split(",")
    try:
        for part in parts:
            parse_policy(part.strip())
    except InputError:
        return [text]
    return parts


def swept_options(arguments: argparse.Namespace) -> dict[str, Several]:
    """The options that were given several values."""
    given = {setting.name: getattr(arguments, setting.name) for setting in SETTINGS}
    return {name: value for name, value in given.items() if isinstance(value, Several)}


def options_of_point(arguments: argparse.Namespace, values: Mapping[str, Any]) -> dict[str, Option]:
    """The resolved options of one combination of a sweep's values. Raises as `resolve_options`."""
    return resolve_options(argparse.Namespace(**{**vars(arguments), **values}))


def add_to_parser(
    parser: argparse.ArgumentParser, settings: Sequence[Setting] = SETTINGS, *, several: bool = False
) -> None:
    """Add a flag for every setting, and --config. `several`: a flag takes several values."""
    group = parser.add_argument_group("step, strategies and device" if settings is SETTINGS else "engine and device")
    add_flags(group, settings, several=several)
    group.add_argument(
        "--config", default=None, metavar="FILE", help="a YAML or JSON file of the same names, or DeepSpeed's own"
    )


def add_flags(group: argparse._ArgumentGroup, settings: Sequence[Setting], *, several: bool = False) -> None:
    """Add a flag for every setting. `several`: a flag takes several values."""
    for setting in settings:
        if setting.kind is bool:
            group.add_argument(setting.flag, action="store_true", default=None, help=setting.help)
            continue
        text = setting.help + (f" ({', '.join(setting.choices)})" if setting.choices else "")
        metavar = "NAME[,NAME]" if setting.parse else {int: "N", float: "X", str: "NAME"}[setting.kind]
        kind = _several_of(setting) if several else setting.kind
        group.add_argument(setting.flag, type=kind, default=None, metavar=metavar, help=text)


def _several_of(setting: Setting):
    def read(text: str) -> Any:
        return values_of(setting, text)

    read.__name__ = setting.kind.__name__  # what argparse calls a value that is of another type
    return read


def resolve_options(arguments: argparse.Namespace, settings: Sequence[Setting] = SETTINGS) -> dict[str, Option]:
    """Every setting with its value and origin: the command line wins over --config, --config over the default.

    Raises InputError or UnknownName for a file or value that cannot be used.
    """
    return resolve(*given_options(arguments, settings), settings=settings)


def given_options(
    arguments: argparse.Namespace, settings: Sequence[Setting] = SETTINGS
) -> tuple[dict[str, Option], dict[str, Option]]:
    """(options of the --config file, options of the command line): those that were given, nothing filled in."""
    given = {setting: getattr(arguments, setting.name) for setting in settings}
    return (
        _from_file(arguments.config, settings) if arguments.config else {},
        {
            setting.name: Option(value=setting.parse(value) if setting.parse else value, origin="command line")
            for setting, value in given.items()
            if value is not None
        },
    )


def _from_file(path: str, settings: Sequence[Setting]) -> dict[str, Option]:
    values, lines = _read_mapping(path)
    if is_deepspeed_config(values):
        return options_of(options_of_config(values, path), path, settings=settings)
    options: dict[str, Option] = {}
    for key, value in values.items():
        options |= options_of({key: value}, f"{path}:{lines[key]}" if key in lines else path, settings=settings)
    return options


def _read_mapping(path: str) -> tuple[Mapping[str, Any], dict[str, int]]:
    """(the mapping in a YAML or JSON file, line of each of its keys)."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"Cannot read --config {path}: {error}.") from error
    try:
        values = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(f"--config {path} is neither YAML nor JSON: {error}.") from error
    if not isinstance(values, dict):
        raise InputError(f"--config {path} has to hold a mapping from option names to values.")
    lines = {key.value: key.start_mark.line + 1 for key, _ in node.value} if node is not None else {}
    return values, lines
