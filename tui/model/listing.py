"""Which rows a table shows, and in which order: kept up to date row by row, never built anew for one change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from tui.model.filters import Filter

R = TypeVar("R")


class Listing(Generic[R]):
    """The keys of the rows that pass the filter, sorted; ties keep the order of `tie`."""

    def __init__(
        self, fields: Callable[[R], Mapping[str, str]], order: Callable[[R], Any], tie: Callable[[str], Any]
    ) -> None:
        """`fields` gives what a filter looks at; `order` and `tie` what is sorted by, the first by choice."""
        self._fields = fields
        self._order = order
        self._tie = tie
        self._filter = Filter("")
        self._descending = False
        self._places: dict[str, Any] = {}  # sort keys of the rows that pass
        self.keys: list[str] = []
        self.hidden = 0
        """Rows that the filter keeps away."""

    def choose(self, shown: Filter, order: Callable[[R], Any], descending: bool) -> None:
        """Filter and sort otherwise; takes effect with the next `rebuild`."""
        self._filter, self._order, self._descending = shown, order, descending

    def rebuild(self, rows: Mapping[str, R]) -> None:
        """Look at every row."""
        self._places.clear()
        self._look(rows, rows)
        self._sort()
        self.hidden = len(rows) - len(self.keys)

    def update(self, rows: Mapping[str, R], touched: Iterable[str]) -> bool:
        """Look at the touched rows alone; True if keys came, went or changed places."""
        moved = self._look(rows, touched)
        if moved:
            self._sort()
        self.hidden = len(rows) - len(self.keys)
        return moved

    def _look(self, rows: Mapping[str, R], touched: Iterable[str]) -> bool:
        moved = False
        for key in touched:
            row = rows.get(key)
            if row is None or (self._filter and not self._filter.matches(self._fields(row))):
                moved |= self._places.pop(key, None) is not None
                continue
            place = (self._order(row), self._tie(key))
            if self._places.get(key) != place:
                self._places[key] = place
                moved = True
        return moved

    def _sort(self) -> None:
        keys = sorted(self._places, key=lambda key: self._places[key][1])
        self.keys = sorted(keys, key=lambda key: self._places[key][0], reverse=self._descending)
