"""Store of measurements by model, device type, environment and link, in one SQLite file."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path

import msgspec

from clusterd.plans.plan import Plan
from clusterd.profiling.model import Row
from clusterd.profiling.placement import Allocation, HostShare
from clusterd.profiling.table import LEAST_S, MOST_S, TableError, read_rows
from clusterd.profiling.workload import Workload

_VERSION = 1
_COLUMNS = ("signature", "device_type", "environment", "link", "plan", "allocation", "workload", "kind",
            "step_time_s", "steps", "phases", "device_peak_bytes", "host_peak_bytes", "at_s")  # fmt: skip
KINDS = ("measured", "out-of-memory")
_ENDLESS = float(1 << 62)
"""Upper bound of stored numbers, because SQLite's integers have 64 bits."""


@dataclass(frozen=True, slots=True)
class Key:
    """Key of comparable measurements, which jobs can share."""

    signature: str  # of the model: its shape and global batch
    device_type: str
    environment: str = ""  # software: torch version, interpreter
    link: str = ""  # network between the hosts; empty for one host or if unknown


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurement of one plan on one allocation."""

    key: Key
    row: Row
    step_time_s: float  # median; 0 if the plan ran out of memory
    kind: str = "measured"  # or "out-of-memory"
    steps: int = 0  # number of steps of which `step_time_s` is the median
    phases: tuple[tuple[str, float], ...] = ()  # name, seconds
    device_peak_bytes: int = 0
    host_peak_bytes: int = 0
    at_s: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; it must be one of {', '.join(KINDS)}")
        if self.kind == "measured" and not LEAST_S <= self.step_time_s <= MOST_S:
            raise ValueError(f"step_time_s is {self.step_time_s}; it must be {LEAST_S:g} to {MOST_S:g} seconds")
        for name, value in (
            ("steps", self.steps),
            ("device_peak_bytes", self.device_peak_bytes),
            ("host_peak_bytes", self.host_peak_bytes),
            ("at_s", self.at_s),
            *self.phases,
        ):
            if not 0 <= value < _ENDLESS:
                raise ValueError(f"{name} is {value}; it must be 0 or more, and finite")


class Store:
    """An open store, also a context manager. Only one process may write."""

    def __init__(self, path: Path | str = ":memory:") -> None:
        """Open or create a store.

        Raises:
            TableError: the file is not a store, or was written by a newer version.
        """
        self._database = sqlite3.connect(path)
        try:
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version > _VERSION:
                raise TableError(f"{path}: written by a newer version ({version}); update, or give another file")
            self._database.execute("PRAGMA journal_mode = WAL")
            with self._database:
                self._database.execute(
                    "CREATE TABLE IF NOT EXISTS measurements (signature TEXT NOT NULL, device_type TEXT NOT NULL, "
                    "environment TEXT NOT NULL, link TEXT NOT NULL, plan TEXT NOT NULL, allocation TEXT NOT NULL, "
                    "workload TEXT NOT NULL, kind TEXT NOT NULL, step_time_s REAL NOT NULL, steps INTEGER NOT NULL, "
                    "phases TEXT NOT NULL, device_peak_bytes INTEGER NOT NULL, host_peak_bytes INTEGER NOT NULL, "
                    "at_s REAL NOT NULL)"
                )
                self._database.execute("CREATE INDEX IF NOT EXISTS by_model ON measurements (signature, device_type)")
                self._database.execute(f"PRAGMA user_version = {_VERSION}")
        except sqlite3.DatabaseError as error:
            self._database.close()
            raise TableError(
                f"{path}: not a store of measurements ({error}); move it away, or give another file"
            ) from None
        except TableError:
            self._database.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the store; all added measurements are on disk."""
        self._database.close()

    def add(self, *measurements: Measurement) -> None:
        """Add measurements in one transaction."""
        with self._database:
            self._database.executemany(
                f"INSERT INTO measurements VALUES ({', '.join('?' * len(_COLUMNS))})", map(_pack, measurements)
            )

    def find(self, key: Key, *, any_environment: bool = False) -> list[Measurement]:
        """Measurements of this key, oldest first; those without a link match every link.

        Args:
            any_environment: ignore environment and link.
        """
        where, given = "signature = ? AND device_type = ?", [key.signature, key.device_type]
        if not any_environment:
            where += " AND environment = ? AND link IN ('', ?)"
            given += [key.environment, key.link]
        with closing(
            self._database.execute(f"SELECT * FROM measurements WHERE {where} ORDER BY at_s, rowid", given)
        ) as rows:
            return [_unpack(values) for values in rows]

    def known(self) -> list[Key]:
        """Keys that have measurements."""
        query = "SELECT DISTINCT signature, device_type, environment, link FROM measurements ORDER BY 1, 2, 3, 4"
        with closing(self._database.execute(query)) as rows:
            return [Key(*values) for values in rows]

    def to_csv(self) -> tuple[str, int]:
        """All measurements as CSV, one per row, and their number."""
        with closing(self._database.execute("SELECT * FROM measurements ORDER BY rowid")) as rows:
            found = rows.fetchall()
        text = io.StringIO(newline="")
        csv.writer(text).writerows([_COLUMNS, *found])
        return text.getvalue(), len(found)

    def add_csv(self, text: str, name: str) -> int:
        """Import the output of `to_csv` in one transaction; known measurements are skipped.

        Args:
            name: of the file, for error messages.

        Returns:
            Number of new measurements.

        Raises:
            TableError: a line is malformed; the message names file, line and error.
        """
        _, lines = read_rows(name, text, _COLUMNS, "give a file that was exported")
        found: list[Measurement] = []
        for line, values in lines:
            try:
                found.append(_unpack([values[column] for column in _COLUMNS]))
            except (ValueError, TypeError) as error:
                raise TableError(f"{name}, line {line}: {error}; correct or remove the line") from None
        with closing(self._database.execute("SELECT * FROM measurements")) as rows:
            known = {tuple(values) for values in rows}
        fresh = [m for m in found if _pack(m) not in known]
        self.add(*fresh)
        return len(fresh)


