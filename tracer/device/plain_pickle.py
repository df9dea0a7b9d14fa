"""Pickles that hold nothing but plain data, read without running anything.

A pickle is a program: its opcodes may import and call whatever they name. Here every opcode is looked at before the
first one runs, and only those that build dictionaries, lists, tuples, texts, numbers, booleans and None are let
through. What is left cannot import, call or reserve memory that the file does not fill.

Source: the opcodes of Lib/pickletools.py; what a memory snapshot holds is what torch's viewer accepts.
"""

from __future__ import annotations

import gzip
import io
import lzma
import pickle
import pickletools
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metapeak.tracer.errors import InputError

# More than any recording seen by far; keeps a small compressed file from filling the memory.
MAX_BYTES = 4 << 30
_LZMA_MEMORY_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 24

_OPCODES = {opcode.name: re.escape(opcode.code.encode("latin-1")) for opcode in pickletools.opcodes}
_NO_ARGUMENT = (
    "MARK", "POP", "POP_MARK", "DUP", "NONE", "NEWTRUE", "NEWFALSE", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE",
    "DICT", "LIST", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "MEMOIZE",
)  # fmt: skip
_FIXED_ARGUMENT = {
    "PROTO": 1, "BININT1": 1, "BININT2": 2, "BININT": 4, "BINFLOAT": 8, "FRAME": 8, "BINGET": 1, "BINPUT": 1,
    "LONG_BINGET": 4,
}  # fmt: skip
_STOP = b"."
_TEXTS = {b"\x8c": 1, b"X": 4}  # SHORT_BINUNICODE, BINUNICODE: bytes of their length
_LONGEST_INTEGER = 16  # bytes; addresses take 8 or 9


def read_plain_pickle(path: str | Path) -> Any:
    """What the pickle at `path` holds (as it is, or compressed by xz or gzip).

    Raises InputError for a file that cannot be read, is damaged, or holds anything but plain data.
    """
    try:
        data = _decompressed(Path(path).read_bytes(), path)
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (EOFError, lzma.LZMAError, zlib.error) as error:
        raise InputError(f"{path} is damaged or cut off: {error}.") from error
    check_plain(data, path)
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:
        raise InputError(f"{path} is no readable pickle: {error or type(error).__name__}.") from error


def check_plain(data: bytes, path: str | Path) -> None:
    """Raise InputError unless every opcode of the pickle builds plain data and lies within it."""
    runs = _opcode_runs(len(data))
    position = 0
    while True:
        start, position = position, runs.match(data, position).end()
        code = data[position : position + 1]
        if code == _STOP:
            return
        if code in _TEXTS:
            length = data[position + 1 : position + 1 + _TEXTS[code]]
            position += 1 + len(length) + int.from_bytes(length, "little")
        elif position == start:
            raise InputError(_refusal(code, position, path))


def _refusal(code: bytes, position: int, path: str | Path) -> str:
    named = {opcode.code.encode("latin-1"): opcode.name for opcode in pickletools.opcodes}
    if code not in named:
        what = f"byte {code.hex()} at {position} starts no opcode" if code else "it ends without an end mark"
        return f"{path} is no whole pickle: {what}."
    return (
        f"{path} is refused: {named[code]} at byte {position} of the pickle. A memory snapshot holds only plain data "
        "(dictionaries, lists, texts, numbers); this would import, call or reserve something."
    )


def _opcode_runs(nbytes: int) -> re.Pattern[bytes]:
    """Runs of opcodes without a text. Memo numbers have to be smaller than the pickle (it fills them one by one)."""
    highest = re.escape(bytes([min(nbytes >> 24, 255)]))
    alternatives = [b"[" + b"".join(_OPCODES[name] for name in _NO_ARGUMENT) + b"]"]
    alternatives += [_OPCODES[name] + b".{%d}" % size for name, size in _FIXED_ARGUMENT.items()]
    alternatives += [_OPCODES["LONG1"] + b"\\x%02x.{%d}" % (size, size) for size in range(_LONGEST_INTEGER + 1)]
    alternatives += [_OPCODES["LONG_BINPUT"] + b"...[\\x00-" + highest + b"]"]
    return re.compile(b"(?:" + b"|".join(alternatives) + b"){0,4096}", re.DOTALL)


class _Unpickler(pickle.Unpickler):
    """The second lock: no name is looked up, whatever an opcode asks for."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside the file")


def _decompressed(data: bytes, path: str | Path) -> bytes:
    if data.startswith(b"\xfd7zXZ\x00"):
        xz = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_LZMA_MEMORY_BYTES)
        return _limited(lambda: _next_piece(xz, data), path)
    if data.startswith(b"\x1f\x8b"):
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
            return _limited(lambda: stream.read(_CHUNK_BYTES), path)
    return data


def _next_piece(xz: lzma.LZMADecompressor, data: bytes) -> bytes:
    """The next piece of what an xz file holds; `data` is all of the file and is handed over at the first call."""
    if xz.eof:
        return b""
    piece = xz.decompress(data if xz.needs_input else b"", _CHUNK_BYTES)
    if not piece and not xz.eof:
        raise EOFError("the compressed data end early")
    return piece


def _limited(read: Callable[[], bytes], path: str | Path) -> bytes:
    pieces, total = [], 0
    while piece := read():
        total += len(piece)
        if total > MAX_BYTES:
            raise InputError(f"{path} holds more than {MAX_BYTES >> 30} GiB when unpacked, which no snapshot does.")
        pieces.append(piece)
    return b"".join(pieces)
