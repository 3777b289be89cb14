"""``clusterd edit`` and ``resume``: change what a submitted job asks for, or go on from one with changes."""

from __future__ import annotations

import os
from typing import Any

import click

from clusterd.cli.common.completers import complete_job
from clusterd.cli.common.output import note, output_option, show_json
from clusterd.client import Client
from clusterd.protocol.launch import SAME_VARIABLE
from clusterd.submission.job_edit import parse_changes
from clusterd.submission.job_file import variables


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


@click.command()
@click.argument("job", shell_complete=complete_job)
@click.argument("changes", nargs=-1, metavar="[KEY=VALUE...]")
@click.option("--time", "time_limit", help="Time limit of the new job, as in 4h; default: that of JOB.")
@click.option("--steps", type=click.IntRange(1), help="Steps in all, instead of the number in the script.")
@click.option("--env", multiple=True, help="NAME=VALUE, or NAME to pass on; may be repeated.")
@click.option("--accept-difference", is_flag=True, help="Go on even if its first step has another loss than in JOB.")
@output_option
def resume(job: str, changes: tuple[str, ...], output: str, **options: Any) -> None:
    """Submit a job that goes on where JOB ended, from its newest checkpoint; prints its id.

    The script, the data and all settings are those of JOB, except for the changes, with the keys of a job file. Its
    secrets are read from this environment. Another script goes on with clusterd submit --from JOB.

    \b
    clusterd resume night --time 4h
    clusterd resume night --steps 20000 gpus=a100:4
    """
    env = variables(options["env"]) | {SAME_VARIABLE: "" if options["accept_difference"] else "1"}
    given = [*changes, *([f"time={options['time_limit']}"] if options["time_limit"] else [])]
    fields = parse_changes(given) if given else {}
    with Client() as cluster:
        names = cluster.call("job", job=job)["spec"]["secrets"]
        secrets = {name: os.environ[name] for name in names if name in os.environ}
        answer = cluster.call("resume", job=job, changes=fields, steps=options["steps"], env=env, secrets=secrets)
    if output != "table":
        show_json(answer, output)
        return
    print(answer["id"], flush=True)
    note(f"{answer['name']} is queued: clusterd why {answer['id']} shows its state")
