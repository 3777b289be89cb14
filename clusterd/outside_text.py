"""Texts from outside, as hosts, agents, jobs and clients send them: bounded where they enter, escaped where shown."""

from __future__ import annotations

import re
from typing import Any

TEXT_LETTERS_MAX = 4096
"""Of one text in an agent's message, and in an argument that a person gives."""

LINE_LETTERS_MAX = 1000
"""Of the reason why a host or an account cannot be reached."""

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but for the tab and the end of a line
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # direction of writing, and other ends of lines
    "\ud800-\udfff]"  # bytes that were no text
)


def escaped(text: str) -> str:
    """Text with control characters escaped: text from one user must not control the terminal of another."""
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def one_line(text: str, letters: int = LINE_LETTERS_MAX) -> str:
    """Text in one escaped line of bounded length."""
    return _cut(escaped(" ".join(text[: letters + 1].splitlines())), letters)


def bounded(value: Any) -> Any:
    """A message with each text cut to a bound and without unsafe characters; lines and tabs stay, and so do bytes."""
    if isinstance(value, str):
        text = _cut(value, TEXT_LETTERS_MAX)
        return text if text.isprintable() else _UNSAFE.sub(lambda found: _escape(found[0]), text)
    if isinstance(value, dict):
        return {bounded(key): bounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bounded(item) for item in value]
    return value


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: letters - 1] + "…"
