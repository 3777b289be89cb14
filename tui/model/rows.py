"""Rows of the daemon as the terminal UI has them: everything from the socket is validated here before a widget sees it.

`clusterd.rows` declares them; the fields here are those that the interface adds.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from clusterd import rows
from clusterd.rows import Decision as Decision
from clusterd.rows import Host as Host
from clusterd.rows import Migration as Migration
from clusterd.rows import Promise as Promise
from clusterd.rows import Seconds as Seconds


class NextPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan the job would get next, its gain, and the cost of the migration."""

    plan: str
    devices: int = 0
    gain: float | None = None
    move_cost_s: rows.Seconds | None = None


class Job(rows.Job, frozen=True, kw_only=True):
    """Current state of a job; `Model.place_jobs` sets its place."""

    place: int | None = None
    tasks: str = ""  # of a row that stands for a whole array: how many are in which state
    next: NextPlan | None = None


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """An event; `fields` holds all of its fields."""

    kind: str
    id: int = 0
    at_s: rows.Seconds = 0.0
    job: str | None = None
    host: str | None = None
    text: str = ""
    routine: bool = False
    fields: dict[str, Any] = {}

    @property
    def sentence(self) -> str:
        """The event as a sentence; empty where an older daemon sent none."""
        return self.text


class Baseline(rows.Baseline, frozen=True, kw_only=True):
    """The whole state at one instant."""

    jobs: tuple[Job, ...] = ()


class Change(rows.Change, frozen=True, kw_only=True):
    """One batch of events with every row it touched, as of after the batch."""

    jobs: tuple[Job, ...] = ()


Malformed = msgspec.ValidationError

Row = TypeVar("Row")


def read(kind: type[Row], value: Any) -> Row:
    """Convert a message to a row type.

    Raises:
        Malformed: it does not match.
    """
    return msgspec.convert(value, kind)


def read_event(value: dict[str, Any]) -> EventRow:
    """Convert a message to an event.

    Raises:
        Malformed: it does not match.
    """
    known = msgspec.convert(value, EventRow)
    return msgspec.structs.replace(
        known, fields={k: v for k, v in value.items() if k not in ("kind", "text", "routine")}
    )
