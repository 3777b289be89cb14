"""Traces of jobs: name, time, model, requested devices and plan, steps, guarantee, as in Rubick's published artifact.

A plan is a family of the truth's table (``zero-dp``) or three digits ``PTD`` for pp, tp and dp.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

from clusterd.plans.plan import Plan
from clusterd.simulate.cluster import Cluster
from clusterd.simulate.errors import InputError
from clusterd.simulate.truth import Truth, read_truth
from clusterd.simulate.workload import Arrival, Workload, fit_to

COLUMNS = ("name", "submission_time", "application", "num_gpus", "exec_plan", "steps", "is_sla")

Reader = Callable[[Path, Path, Cluster], tuple[Truth, Workload] | None]

OTHER_FORMATS: list[Reader] = []
"""Readers of files in other formats; each returns None for files that are not its own (`tests/benchmarks/peers.py`)."""


def read(workload: Path, truth: Path, cluster: Cluster) -> tuple[Truth, Workload]:
    """Read step times and jobs.

    Raises:
        InputError: a file cannot be read, a line is wrong, or nothing of the workload can be run.
    """
    for reader in OTHER_FORMATS:
        if (found := reader(workload, truth, cluster)) is not None:
            return found
    world = read_truth(truth, cluster.groups[0].device_type).on(cluster.sizes)
    return world, read_jobs(workload, world)


def read_jobs(path: Path, truth: Truth) -> Workload:
    """Read the jobs whose model the truth holds, and count the others.

    Raises:
        InputError: the file cannot be read, or a line of it, or nothing of it can be run.
    """
    arrivals: list[Arrival] = []
    plans: list[str | Plan | None] = []
    for line, row in rows(path, COLUMNS):
        try:
            requested = row["exec_plan"].strip()
            plan = None
            if requested.isdigit() and len(requested) == 3:
                plan = Plan(pp=int(requested[0]), tp=int(requested[1]), dp=int(requested[2]))
            arrival = Arrival(
                name=row["name"].strip(),
                at_s=float(row["submission_time"]),
                model=row["application"].strip(),
                steps=int(float(row["steps"])),
                devices=int(row["num_gpus"]),
                guaranteed=row["is_sla"].strip() in ("1", "True", "true"),
                cpus=int(row.get("num_cpus") or 0),
            )
            if arrival.steps < 1 or arrival.devices < 1:
                raise ValueError("steps and devices must be at least 1")
        except (ValueError, OverflowError) as error:
            raise InputError(f"{path}, line {line}: {error}; correct the line or take it out") from None
        arrivals.append(arrival)
        plans.append(plan or requested or None)
    return fit_to(arrivals, truth, plans, str(path))


def text_of(path: Path) -> str:
    """Read a text file.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None


def rows(
    path: Path, columns: Sequence[str], delimiter: str = ",", header: bool = True
) -> list[tuple[int, dict[str, str]]]:
    """Read the lines of a table with their numbers.

    Args:
        header: the first line names the columns; otherwise they are as given, in that order.
    Raises:
        InputError: it cannot be read, lacks one of the columns, or has nothing below the header.
    """
    lines = text_of(path).splitlines()
    reader = csv.DictReader(lines, None if header else list(columns), delimiter=delimiter)
    missing = [c for c in columns if c not in (reader.fieldnames or [])]
    if missing:
        raise InputError(f"{path}, line 1: no column {', '.join(missing)}; needed are {', '.join(columns)}")
    found: list[tuple[int, dict[str, str]]] = []
    for row in reader:
        if None in row or None in row.values():
            count = len(reader.fieldnames or [])
            raise InputError(f"{path}, line {reader.line_num}: it has not {count} fields; correct the line")
        found.append((reader.line_num, dict(row)))
    if not found:
        raise InputError(f"{path}: no lines{' below the header' if header else ''}")
    return found
