"""`metapeak cache`."""

from __future__ import annotations

import argparse
import json
import sys
import time

from metapeak.reports.commands.base import DONE, make_console
from metapeak.tracer.errors import InputError

SHOWN = 20


class Cache:
    """`metapeak cache`: answers kept on disk."""

    name = "cache"
    help = "answers kept on disk: shown, cleared, bounded"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--clear", action="store_true", help="remove every answer")
        parser.add_argument("--max-size", metavar="SIZE", help="keep at most this, as 500MiB or 2GiB; default 1GiB")
        parser.add_argument("--json", metavar="FILE", choices=["-"], help="- prints JSON on stdout")

    def run(self, arguments: argparse.Namespace) -> int:
        from metapeak.reports.sizes import size
        from metapeak.strategies.request import memory_of
        from metapeak.tracer.disk_cache import DiskCache, cache_folder

        folder = cache_folder()
        if folder is None:
            raise InputError("METAPEAK_CACHE is off: there is no cache. Unset it or name a folder.")
        cache = DiskCache(folder)
        if arguments.clear:
            removed, nbytes = cache.clear()
            print(f"removed {removed} answers, {size(nbytes)}", file=sys.stderr)
        if arguments.max_size is not None:
            removed = cache.bound(memory_of(arguments.max_size))
            print(f"at most {size(cache.max_bytes)} from now on; removed {removed} answers", file=sys.stderr)
        entries = cache.entries()
        record = {
            "folder": str(folder),
            "answers": len(entries),
            "bytes": sum(entry.nbytes for entry in entries),
            "max_bytes": cache.max_bytes,
            "entries": [
                {"key": entry.key, "bytes": entry.nbytes, "last_used": entry.used, "title": entry.title}
                for entry in entries
            ],
        }
        if arguments.json:
            print(json.dumps(record, indent=2))
        elif not (arguments.clear or arguments.max_size is not None):
            _show(record, make_console())
        return DONE


def _show(record, console) -> None:
    from rich.table import Table
    from rich.text import Text

    from metapeak.reports.sizes import size

    console.print(
        Text(
            f"{record['folder']}: {record['answers']} answers, {size(record['bytes'])} of at most "
            f"{size(record['max_bytes'])}"
        )
    )
    table = Table(box=None, pad_edge=False)
    for name in ("last used", "bytes", "answer"):
        table.add_column(name, justify="right" if name == "bytes" else "left", overflow="fold")
    for entry in record["entries"][:SHOWN]:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry["last_used"]))
        table.add_row(used, size(entry["bytes"]), Text(entry["title"]))
    if record["entries"]:
        console.print(table)
