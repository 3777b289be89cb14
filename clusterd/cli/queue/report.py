"""``clusterd report``: device-hours, utilisation and waiting times."""

from __future__ import annotations

import time
from typing import Any

import click

from clusterd.cli.common.arguments import time_s
from clusterd.cli.common.output import note, show_csv, show_json, show_table
from clusterd.client import Client
from clusterd.units import duration


@click.command()
@click.option("--since", default="30d", show_default=True, metavar="TIME", help="As in 12h or 30d; whole days count.")
@click.option("--by", type=click.Choice(("user", "tenant", "model", "host", "job")), default="user", show_default=True)
@click.option("--forecasts", is_flag=True, help="How forecasts of starts and ends came true, over the last 90 days.")
@click.option("-o", "--output", type=click.Choice(("table", "json", "jsonl", "csv")), default="table")
def report(since: str, by: str, forecasts: bool, output: str) -> None:
    """Print device-hours, utilisation and waiting times by user, tenant, model, host or job.

    Utilisation is the share of a device's leased time in which it worked: a GPU's by its driver, that of CPU devices by
    the processor time of their job. Devices are counted every 10 seconds.
    """
    begin_s = time.time() - time_s("--since", since)
    with Client() as cluster:
        rows = cluster.call("forecasts") if forecasts else cluster.call("report", since_s=begin_s, by=by)
    if output == "csv":
        headings = list(rows[0]) if rows else ["group"]
        show_csv(headings, [[row[heading] for heading in headings] for row in rows])
        return
    if output != "table":
        show_json(rows, output)
        return
    if forecasts:
        _show_calibration(rows)
        return
    headings = [by, "jobs", "device-hours", "utilisation"]
    headings += ["idle device-hours"] if by == "host" else ["submitted", "median wait", "longest wait"]
    show_table(headings, [_line(row, by) for row in rows], f"nothing ran in the last {since}")
    if rows:
        total = sum(row["device_hours"] for row in rows)
        note(f"{total:.2f} device-hours in the last {since}")


def _show_calibration(rows: list[dict[str, Any]]) -> None:
    headings = ["forecast", "kind", "ahead", "number", "within 50%", "within 90%", "width of 90%", "pinball loss"]
    lines = [
        [row["what"], row["kind"], "later" if row["horizon"] == "later" else f"<{row['horizon']}", row["count"],
         f"{row['within50']:.0%}", f"{row['within90']:.0%}",
         "" if row["width90_s"] is None else duration(row["width90_s"]), duration(row["pinball_s"])]
        for row in rows
    ]  # fmt: skip
    show_table(headings, lines, "no forecast has come true or not yet")


def _line(row: dict[str, Any], by: str) -> list[Any]:
    used = f"{100 * row['utilisation']:.0f}%" if row["utilisation"] is not None else "not known"
    line = [row["group"], row["jobs"], f"{row['device_hours']:.2f}", used]
    if by == "host":
        return [*line, f"{row['idle_device_hours']:.2f}"]
    waits = (row["waited_s_median"], row["waited_s_longest"])
    return [*line, row["submitted"], *("" if wait is None else duration(wait) for wait in waits)]
