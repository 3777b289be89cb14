"""``clusterd history``: what happened, and what was decided because of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click

from clusterd.cli.completing import complete_host, complete_job
from clusterd.cli.jobs import time_s
from clusterd.cli.output import note, output_option, show_json, shown, tell, words
from clusterd.client import Client

ROWS_MOST = 5000
"""Of events and of decisions, that a daemon tells at a time."""

_ROUTINE = ("AttemptProgressed", "TimerFired", "SetTimer")
"""Said of everything that runs, again and again."""

_ABOUT = ("kind", "at_s", "id", "cause", "job", "host", "reason", "attempt", "generation", "agent")


@click.command()
@click.option("--since", default="1h", show_default=True, metavar="TIME", help="As in 90s, 12h or 7d.")
@click.option("--job", shell_complete=complete_job, help="What is about this job alone.")
@click.option("--host", shell_complete=complete_host, help="What is about this host alone.")
@output_option
def history(since: str, job: str | None, host: str | None, output: str) -> None:
    """What happened to jobs and hosts, and what was decided because of it; the oldest first."""
    begin_s = time.time() - time_s("--since", since)
    with Client() as cluster:
        wanted = cluster.call("job", job=job)["id"] if job is not None else None
        if host is not None:
            host = cluster.call("host", host=host)["name"]
        told = cluster.call("history", limit=ROWS_MOST)
        names = {row["id"]: row["name"] for row in cluster.call("jobs", all=True)}
    rows = [row for row in (*told["events"], *told["decisions"]) if row["kind"] not in _ROUTINE]
    rows = [row for row in rows if row["at_s"] >= begin_s]
    rows = [row for row in rows if wanted is None or row.get("job") == wanted]
    rows = sorted((row for row in rows if host is None or row.get("host") == host), key=_order)
    if output != "table":
        show_json(rows, output)
        return
    oldest_s = max((kept[0]["at_s"] for kept in told.values() if len(kept) >= ROWS_MOST), default=0.0)
    if oldest_s > begin_s:
        note(f"before {_when(oldest_s)} there is more than is told at a time")
    for row in rows:
        about = " on ".join(filter(None, (_job(row, names), row.get("host") or "")))
        tell(f"{_when(row['at_s'])}  {words(row['kind']):<20} {about:<28} {_said(row)}".rstrip())
    if not rows:
        note(f"nothing in the last {since}")


def _order(row: Mapping[str, Any]) -> tuple[float, bool]:
    """Decisions come after what they were made for."""
    return row["at_s"], "cause" in row


def _when(at_s: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(at_s))


def _job(row: Mapping[str, Any], names: Mapping[str, str]) -> str:
    job = row.get("job")
    return f"{names.get(job, '?')} ({job})" if job else ""


def _said(row: Mapping[str, Any]) -> str:
    """Its reason; of an event, the plain ones of its fields."""
    if "reason" in row:
        return str(row["reason"])
    if isinstance(spec := row.get("spec"), Mapping):
        return shown(" ".join(map(str, spec.get("command", ()))))
    fields = {k: v for k, v in row.items() if k not in _ABOUT and isinstance(v, (str, int, float)) and v != ""}
    said = [f"{name} {value}" for name, value in fields.items() if value is not False]
    end = row.get("end")
    return ", ".join([*said, *([_end(end)] if isinstance(end, Mapping) else [])])


def _end(end: Mapping[str, Any]) -> str:
    """How a rank ended."""
    if end.get("signal"):
        return f"signal {end['signal']}"
    return f"exit code {end['exit_code']}" if end.get("exit_code") is not None else str(end.get("reason", ""))
