"""Follow a job until it ends: its output and exit code, across restarts of the daemon."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from clusterd.cli.common.output import note
from clusterd.client import Client
from clusterd.errors import DaemonAbsent
from clusterd.units import duration

RESTART_S = 60.0
"""Time allowed for a restart of the daemon, as for an upgrade."""

BLINK_S = 2.0
"""Shorter outages of a host, as during a restart of the daemon, are not reported."""

T = TypeVar("T")


def show_logs(row: dict[str, Any], rank: int | None, follow: bool, attempt: int | None = None) -> None:
    """Print a job's log as it arrives; with several ranks, whole lines prefixed with the rank.

    Raises:
        ClusterError: there is no log.
        DaemonAbsent: the daemon went away and did not come back.
    """
    name = f"{row['name']} ({row['id']})"
    out = sys.stdout.buffer
    begun: dict[tuple[int, int], bytes] = {}
    after: dict[str, Any] = {}  # position up to which the log is printed

    def show(cluster: Client) -> None:
        more = {"after": after} if after else {}
        for chunk in cluster.stream("logs", job=row["id"], rank=rank, follow=follow, attempt=attempt, **more):
            if notice := chunk.get("says"):
                note(f"{name}: {notice}")
                continue
            if rank is not None:
                out.write(chunk["data"])
            else:
                key = (chunk["attempt"], chunk["rank"])
                *lines, begun[key] = (begun.get(key, b"") + chunk["data"]).split(b"\n")
                out.writelines(b"%d: %s\n" % (chunk["rank"], line) for line in lines)
            out.flush()
            at = {"attempt": chunk["attempt"], "generation": chunk.get("generation", 1)}
            if not at.items() <= after.items():
                after.update(at, offsets={})
            after["offsets"][str(chunk["rank"])] = chunk["offset"]

    _over_restarts(
        show, f"the daemon went away; {name} keeps running; waiting up to {duration(RESTART_S)} for a restart"
    )
    out.writelines(b"%d: %s\n" % (key[1], rest) for key, rest in begun.items() if rest)
    out.flush()


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
    return _over_restarts(lambda cluster: _last_row(cluster, job, deadline_s), deadline_s=deadline_s)


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


def _over_restarts(ask: Callable[[Client], T], message: str = "", deadline_s: float | None = None) -> T:
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
