"""``clusterd migrate``, ``unpin`` and ``checkpoint``: manual control of training jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from clusterd.cli.common.completers import complete_job
from clusterd.cli.common.output import compact_devices, note, output_option, print_line, show_json
from clusterd.client import Client
from clusterd.errors import ClusterError
from clusterd.units import duration, size


@click.command()
@click.argument("job", shell_complete=complete_job)
@click.option("--plan", help="As in dp=2,tp=2; default: the current plan.")
@click.option("--devices", help="HOST:DEV,... in rank order; default: clusterd chooses.")
@click.option("--pin", is_flag=True, help="Keep plan and devices until unpinned, or until they become unavailable.")
@click.option("--dry-run", is_flag=True, help="Print the bytes to move and the predicted downtime; move nothing.")
@output_option
def migrate(job: str, plan: str | None, devices: str | None, pin: bool, dry_run: bool, output: str) -> int:
    """Move a running elastic job to another plan or other devices, in memory; restart a checkpointable one.

    If source and target ranks do not fit on a device side by side, the job stops, keeps its state in host memory, and
    restarts from it: no step is lost, but the downtime is seconds. A checkpointable job saves a checkpoint, stops, and
    restarts under the plan, to which it is then pinned.
    """
    chosen = [device.strip() for device in devices.split(",")] if devices else []
    with Client() as cluster:
        answer = cluster.call("migrate", job=job, plan=plan, devices=chosen, pin=pin, dry_run=dry_run)
        if answer.get("restarts"):
            show_json(answer, output) if output != "table" else None
            will = "would save and restart" if dry_run else "saves and restarts"
            note(f"{answer['name']} {will} as {answer['plan']} (now {answer['from']}): clusterd why {answer['job']}")
            if not dry_run:
                note(f"it stays pinned until clusterd unpin {answer['job']}")
            return 0
        if dry_run:
            if output == "table":
                moved = f"{answer['from']} -> {answer['plan']} on {compact_devices(answer['devices'])}"
                print_line(f"{answer['name']}: {moved}")
                if answer["crowded"]:
                    print_line(f"  it stops and restarts: {answer['crowded']}")
                print_line(f"  {_bytes(answer)}; predicted downtime {duration(answer['predicted_downtime_s'])}")
            else:
                show_json(answer, output)
            return 0
        if answer.get("stays"):
            note(
                f"{answer['name']} is pinned to {answer['plan']} on its devices: clusterd unpin {answer['job']} reverts"
            )
            return 0
        done = _watch(cluster, answer)
    if output != "table":
        show_json({**answer, "migration": done}, output)
        return 1 if done["failure"] else 0
    for phase in done["phases"]:
        print_line(f"  {phase['phase']:<9} {duration(phase['seconds']):>6}  {phase['what']}".rstrip())
    if done["failure"]:
        raise ClusterError(f"the move failed, {done['from']} continues: {done['failure']}")
    moved = f"{done['from']} -> {done['to']} on {compact_devices(done['devices'])}, {_bytes(done)}"
    print_line(f"{answer['name']}: {moved}")
    print_line(
        f"  downtime {duration(done['downtime_s'])}, predicted {duration(answer['predicted_downtime_s'])}; "
        f"resumed after step {done['step']}"
    )
    if not pin:
        note("it may be moved again where that pays: --pin keeps plan and devices")
    return 0


def _watch(cluster: Client, answer: dict[str, Any]) -> dict[str, Any]:
    """Wait until the migration ends."""
    for row in cluster.stream("wait", job=answer["job"]):
        new = row["migrations"][answer["migrations"] :]
        if new and new[0]["to"] != answer["plan"]:
            instead = f"to {new[0]['to']} instead: clusterd why {answer['job']}"
            raise ClusterError(f"{answer['name']} is being moved {instead}")
        if new and new[0]["ended_s"]:
            return dict(new[0])
        if row["state"] in ("finished", "failed", "cancelled"):
            break
    raise ClusterError(f"{answer['name']} ended before it was moved: clusterd why {answer['job']}")


def _bytes(row: dict[str, Any]) -> str:
    if row.get("crowded") or row.get("restarts"):
        return f"{size(row['local_bytes'])} through host memory"
    return f"{size(row['local_bytes'])} within hosts, {size(row['network_bytes'])} over the network"


@click.command()
@click.argument("job", shell_complete=complete_job)
def unpin(job: str) -> None:
    """Let the scheduler choose a job's plan and devices again."""
    with Client() as cluster:
        row = cluster.call("unpin", job=job)
    note(f"{row['id']} ({row['name']}) is unpinned")


@click.command()
@click.argument("job", shell_complete=complete_job)
@click.argument("directory")
def checkpoint(job: str, directory: str) -> None:
    """Write a job's state to DIRECTORY, which all its hosts must share; training continues meanwhile.

    DIRECTORY is created, or holds an earlier checkpoint, which is replaced.

    The format is torch's distributed checkpoint; the script of a checkpointable job chooses its own format, and may
    choose its own place. A lost job resumes from its latest checkpoint.
    """
    with Client() as cluster:
        answer = cluster.call("checkpoint", job=job, path=directory)
    elsewhere = "" if Path(answer["path"]).is_relative_to(directory) else ", where its script saves"
    took = f" (training paused for {duration(answer['blocked_s'])}, written in {duration(answer['write_s'])})"
    # The script of a checkpointable job does not report times.
    times = took if answer["write_s"] else ""
    note(f"{answer['name']}: step {answer['step']} is in {answer['path']}{elsewhere}{times}")
