"""Filtered and sorted keys of a table, updated row by row instead of rebuilt on each change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from clusterd.tui.model.filters import Filter

R = TypeVar("R")


class Listing(Generic[R]):
    """Keys of the rows that pass the filter, in order; `tie` orders equal rows."""

    def __init__(
        self, fields: Callable[[R], Mapping[str, str]], order: Callable[[R], Any], tie: Callable[[str], Any]
    ) -> None:
        """Start empty.

        Args:
            fields: filter fields of a row.
            order: sort key of a row.
            tie: sort key, by row key, among rows that are otherwise equal.
        """
        self._fields = fields
        self._order = order
        self._tie = tie
        self._filter = Filter("")
        self._descending = False
        self._sort_keys: dict[str, Any] = {}
        self.keys: list[str] = []
        self.hidden = 0
        """Number of rows that the filter hides."""

    def configure(self, shown: Filter, order: Callable[[R], Any], descending: bool) -> None:
        """Set filter and order; takes effect with the next `rebuild`."""
        self._filter, self._order, self._descending = shown, order, descending

    def rebuild(self, rows: Mapping[str, R]) -> None:
        """Evaluate every row."""
        self._sort_keys.clear()
        self._evaluate(rows, rows)
        self._sort()
        self.hidden = len(rows) - len(self.keys)

    def update(self, rows: Mapping[str, R], touched: Iterable[str]) -> bool:
        """Evaluate only the touched rows; returns whether keys appeared, disappeared or moved."""
        moved = self._evaluate(rows, touched)
        if moved:
            self._sort()
        self.hidden = len(rows) - len(self.keys)
        return moved

    def _evaluate(self, rows: Mapping[str, R], touched: Iterable[str]) -> bool:
        moved = False
        for key in touched:
            row = rows.get(key)
            if row is None or (self._filter and not self._filter.matches(self._fields(row))):
                moved |= self._sort_keys.pop(key, None) is not None
                continue
            sort_key = (self._order(row), self._tie(key))
            if self._sort_keys.get(key) != sort_key:
                self._sort_keys[key] = sort_key
                moved = True
        return moved

    def _sort(self) -> None:
        keys = sorted(self._sort_keys, key=lambda key: self._sort_keys[key][1])
        self.keys = sorted(keys, key=lambda key: self._sort_keys[key][0], reverse=self._descending)
