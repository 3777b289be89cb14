"""``clusterd report``: device-hours, utilisation and waiting times."""

from __future__ import annotations

import time
from typing import Any

import click

from clusterd.cli.common.arguments import time_s
from clusterd.cli.common.output import note, output_option, show_json, show_table
from clusterd.client import Client
from clusterd.units import duration


@click.command()
@click.option("--since", default="30d", show_default=True, metavar="TIME", help="As in 12h or 30d; whole days count.")
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
    begin_s = time.time() - time_s("--since", since)
    with Client() as cluster:
        rows = cluster.call("forecasts") if forecasts else cluster.call("report", since_s=begin_s, by=by)
    if output != "table":
        show_json(rows, output)
        return
    if forecasts:
        _show_calibration(rows)
        return
    headings = [by, "jobs", "device-hours", "utilisation"]
    headings += ["idle device-hours"] if by == "host" else ["submitted", "median wait", "longest wait"]
    lines = [_line(row, by) for row in rows]
    if any(row["outside_device_hours"] for row in rows):
        headings.append("outside the queue")
        lines = [[*line, f"{row['outside_device_hours']:.2f}"] for line, row in zip(lines, rows, strict=True)]
    show_table(headings, lines, f"nothing ran in the last {since}")
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


def _fair_share(output: str) -> None:
    with Client() as cluster:
        rows = cluster.call("fair_share")
    if output != "table":
        show_json(rows, output)
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