def _pack(m: Measurement) -> tuple[str | float | int, ...]:
    load, hosts = m.row.workload, m.row.allocation.hosts
    return (
        m.key.signature, m.key.device_type, m.key.environment, m.key.link, str(m.row.plan),
        json.dumps([[h.devices, h.cores, h.device_type, h.speed] for h in hosts]),
        json.dumps({f.name: getattr(load, f.name) for f in fields(load)}, sort_keys=True),
        m.kind, float(m.step_time_s), m.steps, json.dumps(m.phases), m.device_peak_bytes, m.host_peak_bytes,
        float(m.at_s),
    )  # fmt: skip


def _unpack(values: Iterable[object]) -> Measurement:
    v = dict(zip(_COLUMNS, values, strict=True))
    hosts = msgspec.json.decode(str(v["allocation"]), type=list[tuple[int, int, str, float]])
    row = Row(
        msgspec.json.decode(str(v["workload"]), type=Workload),
        Plan.parse(str(v["plan"])),
        Allocation(tuple(HostShare(*host) for host in hosts)),
    )
    if row.plan.ranks != row.allocation.devices:
        raise ValueError(
            f"the plan {row.plan} has {row.plan.ranks} ranks, the allocation {row.allocation.devices} devices"
        )
    return Measurement(
        key=Key(str(v["signature"]), str(v["device_type"]), str(v["environment"]), str(v["link"])),
        row=row,
        kind=str(v["kind"]),
        step_time_s=float(str(v["step_time_s"])),
        steps=int(str(v["steps"])),
        phases=tuple(msgspec.json.decode(str(v["phases"]), type=list[tuple[str, float]])),
        device_peak_bytes=int(str(v["device_peak_bytes"])),
        host_peak_bytes=int(str(v["host_peak_bytes"])),
        at_s=float(str(v["at_s"])),
    )
