"""Data to standard output, as a table or JSON, and texts about expected times; everything else to standard error."""

from __future__ import annotations

import errno
import functools
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO, TypeVar

import click

from clusterd.errors import ClusterError
from clusterd.outside_text import escaped as escaped
from clusterd.units import duration, with_iso_times

HUNG_UP = 129
"""Exit code of a command whose terminal is gone, as a shell reports the end by SIGHUP."""

F = TypeVar("F", bound=Callable[..., Any])

_COLOURS = {
    "running": "green", "up": "green", "finished": "blue", "queued": "yellow", "starting": "cyan", "stopping": "cyan",
    "failed": "red", "lost": "red", "unreachable": "red", "connecting": "yellow", "cancelled": "bright_black",
}  # fmt: skip


def output_option(command: F) -> F:
    """Decorator for the option ``-o table|json|jsonl|csv``, and for ``--json`` and ``--csv``, which hands type."""

    @click.option("--json", "output", flag_value="json", hidden=True)
    @click.option("--csv", "output", flag_value="csv", hidden=True)
    @click.option(
        "-o", "--output", type=click.Choice(["table", "json", "jsonl", "csv"]), default="table", help="Output format."
    )
    @functools.wraps(command)
    def with_option(*args: Any, **kwargs: Any) -> Any:
        return command(*args, **kwargs)

    return with_option  # type: ignore[return-value]


def show_json(value: Any, form: str, row: str = "") -> None:
    """Print the value as JSON, whole and indented, or one line per element; as CSV, with a column per field.

    Args:
        row: class of `clusterd.rows` whose fields are the columns of an empty list.
    """
    import json

    value = with_iso_times(value)
    elements = value if isinstance(value, list) else [value]
    try:
        if form == "csv":
            headings = list(dict.fromkeys(name for element in elements or [_fields(row)] for name in element))
            rows = [[element.get(name) for name in headings] for element in elements]
            nested = (dict, list, tuple)
            show_csv(headings, [[json.dumps(c) if isinstance(c, nested) else c for c in row] for row in rows])
        elif form == "jsonl":
            for element in elements:
                print(json.dumps(element, default=_plain))
        else:
            print(json.dumps(value, indent=2, default=_plain))
        sys.stdout.flush()
    except OSError as error:
        if not is_unread(sys.stdout, error):
            raise
        drop_output(sys.stdout)  # the command still returns its exit code


def _fields(row: str) -> dict[str, None]:
    from clusterd import rows  # rarely needed: the command line starts faster without

    return dict(with_iso_times(dict.fromkeys(getattr(rows, row).__struct_fields__)) if row else {})


def shown_as(output: str, value: Any, row: str = "") -> bool:
    """Print the value as `show_json` where ``-o`` asks for it; false for a table, which its command prints."""
    if output != "table":
        show_json(value, output, row)
    return output != "table"


