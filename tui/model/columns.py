"""Table columns: cells, sort key and filter fields of each row type."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar

from clusterd.rows import SEARCHED
from clusterd.tui.model import rows
from clusterd.tui.model.fleet import tiles
from clusterd.tui.model.lines import Line, clock, line, printable, readable_kind, short_plan
from clusterd.tui.model.state_styles import Look, job_colour
from clusterd.units import asked_text, duration, expected_text, held_text, size, start_text

R = TypeVar("R")

LOSS_CELLS = 7


@dataclass(frozen=True, slots=True)
class CellContext:
    """Inputs of a cell besides its row: time, terminal and jobs by id."""

    now_s: float
    look: Look
    jobs: dict[str, rows.Job]


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """A table column; `flexible` columns share the space that is left."""

    name: str
    title: str
    cells: int
    show: Callable[[R, CellContext], Line]
    order: Callable[[R], Any]
    right: bool = False
    flexible: bool = False  # grows to its content where there is space; the last one takes what is left
    middle: bool = False  # a cell that is too long is shortened in its middle
    falling: bool = False  # its order begins with the largest value, as the newest of times
    shown: bool = True  # by default; one that is not, but was chosen, is never dropped
    rank: int = 0  # narrow terminals drop columns of the highest rank first


def lay_out(columns: Sequence[Column[R]], cells: int, content: Mapping[str, int]) -> list[tuple[Column[R], int]]:
    """Columns that fit in `cells`, each with its width, separated by one space.

    A column is as wide as its content and its title, at most `Column.cells`. Flexible ones share what is left.

    Args:
        content: width of the widest cell of a column, by its name.
    """
    full = {column.name: max(content.get(column.name, 0), len(column.title) + 1) for column in columns}
    widths = {column.name: min(full[column.name], column.cells, cells) for column in columns}
    chosen = list(columns)
    while len(chosen) > 1 and sum(widths[column.name] + 1 for column in chosen) - 1 > cells:
        chosen.remove(max(chosen, key=lambda column: column.rank if column.shown else -1))
    spare = max(cells - (sum(widths[column.name] + 1 for column in chosen) - 1), 0)
    flexible = [column for column in chosen if column.flexible]
    for column in flexible:
        more = min(full[column.name] - widths[column.name], spare)
        widths[column.name] += more
        spare -= more
    if flexible:
        widths[flexible[-1].name] += spare
    return [(column, widths[column.name]) for column in chosen]


def ran_s(job: rows.Job, now_s: float) -> float | None:
    """Seconds from the first start to the end or now; None before the start."""
    return max((job.ended_s or now_s) - job.started_s, 0.0) if job.started_s else None


def waited_s(job: rows.Job, now_s: float) -> float:
    """Seconds from submission to the start, the end or now."""
    return max((job.started_s or job.ended_s or now_s) - job.submitted_s, 0.0)


def time_left_s(job: rows.Job, now_s: float) -> float | None:
    """Seconds that a job of known length still trains, as expected, else at its speed; None: neither is known."""
    if not job.steps or job.step_time_s is None or job.is_over:
        return None
    if job.state == "running" and (forecast := job.forecast) is not None and forecast.end is not None:
        expected_s = forecast.end.p50_s - max(now_s, forecast.at_s)
        if expected_s > 0.0:
            return expected_s
    return (job.steps - job.step) * job.step_time_s


def promise_text(promise: rows.Promise, now_s: float) -> str:
    """Sentence about the start of the first blocked job."""
    return start_text(promise.at_s, promise.latest_s, promise.after, now_s, lambda at_s: clock(at_s, now_s))


def forecast_texts(job: rows.Job, now_s: float) -> dict[str, str]:
    """Expected start and end of a job, as far as roll-outs tell them."""
    if (forecast := job.forecast) is None:
        return {}
    return {
        what: expected_text(times.p5_s, times.p50_s, times.p95_s, lambda at_s: clock(at_s, now_s), after)
        for what, times, after in (("start", forecast.start, forecast.after), ("end", forecast.end, ""))
        if times is not None
    }


def start_facts(job: rows.Job, now_s: float) -> list[str]:
    """Sentences about the start of a queued job: expected by roll-outs, and promised."""
    expected = forecast_texts(job, now_s).get("start")
    promise = job.promise
    if expected is None:
        return [promise_text(promise, now_s)] if promise is not None else []
    if promise is None or promise.latest_s is None or promise.latest_s < now_s:
        return [expected]
    return [expected, f"promised by {clock(promise.latest_s, now_s)} at the latest"]


def _text(text: str, style: str = "") -> Line:
    return ((printable(text), style),) if text else ()


def short_number(value: float | None, cells: int) -> str:
    """Number with up to four significant digits that fits in `cells`, as in ``5.52e-5``.

    Drops digits rather than cutting the text, which would change the value.
    """
    if value is None:
        return ""
    made = [re.sub(r"e([+-])0*(\d)", r"e\1\2", f"{value:.{digits}g}").replace("e+", "e") for digits in (4, 3, 2, 1)]
    return next((text for text in made if len(text) <= cells), made[-1])


def _name(job: rows.Job, frame: CellContext) -> Line:
    style = f"job{job_colour(job.id)}" if job.holds_devices else "dim" if job.is_over else ""
    return _text(job.name, style)


def _progress(job: rows.Job) -> str:
    if job.steps:
        return f"{job.step}/{job.steps}"
    return str(job.step) if job.step else ""


def _devices(job: rows.Job, frame: CellContext) -> Line:
    if job.holds_devices:
        return _text(held_text(job.devices, job.hosts, job.cores))
    return _text("" if job.is_over else asked_text(job.asked, job.cores), "dim")


def _plan(job: rows.Job, frame: CellContext) -> Line:
    if job.tasks:
        return _text(job.tasks, "dim")
    if job.plan is None:
        return ()
    return _text(short_plan(job.plan) + (" pinned" if job.pinned else ""), "dim" if job.is_over else "")


_STATES = {
    s: at for at, s in enumerate(("running", "stopping", "starting", "queued", "failed", "finished", "cancelled"))
}


def _by_state(job: rows.Job) -> tuple[int, float, int]:
    """Sort key: running before waiting, waiting jobs by their place in the queue."""
    return _STATES.get(job.state, 9), _last(job.place), -job.priority


def _loss(job: rows.Job, frame: CellContext) -> Line:
    return _text(short_number(job.loss, LOSS_CELLS))


def _step_time(job: rows.Job, frame: CellContext) -> Line:
    return _text("" if job.step_time_s is None else duration(job.step_time_s))


def _waited(job: rows.Job, frame: CellContext) -> Line:
    return _text(duration(waited_s(job, frame.now_s)))


def _ran(job: rows.Job, frame: CellContext) -> Line:
    seconds = ran_s(job, frame.now_s)
    return _text("" if seconds is None else duration(seconds))


def _why(job: rows.Job, frame: CellContext) -> Line:
    """Time left of a job that trains; else the reason for its state, or its promised start."""
    if job.state == "running":
        left_s, at_most = time_left_s(job, frame.now_s), ""
        if left_s is None and job.ends_by_s is not None:
            left_s, at_most = max(job.ends_by_s - frame.now_s, 0.0), "<"
        return _text("" if left_s is None else f"{at_most}{duration(left_s)} left")
    if job.state == "queued" and (facts := start_facts(job, frame.now_s)):
        return _text(f"{'' if job.forecast is None else 'starts '}{facts[0]}", "dim")
    failed = job.state == "failed"
    return _text("" if job.state == "finished" else job.reason, "bad" if failed else "dim")


def _searched(name: str) -> Column[rows.Job]:
    """Column of a text that the job's request declares."""
    text = attrgetter(name)
    return Column(name, name, 16, lambda job, frame: _text(text(job)), text, rank=9, shown=False)


