"""A folder of answers, each a file named after what it answers: read, written, bounded by many processes at once.

Note [What can go wrong in a cache]
    A file is written beside its place and renamed into it, so that readers see a whole file or none, and of two writers
    of one key the later wins with equal contents. A writer that is killed leaves a temporary file, which is swept after
    an hour. Every file carries the SHA-256 of its contents: one that was cut short or changed counts as absent, and is
    written anew by whoever computes it. A full or read-only disk raises CacheProblem; the caller has its answer and
    says that it was not kept. Files may vanish at any moment, when another process makes room: then they are absent.

Folder: METAPEAK_CACHE (`off`: no cache), else the user's cache folder of the platform. Imports neither torch nor numpy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metapeak.tracer.errors import MetapeakError

DEFAULT_MAX_BYTES = 1 << 30
OFF = "off"
SUFFIX = ".answer"
_MAGIC = "metapeak cache 1"
_SETTINGS = "settings.json"
_TEMPORARY = ".partial-"
_STALE_SECONDS = 3600


class CacheProblem(MetapeakError):
    """An answer could not be kept; its text says why. The answer itself is not affected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A file of the cache: its key, its bytes on disk, when it was last used (seconds since the epoch), its title."""

    key: str
    nbytes: int
    used: float
    title: str


def cache_folder() -> Path | None:
    """The folder, which need not exist yet; None where METAPEAK_CACHE is `off`."""
    named = os.environ.get("METAPEAK_CACHE")
    if named:
        return None if named.lower() == OFF else Path(named).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "metapeak"


class DiskCache:
    """The cache in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder

    def read(self, key: str) -> bytes | None:
        """The contents kept under `key`; None when there are none, or none that are whole."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        header, _, body = content.partition(b"\n")
        known = _header(header)
        if known is None or known.get("key") != key or known.get("sha256") != hashlib.sha256(body).hexdigest():
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # last used now: what is used stays longest
        return body

    def write(self, key: str, body: bytes, title: str) -> None:
        """Keep `body` under `key`, then make room if the folder is over its bound. Raises CacheProblem."""
        known = {"cache": _MAGIC, "key": key, "sha256": hashlib.sha256(body).hexdigest(), "title": title}
        self._replace(self._path(key), json.dumps(known).encode() + b"\n" + body)
        self._make_room(keep=key)

    def entries(self) -> list[Entry]:
        """Every whole or broken file of the cache, last used first."""
        found = []
        for path, status in self._files():
            with contextlib.suppress(OSError), path.open("rb") as stream:
                known = _header(stream.readline(1 << 16)) or {}
                title = str(known.get("title", "(unreadable)"))
                found.append(Entry(key=path.stem, nbytes=status.st_size, used=status.st_mtime, title=title))
        return sorted(found, key=lambda entry: -entry.used)

    def clear(self) -> tuple[int, int]:
        """Remove every answer. (how many, bytes)."""
        removed = nbytes = 0
        for path, status in self._files():
            with contextlib.suppress(OSError):
                path.unlink()
                removed, nbytes = removed + 1, nbytes + status.st_size
        self._sweep()
        return removed, nbytes

    @property
    def max_bytes(self) -> int:
        """The bound that was set, or the default."""
        try:
            value = json.loads((self.folder / _SETTINGS).read_text(encoding="utf-8"))["max_bytes"]
        except (OSError, ValueError, KeyError, TypeError):
            return DEFAULT_MAX_BYTES
        return value if isinstance(value, int) and value >= 0 else DEFAULT_MAX_BYTES

    def bound(self, max_bytes: int) -> int:
        """Set the bound and make room. How many answers were removed. Raises CacheProblem."""
        self._replace(self.folder / _SETTINGS, json.dumps({"max_bytes": max_bytes}).encode())
        return self._make_room()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        found = []
        with contextlib.suppress(OSError), os.scandir(self.folder) as items:
            for item in items:
                if item.name.endswith(SUFFIX) and not item.name.startswith("."):
                    with contextlib.suppress(OSError):
                        found.append((Path(item.path), item.stat()))
        return found

    def _replace(self, path: Path, content: bytes) -> None:
        temporary = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("wb", dir=self.folder, prefix=_TEMPORARY, delete=False) as stream:
                temporary = stream.name
                stream.write(content)
            os.replace(temporary, path)
            temporary = None
        except OSError as error:
            raise CacheProblem(
                f"The answer could not be kept in {self.folder}: {error.strerror or error}. Set METAPEAK_CACHE to "
                "another folder, or to off."
            ) from error
        finally:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)

    def _make_room(self, keep: str | None = None) -> int:
        """Remove what was not used for longest until the bound holds; what was just written stays."""
        self._sweep()
        files = sorted(self._files(), key=lambda item: item[1].st_mtime)
        over, removed = sum(status.st_size for _, status in files) - self.max_bytes, 0
        for path, status in files:
            if over <= 0:
                break
            if path.stem == keep:
                continue
            with contextlib.suppress(OSError):  # another process's, or gone already
                path.unlink()
                over, removed = over - status.st_size, removed + 1
        return removed

    def _sweep(self) -> None:
        """Remove what killed writers left."""
        with contextlib.suppress(OSError), os.scandir(self.folder) as items:
            for item in items:
                if item.name.startswith(_TEMPORARY):
                    with contextlib.suppress(OSError):
                        if time.time() - item.stat().st_mtime > _STALE_SECONDS:
                            os.unlink(item.path)


def _header(line: bytes) -> dict[str, Any] | None:
    try:
        known = json.loads(line)
    except ValueError:
        return None
    return known if isinstance(known, dict) and known.get("cache") == _MAGIC else None