def _plain(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


LAST_WIDTH = 25
"""Width that the last column, which has sentences, is to have at least."""


def show_table(headings: Sequence[str], rows: Sequence[Sequence[Any]], empty: str, spare: Sequence[str] = ()) -> None:
    """Print aligned columns, the last truncated to the terminal's width.

    Not rich: importing it takes longer than most commands.

    Args:
        spare: headings of columns that a narrow terminal leaves out, one after another; empty ones go first.
    """
    if not rows:
        print(empty, file=sys.stderr)
        return
    headings, *texts = [["" if cell is None else escaped(str(cell)) for cell in row] for row in (headings, *rows)]
    widths = [max(len(heading), *(len(row[i]) for row in texts)) for i, heading in enumerate(headings)]
    kept = list(range(len(headings)))
    last_width = _terminal_width() - sum(widths[:-1]) - 2 * (len(widths) - 1)
    for column in sorted(map(headings.index, spare), key=lambda i: any(row[i] for row in texts)):
        if last_width < LAST_WIDTH:
            kept.remove(column)
            last_width += widths[column] + 2
    colour = use_colour()
    for number, row in enumerate([[h.upper() for h in headings], *texts]):
        cells = [row[i].ljust(widths[i]) for i in kept]
        last = row[-1]
        cells[-1] = last if len(last) <= last_width or last_width < 10 else last[: last_width - 1] + "…"
        if colour:
            cells = [_coloured(cell) if number else click.style(cell, bold=True) for cell in cells]
        print("  ".join(cells).rstrip())


def show_csv(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print comma-separated values; no text in them controls a terminal, or is a formula to a spreadsheet."""
    import csv

    written = csv.writer(sys.stdout, lineterminator="\n")
    written.writerows([_csv_cell(cell) for cell in row] for row in (headings, *rows))


def _csv_cell(cell: Any) -> Any:
    if not isinstance(cell, str):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{escaped(cell)}" if cell.startswith(("=", "+", "-", "@", "\t", "\r")) else escaped(cell)
    return cell


def use_colour() -> bool:
    """Standard output is a terminal with colours, and ``NO_COLOR`` is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _coloured(cell: str) -> str:
    colour = _COLOURS.get(cell.strip())
    return click.style(cell, fg=colour) if colour else cell


def _terminal_width() -> int:
    if not sys.stdout.isatty():
        return 1 << 20
    import shutil

    return shutil.get_terminal_size().columns


def ago(at_s: float | None) -> str:
    """Time since an instant, as in ``3m12s``."""
    return duration(max(time.time() - at_s, 0.0)) if at_s else ""


def raise_all(failures: Sequence[ClusterError]) -> None:
    """Raise one error for several refusals: every message, and the first one's type and exit code."""
    if failures:
        raise type(failures[0])("\n".join(str(failure) for failure in failures))


def for_each(names: Iterable[str], act: Callable[[str], object]) -> None:
    """Act on each; it happens to the others even if one is refused.

    Raises:
        ClusterError: what was refused.
    """
    failures: list[ClusterError] = []
    for name in names:
        try:
            act(name)
        except ClusterError as error:
            failures.append(error)
    raise_all(failures)


def note(text: str) -> None:
    """Print a notice to standard error; ignored if it is closed."""
    try:
        print("\n".join(map(escaped, text.split("\n"))), file=sys.stderr)
    except OSError as error:
        if not is_unread(sys.stderr, error):
            raise
        drop_output(sys.stderr)


def print_line(line: str) -> None:
    """Print one line of output, escaped."""
    print(escaped(line))


def state_and_reason(row: Mapping[str, Any]) -> str:
    """``failed: exit code 3``, and ``finished`` where the reason says no more than that."""
    reason, state = str(row["reason"]), str(row["state"])
    return reason if reason.startswith(state) else f"{state}: {reason}" if reason else state


def drop_output(stream: TextIO) -> None:
    """Redirect a closed stream to /dev/null, so that the interpreter does not fail on it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def is_unread(stream: TextIO, error: OSError) -> bool:
    """True if a write failed since nobody reads the stream: its pipe was closed, or its terminal hung up."""
    return isinstance(error, BrokenPipeError) or (error.errno == errno.EIO and _is_terminal(stream.fileno()))


def was_closed(stream: TextIO, error: OSError) -> bool:
    """True if a write failed since the caller closed the stream, as with ``>&-``: see `clusterd.cli.main.main`."""
    import fcntl

    return error.errno == errno.EBADF and fcntl.fcntl(stream.fileno(), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY


def exit_when_closed(descriptor: int) -> None:
    """End the process as soon as the other end of a pipe or terminal is gone; for commands that only show something.

    The kernel reports it to readers and writers alone, and a command that waits for the daemon is neither. A terminal
    sends SIGHUP only to the session that it controls, and nohup has that ignored.
    """
    import select
    import threading

    def watch() -> None:
        end = select.poll()
        end.register(descriptor, 0)  # an error or a hang-up is reported unasked
        end.poll()
        os._exit(HUNG_UP if _is_terminal(descriptor) else 0)

    threading.Thread(target=watch, name="hang-up", daemon=True).start()


def _is_terminal(descriptor: int) -> bool:
    return stat.S_ISCHR(os.fstat(descriptor).st_mode)  # `isatty` asks the terminal, which may be gone


def held_for(claim: dict[str, Any]) -> str:
    """Word for what keeps the devices of a claim from others: ``claimed``, ``booked by ann``."""
    return f"booked by {claim['owner']}" if claim.get("owner") else "claimed"  # absent from an older daemon's reply


PLAYING = "playing the queue forward, with it and without it"


def clock(at_s: float, soon: bool = False) -> str:
    """Time of day, with the date where it is not today's, and with seconds for what comes soon."""
    at = time.localtime(at_s)
    return time.strftime(("%H:%M" if at[:3] == time.localtime()[:3] else "%m-%d %H:%M") + ":%S" * soon, at)


def expected_cell(forecast: dict[str, Any] | None, what: str) -> str:
    """Text of a start or an end: ``16:40 (16:10-18:30)``."""
    return quantiles_cell(forecast[what] if forecast else None)


def quantiles_cell(times: dict[str, Any] | None) -> str:
    """Text of a point in time and its 90% interval."""
    if times is None:
        return "not known"
    low, middle, high = (times[name] for name in ("p5_s", "p50_s", "p95_s"))
    soon = middle < time.time() + 600.0  # to the second
    around = f"{clock(low, soon) if low is not None else ''}-{clock(high, soon) if high is not None else ''}"
    return f"{clock(middle, soon)} ({around})"


def print_effect(effect: dict[str, Any]) -> None:
    """Print when devices would be free, and which jobs would end later, or earlier."""
    print_line(f"free: {quantiles_cell(effect['free'])} (90% interval, {effect['rollouts']} pairs of roll-outs)")
    rows = [
        [row["job"], row["name"], row["user"], _later(row["p50_s"]), _later(row["p95_s"])] for row in effect["delays"]
    ]
    show_table(["id", "name", "user", "ends", "95% at most"], rows, "no job would end a minute later or earlier")


def _later(delay_s: float | None) -> str:
    if delay_s is None:
        return "not known"
    return f"{duration(abs(delay_s))} {'earlier' if delay_s < 0 else 'later'}" if delay_s else "as before"
