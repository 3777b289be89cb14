"""Commands about jobs in the queue: hold, release, requeue."""

from __future__ import annotations

from typing import Any

import click

from clusterd.cli.common.completers import complete_job
from clusterd.cli.common.output import note, raise_all
from clusterd.client import Client
from clusterd.errors import ClusterError

_JOBS = click.argument("jobs", nargs=-1, required=True, shell_complete=complete_job)


@click.command()
@_JOBS
def hold(jobs: tuple[str, ...]) -> None:
    """Keep queued JOBS from starting until they are released; jobs behind them go first."""
    _each("hold", jobs, "is held")


@click.command()
@_JOBS
def release(jobs: tuple[str, ...]) -> None:
    """Let held JOBS start."""
    _each("release", jobs, "is queued")


@click.command()
@_JOBS
@click.option("--hold", "held", is_flag=True, help="They stay queued until they are released.")
def requeue(jobs: tuple[str, ...], held: bool) -> None:
    """Stop running JOBS and queue them again.

    Elastic and checkpointable jobs go on from their saved state; a command starts over.
    """
    _each("requeue", jobs, "is being stopped, and queued again", hold=held)


def _each(verb: str, jobs: tuple[str, ...], done: str, **others: Any) -> None:
    """Call the daemon for each job; the others happen even if one is refused."""
    failures: list[ClusterError] = []
    with Client() as cluster:
        for job in jobs:
            try:
                row = cluster.call(verb, job=job, **others)
                note(f"{row['id']} ({row['name']}) {done}")
            except ClusterError as error:
                failures.append(error)
    raise_all(failures)
