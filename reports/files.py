"""Writing results: whole or not at all, and never over something that exists unless told to."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from metapeak.tracer.errors import InputError


def check_writable(path: str, *, force: bool) -> Path:
    """The path, when a file can be written there. Raises InputError before any work is done, else."""
    target = Path(path)
    if target.is_dir():
        raise InputError(f"Cannot write {path}: it is a folder. Give a file name.")
    if target.exists() and not force:
        raise InputError(f"{path} exists. Give --force to replace it, or another name.")
    folder = target.parent
    if not folder.is_dir():
        raise InputError(f"Cannot write {path}: the folder {folder} does not exist.")
    if not os.access(folder, os.W_OK):
        raise InputError(f"Cannot write {path}: no permission to write in {folder}.")
    return target


def check_all_writable(asked: Mapping[str, str | None], *, force: bool) -> dict[str, Path]:
    """The paths of the flags that were given one, each writable. Raises InputError before any work is done, else."""
    targets: dict[str, Path] = {}
    for flag, path in asked.items():
        if path is None:
            continue
        target = check_writable(path, force=force)
        for other, taken in targets.items():
            if os.path.realpath(target) == os.path.realpath(taken):
                raise InputError(f"{other} and {flag} both write {path}. Give each a file of its own.")
        targets[flag] = target
    return targets


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` through a temporary file beside it. Raises InputError; leaves nothing half-written."""
    temporary = None
    try:
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=f".{path.name}.", delete=False) as stream:
            temporary = stream.name
            stream.write(content.encode("utf-8") if isinstance(content, str) else content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror or error}.") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