JOB_COLUMNS: tuple[Column[rows.Job], ...] = (
    Column("id", "id", 6, lambda j, f: _text(j.id), lambda j: (len(j.id), j.id), right=True),
    Column("name", "name", 16, _name, lambda j: j.name, flexible=True, middle=True),
    Column("state", "state", 12, lambda j, f: line(f.look.state(j.shown_state)), _by_state),
    Column("place", "#", 6, lambda j, f: _text(str(j.place or "")), lambda j: _last(j.place), right=True, rank=5,
           shown=False),
    Column("priority", "pri", 5, lambda j, f: _text(str(j.priority)), lambda j: j.priority, right=True, rank=5),
    Column("user", "user", 8, lambda j, f: _text(j.user), lambda j: j.user, rank=8, shown=False),
    Column("kind", "kind", 14, lambda j, f: _text(j.kind, "dim"), lambda j: j.kind, rank=9, shown=False),
    Column("plan", "plan", 10, _plan, lambda j: j.plan or "", flexible=True, rank=2),
    Column("devices", "devices", 16, _devices, lambda j: len(j.devices) if j.holds_devices else 0, rank=3),
    Column("step", "step", 15, lambda j, f: _text(_progress(j)), lambda j: j.step, right=True, rank=1),
    Column("loss", "loss", LOSS_CELLS, _loss, lambda j: _last(j.loss), right=True),
    Column("step_time", "s/step", 7, _step_time, lambda j: _last(j.step_time_s), right=True, rank=7),
    Column("waited", "waited", 7, _waited, lambda j: -j.submitted_s, right=True, rank=8),
    Column("ran", "ran", 7, _ran, lambda j: -(j.started_s or 1e18), right=True, rank=6),
    *(_searched(name) for name in SEARCHED),
    Column("why", "time left / why", 18, _why, lambda j: _last(time_left_s(j, 0.0)), flexible=True),
)  # fmt: skip


