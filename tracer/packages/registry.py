"""Which prefixes of a reference name a package, and what each needs. Imports none of them."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metapeak.tracer.errors import ModelConfigError, ModelNotFound
from metapeak.tracer.user_function import cause_in_one_line

if TYPE_CHECKING:
    from metapeak.tracer.packages.base import Package


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The file of a package and the object in it, the modules that have to be importable, and the package to install
    where the prefix is not its name."""

    file: str
    requires: tuple[str, ...]
    attribute: str = "PACKAGE"
    extra: str | None = None


PACKAGES: dict[str, Entry] = {
    "litgpt": Entry(file="metapeak.tracer.packages.litgpt", requires=("litgpt", "lightning")),
    "litgpt-0.4": Entry(
        file="metapeak.tracer.packages.litgpt", requires=("litgpt", "lightning"), attribute="LITGPT_0_4", extra="litgpt"
    ),
    "torchtune": Entry(file="metapeak.tracer.packages.torchtune", requires=("torchtune", "torchao")),
    "torchtune-0.4": Entry(
        file="metapeak.tracer.packages.torchtune",
        requires=("torchtune", "torchao"),
        attribute="TORCHTUNE_0_4",
        extra="torchtune",
    ),
    "diffusers": Entry(file="metapeak.tracer.packages.diffusers", requires=("diffusers",)),
    "torchtitan": Entry(file="metapeak.tracer.packages.torchtitan", requires=("torchtitan", "tensorboard")),
    "timm": Entry(file="metapeak.tracer.packages.timm", requires=("timm", "torchvision")),
    "synthetic": Entry(file="metapeak.tracer.packages.synthetic", requires=(), extra="torch"),
}


def split_reference(reference: str) -> tuple[str, str] | None:
    """(prefix, name) of a reference to a package's model, None for any other reference.

    >>> split_reference("litgpt:phi-1_5"), split_reference("openai-community/gpt2"), split_reference("model.py:make")
    (('litgpt', 'phi-1_5'), None, None)
    """
    prefix, colon, name = reference.partition(":")
    return (prefix, name) if colon and prefix in PACKAGES else None


def installed_version(prefix: str) -> str:
    """The version of the package behind a prefix. Raises ModelNotFound when it, or what it needs, is not installed."""
    from importlib import metadata  # a tenth of the time of an answer from the cache

    extra = PACKAGES[prefix].extra or prefix
    missing = [name for name in PACKAGES[prefix].requires if not _is_importable(name)]
    if missing:
        needed = "" if missing == [extra] else f" (missing: {', '.join(missing)})"
        raise ModelNotFound(f"{extra} is not installed: pip install 'metapeak[{extra}]'{needed}")
    try:
        return metadata.version(extra)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def load_package(prefix: str) -> Package:
    """The package behind a prefix, imported.

    Raises ModelNotFound when it is not installed, ModelConfigError when it is but cannot be imported.
    """
    installed_version(prefix)
    try:
        entry = PACKAGES[prefix]
        package = getattr(importlib.import_module(entry.file), entry.attribute)
        package.load()
    except Exception as error:
        raise ModelConfigError(
            f"{prefix} is installed but cannot be imported: {cause_in_one_line(error)}. Its versions and this torch's "
            f"have to go together; `python -c 'import {prefix}'` shows the whole error."
        ) from error
    return package
