"""Staying with a job until it is over: its output, its end. A daemon that is restarted meanwhile is waited for."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from clusterd.cli.output import note
from clusterd.client import Client
from clusterd.errors import DaemonAbsent
from clusterd.units import duration

RESTART_S = 60.0
"""For a daemon that is stopped and started, as for an upgrade."""

BLINK_S = 2.0
"""A host that does not answer for less, as when the daemon was restarted, is not remarked upon."""

T = TypeVar("T")


def show_logs(row: dict[str, Any], rank: int | None, follow: bool, attempt: int | None = None) -> None:
    """Print a job's log as it comes; with several ranks, lines are kept whole and numbered.

    Raises:
        ClusterError: there is none; DaemonAbsent: it went away and does not come back.
    """
    name = f"{row['name']} ({row['id']})"
    out = sys.stdout.buffer
    begun: dict[tuple[int, int], bytes] = {}
    after: dict[str, Any] = {}  # up to where it is printed

    def show(cluster: Client) -> None:
        more = {"after": after} if after else {}
        for piece in cluster.stream("logs", job=row["id"], rank=rank, follow=follow, attempt=attempt, **more):
            if says := piece.get("says"):
                note(f"{name}: {says}")
                continue
            if rank is not None:
                out.write(piece["data"])
            else:
                key = (piece["attempt"], piece["rank"])
                *lines, begun[key] = (begun.get(key, b"") + piece["data"]).split(b"\n")
                out.writelines(b"%d: %s\n" % (piece["rank"], line) for line in lines)
            out.flush()
            at = {"attempt": piece["attempt"], "generation": piece.get("generation", 1)}
            if not at.items() <= after.items():
                after.update(at, offsets={})
            after["offsets"][str(piece["rank"])] = piece["offset"]

    _over_restarts(show, f"the daemon went away; {name} runs on. Waiting for both, up to {duration(RESTART_S)}")
    out.writelines(b"%d: %s\n" % (key[1], rest) for key, rest in begun.items() if rest)
    out.flush()


def until_over(job: str) -> dict[str, Any]:
    """The final row; raises as `wait_for`."""
    row = wait_for(job, None)
    assert row is not None
    return row


def wait_for(job: str, timeout_s: float | None) -> dict[str, Any] | None:
    """The final row; None when the time is over.

    Raises:
        DaemonAbsent: it went away and does not come back.
    """
    deadline_s = time.monotonic() + timeout_s if timeout_s is not None else None
    return _over_restarts(lambda cluster: _last_row(cluster, job, deadline_s), deadline_s=deadline_s)


def exit_code(row: dict[str, Any]) -> int:
    """What `run` and `wait` return for a job that is over."""
    code = row["exit_code"]
    if code is not None:
        return int(code)
    return {"finished": 0, "cancelled": 130}.get(row["state"], 1)


def first_failure(rows: Iterable[dict[str, Any]]) -> int:
    """The exit code of the first that failed, of jobs that are over; all are looked at."""
    codes = [exit_code(row) for row in rows]
    return next((code for code in codes if code), 0)


def _over_restarts(ask: Callable[[Client], T], saying: str = "", deadline_s: float | None = None) -> T:
    """What `ask` gives; it is called again when the daemon that went away is back."""
    back_by_s: float | None = None
    while True:
        try:
            with Client() as cluster:
                back_by_s = None
                return ask(cluster)
        except DaemonAbsent:
            if back_by_s is None:
                back_by_s = time.monotonic() + RESTART_S
                if saying:
                    note(saying)
            if time.monotonic() > min(back_by_s, deadline_s or back_by_s):
                raise
            time.sleep(0.2)


def _last_row(cluster: Client, job: str, deadline_s: float | None) -> dict[str, Any] | None:
    row: dict[str, Any] = {}
    away: list[str] = []
    for row in cluster.stream("wait", job=job):
        if _is_over(row):
            return row
        now = row.get("away", [])  # of which an older daemon says nothing
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