def _last(value: float | None) -> float:
    """Sort key that puts unknown values and NaN last."""
    return math.inf if value is None or math.isnan(value) else value


def job_fields(job: rows.Job) -> dict[str, str]:
    """Filter fields of a job."""
    return {
        "id": job.id, "name": job.name, "state": job.shown_state, "kind": job.kind, "reason": job.reason,
        "array": job.array.name if job.array else "",
        "user": job.user, "tenant": job.tenant, "priority": str(job.priority), "plan": job.plan or "",
        "host": " ".join(job.hosts) if job.holds_devices else "", "devices": str(len(job.devices) or job.asked),
        "step": str(job.step), "loss": "" if job.loss is None else f"{job.loss:.6g}",
        "pinned": "yes" if job.pinned else "no", "guaranteed": "yes" if job.guaranteed else "no",
        **{name: getattr(job, name) for name in SEARCHED},
    }  # fmt: skip


JOB_FIELDS = frozenset(job_fields(rows.Job(id="", name="", state="")))


def _tiles(host: rows.Host, frame: CellContext) -> Line:
    return tiles(host, frame.look, frame.jobs)


def _memory(host: rows.Host, frame: CellContext) -> Line:
    if not host.memory_bytes:
        return ()
    return _text(f"{size(host.memory_used_bytes)} of {size(host.memory_bytes)}")


def _cores(host: rows.Host, frame: CellContext) -> Line:
    if not host.cpu_cores:
        return ()
    bar = frame.look.bar(host.cores_used / host.cpu_cores, 4)
    return line((bar, "info"), f" {host.cores_used}/{host.cpu_cores}")


def _address(host: rows.Host, frame: CellContext) -> Line:
    return _text(host.address or "", "dim")


def _why_host(host: rows.Host, frame: CellContext) -> Line:
    return _text(host.why or host.drained or "", "warn")


HOST_COLUMNS: tuple[Column[rows.Host], ...] = (
    Column("host", "host", 14, lambda h, f: _text(h.name), lambda h: h.name),
    Column("state", "state", 13, lambda h, f: line(f.look.state(h.shown_state)), lambda h: h.shown_state, rank=1),
    Column("devices", "devices", 20, _tiles, lambda h: len(h.devices), flexible=True),
    Column("cores", "cores booked", 12, _cores, lambda h: h.cores_used, rank=3),
    Column("memory", "memory booked", 19, _memory, lambda h: h.memory_used_bytes, rank=5),
    Column("free", "free", 5, lambda h, f: _text(str(h.free)), lambda h: -h.free, right=True, falling=True, rank=2),
    Column("address", "address", 15, _address, lambda h: h.address or "", rank=9, shown=False),
    Column("why", "why", 16, _why_host, lambda h: h.why, flexible=True, rank=4),
)  # fmt: skip


