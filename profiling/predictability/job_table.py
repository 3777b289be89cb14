"""Reader of CSV tables of jobs that are over."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from profiling.table import TableError, read_rows, read_text

REQUIRED = ("name", "user", "model", "size", "requested_s", "actual_s", "end")
OPTIONAL = ("submitted_s", "fit_error")
COMPLETED = frozenset({"completed", "complete", "finished", "succeeded", "pass"})
"""Words in column `end` for a job that did all its work."""

WITHIN = 2.0
"""Largest ratio of the actual and the requested time, either way, of a predictable job."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job that is over."""

    name: str
    user: str
    model: str
    size: float  # devices
    requested_s: float  # run time that the user gave; nan: none
    actual_s: float
    end: str
    submitted_s: float = math.nan  # nan: unknown; rows are in the order of submission
    fit_error: float = math.nan  # mean relative error of the online fit of its first steps; nan: not measured

    @property
    def is_predictable(self) -> bool:
        """True if it did all its work, in about the requested time where there was one."""
        if self.end not in COMPLETED:
            return False
        if math.isnan(self.requested_s):
            return True
        return self.requested_s / WITHIN <= self.actual_s <= self.requested_s * WITHIN


def read_jobs(path: Path) -> list[JobRecord]:
    """Read a table of jobs, in the order of their submission.

    Raises:
        TableError: the file cannot be read, or a value is missing, not a number, or out of range.
    """
    _, rows = read_rows(str(path), read_text(path), REQUIRED)
    jobs = [_read_job(path, line, values) for line, values in rows]
    if all(not math.isnan(job.submitted_s) for job in jobs):
        jobs.sort(key=lambda job: job.submitted_s)
    return jobs


def _read_job(path: Path, line: int, values: dict[str, str]) -> JobRecord:
    def number(column: str, least: float, *, needed: bool) -> float:
        text = (values.get(column) or "").strip()
        if not text and not needed:
            return math.nan
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < least:
            raise TableError(f"{path}, line {line}, column {column}: {text!r}; give a number of at least {least:g}")
        return value

    end = (values["end"] or "").strip().lower()
    if not end:
        raise TableError(f"{path}, line {line}, column end: empty; write completed, failed, cancelled or timeout")
    name, user, model = ((values[column] or "").strip() for column in ("name", "user", "model"))
    return JobRecord(
        name,
        user,
        model,
        number("size", 0.0, needed=True),
        number("requested_s", 0.0, needed=False),
        number("actual_s", 0.0, needed=True),
        end,
        number("submitted_s", -math.inf, needed=False),
        number("fit_error", 0.0, needed=False),
    )
