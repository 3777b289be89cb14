"""``clusterd results``: the tasks of an array or a sweep with their values, ends and metrics."""

from __future__ import annotations

import json
from typing import Any

import click

from clusterd.cli.common.completers import complete_job
from clusterd.cli.common.output import note, output_option, show_csv, show_json, show_table
from clusterd.client import Client
from clusterd.errors import ClusterError

METRICS = "metrics.json"
"""File in a task's working directory: one JSON object."""

METRICS_BYTES_MAX = 1 << 20


@click.command()
@click.argument("name", shell_complete=complete_job)
@click.option("--csv", "as_csv", is_flag=True, help="The same as -o csv.")
@click.option("--json", "as_json", is_flag=True, help="The same as -o json.")
@output_option
def results(name: str, as_csv: bool, as_json: bool, output: str) -> None:
    """Show all tasks of the array or sweep NAME: index or values, state, exit code, last loss, and metrics.

    The metrics are those of the JSON object in metrics.json that a task wrote into its working directory.
    """
    with Client() as cluster:
        tasks = cluster.call("tasks", array=name)
        found = [_result(cluster, task) for task in tasks]
    if as_json or output in ("json", "jsonl"):
        show_json(found, "json" if as_json else output)
        return
    values = list(dict.fromkeys(key for one in found for key in one["values"]))
    metrics = list(dict.fromkeys(key for one in found for key in one["metrics"]))
    headings = ["id", "index", *values, "state", "exit", "loss", *metrics]
    rows = [
        [
            one["id"],
            one["index"],
            *(one["values"].get(key) for key in values),
            one["state"],
            one["exit_code"],
            one["loss"],
            *(one["metrics"].get(key) for key in metrics),
        ]
        for one in found
    ]
    if as_csv or output == "csv":
        show_csv(headings, rows)
        return
    show_table(headings, [[_short(cell) for cell in row] for row in rows], "no tasks")


def _result(cluster: Client, task: dict[str, Any]) -> dict[str, Any]:
    array = task["array"]
    return {
        "id": task["id"],
        "name": task["name"],
        "index": array["index"],
        "values": array["values"],
        "state": task["state"],
        "exit_code": task["exit_code"],
        "loss": task["loss"],
        "metrics": _metrics(cluster, task),
    }


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