def host_fields(host: rows.Host) -> dict[str, str]:
    """Filter fields of a host."""
    return {
        "host": host.name, "state": host.shown_state, "why": host.why or host.drained or "", "job": " ".join(host.jobs),
        "devices": str(len(host.devices)), "free": str(host.free), "address": host.address or "",
        "kind": " ".join(sorted({d.kind for d in host.devices})), "foreign": " ".join(d.foreign for d in host.devices),
    }  # fmt: skip


HOST_FIELDS = frozenset(host_fields(rows.Host(name="", state="")))


def _job_name(job: str | None, frame: CellContext) -> Line:
    if job is None:
        return ()
    known = frame.jobs.get(job)
    return _text(f"{job} {known.name}" if known else job, f"job{job_colour(job)}")


def _decided(decision: rows.Decision) -> Line:
    """Sentence about a decision; holding a job back stands out."""
    styles = {"HoldJob": "warn", "RequeueJob": "warn", "AbortMigration": "bad"}
    return _text(decision.sentence, styles.get(decision.kind, "dim" if decision.routine else ""))


DECISION_COLUMNS: tuple[Column[tuple[int, rows.Decision]], ...] = (
    Column("time", "time", 11, lambda r, f: _text(clock(r[1].at_s, f.now_s), "dim"), lambda r: -r[0], falling=True),
    Column(
        "decision",
        "decision",
        15,
        lambda r, f: _text(readable_kind(r[1].kind)),
        lambda r: r[1].kind,
        rank=4,
        shown=False,
    ),
    Column("job", "job", 16, lambda r, f: _job_name(r[1].job, f), lambda r: r[1].job or "", middle=True),
    Column("host", "host", 10, lambda r, f: _text(r[1].host or ""), lambda r: r[1].host or "", rank=2),
    Column("what", "what", 44, lambda r, f: _decided(r[1]), lambda r: r[1].sentence, flexible=True),
    Column("cause", "event", 6, lambda r, f: _text(str(r[1].cause), "dim"), lambda r: r[1].cause, right=True, rank=3),
)


def stream_fields(noun: str, each: rows.Decision | rows.EventRow) -> dict[str, str]:
    """Filter fields of a decision or an event; `noun` tells which it is."""
    return {noun: readable_kind(each.kind), "job": each.job or "", "host": each.host or "", "what": each.sentence}


DECISION_FIELDS = frozenset(("decision", "job", "host", "what"))

EVENT_COLUMNS: tuple[Column[tuple[int, rows.EventRow]], ...] = (
    Column(
        "number",
        "number",
        7,
        lambda r, f: _text(str(r[1].id), "dim"),
        lambda r: -r[0],
        right=True,
        falling=True,
        rank=3,
    ),
    Column(
        "time", "time", 11, lambda r, f: _text(clock(r[1].at_s, f.now_s), "dim"), lambda r: -r[1].at_s, falling=True
    ),
    Column(
        "event", "event", 20, lambda r, f: _text(readable_kind(r[1].kind)), lambda r: r[1].kind, rank=4, shown=False
    ),
    Column("job", "job", 16, lambda r, f: _job_name(r[1].job, f), lambda r: r[1].job or "", middle=True),
    Column("host", "host", 10, lambda r, f: _text(r[1].host or ""), lambda r: r[1].host or "", rank=2),
    Column("what", "what", 44, lambda r, f: _happened(r[1]), lambda r: r[1].sentence, flexible=True),
)


def _happened(event: rows.EventRow) -> Line:
    """Sentence about an event; failures stand out."""
    failed = event.kind.endswith(("Failed", "Orphaned", "Disconnected", "NotDescribed"))
    return _text(event.sentence, "bad" if failed else "dim" if event.routine else "")


EVENT_FIELDS = frozenset(("event", "job", "host", "what"))
