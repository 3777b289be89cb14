"""Reader of CSV tables of jobs that are over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from clusterd.profiling.table import TableError, read_rows, read_text

REQUIRED = ("name", "user", "model", "size", "requested_s", "actual_s", "end")
"""Columns of a table without labels; one with column `predictable` may have any of them."""

OPTIONAL = ("submitted_s", "fit_error")
LABEL = "predictable"
COMPLETED = frozenset({"completed", "complete", "finished", "succeeded", "pass"})
"""Words in column `end` for a job that did all its work."""

LABELS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
WITHIN = 2.0
"""Largest ratio of the actual and the requested time, either way, of a predictable job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job: what is known at its submission, and how it ended if it is over."""

    name: str = ""
    user: str = ""
    model: str = ""
    size: float = math.nan  # devices
    requested_s: float = math.nan  # run time that the user gave; nan: none
    actual_s: float = math.nan
    end: str = ""
    submitted_s: float = math.nan  # nan: unknown
    fit_error: float = math.nan  # mean relative error of the online fit of its first steps; nan: not measured
    label: bool | None = None  # given by the table, in place of the rule
    further: Mapping[str, float | str] = field(default_factory=dict)  # numbers (nan: none) and words by column

    @property
    def is_predictable(self) -> bool:
        """True if it did all its work, in about the requested time where there was one."""
        if self.label is not None:
            return self.label
        if self.end not in COMPLETED:
            return False
        return math.isnan(self.requested_s) or is_within(self.actual_s, self.requested_s)


def is_within(actual_s: float, expected_s: float) -> bool:
    """True if a job ran about as long as expected."""
    return expected_s / WITHIN <= actual_s <= expected_s * WITHIN


def read_jobs(path: Path) -> list[JobRecord]:
    """Read a table of jobs, in the order of their submission where it tells that.

    Raises:
        TableError: the file cannot be read, or a value is missing, not a number, or out of range.
    """
    text = read_text(path)
    header, _ = read_rows(str(path), text, ())
    labelled = LABEL in header
    _, rows = read_rows(str(path), text, () if labelled else REQUIRED)
    lines = list(rows)
    textual = {
        column: not all(_is_number(values.get(column)) for _, values in lines)
        for column in header
        if column not in (*REQUIRED, *OPTIONAL, LABEL)
    }
    jobs = [_read_job(path, line, values, textual, labelled=labelled) for line, values in lines]
    if all(not math.isnan(job.submitted_s) for job in jobs):
        jobs.sort(key=lambda job: job.submitted_s)
    return jobs


def _is_number(text: str | None) -> bool:
    """True for a finite number, and for an empty value."""
    try:
        return math.isfinite(float((text or "").strip() or 0.0))
    except ValueError:
        return False


def _read_job(
    path: Path, line: int, values: dict[str, str], textual: Mapping[str, bool], *, labelled: bool
) -> JobRecord:
    def text(column: str) -> str:
        return (values.get(column) or "").strip()

    def wrong(column: str, remedy: str) -> TableError:
        return TableError(f"{path}, line {line}, column {column}: {text(column)!r}; {remedy}")

    def number(column: str, least: float, *, needed: bool = False) -> float:
        if not text(column) and not needed:
            return math.nan
        try:
            value = float(text(column))
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < least:
            raise wrong(column, f"give a number of at least {least:g}")
        return value

    label = LABELS.get(text(LABEL).lower())
    if labelled and label is None:
        raise wrong(LABEL, "write 1 or 0")
    if None in values:
        raise TableError(f"{path}, line {line}: more values than the header names; remove them or quote the commas")
    end = text("end").lower()
    if not end and not labelled:
        raise TableError(f"{path}, line {line}, column end: empty; write completed, failed, cancelled or timeout")
    return JobRecord(
        name=text("name"),
        user=text("user"),
        model=text("model"),
        size=number("size", 0.0, needed=not labelled),
        requested_s=number("requested_s", 0.0),
        actual_s=number("actual_s", 0.0, needed=not labelled),
        end=end,
        submitted_s=number("submitted_s", -math.inf),
        fit_error=number("fit_error", 0.0),
        label=label,
        further={column: text(column) if is_text else number(column, -math.inf) for column, is_text in textual.items()},
    )
