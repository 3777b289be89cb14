"""``clusterd report`` and ``results``: what jobs used and waited, and what the tasks of an array measured."""

from __future__ import annotations

import json
from typing import Any

import click

from clusterd.cli.common.arguments import complete_job, since_s
from clusterd.cli.common.output import note, output_option, show_csv, show_json, show_table, shown_as
from clusterd.client import Client
from clusterd.errors import ClusterError
from clusterd.units import duration, local_time


@click.command()
@click.option("--since", default="30d", show_default=True, metavar="TIME", help="12h, 30d or a date; whole days count.")
@click.option("--by", type=click.Choice(("user", "tenant", "model", "host", "job")), default="user", show_default=True)
@click.option("--fair-share", is_flag=True, help="What each user has used lately, and what is due.")
@click.option("--forecasts", is_flag=True, help="How forecasts of starts and ends came true, over the last 90 days.")
@output_option
def report(since: str, by: str, fair_share: bool, forecasts: bool, output: str) -> None:
    """Print device-hours, utilisation and waiting times by user, tenant, model, host or job.

    Utilisation is the share of a device's leased time in which it worked: a GPU's by its driver, that of CPU devices by
    the processor time of their job. Devices are counted every 10 seconds.

    With --fair-share: device-hours, of which each half-life (fair_share_half_life, a week) takes half, and their part
    in what those have used who hold or want devices. Who has used more than is due comes later in the queue.
    """
    if fair_share:
        _fair_share(output)
        return
    begin_s = since_s("--since", since)
    with Client() as cluster:
        rows = cluster.call("forecasts") if forecasts else cluster.call("report", since_s=begin_s, by=by)
    if shown_as(output, rows, "ForecastScore" if forecasts else "UsageReport"):
        return
    if forecasts:
        _show_calibration(rows)
        return
    headings = [by, "jobs", "device-hours", "utilisation"]
    headings += ["idle device-hours"] if by == "host" else ["submitted", "median wait", "longest wait"]
    lines = [_row(row, by) for row in rows]
    if any(row["outside_device_hours"] for row in rows):
        headings.append("outside the queue")
        lines = [[*line, f"{row['outside_device_hours']:.2f}"] for line, row in zip(lines, rows, strict=True)]
    show_table(headings, lines, f"nothing ran since {local_time(begin_s)}")
    if rows:
        total = sum(row["device_hours"] for row in rows)
        note(f"{total:.2f} device-hours since {local_time(begin_s)}")


def _show_calibration(rows: list[dict[str, Any]]) -> None:
    headings = ["forecast", "kind", "ahead", "number", "within 50%", "within 90%", "width of 90%", "pinball loss"]
    lines = [
        [row["what"], row["kind"], "later" if row["horizon"] == "later" else f"<{row['horizon']}", row["count"],
         f"{row['within50']:.0%}", f"{row['within90']:.0%}",
         "" if row["width90_s"] is None else duration(row["width90_s"]), duration(row["pinball_s"])]
        for row in rows
    ]  # fmt: skip
    show_table(headings, lines, "no forecast has come true or not yet")


def _row(row: dict[str, Any], by: str) -> list[Any]:
    used = f"{100 * row['utilisation']:.0f}%" if row["utilisation"] is not None else "not known"
    line = [row["group"], row["jobs"], f"{row['device_hours']:.2f}", used]
    if by == "host":
        return [*line, f"{row['idle_device_hours']:.2f}"]
    waits = (row["waited_s_median"], row["waited_s_longest"])
    return [*line, row["submitted"], *("" if wait is None else duration(wait) for wait in waits)]


def _fair_share(output: str) -> None:
    with Client() as cluster:
        rows = cluster.call("fair_share")
    if shown_as(output, rows, "FairShare"):
        return
    headings = ["tenant", "user", "device-hours", "devices", "tenant has", "due", "user has", "due"]
    headings += ["this month", "budget", "left"]
    parts = ("tenant_used", "tenant_due", "user_used", "user_due")
    month = ("month_hours", "budget_hours", "budget_left_hours")
    show_table(
        headings,
        [
            [row["tenant"], row["user"], f"{row['device_hours']:.2f}", f"{row['devices']:g}"]
            + ["" if row[part] is None else f"{100 * row[part]:.0f}%" for part in parts]
            + ["" if row[hours] is None else f"{row[hours]:.2f}" for hours in month]
            for row in rows
        ],
        "nobody has used devices lately, or wants any",
    )


METRICS = "metrics.json"
"""File in a task's working directory: one JSON object."""

METRICS_BYTES_MAX = 1 << 20


@click.command()
@click.argument("name", shell_complete=complete_job)
@output_option
def results(name: str, output: str) -> None:
    """Show all tasks of the array or sweep NAME: index or values, state, exit code, last loss, and metrics.

    The metrics are those of the JSON object in metrics.json that a task wrote into its working directory.
    """
    with Client() as cluster:
        tasks = cluster.call("tasks", array=name)
        found = [_result(cluster, task) for task in tasks]
    if output in ("json", "jsonl"):
        show_json(found, output)
        return
    values = list(dict.fromkeys(key for one in found for key in one["values"]))
    metrics = list(dict.fromkeys(key for one in found for key in one["metrics"]))
    trained = ["loss"] if any(one["loss"] is not None for one in found) else []
    headings = ["id", "index", *values, "state", "exit", *trained]
    headings += [f"metrics.{key}" if key in headings else key for key in metrics]
    rows = [
        [
            one["id"],
            one["index"],
            *(one["values"].get(key) for key in values),
            one["state"],
            one["exit_code"],
            *(one[key] for key in trained),
            *(one["metrics"].get(key) for key in metrics),
        ]
        for one in found
    ]
    if output == "csv":
        show_csv(headings, rows)
        return
    show_table(headings, [[_short(cell) for cell in row] for row in rows], "no tasks")


def _result(cluster: Client, task: dict[str, Any]) -> dict[str, Any]:
    place = {"index": task["array"]["index"], "values": task["array"]["values"]}
    end = {key: task[key] for key in ("state", "exit_code", "loss")}
    return {"id": task["id"], "name": task["name"], **place, **end, "metrics": _metrics(cluster, task)}


def _metrics(cluster: Client, task: dict[str, Any]) -> dict[str, Any]:
    """Metrics that the task wrote, nested names joined by dots; empty: none can be read."""
    if not task["hosts"]:
        return {}
    place = {"host": task["hosts"][0], "attempt": task["attempt"]}
    data = b""
    try:
        for piece in cluster.stream("file", job=task["id"], path=METRICS, written=True, **place):
            data += piece["data"]
            if piece["size"] > METRICS_BYTES_MAX:
                note(f"{task['name']}: {METRICS} is larger than 1 MiB and left out")
                return {}
    except ClusterError:  # it wrote none
        return {}
    try:
        metrics = json.loads(data)
    except ValueError:
        note(f"{task['name']}: {METRICS} is no JSON")
        return {}
    return dict(_flat(metrics)) if isinstance(metrics, dict) else {}


def _flat(metrics: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in metrics.items():
        pairs += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return pairs


def _short(cell: Any) -> Any:
    return f"{cell:.5g}" if isinstance(cell, float) else cell
