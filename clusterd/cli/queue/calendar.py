"""``clusterd calendar`` and ``when``: who is expected where, and when a job would start and end."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from clusterd.cli.common.output import expected_cell, output_option, show_table, shown_as
from clusterd.client import Client
from clusterd.errors import UsageError
from clusterd.submission.batch_script import read_job_or_script
from clusterd.submission.submit import plain
from clusterd.units import compact_devices

WEEKDAY_DAYS = 6
"""Days for which the day of the week tells the day."""

LINE_BYTES = 75
"""Longest line of iCalendar; what follows begins with a space (RFC 5545, 3.1)."""


@click.command()
@click.option("--days", type=click.IntRange(min=1), default=1, show_default=True, help="Days from now.")
@click.option("--host", help="This host only.")
@click.option("--user", help="This user only.")
@click.option(
    "-o", "--output", type=click.Choice(["table", "json", "jsonl", "csv", "ics"]), default="table",
    help="Output format; ics: bookings and claims for a calendar program.",
)  # fmt: skip
def calendar(days: int, host: str | None, user: str | None, output: str) -> None:
    """Show running jobs, expected starts, bookings and claims by host.

    Ends of jobs are expected, by their forecast, or else by their time limit.
    """
    with Client() as cluster:
        if host is not None:
            cluster.call("host", host=host)
        rows = cluster.call("calendar", days=days)
    rows = [row for row in rows if host in (None, row["host"]) and user in (None, row["user"])]
    if output == "ics":
        click.echo(icalendar(rows, time.time()), nl=False)
        return
    if shown_as(output, rows, "CalendarEntry"):
        return
    form = "%a %H:%M" if days <= WEEKDAY_DAYS else "%m-%d %H:%M"
    now_s, lines, shown = time.time(), list[list[Any]](), None
    for row in rows:
        begins = "now" if row["from_s"] <= now_s else _clock(row["from_s"], form)
        where = (row["host"] or "not known yet") if row["host"] != shown else ""
        devices = compact_devices(row["devices"]).replace(f"{row['host']}:", "")
        lines.append([where, begins, _clock(row["until_s"], form), devices, row["user"], row["text"]])
        shown = row["host"]
    show_table(["host", "from", "until", "devices", "user", "what"], lines, "nothing is expected")


def _clock(at_s: float | None, form: str) -> str:
    """Point in time; empty where it is not known, or too far away for that form."""
    if at_s is None:
        return ""
    far = form.startswith("%a") and at_s > time.time() + WEEKDAY_DAYS * 86400.0
    return time.strftime("%Y-%m-%d" if far else form, time.localtime(at_s))


def icalendar(rows: list[dict[str, Any]], now_s: float) -> str:
    """Bookings and claims among entries of the calendar, as iCalendar (RFC 5545), one event for each."""
    events: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["claim"] is not None:
            events.setdefault(row["claim"], []).append(row)
    lines = ["BEGIN:VCALENDAR", "VERSION:2.0", "PRODID:-//clusterd//calendar//EN"]
    for claim, some in events.items():
        first, devices = some[0], [device for row in some for device in row["devices"]]
        summary = f"{first['user']}: {first['text']}"
        ends = [f"DTEND:{_utc(first['until_s'])}"] if first["until_s"] is not None else []
        lines += [
            "BEGIN:VEVENT",
            f"UID:{claim}-{first['from_s']:.0f}@clusterd",
            f"DTSTAMP:{_utc(now_s)}",
            f"DTSTART:{_utc(first['from_s'])}",
            *ends,
            f"SUMMARY:{_escaped(summary)}",
            f"LOCATION:{_escaped(compact_devices(devices))}",
            "END:VEVENT",
        ]
    return "".join(f"{_folded(line)}\r\n" for line in [*lines, "END:VCALENDAR"])


def _utc(at_s: float) -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at_s))


def _escaped(text: str) -> str:
    """Text as a value (RFC 5545, 3.3.11)."""
    for letters, escape in (("\\", "\\\\"), (";", "\\;"), (",", "\\,"), ("\n", "\\n")):
        text = text.replace(letters, escape)
    return "".join(letter for letter in text if letter.isprintable())


def _folded(line: str) -> str:
    """A line in parts of at most `LINE_BYTES`, no letter of which is divided."""
    parts, part = [], ""
    for letter in line:
        if len(f"{part}{letter}".encode()) > LINE_BYTES:
            parts.append(part)
            part = " "
        part += letter
    return "\r\n".join([*parts, part])


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--gpus", metavar="N,N,...", help="A line for each of these numbers of GPUs.")
@click.option("--devices", metavar="N,N,...", help="The same for devices of any kind, as CPU devices.")
@click.option("--guaranteed", is_flag=True, help="Further lines with a guarantee.")
@output_option
def when(file: Path, gpus: str | None, devices: str | None, guaranteed: bool, output: str) -> None:
    """Compare when the job of FILE, and variants of it, would start and end if submitted now; nothing is submitted.

    The scheduler is played forward from its state of now, with run times drawn from what is known of each job. Times
    are the median and the 90% interval.
    """
    spec = read_job_or_script(file).spec
    sizes = []
    for option, text, kind in (("--gpus", gpus, "cuda"), ("--devices", devices, None)):
        try:
            sizes += [(int(part), kind) for part in (text.split(",") if text is not None else ())]
        except ValueError:
            raise UsageError(f"{option} {text}: write numbers with commas between them, as in 1,2,4") from None
    sized = [replace(spec.resources, devices=count, kind=kind, plan=None) for count, kind in sizes]
    specs = [replace(spec, resources=each) for each in sized] or [spec]
    if guaranteed:
        specs += [replace(each, guaranteed=True) for each in specs if not each.guaranteed]
    with Client() as cluster:
        first, *others = (plain(each) for each in specs)
        meanwhile = "playing the queue forward, some seconds for each line"
        answers = cluster.call("when", spec=first, also=others, meanwhile=meanwhile)
    if shown_as(output, answers):
        return
    headings = ["devices", "guaranteed", "start", "end", "as", ""]
    show_table(headings, [_line(answer) for answer in answers], "nothing was asked")


def _line(answer: dict[str, Any]) -> list[Any]:
    forecast, guaranteed = answer["forecast"], "yes" if answer["guaranteed"] else "no"
    times = [expected_cell(forecast, what) for what in ("start", "end")]
    return [answer["devices"] or "CPU cores", guaranteed, *times, answer["plan"], answer["why"]]
