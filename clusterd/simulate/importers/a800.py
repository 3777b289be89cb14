"""Jobs of Rubick's published artifact: name, time, model, requested devices and plan, steps, guarantee.

A plan is a family of the truth's table (``zero-dp``) or three digits ``PTD`` for pp, tp and dp.
"""

from __future__ import annotations

from pathlib import Path

from clusterd.plans.plan import Plan
from clusterd.simulate.errors import InputError
from clusterd.simulate.importers.lines import rows
from clusterd.simulate.truth import Truth
from clusterd.simulate.workload import Arrival, Workload, fit_to

COLUMNS = ("name", "submission_time", "application", "num_gpus", "exec_plan", "steps", "is_sla")


def read(path: Path, truth: Truth) -> Workload:
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
