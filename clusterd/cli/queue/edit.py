"""``clusterd edit``: change what a submitted job asks for."""

from __future__ import annotations

import click

from clusterd.cli.common.completers import complete_job
from clusterd.cli.common.output import note
from clusterd.client import Client
from clusterd.submission.job_edit import parse_changes


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("job", shell_complete=complete_job)
@click.argument("changes", nargs=-1, required=True, metavar="KEY=VALUE...")
def edit(job: str, changes: tuple[str, ...]) -> None:
    """Change what JOB asks for, with the keys of a job file.

    A queued job takes every key, a running one: priority, time, stall, grace, retries, retry_on, min_devices and
    max_devices. The value "none" takes a limit away. All changes happen, or none.

    \b
    clusterd edit night time=12h priority=5
    clusterd edit wide gpus=a100:4 after=prepare,study:any
    """
    fields = parse_changes(changes)
    with Client() as cluster:
        row = cluster.call("edit", job=job, changes=fields)
    note(f"{row['id']} ({row['name']}): {row['edited'] or 'nothing changes'}")
