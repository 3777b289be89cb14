"""``clusterd migrate``, ``unpin`` and ``checkpoint``: what is done by hand to a job that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from clusterd.cli.completing import complete_job
from clusterd.cli.jobs import compact_devices
from clusterd.cli.output import note, output_option, show_json, tell
from clusterd.client import Client
from clusterd.errors import ClusterError
from clusterd.units import duration, size


@click.command()
@click.argument("job", shell_complete=complete_job)
@click.option("--plan", help="As in dp=2,tp=2; default: the plan it has.")
@click.option("--devices", help="HOST:DEV,... rank by rank; default: clusterd chooses.")
@click.option("--pin", is_flag=True, help="And keep it so until unpinned, or until it cannot be.")
@click.option("--dry-run", is_flag=True, help="Say what would move and how long it would stand still.")
@output_option
def migrate(job: str, plan: str | None, devices: str | None, pin: bool, dry_run: bool, output: str) -> int:
    """Move a running elastic job to another plan or other devices, in memory; start a checkpointable one again.

    Where old and new ranks do not fit on a device side by side, the job stops, leaves its state in host memory, and
    starts again from there: no step is lost, but it stands still for seconds. A checkpointable job saves, stops, and
    starts under the plan, to which it is pinned.
    """
    chosen = [device.strip() for device in devices.split(",")] if devices else []
    with Client() as cluster:
        answer = cluster.call("migrate", job=job, plan=plan, devices=chosen, pin=pin, dry_run=dry_run)
        if answer.get("restarts"):
            show_json(answer, output) if output != "table" else None
            will = "would save, stop, and start" if dry_run else "saves, stops, and starts"
            note(f"{answer['name']} {will} as {answer['plan']} (now {answer['from']}): clusterd why {answer['job']}")
            if not dry_run:
                note(f"it is kept so until clusterd unpin {answer['job']}")
            return 0
        if dry_run:
            if output == "table":
                print(f"{answer['name']}: {answer['from']} -> {answer['plan']} on {compact_devices(answer['devices'])}")
                if answer["crowded"]:
                    tell(f"  it stops and starts again: {answer['crowded']}")
                print(f"  {_bytes(answer)}; predicted downtime {duration(answer['predicted_downtime_s'])}")
            else:
                show_json(answer, output)
            return 0
        if answer.get("stays"):
            note(
                f"{answer['name']} is pinned to {answer['plan']} where it is: clusterd unpin {answer['job']} undoes it"
            )
            return 0
        done = _watch(cluster, answer)
    if output != "table":
        show_json({**answer, "migration": done}, output)
        return 1 if done["failure"] else 0
    for phase in done["phases"]:
        tell(f"  {phase['phase']:<9} {duration(phase['seconds']):>6}  {phase['what']}".rstrip())
    if done["failure"]:
        raise ClusterError(f"the move failed, {done['from']} goes on: {done['failure']}")
    print(f"{answer['name']}: {done['from']} -> {done['to']} on {compact_devices(done['devices'])}, {_bytes(done)}")
    print(
        f"  downtime {duration(done['downtime_s'])}, predicted {duration(answer['predicted_downtime_s'])}; "
        f"went on after step {done['step']}"
    )
    return 0


def _watch(cluster: Client, answer: dict[str, Any]) -> dict[str, Any]:
    """Until the move is over."""
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
    """Let the scheduler choose a job's plan and place again."""
    with Client() as cluster:
        row = cluster.call("unpin", job=job)
    note(f"{row['id']} ({row['name']}) is the scheduler's again")


@click.command()
@click.argument("job", shell_complete=complete_job)
@click.argument("directory")
def checkpoint(job: str, directory: str) -> None:
    """Write a job's state to DIRECTORY, which all its hosts must share; it trains on meanwhile.

    DIRECTORY is made, or holds an earlier checkpoint, which is replaced.

    The format is torch's distributed checkpoint; a checkpointable job's script writes what it likes, and may do so at a
    place of its own. A job that is lost goes on from its newest one.
    """
    with Client() as cluster:
        said = cluster.call("checkpoint", job=job, path=directory)
    elsewhere = "" if Path(said["path"]).is_relative_to(directory) else ", where its script saves"
    took = f" (stood still for {duration(said['blocked_s'])}, written in {duration(said['write_s'])})"
    # A script of its own does not say.
    note(f"{said['name']}: step {said['step']} is in {said['path']}{elsewhere}{took if said['write_s'] else ''}")
