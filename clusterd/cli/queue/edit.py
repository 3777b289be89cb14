"""``clusterd edit``, ``resume`` and ``rerun``: change what a job asks for, go on from one, or run it again."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import click

from clusterd.cli.common.arguments import complete_job, own_jobs
from clusterd.cli.common.output import note, output_option, shown_as
from clusterd.client import Client
from clusterd.errors import ClusterError, UsageError
from clusterd.protocol.launch import SAME_VARIABLE
from clusterd.submission.job_file import parse_changes, variables
from clusterd.submission.submit import spec_of, with_workdir


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
        for one in own_jobs(cluster, [job], over=False):
            row = cluster.call("edit", job=one, changes=fields)
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
    if shown_as(output, answer):
        return
    print(answer["id"], flush=True)
    note(f"{answer['name']} is queued: clusterd why {answer['id']} shows its state")


@click.command()
@click.argument("job", shell_complete=complete_job)
@click.argument("changes", nargs=-1, metavar="[KEY=VALUE...]")
@click.option("--env", multiple=True, help="NAME=VALUE, or NAME to pass on; may be repeated.")
@click.option("--fresh", is_flag=True, help="Send the working directory as it is now, not as it was submitted.")
@click.option("--all", "every", is_flag=True, help="All tasks of an array, not only those that failed.")
@output_option
def rerun(job: str, changes: tuple[str, ...], env: tuple[str, ...], fresh: bool, every: bool, output: str) -> None:
    """Submit JOB, which is over, again, with changes by the keys of a job file; prints the new id.

    Of an array or sweep, the tasks that failed or were cancelled run again, each in its place. Secrets are read from
    this environment.

    \b
    clusterd rerun night memory=64GB
    clusterd rerun sweep --fresh
    """
    fields = parse_changes(changes) if changes else {}
    answers = []
    with Client() as cluster:
        names = [job]
        with suppress(ClusterError):  # of no array
            names = [task["id"] for task in cluster.call("tasks", array=job)]
        jobs = [cluster.call("job", job=name) for name in names]
        chosen = [row for row in jobs if every or len(jobs) == 1 or row["state"] in ("failed", "cancelled")]
        if not chosen:
            raise UsageError(f"no task of {job} failed: clusterd rerun --all {job} runs all of them again")
        for row in chosen:
            spec = row["spec"]
            sent = with_workdir(cluster, spec_of(spec), note) if fresh else None
            code = {"snapshot": sent.snapshot, "commit": sent.commit} if sent is not None else {}
            secrets = {name: os.environ[name] for name in spec["secrets"] if name in os.environ}
            more: dict[str, Any] = {"env": variables(env), "secrets": secrets, **code}
            answers.append(cluster.call("rerun", job=row["id"], changes=fields, **more))
            if output == "table":
                print(answers[-1]["id"], flush=True)
    if shown_as(output, answers if len(answers) > 1 else answers[0]):
        return
    note(f"{answers[0]['name']} is queued{f', and {len(answers) - 1} more' if len(answers) > 1 else ''}")
