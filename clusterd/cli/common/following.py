"""Follow a job until it ends: its output and exit code, across restarts of the daemon."""

from __future__ import annotations

import codecs
import math
import re
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from clusterd.cli.common.output import escaped, note
from clusterd.client import Client
from clusterd.errors import DaemonAbsent
from clusterd.units import duration

RESTART_S = 60.0
"""Time allowed for a restart of the daemon, as for an upgrade."""

BLINK_S = 2.0
"""Shorter outages of a host, as during a restart of the daemon, are not reported."""

T = TypeVar("T")


class TerminalText:
    """Log output made safe for a terminal: line ends, tabs and colours stay, other control characters are escaped.

    A sequence in the log of another user's job could rename the window, or answer for the reader at the prompt.
    """

    _CONTROL = re.compile(r"(\x1b\[[0-9;:]*m)|[^\n\r\t\x20-\x7e\xa0-\U0010ffff]")
    _UNFINISHED = re.compile(r"\x1b(\[[0-9;:]{0,40})?\Z")

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._held = ""

    def feed(self, data: bytes, final: bool = False) -> bytes:
        """Safe text for the next bytes; the start of a sequence waits for its rest unless this is `final`."""
        text, self._held = self._held + self._decoder.decode(data, final), ""
        unfinished = None if final else self._UNFINISHED.search(text)
        if unfinished is not None:
            text, self._held = text[: unfinished.start()], unfinished[0]
        return self._CONTROL.sub(lambda found: found[1] or escaped(found[0]), text).encode()


def show_logs(
    row: dict[str, Any],
    rank: int | None,
    follow: bool,
    attempt: int | None = None,
    *,
    raw: bool = True,
    last_lines: int | None = None,
    apart: bool = False,
    labelled: bool = False,
) -> None:
    """Print a job's log as it arrives; with several ranks, whole lines prefixed with the rank.

    Args:
        raw: pass control sequences on to a terminal, as for the caller's own job.
        last_lines: of what is there already, of one rank; None: all.
        apart: stderr goes to stderr, where the job was submitted so.
        labelled: the lines of all ranks have prefixes already.
    Raises:
        ClusterError: there is no log.
        DaemonAbsent: the daemon went away and did not come back.
    """
    name = f"{row['name']} ({row['id']})"
    out = sys.stdout.buffer
    safe = TerminalText() if not raw and sys.stdout.isatty() else None
    begun: dict[tuple[int, int, bool], bytes] = {}
    after: dict[str, Any] = {}  # position up to which the log is printed

    def show(cluster: Client) -> None:
        if last_lines is not None and not after:
            text, position = _last_lines(cluster, row["id"], rank or 0, attempt, last_lines)
            out.write(safe.feed(text) if safe is not None else text)
            after.update(position)
            if not follow or not position:
                return
        more: dict[str, Any] = {**({"after": after} if after else {}), **({"apart": True} if apart else {})}
        for chunk in cluster.stream("logs", job=row["id"], rank=rank, follow=follow, attempt=attempt, **more):
            if notice := chunk.get("says"):
                note(f"{name}: {notice}")
                continue
            is_error = bool(chunk.get("stderr"))
            sink = sys.stderr.buffer if is_error else out
            if rank is not None or labelled:
                sink.write(safe.feed(chunk["data"]) if safe is not None else chunk["data"])
            else:
                key = (chunk["attempt"], chunk["rank"], is_error)
                *lines, begun[key] = (begun.get(key, b"") + chunk["data"]).split(b"\n")
                lines = lines if safe is None else [TerminalText().feed(line, final=True) for line in lines]
                sink.writelines(b"%d: %s\n" % (chunk["rank"], line) for line in lines)
            sink.flush()
            at = {"attempt": chunk["attempt"], "generation": chunk.get("generation", 1)}
            if not at.items() <= after.items():
                after.update(at, offsets={})
            after["offsets"][str(chunk["rank"])] = chunk["offset"]

    over_restarts(
        show, f"the daemon went away; {name} keeps running; waiting up to {duration(RESTART_S)} for a restart"
    )
    for (_, number, is_error), rest in begun.items():
        if rest:
            sink = sys.stderr.buffer if is_error else out
            sink.write(b"%d: %s\n" % (number, rest if safe is None else TerminalText().feed(rest, final=True)))
    if safe is not None:
        out.write(safe.feed(b"", final=True))
    out.flush()


