"""Styled text as plain values, produced by `tui.model` and painted by the widgets; kinds, plans and values as text."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from rich.cells import cell_len, set_cell_size

Run = tuple[str, str]
Line = tuple[Run, ...]

EMPTY: Line = ()


def line(*parts: str | Run) -> Line:
    """Build a line of runs; bare text is unstyled."""
    return tuple((part, "") if isinstance(part, str) else part for part in parts)


def plain(runs: Line) -> str:
    """Text of a line without styles."""
    return "".join(text for text, _ in runs)


def printable(text: str) -> str:
    """Text without control characters: tabs and newlines become spaces, others a middle dot."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c in "\t\n\r" else "·" for c in text)


def width(runs: Line) -> int:
    """Width in terminal cells."""
    return sum(cell_len(text) for text, _ in runs)


def fit(runs: Line, cells: int, right: bool = False, more: str = "…", middle: bool = False) -> Line:
    """Pad, or truncate with `more`, to exactly `cells`; `middle`: keep both ends of a text of one style."""
    have = width(runs)
    if have == cells:
        return runs
    if have < cells:
        padding = (" " * (cells - have), "")
        return (padding, *runs) if right else (*runs, padding)
    if cells <= 0:
        return EMPTY
    left = cells - cell_len(more)
    if middle and left > 2:
        text, style = plain(runs), runs[-1][1]
        end = text[-(left // 2) :]
        return ((set_cell_size(text, left - cell_len(end)) + more + end, style),)
    return (*_cut(runs, left), (more, runs[-1][1]))


def _cut(runs: Line, cells: int) -> Iterator[Run]:
    for text, style in runs:
        have = cell_len(text)
        if have <= cells:
            yield text, style
            cells -= have
            continue
        if cells > 0:
            yield set_cell_size(text, cells), style
        return


def wrap(runs: Line, cells: int, hang: int = 0) -> list[Line]:
    """Break into lines of at most `cells`, at spaces and after commas of plans.

    Continuation lines are indented by `hang`.
    """
    if width(runs) <= cells or cells <= 0:
        return [runs]
    hang = hang if hang < cells // 2 else 0
    made: list[list[Run]] = [[]]
    used = 0
    for text, style in runs:
        for token in _tokens(text):
            size = cell_len(token)
            if used + len(token.rstrip()) > cells and used > (hang if len(made) > 1 else 0):
                made.append([(" " * hang, "")] if hang else [])
                used = hang
                token = token.lstrip()
                size = cell_len(token)
            while used + cell_len(token.rstrip()) > cells:  # a word longer than the line
                part = set_cell_size(token, cells - used)
                made[-1].append((part, style))
                token = token[len(part.rstrip()) or 1 :]
                size = cell_len(token)
                made.append([(" " * hang, "")] if hang else [])
                used = hang
            made[-1].append((token, style))
            used += size
    return [tuple(_merged(_rstrip(part))) for part in made]


def _rstrip(runs: list[Run]) -> list[Run]:
    """Drop trailing spaces, which would not fit."""
    if runs and runs[-1][0].endswith(" ") and len(runs) > 1:
        return [*runs[:-1], (runs[-1][0].rstrip(), runs[-1][1])]
    return runs


def _tokens(text: str) -> Iterator[str]:
    """Split into words with their trailing spaces; a plan, which is long, is also split after its commas."""
    start = 0
    for at in range(1, len(text)):
        if (text[at] != " " and text[at - 1] == " ") or (text[at].isalpha() and text[at - 1] == ","):
            yield text[start:at]
            start = at
    if text[start:]:
        yield text[start:]


def _merged(runs: Iterable[Run]) -> Iterator[Run]:
    """Merge adjacent runs of the same style."""
    text, style = "", ""
    for part, name in runs:
        if name == style:
            text += part
            continue
        if text:
            yield text, style
        text, style = part, name
    if text:
        yield text, style


def beside(left: list[Line], right: list[Line], left_cells: int, between: str) -> list[Line]:
    """Two columns side by side: `left` padded to `left_cells`, then `between`, then `right`."""
    made = []
    for at in range(max(len(left), len(right))):
        mine = fit(left[at] if at < len(left) else EMPTY, left_cells)
        made.append((*mine, (between, "dim"), *(right[at] if at < len(right) else EMPTY)))
    return made


SIMULATED_BEFORE_S = 1e8
"""Timestamps before this (1973) count from the start of a simulation."""


def clock(at_s: float, now_s: float) -> str:
    """Time of day, with the date on other days; elapsed time since the start in simulations."""
    if now_s < SIMULATED_BEFORE_S:
        hours, rest_s = divmod(int(at_s), 3600)
        return f"{hours}:{rest_s // 60:02d}:{rest_s % 60:02d}"
    at, now = time.localtime(at_s), time.localtime(now_s)
    return time.strftime("%H:%M:%S" if at[:3] == now[:3] else "%m-%d %H:%M", at)


def readable_kind(kind: str) -> str:
    """``launch attempt`` for ``LaunchAttempt``."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in kind).strip()


def short_plan(plan: str) -> str:
    """``pp=2,acc=4`` for ``pp=2,accumulation=4``."""
    return plan.replace("accumulation", "acc").replace("checkpointing", "ckpt").replace("micro_batch", "mb")


def full_value(value: Any) -> str:
    """A field's value with all nested fields that are set."""
    if isinstance(value, dict):
        return ", ".join(
            f"{name} {_bracketed(v)}" for name, v in value.items() if v not in (False, None, "", (), [], {})
        )
    if isinstance(value, list | tuple):
        return ", ".join(map(_bracketed, value)) or "none"
    return "none" if value is None else str(value)


def _bracketed(value: Any) -> str:
    return f"({full_value(value)})" if isinstance(value, dict | list | tuple) else str(value)
