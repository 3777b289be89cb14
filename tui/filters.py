r"""What is typed after ``/``: terms that must all hold.

``gpt`` and ``gpt-\d`` are regular expressions over everything a row shows; ``state:running`` looks at one field;
``step:>100`` compares numbers; ``!`` before any of them turns it round.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Fields = Mapping[str, str]


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
    if word.startswith("!") and len(word) > 1:
        inner = _term(word[1:], known)
        return lambda fields: not inner(fields)
    name, colon, value = word.partition(":")
    if not colon or not re.fullmatch(r"[a-z_]+", name):
        found = _regex(word)
        return lambda fields: any(found.search(shown) for shown in fields.values())
    if name not in known:
        raise BadFilter(f"there is no field {name!r}; there are {', '.join(sorted(known))}")
    if value[:1] in ("<", ">"):
        return _comparison(name, value[0], value[1:])
    found = _regex(value)
    return lambda fields: found.search(fields.get(name, "")) is not None


def _regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise BadFilter(f"{text!r} is no regular expression: {error}") from None


def _comparison(name: str, sign: str, limit: str) -> Callable[[Fields], bool]:
    try:
        bound = float(limit)
    except ValueError:
        raise BadFilter(f"{name}:{sign}{limit}: {limit!r} is no number") from None

    def compare(fields: Fields) -> bool:
        number = re.search(r"-?\d+(\.\d+)?", fields.get(name, ""))
        if number is None:
            return False
        return float(number[0]) > bound if sign == ">" else float(number[0]) < bound

    return compare
