"""From a model reference to its config, without importing torch or transformers.

Cases, in the order in which they are tried:
0. `litgpt:NAME` and its like: the model of another package (packages/), built by models.build.
1. `file.py:function` and `package.module:function`: the function is named here and called by models.build.
2. A path: what starts with `.`, `/` or `~`, ends in `.json`, or is an existing folder with a config.json.
3. An id, optionally `@revision`: the built-in catalogue (not when a revision is asked for), the Hub cache, the Hub.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from metapeak.tracer.errors import ModelConfigError, ModelNotFound
from metapeak.tracer.hub import CONFIG_NAME, find_config
from metapeak.tracer.packages.registry import installed_version, split_reference
from metapeak.tracer.spec import ModelSpec

FORCED_TIES = frozenset({"t5", "mt5", "umt5"})
"""Model types whose config class ignores `tie_word_embeddings: false`. See models.py, Note [Separate output heads]."""

_FILE_FUNCTION = re.compile(r"(?P<where>.+\.py):(?P<name>[A-Za-z_][\w.]*)")
_MODULE_FUNCTION = re.compile(r"(?P<where>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_][\w.]*)")
_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?)(@(?P<revision>[^@\s]+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class LocatedModel:
    """What a reference leads to, before anything is known about classes.

    `config_dict` is None for a function, `function` then (file or module, name), and for a model of another package,
    `package` then (prefix, name). `location` is the folder or the
    repository that code of the model's own would be loaded from. `catalogue_row` is the row of the catalogue's index.
    """

    id: str
    source: str
    revision: str | None = None
    config_dict: dict[str, Any] | None = None
    function: tuple[str, str] | None = None
    package: tuple[str, str] | None = None
    location: str | None = None
    catalogue_row: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueModel:
    """One row of `metapeak models`. `params` (tied ones once) and `dtype` are those of what `build_model` builds."""

    id: str
    architecture: str
    params: int
    dtype: str
    gated: bool
    aliases: tuple[str, ...]


def locate_model(spec: ModelSpec) -> LocatedModel:
    """The config (or function) that `spec.reference` leads to, and where it was found.

    Raises ModelNotFound (nothing there) and ModelConfigError (there is a file but it is no config).
    """
    reference = spec.reference.strip()
    if not reference:
        raise ModelNotFound("No model was named. Give a Hugging Face id, a folder, a config.json or file.py:function.")
    package = split_reference(reference)
    if package:
        version = installed_version(package[0])
        return LocatedModel(id=reference, source=f"{package[0]} {version}", package=package)
    function = _FILE_FUNCTION.fullmatch(reference) or _MODULE_FUNCTION.fullmatch(reference)
    if function:
        return LocatedModel(
            id=reference, source=f"function {reference}", function=(function["where"], function["name"])
        )
    if _is_path(reference):
        return _locate_path(Path(reference).expanduser(), reference)
    return _locate_id(reference)


# -- files -------------------------------------------------------------------------------------------------------------


def _is_path(reference: str) -> bool:
    if reference.startswith((".", "/", "~", os.sep)) or reference.endswith((".json", ".py")) or "\\" in reference:
        return True
    path = Path(reference)
    return path.is_file() or (path / CONFIG_NAME).is_file()


def _locate_path(path: Path, reference: str) -> LocatedModel:
    if path.suffix == ".py":
        raise ModelNotFound(
            f"'{path}' is a Python file; name the function in it that returns the model: {path}:function."
        )
    if path.is_dir():
        if not (path / CONFIG_NAME).is_file():
            raise ModelConfigError(_no_config(path))
        config = read_config(path / CONFIG_NAME)
        return LocatedModel(
            id=reference, source=f"folder {path.resolve()}", config_dict=config, location=str(path.resolve())
        )
    if not path.exists():
        raise ModelNotFound(
            f"There is no file or folder '{path}'. Give an existing folder with a config.json, a config.json, "
            "or a Hugging Face id such as org/name."
        )
    config = read_config(path)
    return LocatedModel(
        id=reference, source=f"file {path.resolve()}", config_dict=config, location=str(path.resolve().parent)
    )


def _no_config(folder: Path) -> str:
    found = sorted(child.name for child in folder.iterdir())
    listed = f"it holds {', '.join(found[:8])}{', ...' if len(found) > 8 else ''}" if found else "it is empty"
    adapter = folder / "adapter_config.json"
    advice = "Give a folder with the config.json of a model."
    if adapter.is_file():
        base = read_config(adapter).get("base_model_name_or_path")
        advice = f"It is a PEFT adapter: name its base model{f' ({base})' if base else ''} with --method lora."
    return f"Folder '{folder}' has no config.json; {listed}. {advice}"


def read_config(path: Path) -> dict[str, Any]:
    """The object in a config.json.

    Raises ModelConfigError when the file cannot be read, is not JSON, or is not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ModelConfigError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ModelConfigError(f"'{path}' is not a text file in UTF-8, so it is no config.json.") from error
    except json.JSONDecodeError as error:
        raise ModelConfigError(
            f"'{path}' is not JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from error
    except RecursionError as error:
        raise ModelConfigError(f"'{path}' is nested too deeply to be a config.json.") from error
    if not isinstance(value, dict):
        raise ModelConfigError(f"'{path}' holds a JSON {_json_kind(value)}; a config.json holds an object {{...}}.")
    return value


def _json_kind(value: object) -> str:
    kinds = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def named_dtype(config: Mapping[str, Any]) -> tuple[Any, str | None]:
    """The weights dtype in a config and the field that holds it: its own, else text_config's, else another part's.

    (None, None) where no field names one.
    """
    parts = {"": config, "text_config.": config.get("text_config")}
    parts |= {f"{name}.": value for name, value in config.items() if name.endswith("_config")}
    for prefix, part in parts.items():
        if not isinstance(part, Mapping) or prefix == "quantization_config.":
            continue
        for field in ("dtype", "torch_dtype"):
            value = part.get(field)
            if value is not None:
                return value.removeprefix("torch.") if isinstance(value, str) else value, f"{prefix}{field}"
    return None, None


# -- ids ---------------------------------------------------------------------------------------------------------------


def _locate_id(reference: str) -> LocatedModel:
    match = _ID.fullmatch(reference)
    if not match:
        raise ModelNotFound(
            f"'{reference}' is no model reference. Give a Hugging Face id (org/name, optionally @revision), a folder, "
            "a config.json, file.py:function or package.module:function."
        )
    name, revision = match["id"], match["revision"]
    row = _find_row(name)
    if row is not None and revision is None:
        return _from_catalogue(name, row)
    known = f"the built-in catalogue was skipped because revision '{revision}' was asked for" if row else None
    hint = f"Without @{revision} the built-in catalogue answers." if row else _nearest_text(name)
    if Path(name).is_dir():
        hint = f"The local folder '{name}' has no config.json. {hint}"
    found = find_config(name, revision, catalogue=known or "it is not in the built-in catalogue", hint=hint)
    return LocatedModel(
        id=name,
        source=found.source,
        revision=found.revision,
        config_dict=read_config(found.path),
        location=name,
        notes=(f"{known}.".capitalize(),) if known else (),
    )


def _from_catalogue(name: str, row: Mapping[str, Any]) -> LocatedModel:
    notes = []
    if name.lower() != row["id"].lower():
        notes.append(
            f"{name} has the shapes of {row['id']}, whose built-in config is used; context length, rope and token ids "
            "can differ."
        )
    if row.get("confidence") == "recalled":
        notes.append(
            f"The built-in config of {row['id']} is recalled, not copied: fields that its parameter count does not pin "
            "are unchecked."
        )
    return LocatedModel(
        id=row["id"] if name.lower() == row["id"].lower() else name,
        source="catalogue",
        config_dict=_catalogue_config(row),
        location=row["id"],
        catalogue_row=row,
        notes=tuple(notes),
    )


def _nearest_text(name: str) -> str:
    near = nearest_ids(name)
    return f"Nearest in the catalogue: {', '.join(near)}." if near else "`metapeak models` lists the catalogue."


def nearest_ids(name: str, count: int = 5) -> list[str]:
    """Ids of the catalogue (aliases too) that look like `name`, best first: the same name in another organisation,
    then similar ids."""
    index = _rows_by_id()
    base = name.lower().rpartition("/")[2]
    same = [known for known in index if known.rpartition("/")[2] == base]
    close = difflib.get_close_matches(name.lower(), index, n=count, cutoff=0.6)
    bases = {known.rpartition("/")[2]: known for known in index}
    close += [bases[match] for match in difflib.get_close_matches(base, bases, n=count, cutoff=0.6)]
    spelled = _spellings()
    return [spelled[known] for known in dict.fromkeys(same + close)][:count]


# -- the catalogue -----------------------------------------------------------------------------------------------------


def list_models() -> list[CatalogueModel]:
    """Every model of the built-in catalogue, sorted by id."""
    rows = [
        CatalogueModel(
            id=row["id"],
            architecture=row["model_class"],
            params=row["params"] + _separate_head_params(row),
            dtype=row["dtype"] or named_dtype(_catalogue_config(row))[0] or "float32",
            gated=bool(row.get("gated")),
            aliases=tuple(row.get("aliases", ())),
        )
        for row in _rows()
    ]
    return sorted(rows, key=lambda row: row.id.lower())


def _separate_head_params(row: Mapping[str, Any]) -> int:
    """Parameters of an output head that the index counts as tied and from_pretrained keeps apart."""
    if not row["model_class"].lower().startswith(tuple(FORCED_TIES)):
        return 0
    config = _catalogue_config(row)
    return config["vocab_size"] * config["d_model"] if config.get("tie_word_embeddings") is False else 0


def _catalogue_text(name: str) -> str:
    return resources.files("metapeak.tracer.catalogue").joinpath(name).read_text(encoding="utf-8")


def _catalogue_config(row: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(_catalogue_text(f"configs/{row['file']}"))


@functools.cache
def _rows() -> list[dict[str, Any]]:
    return json.loads(_catalogue_text("models.json"))


@functools.cache
def _spellings() -> dict[str, str]:
    """Lower-cased id or alias -> as the Hub spells it. Ids win over aliases."""
    names = [alias for row in _rows() for alias in row.get("aliases", ())] + [row["id"] for row in _rows()]
    return {name.lower(): name for name in names}


@functools.cache
def _rows_by_id() -> dict[str, dict[str, Any]]:
    index = {alias.lower(): row for row in _rows() for alias in row.get("aliases", ())}
    return index | {row["id"].lower(): row for row in _rows()}


def _find_row(name: str) -> Mapping[str, Any] | None:
    return _rows_by_id().get(name.lower())
