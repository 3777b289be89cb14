"""``clusterd plans``, ``profile``, ``estimate``, ``measurements``, ``migrate``, ``unpin``, ``checkpoint``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import click

from clusterd.cli.common.arguments import complete_job
from clusterd.cli.common.output import note, output_option, print_line, show_json, show_table, shown_as
from clusterd.client import Client
from clusterd.errors import ClusterError, UsageError
from clusterd.submission.batch_script import read_job_or_script
from clusterd.submission.submit import plain, with_workdir
from clusterd.units import compact_devices, counted, duration, fine, size

_SHOWN = 12
_IMPORT_CHARACTERS = 1 << 18
"""Of a file in one request; a character takes up to four bytes."""


@click.command()
@click.argument("job", shell_complete=complete_job)
@click.option("--html", type=click.Path(path_type=Path), help="Also write a self-contained HTML page.")
@click.option(
    "--over",
    type=click.Choice(["devices", "cores", "memory", "bandwidth", "types"]),
    default="devices",
    help="Resource of the curve; types: device types.",
)
@output_option
def profile(job: str, html: Path | None, over: str, output: str) -> int:
    """Show measurements and fitted performance of JOB's model, or of a model given by its signature."""
    with Client() as cluster:
        answer = cluster.call("profile", job=job, html=html is not None, over=over)
    page = answer.pop("html", None)
    if html is not None and page is not None:
        _write(html, page)
        note(f"written: {html}")
    if shown_as(output, answer):
        return 0
    print_line(f"{answer['name']}: model {answer['model']} on {answer['device_type']}; {answer['known']}")
    print()
    rows = [
        [line["plan"], line["shape"], fine(line["measured_s"]), fine(line["predicted_s"]),
         f"{line['predicted_s'] / line['measured_s'] - 1:+.1%}", line.get("spent", "")]
        for line in answer["lines"]
        if line["measured_s"]
    ]  # fmt: skip
    headings = ["plan", "devices", "measured", "predicted", "error", "breakdown of a step"]
    show_table(headings, rows, "no measurements yet")
    for trial in answer["trials"]:
        if trial["failure"]:
            print_line(f"not measured: {trial['plan']}: {trial['failure']}")
    print()
    _show_curve(answer["curve"], over)
    print()
    show_table(
        ["coefficient", "value", "learned", "meaning"],
        [[c["name"], c["value"], c["learned"], c["meaning"]] for c in answer["coefficients"] if c["learned"] != "0%"],
        "no coefficients fitted yet",
    )
    for reason in answer["drifts"][-3:]:
        print_line(f"changed: {reason}")
    return 0


@click.command()
@click.argument("job", shell_complete=complete_job)
@click.option("--devices", type=click.IntRange(1), help="Number of devices; default: current, or as requested.")
@click.option("--all", "everything", is_flag=True, help=f"Show more than the best {_SHOWN}.")
@output_option
def plans(job: str, devices: int | None, everything: bool, output: str) -> int:
    """Rank JOB's plans by predicted step time, with memory, and explain excluded ones."""
    with Client() as cluster:
        answer = cluster.call("plans", job=job, devices=devices)
    if shown_as(output, answer["rows"] if output == "jsonl" else answer):
        return 0
    print_line(f"{answer['name']} on {answer['devices']} × {answer['device_type']}; {answer['known']}")
    _show_plans(answer["rows"], everything)
    return 0


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@output_option
def estimate(file: Path, output: str) -> int:
    """Estimate plans and duration of the job of FILE before submitting it.

    Its model is built on a host without storage; nothing is trained.
    """
    request = read_job_or_script(file)
    if request.spec.kind != "elastic":
        raise UsageError(f'{file}: kind is "{request.spec.kind.value}": only models of elastic jobs can be inspected')
    with Client() as cluster:
        answer = cluster.call(
            "estimate",
            spec=plain(with_workdir(cluster, request.spec, say=note)),
            meanwhile=f"inspecting the model of {request.spec.name}: its script runs on a host, "
            "then its plans are ranked",
        )
    if shown_as(output, answer):
        return 0
    took = f", about {duration(answer['duration_s'])} for {answer['steps']} steps" if answer["duration_s"] else ""
    print_line(f"{answer['name']}: {answer['parameters'] / 1e6:.3g} M parameters{took}; {answer['known']}")
    _show_plans(answer["rows"], everything=False)
    print()
    _show_curve(answer["curve"])
    fastest = answer["curve"][-1] if answer["curve"] else None
    if fastest and fastest["devices"] < answer["devices"]:
        on = counted(fastest["devices"], "device")
        print_line(f"{answer['devices']} devices are not faster than {on} with {fastest['plan']}")
    return 0


@click.group()
def measurements() -> None:
    """Export and import the measured step times of all jobs."""


@measurements.command("export")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
def export(file: Path) -> None:
    """Write all measurements to FILE as CSV; '-' is standard output."""
    with Client() as cluster:
        answer = cluster.call("measurements_export")
    if str(file) == "-":
        sys.stdout.buffer.write(answer["csv"].encode())
        sys.stdout.buffer.flush()
        return
    _write(file, answer["csv"])
    note(f"{answer['count']} measurements written to {file}")


