"""Cluster state as reported by the daemon; the single source that all screens render.

`Model.apply` takes an item of `watch`, or of a recording, and returns what it touched. Rows are immutable, so a copy
of the model is a copy of a few dictionaries, which makes seeking back in a recording cheap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from clusterd.rows import QueuePlace, Status
from clusterd.tui.model import rows

DECISIONS_MAX = 5000
EVENTS_MAX = 3000
POINTS_MAX = 2048
"""Points of a job's loss curve since we attached; the job screen requests the whole curve."""

Item = dict[str, Any]
"""One message of the daemon's `watch` stream: a baseline, a change, or a heartbeat."""

Point = tuple[int, float]


@dataclass(slots=True)
class Touched:
    """Rows to redraw at the next refresh."""

    everything: bool = False
    jobs: set[str] = field(default_factory=set)
    hosts: set[str] = field(default_factory=set)
    stream: bool = False  # decisions or events were added

    def __bool__(self) -> bool:
        return bool(self.everything or self.jobs or self.hosts or self.stream)

    def add(self, other: Touched) -> None:
        """Merge the changes of `other`."""
        self.everything |= other.everything
        self.stream |= other.stream
        self.jobs |= other.jobs
        self.hosts |= other.hosts


@dataclass(slots=True)
class Model:
    """Latest reported state of the cluster."""

    jobs: dict[str, rows.Job] = field(default_factory=dict)
    hosts: dict[str, rows.Host] = field(default_factory=dict)
    status: Status = field(default_factory=Status)
    decisions: deque[tuple[int, rows.Decision]] = field(default_factory=lambda: deque(maxlen=DECISIONS_MAX))
    events: deque[tuple[int, rows.EventRow]] = field(default_factory=lambda: deque(maxlen=EVENTS_MAX))
    losses: dict[str, tuple[Point, ...]] = field(default_factory=dict)
    number: int = -1  # of the newest change; -1: nothing received yet
    at_s: float = 0.0  # of the newest event
    order: dict[str, QueuePlace] = field(default_factory=dict)  # of the last scheduling pass
    arrays: dict[str, dict[str, None]] = field(default_factory=dict)  # jobs of each array
    stream_count: int = 0  # decisions and events so far; numbers their rows
    _is_reordered: bool = False  # since the last `place_jobs`

    def copy(self) -> Model:
        """Independent copy of the current state."""
        return Model(
            jobs=dict(self.jobs),
            hosts=dict(self.hosts),
            status=self.status,
            decisions=deque(self.decisions, DECISIONS_MAX),
            events=deque(self.events, EVENTS_MAX),
            losses=dict(self.losses),
            order=dict(self.order),
            _is_reordered=True,
            arrays={array: dict(jobs) for array, jobs in self.arrays.items()},
            number=self.number,
            at_s=self.at_s,
            stream_count=self.stream_count,
        )

    def apply(self, item: Mapping[str, Any]) -> Touched:
        """Apply one item of `watch`.

        Raises:
            Malformed: the item is invalid; the model is unchanged.
        """
        if "snapshot" in item:
            self._restart(rows.read(rows.Baseline, item["snapshot"]), item)
            return Touched(everything=True)
        if "alive_s" in item:
            return Touched()
        change = rows.read(rows.Change, item)
        events = [rows.read_event(event) for event in change.events]
        decisions = [rows.read(rows.Decision, decision) for decision in change.decisions]
        self._is_reordered |= bool(change.order)
        for job in change.jobs:
            self._add_loss(job)
            self._add_to_array(job)
            before = self.jobs.get(job.id)
            if before is None or (before.state, before.held_by) != (job.state, job.held_by):
                self._is_reordered = True
            elif before.place is not None:
                job = msgspec.structs.replace(job, place=before.place)
            self.jobs[job.id] = job
        for host in change.hosts:
            self.hosts[host.name] = host
        for name in change.gone:
            self.hosts.pop(name, None)
        for waiting, place in change.order.items():
            if place is None:
                self.order.pop(waiting, None)
            else:
                self.order[waiting] = place
        if change.recovering is not None:
            self.status = msgspec.structs.replace(self.status, recovering=change.recovering)
        if change.notice is not None:
            self.status = msgspec.structs.replace(self.status, notice=change.notice)
        self._append(events, decisions, change.at_s)
        self.number = change.number
        self.at_s = change.at_s or self.at_s
        return Touched(
            jobs={job.id for job in change.jobs},
            hosts={host.name for host in change.hosts} | set(change.gone),
            stream=True,
        )

    def add_history(self, events: Iterable[Mapping[str, Any]], decisions: Iterable[Mapping[str, Any]]) -> Touched:
        """Merge events and decisions from before we attached, or from a gap, in order and without duplicates.

        Raises:
            Malformed: an event or decision is invalid.
        """
        all_events = {event.id: event for event in map(rows.read_event, map(dict, events))}
        all_events |= {event.id: event for _, event in self.events}
        # All decisions of one event arrive together.
        shown = {decision.cause for _, decision in self.decisions}
        all_decisions = [rows.read(rows.Decision, row) for row in decisions]
        all_decisions = [decision for decision in all_decisions if decision.cause not in shown]
        all_decisions += [decision for _, decision in self.decisions]
        self.events.clear()
        self.decisions.clear()
        self._append(
            sorted(all_events.values(), key=lambda event: event.id),
            sorted(all_decisions, key=lambda decision: decision.cause),
            0.0,
        )
        return Touched(stream=True)

    def _restart(self, baseline: rows.Baseline, item: Mapping[str, Any]) -> None:
        self.jobs = {job.id: job for job in baseline.jobs}
        self.hosts = {host.name: host for host in baseline.hosts}
        self.status, self._is_reordered = baseline.status, True
        self.order = {job: place for job, place in baseline.order.items() if place is not None}
        number = item.get("number")
        self.number = number if isinstance(number, int) else 0
        at_s = item.get("at_s")
        self.at_s = float(at_s) if isinstance(at_s, int | float) else self.at_s
        self.arrays = {}
        for job in baseline.jobs:
            self._add_loss(job)
            self._add_to_array(job)

    def _add_loss(self, job: rows.Job) -> None:
        if job.loss is None:
            return
        points = self.losses.get(job.id, ())
        if not points and job.first_loss is not None and job.step > 1:
            points = ((1, job.first_loss),)
        if points and points[-1][0] >= job.step:  # a repeated step, or an attempt that restarted from an earlier one
            points = tuple(point for point in points if point[0] < job.step)
        points = (*points, (job.step, job.loss))
        if len(points) > POINTS_MAX:
            points = (*points[: POINTS_MAX // 2 : 2], *points[POINTS_MAX // 2 :])
        self.losses[job.id] = points

    def _add_to_array(self, job: rows.Job) -> None:
        if job.array is not None:
            self.arrays.setdefault(job.array.id, {})[job.id] = None

    def key_of(self, job: str) -> str:
        """Key of the row that shows a job: that of its array, if it has several tasks."""
        array = self.jobs[job].array if job in self.jobs else None
        return f"{array.id}_*" if array is not None and len(self.arrays[array.id]) > 1 else job

    def tasks_of(self, key: str) -> list[str]:
        """Jobs that a row stands for."""
        return list(self.arrays.get(key.removesuffix("_*"), ())) if key.endswith("_*") else [key]

    def folded_jobs(self) -> Mapping[str, rows.Job]:
        """Rows of jobs by key, with one row for each array of several tasks."""
        several = {array: jobs for array, jobs in self.arrays.items() if len(jobs) > 1}
        if not several:
            return self.jobs
        inside = {job for jobs in several.values() for job in jobs}
        folded = {key: job for key, job in self.jobs.items() if key not in inside}
        return folded | {f"{array}_*": _fold([self.jobs[job] for job in jobs]) for array, jobs in several.items()}

    def _append(self, events: Iterable[rows.EventRow], decisions: Iterable[rows.Decision], at_s: float) -> None:
        for event in events:
            self.stream_count += 1
            self.events.append((self.stream_count, event))
        for decision in decisions:
            self.stream_count += 1
            if not decision.at_s and at_s:
                decision = msgspec.structs.replace(decision, at_s=at_s)
            self.decisions.append((self.stream_count, decision))

    def queue(self) -> list[rows.Job]:
        """Waiting jobs in the order of the last scheduling pass; without those that it did not consider."""
        behind = {place.after: job for job, place in self.order.items()}
        jobs: list[rows.Job] = []
        job = behind.pop(None, None)
        while job is not None:
            known = self.jobs.get(job)
            if known is not None and known.state == "queued" and known.held_by is None:
                jobs.append(known)
            job = behind.pop(job, None)
        return jobs

    def place_jobs(self) -> set[str]:
        """Set the places of the rows of waiting jobs; returns the jobs whose place changed."""
        if not self._is_reordered:
            return set()
        self._is_reordered = False
        places = {job.id: place for place, job in enumerate(self.queue(), 1)}
        moved = {id for id, job in self.jobs.items() if job.place != places.get(id)}
        for id in moved:
            self.jobs[id] = msgspec.structs.replace(self.jobs[id], place=places.get(id))
        return moved

    def decisions_on(self, job: str) -> list[rows.Decision]:
        """Decisions about a job since we attached, oldest first."""
        return [decision for _, decision in self.decisions if decision.job == job]


_TASK_STATES = {
    "queued": "pending", "starting": "starting", "running": "running", "stopping": "stopping", "finished": "done",
    "failed": "failed", "cancelled": "cancelled",
}  # fmt: skip
"""Words for the states in which tasks of an array are counted."""


def _fold(runs: Sequence[rows.Job]) -> rows.Job:
    """Row that stands for the tasks of an array; of one that ran again, for the newest run."""
    tasks = list({run.array.index: run for run in runs if run.array is not None}.values())
    counts: dict[str, int] = {}
    for task in tasks:
        counts[task.state] = counts.get(task.state, 0) + 1
    first, array = tasks[0], tasks[0].array
    assert array is not None, "only tasks of arrays are folded"
    order = ("running", "starting", "stopping", "queued", "failed", "cancelled", "finished")
    holding = [task for task in tasks if task.holds_devices]
    texts = [f"{counts[state]} {text}" for state, text in _TASK_STATES.items() if state in counts]
    most = f", at most {array.most} at once" if array.most else ""
    return rows.Job(
        id=f"{array.id}_*",
        name=array.name,
        state=next(state for state in order if state in counts),
        reason=f"{len(tasks)} tasks{most}",
        kind=first.kind,
        priority=first.priority,
        user=first.user,
        tenant=first.tenant,
        asked=first.asked,
        asked_kind=first.asked_kind,
        devices=tuple(device for task in holding for device in task.devices),
        hosts=tuple(dict.fromkeys(host for task in holding for host in task.hosts)),
        holds_devices=bool(holding),
        step=sum(task.is_over for task in tasks),
        steps=len(tasks),
        place=min((task.place for task in tasks if task.place is not None), default=None),
        submitted_s=min(task.submitted_s for task in tasks),
        started_s=min((task.started_s for task in tasks if task.started_s), default=None),
        ended_s=max(task.ended_s or 0.0 for task in tasks) if all(task.is_over for task in tasks) else None,
        array=array,
        tasks=", ".join(texts),
    )
