"""``clusterd when``: expected start and end of a job that has not been submitted, and of variants of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from clusterd.cli.common.expected import expected_cell
from clusterd.cli.common.output import output_option, show_json, show_table
from clusterd.client import Client
from clusterd.errors import UsageError
from clusterd.submission.job_file import read_job_file
from clusterd.submission.submit import plain


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--gpus", metavar="N,N,...", help="A line for each of these numbers of GPUs.")
@click.option("--guaranteed", is_flag=True, help="Further lines with a guarantee.")
@output_option
def when(file: Path, gpus: str | None, guaranteed: bool, output: str) -> None:
    """Compare when the job of FILE, and variants of it, would start and end if submitted now; nothing is submitted.

    The scheduler is played forward from its state of now, with run times drawn from what is known of each job. Times
    are the median and the 90% interval.
    """
    spec = read_job_file(file).spec
    specs = [spec]
    if gpus is not None:
        try:
            counts = [int(part) for part in gpus.split(",")]
        except ValueError:
            raise UsageError(f"--gpus {gpus}: write numbers with commas between them, as in 1,2,4") from None
        resources = spec.resources
        specs = [replace(spec, resources=replace(resources, devices=n, kind="cuda", plan=None)) for n in counts]
    if guaranteed:
        specs += [replace(each, guaranteed=True) for each in specs if not each.guaranteed]
    with Client() as cluster:
        first, *others = (plain(each) for each in specs)
        meanwhile = "playing the queue forward, some seconds for each line"
        answers = cluster.call("when", spec=first, also=others, meanwhile=meanwhile)
    if output != "table":
        show_json(answers, output)
        return
    headings = ["devices", "guaranteed", "start", "end", "as", ""]
    show_table(headings, [_line(answer) for answer in answers], "nothing was asked")


def _line(answer: dict[str, Any]) -> list[Any]:
    forecast, guaranteed = answer["forecast"], "yes" if answer["guaranteed"] else "no"
    times = [expected_cell(forecast, what) for what in ("start", "end")]
    return [answer["devices"] or "CPU cores", guaranteed, *times, answer["plan"], answer["why"]]