def _last_lines(cluster: Client, job: str, rank: int, attempt: int | None, count: int) -> tuple[bytes, dict[str, Any]]:
    """The last lines of a rank's log, and the position behind them; the position is empty where there is no log."""
    last_bytes = 1 << 14
    while True:
        data, read, position = b"", 0, {}
        for chunk in cluster.stream("logs", job=job, rank=rank, attempt=attempt, last_bytes=last_bytes):
            data += chunk["data"]
            read += len(chunk["data"])
            at = {"attempt": chunk["attempt"], "generation": chunk.get("generation", 1)}
            position = {**at, "offsets": {str(rank): chunk["offset"]}}
        lines = data.splitlines(keepends=True)
        if len(lines) > count or read < last_bytes:
            return b"".join(lines[len(lines) - count :] if count else []), position
        last_bytes *= 4


def until_over(job: str) -> dict[str, Any]:
    """The final row of a job; raises as `wait_for`."""
    row = wait_for(job, None)
    assert row is not None
    return row


def wait_for(job: str, timeout_s: float | None) -> dict[str, Any] | None:
    """The final row of a job; None after `timeout_s`.

    Raises:
        DaemonAbsent: the daemon went away and did not come back.
    """
    deadline_s = time.monotonic() + timeout_s if timeout_s is not None else None
    return over_restarts(lambda cluster: _last_row(cluster, job, deadline_s), deadline_s=deadline_s)


def exit_code(row: dict[str, Any]) -> int:
    """Exit code of `run` and `wait` for a finished job."""
    code = row["exit_code"]
    if code is not None:
        return int(code)
    return {"finished": 0, "cancelled": 130}.get(row["state"], 1)


def first_failure(rows: Iterable[dict[str, Any]]) -> int:
    """Exit code of the first failed job; consumes all rows."""
    codes = [exit_code(row) for row in rows]
    return next((code for code in codes if code), 0)


def over_restarts(ask: Callable[[Client], T], message: str = "", deadline_s: float | None = None) -> T:
    """Result of `ask`, which is called again after a restart of the daemon."""
    back_by_s: float | None = None
    while True:
        try:
            with Client() as cluster:
                back_by_s = None
                return ask(cluster)
        except DaemonAbsent:
            if back_by_s is None:
                back_by_s = time.monotonic() + RESTART_S
                if message:
                    note(message)
            if time.monotonic() > min(back_by_s, deadline_s or back_by_s):
                raise
            time.sleep(0.2)


def _last_row(cluster: Client, job: str, deadline_s: float | None) -> dict[str, Any] | None:
    row: dict[str, Any] = {}
    away: list[str] = []
    for row in cluster.stream("wait", job=job):
        if _is_over(row):
            return row
        now = row.get("away", [])  # absent from the reply of an older daemon
        if now != away and not cluster.ready(_left_s(deadline_s, BLINK_S)):
            away = now
            note(f"{row['name']} ({row['id']}): {row['reason'] if away else 'its hosts answer again'}")
        if deadline_s is not None and not cluster.ready(_left_s(deadline_s)):
            return None
    return row


def _left_s(deadline_s: float | None, most_s: float = math.inf) -> float:
    return most_s if deadline_s is None else min(max(deadline_s - time.monotonic(), 0.0), most_s)


def _is_over(row: dict[str, Any]) -> bool:
    return row["state"] in ("finished", "failed", "cancelled")
