r"""What is typed after ``/``: terms that must all hold.

``gpt`` and ``gpt-\d`` are regular expressions over everything a row shows; ``state:running`` looks at one field;
``step:>100`` compares numbers; ``!`` before any of them turns it round.
"""

from __future__ import annotations

import contextlib
import math
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

Fields = Mapping[str, str]

_NUMBER = re.compile(r"(?:(?<!\w)-)?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|(?<!\w)inf(?!\w))")
"""As cells show them; the dash of ``sweep-17`` is no sign."""


SHOWN_CHARS = 60
"""Of what was typed, in what is said of it."""


PATIENCE_S = 1.0
"""Of this process's time, for looking at all rows; they take some milliseconds."""


class FilterTooSlow(Exception):
    """A regular expression that repeats what repeats may take for ever."""


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """What is done within is interrupted when it takes too long; the main thread alone can be.

    Raises:
        FilterTooSlow: it did; the message is for the person who typed the expression.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(*_: object) -> None:
        raise FilterTooSlow("that expression takes too long, and was taken off: can it do with fewer * and +?")

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


class BadFilter(ValueError):
    """It is no filter; the message says where."""


@dataclass(frozen=True, slots=True)
class Filter:
    """A compiled filter; `text` is what was typed."""

    text: str
    _terms: tuple[Callable[[Fields], bool], ...] = ()

    def matches(self, fields: Fields) -> bool:
        """Every term holds for these fields (name to shown text)."""
        return all(term(fields) for term in self._terms)

    def __bool__(self) -> bool:
        return bool(self._terms)


def parse(text: str, known: frozenset[str]) -> Filter:
    """The filter that `text` means, over rows with the fields `known`.

    Raises:
        BadFilter: a field that is not there, or no regular expression.
    """
    return Filter(text.strip(), tuple(_term(word, known) for word in text.split()))


def _term(word: str, known: frozenset[str]) -> Callable[[Fields], bool]:
    bare = word.lstrip("!")
    if bare and bare != word:
        inner = _term(bare, known)
        turned = bool((len(word) - len(bare)) % 2)
        return lambda fields: inner(fields) is not turned
    name, colon, value = word.partition(":")
    if not colon or not re.fullmatch(r"[a-z_]+", name):
        found = pattern(word)
        return lambda fields: any(found.search(shown) for shown in fields.values())
    if name not in known:
        raise BadFilter(f"there is no field {name!r}; there are {', '.join(sorted(known))}")
    if value[:1] in ("<", ">"):
        return _comparison(name, value[0], value[1:])
    found = pattern(value)
    return lambda fields: found.search(fields.get(name, "")) is not None


def pattern(text: str) -> re.Pattern[str]:
    """The regular expression that somebody typed; case does not matter.

    Raises:
        BadFilter: it is none.
    """
    try:
        return re.compile(text, re.IGNORECASE)
    except (re.error, OverflowError, RecursionError) as error:  # repeated too often; nested too deeply
        shown = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
        raise BadFilter(f"{shown!r} is no regular expression: {error}") from None


def _comparison(name: str, sign: str, limit: str) -> Callable[[Fields], bool]:
    try:
        bound = float(limit)
    except ValueError:
        bound = math.nan
    if math.isnan(bound):
        raise BadFilter(f"{name}:{sign}{limit}: {limit!r} is no number")

    def compare(fields: Fields) -> bool:
        number = _NUMBER.search(fields.get(name, ""))
        if number is None:
            return False
        return float(number[0]) > bound if sign == ">" else float(number[0]) < bound

    return compare
