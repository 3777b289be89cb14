"""``clusterd history`` and ``clusterd journal``: past events and decisions, and the file that holds them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from clusterd import config as configuration
from clusterd.cli.common.arguments import complete_host, complete_job, since_s
from clusterd.cli.common.output import note, output_option, print_line, shown_as
from clusterd.client import Client
from clusterd.errors import ClusterError
from clusterd.units import local_time

SUBJECT_CELLS = 32
"""Width of the column of jobs and hosts; longer names shift their line."""

ROWS_MAX = 5000
"""Limit of events, and of decisions, per reply of the daemon."""


@click.command()
@click.option("--since", default="1h", show_default=True, metavar="TIME", help="As in 90s, 7d or yesterday.")
@click.option("--job", shell_complete=complete_job, help="Only this job.")
@click.option("--host", shell_complete=complete_host, help="Only this host.")
@click.option("--verbose", "-v", is_flag=True, help="Also progress, timers, ends of ranks and steps of moves.")
@output_option
def history(since: str, job: str | None, host: str | None, verbose: bool, output: str) -> None:
    """Print what happened to jobs and hosts and what the scheduler decided, oldest first."""
    begin_s = since_s("--since", since)
    with Client() as cluster:
        wanted = cluster.call("job", job=job)["id"] if job is not None else None
        if host is not None:
            host = cluster.call("host", host=host)["name"]
        answer = cluster.call("history", limit=ROWS_MAX)
        names = {row["id"]: row["name"] for row in cluster.all_jobs()}
    rows = [row for row in (*answer["events"], *answer["decisions"]) if row["at_s"] >= begin_s]
    rows = [row for row in rows if verbose or not row["routine"]]
    rows = [row for row in rows if wanted is None or row.get("job") == wanted]
    rows = sorted((row for row in rows if host is None or row.get("host") == host), key=_order)
    if shown_as(output, rows, "Decision"):
        return
    oldest_s = max((page[0]["at_s"] for page in answer.values() if len(page) >= ROWS_MAX), default=0.0)
    if oldest_s > begin_s:
        note(f"there are more rows before {_when(oldest_s)} than the daemon sends at once")
    rows = rows if verbose else _without_begun(rows)
    subjects = [" on ".join(filter(None, (_job(row, names), row.get("host") or ""))) for row in rows]
    cells = min(max(map(len, subjects), default=0), SUBJECT_CELLS)
    for row, about in zip(rows, subjects, strict=True):
        print_line(f"{_when(row['at_s'])}  {about:<{cells}}  {row['text']}")
    if not rows:
        note(f"nothing since {local_time(begin_s)}")


def _without_begun(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without the beginnings of moves of which the end is there: it says what both say."""
    left: list[dict[str, Any]] = []
    ended: set[str] = set()
    for row in reversed(rows):
        if row["kind"] in ("MigrationFinished", "MigrationFailed"):
            ended.add(row["job"])
        elif row["kind"] == "StartMigration" and row["job"] in ended:
            ended.discard(row["job"])
            continue
        left.append(row)
    return left[::-1]


def _order(row: Mapping[str, Any]) -> tuple[float, bool]:
    """Sort key: decisions after the event that caused them."""
    return row["at_s"], "cause" in row


def _when(at_s: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(at_s))


def _job(row: Mapping[str, Any], names: Mapping[str, str]) -> str:
    job = row.get("job")
    return f"{names.get(job, '?')} ({job})" if job else ""


@click.group()
def journal() -> None:
    """Check the daemon's journal."""


@journal.command()
@click.argument("place", required=False, metavar="[FILE_OR_STATE_DIR]", type=click.Path(path_type=Path))
@click.option("--system", is_flag=True, help="The journal of the system's daemon, not the user's.")
def check(place: Path | None, system: bool) -> None:
    """Check every event of a journal; needs no daemon, and may run beside one."""
    from clusterd.daemon.journal.check import check_file
    from clusterd.replay import journal_file

    file = journal_file(place or configuration.load(None, system=system).state_dir)
    sound, damages = check_file(file)
    if damages:
        raise ClusterError(
            "\n".join([f"{file} is damaged; {sound} events before the damage are sound", *damages])
            + "\nrestore a backup of it and start with `clusterd start --restored`"
        )
    note(f"{file}: {sound} events: sound")
