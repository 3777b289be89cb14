"""``clusterd forget``: disk space back from jobs that are over."""

from __future__ import annotations

import time
from typing import Any

import click

from clusterd.cli.completing import complete_job
from clusterd.cli.jobs import time_s
from clusterd.cli.naming import own_jobs
from clusterd.cli.output import note, raise_all, tell
from clusterd.client import Client
from clusterd.errors import ClusterError, UsageError
from clusterd.units import size


@click.command()
@click.argument("jobs", nargs=-1, shell_complete=complete_job)
@click.option("--older", metavar="TIME", help="All of yours that ended longer ago than this, as in 30d.")
@click.option("--dry-run", is_flag=True, help="Name them, and do nothing.")
def forget(jobs: tuple[str, ...], older: str | None, dry_run: bool) -> None:
    """Remove logs, steps and working directories of jobs that are over, here and on their hosts.

    What a job wrote into its working directory goes with it; checkpoints elsewhere and the job's line in `clusterd ls
    --all` stay. 'net_*' is those of yours that have such a name and are over.
    """
    if bool(jobs) == (older is not None):
        raise UsageError("name jobs, or say --older TIME")
    limit_s = time.time() - time_s("--older", older) if older is not None else None
    failures: list[ClusterError] = []
    freed, left = 0, set()
    with Client() as cluster:
        chosen = own_jobs(cluster, jobs, over=True) if limit_s is None else _ended_before(cluster, limit_s)
        for job in chosen:
            try:
                if dry_run:
                    row = cluster.call("job", job=job)
                    tell(f"{row['id']} ({row['name']}), {row['state']}")
                    continue
                answer = cluster.call("forget", job=job)
            except ClusterError as error:
                failures.append(error)
                continue
            freed += answer["bytes"]
            for host, why in answer["left"].items():
                left.add(host)
                note(f"{answer['job']} ({answer['name']}): {host} still has its part: {why}")
    count = len(chosen) - len(failures)
    if not dry_run and (count or not failures):
        again = f"; once {', '.join(sorted(left))} can be reached, say it again" if left else ""
        note(f"{count} job{'s' * (count != 1)} forgotten, {size(freed)} free{again}")
    raise_all(failures)


def _ended_before(cluster: Client, limit_s: float) -> list[str]:
    me: dict[str, Any] = cluster.call("hello")
    rows = cluster.call("jobs", all=True)
    mine = [row for row in rows if row["user"] == me["user"]]
    return [row["id"] for row in mine if row["ended_s"] is not None and row["ended_s"] < limit_s]