@measurements.command("import")
@click.argument("file", type=click.Path(path_type=Path))
def import_(file: Path) -> None:
    """Import the measurements of FILE that are new."""
    from clusterd.profiling.table import TableError, read_text

    try:
        text = read_text(file)
    except TableError as error:
        raise UsageError(str(error)) from None
    with Client() as cluster:
        for start in range(0, max(len(text), 1), _IMPORT_CHARACTERS):
            end = start + _IMPORT_CHARACTERS
            continued: dict[str, Any] = {"more": True} if end < len(text) else {}
            answer = cluster.call("measurements_import", csv=text[start:end], name=str(file), **continued)
    note(f"{answer['count']} measurements were new")


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise ClusterError(f"{file}: cannot be written ({error.strerror}): give another file") from None


def _show_plans(rows: list[dict[str, Any]], everything: bool) -> None:
    can = [row for row in rows if row["fits"]]
    shown = can if everything else [r for i, r in enumerate(can) if i < _SHOWN or r["current"]]
    show_table(
        ["", "plan", "on", "step", "90% within", "measured", "memory per device"],
        [
            ["*" if r["current"] else "", r["plan"], r["shape"], fine(r["step_time_s"]),
             f"{fine(r['lower_s'])} to {fine(r['upper_s'])}",
             fine(r["measured_s"]) if r["measured_s"] else "", size(r["device_bytes"])]
            for r in shown
        ],
        "no plan can run on this many devices",
    )  # fmt: skip
    if any(r["measured_s"] and not r["lower_s"] <= r["measured_s"] <= r["upper_s"] for r in shown):
        note("measured is the newest step time alone; outside of its interval: the speed has changed, or varies")
    if len(can) > len(shown):
        note(f"{len(can) - len(shown)} slower plans not shown: --all")
    for row in rows:
        if not row["fits"]:
            print_line(f"excluded: {row['plan']}: {row['why']}")


def _show_curve(curve: list[dict[str, Any]], over: str = "devices") -> None:
    most = max((point["samples_per_s"] for point in curve), default=0.0)
    rows = []
    for point in curve:
        rate = point["samples_per_s"]
        bar = "█" * round(24 * rate / most)
        rows.append([_amount(point, over), point["plan"], point["shape"], f"{rate:.4g}", bar])
    show_table([over, "best plan", "on", "samples/s", ""], rows, "no curve: no plan can run")


def _amount(point: dict[str, Any], over: str) -> str:
    if over == "types":
        return str(point["device_type"])
    if over == "memory":
        return size(point["amount"])
    if over == "bandwidth":
        return f"{point['amount']:g}x"
    return f"{point.get('amount', point['devices']):g}"


@click.command()
@click.argument("job", shell_complete=complete_job)
@click.option("--plan", help="As in dp=2,tp=2; default: the current plan.")
@click.option("--devices", help="As in gpu01:gpu0-3,gpu02:gpu0, in rank order; default: clusterd chooses.")
@click.option("--pin", is_flag=True, help="Keep plan and devices until unpinned, or until they become unavailable.")
@click.option("--dry-run", is_flag=True, help="Print the bytes to move and the predicted downtime; move nothing.")
@output_option
def migrate(job: str, plan: str | None, devices: str | None, pin: bool, dry_run: bool, output: str) -> int:
    """Move a running elastic job to another plan or other devices, in memory; restart a checkpointable one.

    If source and target ranks do not fit on a device side by side, the job stops, keeps its state in host memory, and
    restarts from it: no step is lost, but the downtime is seconds. A checkpointable job saves a checkpoint, stops, and
    restarts under the plan, to which it is then pinned.
    """
    chosen = re.split(r"[\s,]+(?=[^\s,]+:)", devices.strip()) if devices else []  # gpu01:gpu0-2,5 is one
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
@click.argument("directory", required=False)
def checkpoint(job: str, directory: str | None) -> None:
    """Write a job's state to DIRECTORY, which all its hosts must share; training continues meanwhile.

    DIRECTORY is created, or holds an earlier checkpoint, which is replaced; without one, the checkpoint goes below the
    directory of the job's [checkpoints].

    The format is torch's distributed checkpoint; the script of a checkpointable job chooses its own format, and may
    choose its own place. A lost job resumes from its latest checkpoint.
    """
    with Client() as cluster:
        answer = cluster.call("checkpoint", job=job, **({"path": directory} if directory is not None else {}))
    inside = directory is None or Path(answer["path"]).is_relative_to(directory)
    elsewhere = "" if inside else ", where its script saves"
    took = f" (training paused for {duration(answer['blocked_s'])}, written in {duration(answer['write_s'])})"
    # The script of a checkpointable job does not report times.
    times = took if answer["write_s"] else ""
    note(f"{answer['name']}: step {answer['step']} is in {answer['path']}{elsewhere}{times}")
