"""Reader of CSV tables of measured step times."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterd.plans.plan import Plan, PlanError
from clusterd.profiling.model import Row
from clusterd.profiling.placement import Allocation
from clusterd.profiling.workload import Workload


class TableError(ValueError):
    """A table is unusable; the message names file, line, column and remedy."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured step time."""

    row: Row
    step_time_s: float
    family: str  # group of rows in reports
    line: int  # in the file; 0 if the row is from no file

    @property
    def hosts(self) -> int:
        """Number of hosts of the allocation."""
        return len(self.row.allocation.hosts)


REQUIRED = (
    "model", "parameters", "layers", "hidden", "seq_len", "global_batch", "dp", "tp", "pp", "zero_stage", "offload",
    "act_ckpt", "gpus_per_node", "step_time_s",
)  # fmt: skip
MOST_S = 86_400.0
LEAST_S = 1e-6
"""Limits of a step time, in seconds."""


def read_text(path: Path) -> str:
    """Read the text of a CSV file.

    Raises:
        TableError: the file cannot be read or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: cannot be read ({error}); give a CSV file") from None


def is_table(path: Path) -> bool:
    """True if the first line of a file names all required columns."""
    header = next(csv.reader(read_text(path).splitlines()[:1]), [])
    return set(REQUIRED) <= {name.strip() for name in header}


def read_rows(
    name: str, text: str, required: Sequence[str], remedy: str = ""
) -> tuple[Sequence[str], Iterator[tuple[int, dict[str, str]]]]:
    """Read a CSV text: names of its columns, and its rows, each with the number of its last line.

    Args:
        name: of the file, for messages.
        remedy: for a missing column; default: name those that are needed.
    Raises:
        TableError: a required column is missing; while rows are read: the text is not valid CSV.
    """
    reader = csv.DictReader(io.StringIO(text, newline=""))
    header = reader.fieldnames or []
    if missing := [column for column in required if column not in header]:
        remedy = remedy or f"needed are {', '.join(required)}"
        raise TableError(f"{name}, line 1: no column {', '.join(missing)}; {remedy}")
    return header, _numbered(name, reader)


def _numbered(name: str, reader: csv.DictReader[str]) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        for values in reader:
            yield reader.line_num, values
    except csv.Error as error:
        raise TableError(f"{name}, line {reader.line_num}: {error}; is a quote left open?") from None


def read_table(path: Path) -> dict[str, list[Measured]]:
    """Read a table; returns its rows by model, in the order of the file.

    Raises:
        TableError: the file cannot be read, or a value is missing, not a number, or out of range.
    """
    header, rows = read_rows(str(path), read_text(path), REQUIRED)
    if len(set(header)) < len(header):
        raise TableError(f"{path}, line 1: a column is named twice; keep one of each")
    models: dict[str, list[Measured]] = {}
    for line, values in rows:
        one = _read_row(path, line, values)
        models.setdefault(one.row.workload.name, []).append(one)
    if not models:
        raise TableError(f"{path}: no rows below the header; add measurements")
    return models


def _read_row(path: Path, line: int, values: dict[str, str]) -> Measured:
    def wrong(column: str, why: str) -> TableError:
        return TableError(f"{path}, line {line}, column {column}: {why}")

    def number(column: str, least: float, most: float, hint: str) -> float:
        text = (values.get(column) or "").strip()
        try:
            value = float(text)
        except ValueError:
            raise wrong(column, f"{text!r} is not a number; {hint}") from None
        if not math.isfinite(value) or not least <= value <= most:
            raise wrong(column, f"{text} is outside {least:g} to {most:g}; {hint}")
        return value

    def whole(column: str, least: int, most: int, hint: str) -> int:
        value = number(column, least, most, hint)
        if value != int(value):
            raise wrong(column, f"{value:g} is not whole; {hint}")
        return int(value)

    if None in values:
        raise wrong("(after the last)", "more values than the header names; remove them or quote the commas")
    model = (values["model"] or "").strip()
    if not model:
        raise wrong("model", "empty; name the model")
    step_time_s = number("step_time_s", LEAST_S, MOST_S, "give seconds per step")
    counts = []
    for part in (values["gpus_per_node"] or "").split("+"):
        if not part.strip().isdecimal() or int(part) < 1:
            raise wrong("gpus_per_node", f"{values['gpus_per_node']!r}; write devices of each host as in 4+4")
        counts.append(int(part))
    degrees = {name: whole(name, 1, 100_000, "give a degree of parallelism") for name in ("dp", "tp", "pp")}
    ranks = degrees["dp"] * degrees["tp"] * degrees["pp"]
    if sum(counts) != ranks:
        raise wrong("gpus_per_node", f"{sum(counts)} devices, but dp*tp*pp is {ranks}; correct one of them")
    if (values.get("gpus") or "").strip() and number("gpus", 1, 1e6, "give the number of devices") != ranks:
        raise wrong("gpus", f"{values['gpus']}, but dp*tp*pp is {ranks}; correct one of them")
    if (values.get("nodes") or "").strip() and number("nodes", 1, 1e6, "give the number of hosts") != len(counts):
        raise wrong("nodes", f"{values['nodes']}, but gpus_per_node lists {len(counts)}; correct one of them")
    micro = 1
    if (values.get("micro_batches") or "").strip():
        micro = whole("micro_batches", 1, 1_000_000, "give micro-batches per step, or nothing if not known")
    try:
        plan = Plan(
            dp=degrees["dp"],
            tp=degrees["tp"],
            pp=degrees["pp"],
            zero=whole("zero_stage", 0, 3, "give a ZeRO stage"),
            offload="optimizer" if whole("offload", 0, 1, "give 0 or 1") else "none",
            accumulation=micro,
            checkpointing=bool(whole("act_ckpt", 0, 1, "give 0 or 1")),
            schedule="gpipe",
        )
    except PlanError as error:
        raise TableError(f"{path}, line {line}: {error}") from None
    workload = Workload.from_sizes(
        model,
        parameters=whole("parameters", 1, 10**14, "give the number of parameters"),
        layers=whole("layers", 0, 100_000, "give the number of blocks"),
        hidden=whole("hidden", 0, 10**7, "give the width, 0 where there is none"),
        seq_len=whole("seq_len", 0, 10**8, "give the length of a sample, 0 where it has none"),
        global_batch=whole("global_batch", 1, 10**9, "give samples per step"),
    )
    if workload.global_batch < plan.dp:
        raise wrong("global_batch", f"{workload.global_batch} samples cannot be shared by dp={plan.dp}; correct one")
    row = Row(workload, plan, Allocation.of(counts))
    return Measured(row, step_time_s, (values.get("family") or "").strip() or "all", line)


def families(rows: Iterable[Measured]) -> list[str]:
    """Families of the rows, without duplicates, in order."""
    return list(dict.fromkeys(r.family for r in rows))
