"""What is going on, on a terminal, when it takes more than a second."""

from __future__ import annotations

import sys
import threading

from rich.console import Console


class Progress:
    """Use as a context manager and call it with each stage: after a second the latest stage is shown on stderr.

    Silent when stderr is no terminal. The line disappears at the end, also on Ctrl-C.
    """

    def __init__(self, delay_seconds: float = 1.0):
        self._what = "starting"
        self._status = None
        self._timer = threading.Timer(delay_seconds, self._show) if sys.stderr.isatty() else None

    def __enter__(self) -> Progress:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __call__(self, what: str) -> None:
        self._what = what
        if self._status is not None:
            self._status.update(what)

    def _show(self) -> None:
        self._status = Console(stderr=True).status(self._what)
        self._status.start()

    def __exit__(self, *exception) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        if self._status is not None:
            self._status.stop()
