r"""Row filters, as typed after ``/``: terms separated by spaces, all of which must match.

``gpt`` and ``gpt-\d`` are regular expressions over all fields of a row; ``state:running`` matches one field;
``step:>100`` compares numbers; a leading ``!`` negates a term.
"""

from __future__ import annotations

import contextlib
import math
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Fields = Mapping[str, str]

_NUMBER = re.compile(r"(?:(?<!\w)-)?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|(?<!\w)inf(?!\w))")
"""A number as cells show it; the dash in ``sweep-17`` is not a sign."""


SHOWN_CHARS = 60
"""Limit of the quoted input in an error message."""


TIME_LIMIT_S = 1.0
"""CPU time limit of one pass over all rows, which normally takes milliseconds."""


class FilterTooSlow(Exception):
    """A regular expression with nested repetition takes too long."""


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Interrupt the block after `TIME_LIMIT_S` of CPU time; only in the main thread, where signals are handled.

    Raises:
        FilterTooSlow: the limit is exceeded; the message addresses the user who typed the expression.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(*_: object) -> None:
        raise FilterTooSlow("the filter took too long and was removed: use fewer * and +")

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, TIME_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


class BadFilter(ValueError):
    """Invalid filter; the message says where."""


@dataclass(frozen=True, slots=True)
class Filter:
    """A compiled filter; `text` is the source."""

    text: str
    _terms: tuple[Callable[[Fields], bool], ...] = ()

    def matches(self, fields: Fields) -> bool:
        """Every term matches these fields (displayed text by field name)."""
        return all(term(fields) for term in self._terms)

    def __bool__(self) -> bool:
        return bool(self._terms)


def parse(text: str, known: frozenset[str]) -> Filter:
    """Compile a filter over rows with the fields `known`.

    Raises:
        BadFilter: unknown field, or invalid regular expression.
    """
    return Filter(text.strip(), tuple(_term(term, known) for term in text.split()))


def _term(term: str, known: frozenset[str]) -> Callable[[Fields], bool]:
    bare = term.lstrip("!")
    if bare and bare != term:
        inner = _term(bare, known)
        negated = bool((len(term) - len(bare)) % 2)
        return lambda fields: inner(fields) is not negated
    name, colon, value = term.partition(":")
    if not colon or not re.fullmatch(r"[a-z_]+", name):
        found = pattern(term)
        return lambda fields: any(found.search(shown) for shown in fields.values())
    if name not in known:
        raise BadFilter(f"there is no field {name!r}; there are {', '.join(sorted(known))}")
    if value[:1] in ("<", ">"):
        return _comparison(name, value[0], value[1:])
    found = pattern(value)
    return lambda fields: found.search(fields.get(name, "")) is not None


def pattern(text: str) -> re.Pattern[str]:
    """Compile a regular expression typed by the user, ignoring case.

    Raises:
        BadFilter: it is invalid.
    """
    try:
        return re.compile(text, re.IGNORECASE)
    except (re.error, OverflowError, RecursionError) as error:  # repeated too often; nested too deeply
        shown = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
        raise BadFilter(f"{shown!r} is not a regular expression: {error}") from None


def _comparison(name: str, sign: str, limit: str) -> Callable[[Fields], bool]:
    try:
        bound = float(limit)
    except ValueError:
        bound = math.nan
    if math.isnan(bound):
        raise BadFilter(f"{name}:{sign}{limit}: {limit!r} is not a number")

    def compare(fields: Fields) -> bool:
        number = _NUMBER.search(fields.get(name, ""))
        if number is None:
            return False
        return float(number[0]) > bound if sign == ">" else float(number[0]) < bound

    return compare


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
