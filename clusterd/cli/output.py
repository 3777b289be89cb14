"""Data to standard output, as a table for people or as JSON for programs; everything else to standard error."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO, TypeVar

import click

from clusterd.errors import ClusterError
from clusterd.units import duration

F = TypeVar("F", bound=Callable[..., Any])

_COLOURS = {
    "running": "green", "up": "green", "finished": "blue", "queued": "yellow", "starting": "cyan", "stopping": "cyan",
    "failed": "red", "lost": "red", "unreachable": "red", "connecting": "yellow", "cancelled": "bright_black",
}  # fmt: skip


def output_option(command: F) -> F:
    """``-o table|json|jsonl``."""

    @click.option(
        "-o", "--output", type=click.Choice(["table", "json", "jsonl"]), default="table", help="How to print."
    )
    @functools.wraps(command)
    def with_option(*args: Any, **kwargs: Any) -> Any:
        return command(*args, **kwargs)

    return with_option  # type: ignore[return-value]


def show_json(value: Any, form: str) -> None:
    """The value as JSON: whole and indented, or one line per element."""
    import json

    try:
        if form == "jsonl":
            for element in value if isinstance(value, list) else [value]:
                print(json.dumps(element, default=_plain))
        else:
            print(json.dumps(value, indent=2, default=_plain))
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output(sys.stdout)  # the command goes on to its exit code


def _plain(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def show_table(headings: Sequence[str], rows: Sequence[Sequence[Any]], empty: str) -> None:
    """Aligned columns, the last cut to the terminal's width. Own code: importing rich takes longer than the command."""
    if not rows:
        print(empty, file=sys.stderr)
        return
    texts = [["" if cell is None else shown(str(cell)) for cell in row] for row in rows]
    widths = [max(len(heading), *(len(row[i]) for row in texts)) for i, heading in enumerate(headings)]
    room = _terminal_width() - sum(widths[:-1]) - 2 * (len(widths) - 1)
    colour = use_colour()
    for number, row in enumerate([[h.upper() for h in headings], *texts]):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        last = row[-1]
        cells[-1] = last if room is None or len(last) <= room or room < 10 else last[: room - 1] + "…"
        if colour:
            cells = [_coloured(cell) if number else click.style(cell, bold=True) for cell in cells]
        print("  ".join(cells).rstrip())


def use_colour(stream: Any = None) -> bool:
    """A terminal that shows colours, and nobody who minds (``NO_COLOR``)."""
    stream = stream or sys.stdout
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _coloured(cell: str) -> str:
    colour = _COLOURS.get(cell.strip())
    return click.style(cell, fg=colour) if colour else cell


def _terminal_width() -> int:
    if not sys.stdout.isatty():
        return 1 << 20
    import shutil

    return shutil.get_terminal_size().columns


def ago(at_s: float | None) -> str:
    """``3m12s``: since then."""
    return duration(max(time.time() - at_s, 0.0)) if at_s else ""


def raise_all(failures: Sequence[ClusterError]) -> None:
    """What was refused of several, after the others were served: every line, and the first one's exit code."""
    if failures:
        raise type(failures[0])("\n".join(str(failure) for failure in failures))


def note(text: str) -> None:
    """A word to the person, not to the program that reads the output; nothing where that person is gone."""
    try:
        print("\n".join(map(shown, text.split("\n"))), file=sys.stderr)
    except BrokenPipeError:
        drop_output(sys.stderr)


def tell(line: str) -> None:
    """A line of what was asked for."""
    print(shown(line))


def shown(text: str) -> str:
    """With escapes in place of what a terminal would obey: what one user wrote, others look at."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def drop_output(stream: TextIO) -> None:
    """What is still buffered goes nowhere: the interpreter tries it once more at its end, and says what came of it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def words(kind: str) -> str:
    """``launch attempt`` of ``LaunchAttempt``."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in kind).strip()
