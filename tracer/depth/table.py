"""Rows of one kind by group of blocks, and their places in the spliced step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# An index for what has no counterpart.
LOST = -9
_NO_ROWS = np.zeros(0, dtype=np.int64)


class CannotSplice(Exception):
    """Why the recorded step of a shorter model does not tell that of the deep one."""


class Table:
    """Rows with the group of each and the part of its group that it lies in; rows that have the same place in the same
    part are counterparts.

    `place` has for every new group the new indices of its rows, once they are laid out, and `size` is then how many
    rows there are.
    """

    def __init__(self, group: np.ndarray, part: np.ndarray):
        self.group = group
        self.key = (part << _PLACES) + places_in(group, part)
        by_group = np.argsort(group, kind="stable")
        bounds = np.flatnonzero(np.diff(group[by_group])) + 1
        self.rows = {int(group[rows[0]]): rows for rows in np.split(by_group, bounds) if len(rows)}
        self._order = np.empty(len(group), dtype=np.int64)  # the how-manieth of its group a row is
        for rows in self.rows.values():
            self._order[rows] = np.arange(len(rows))
        self._known: dict[tuple[int, int], np.ndarray] = {}
        self.place: dict[int, np.ndarray] = {}
        self.size: int | None = None

    def rows_of(self, group: int) -> np.ndarray:
        return self.rows.get(group, _NO_ROWS)

    def place_of(self, group: int) -> np.ndarray:
        return self.place.get(group, _NO_ROWS)

    def counterparts(self, group: int, other: int) -> np.ndarray:
        """For the rows of a group those of another one, LOST for rows that it has not."""
        if group == other:
            return self.rows_of(group)
        if (group, other) not in self._known:
            ours, theirs = self.key[self.rows_of(group)], self.rows_of(other)
            found = np.full(len(ours), LOST)
            if len(theirs):
                theirs = theirs[np.argsort(self.key[theirs])]
                at = np.minimum(np.searchsorted(self.key[theirs], ours), len(theirs) - 1)
                found = np.where(self.key[theirs[at]] == ours, theirs[at], LOST)
            self._known[group, other] = found
        return self._known[group, other]

    def places_of(self, rows: np.ndarray, group: int) -> np.ndarray:
        """Where rows come to lie as rows of a new group; LOST where they are."""
        return np.where(rows < 0, LOST, self.place[group][self._order[rows]])

    def put(self, stretches: Sequence[tuple[int, np.ndarray]]) -> None:
        """Place (new group, rows) one after the other."""
        begin, counts = 0, {group: len(self.rows[int(self.group[rows[0]])]) for group, rows in stretches}
        self.place = {group: np.full(count, LOST) for group, count in counts.items()}
        for group, rows in stretches:
            self.place[group][self._order[rows]] = np.arange(begin, begin + len(rows))
            begin += len(rows)
        self.size = begin

    def sort(self, parts: Sequence[tuple[int, np.ndarray]], keys: Sequence[Sequence[np.ndarray]]) -> None:
        """Place all rows of each (new group, rows) in the order of their keys, the first key first."""
        self.size = sum(len(rows) for _, rows in parts)
        if not parts:
            return
        columns = [np.concatenate(column) for column in zip(*keys)]
        if np.any(columns[0] == LOST):
            raise CannotSplice("a row without a place")
        ranks = np.empty(self.size, dtype=np.int64)
        ranks[np.lexsort(columns[::-1])] = np.arange(self.size)
        begin = 0
        for group, rows in parts:
            self.place[group] = ranks[begin : begin + len(rows)]
            begin += len(rows)


# Bits of a key for the place in a part.
_PLACES = 20


def places_in(group: np.ndarray, part: np.ndarray) -> np.ndarray:
    """For each row how many rows of its group and part come before it."""
    order = np.lexsort((part, group))
    if not len(order):
        return order
    begins = np.flatnonzero((np.diff(group[order], prepend=group[order[0]] - 1) != 0) | _changes(part[order]))
    places = np.empty(len(order), dtype=np.int64)
    places[order] = np.arange(len(order)) - np.repeat(begins, np.diff(begins, append=len(order)))
    return places


def _changes(column: np.ndarray) -> np.ndarray:
    return np.diff(column, prepend=column[0]) != 0
