"""Roll-outs: courses of a live cluster, each with run times drawn anew, and the forecasts that they give."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.scheduler import Scheduler
from clusterd.core.state import State
from clusterd.core.view import Policy
from clusterd.forecasting import SHARES, PastJob
from clusterd.rows import Forecast, Quantiles
from clusterd.simulate.arrivals import Arrivals
from clusterd.simulate.live import LiveSimulation
from clusterd.simulate.remaining import Chance, Draw, Elapsing
from clusterd.simulate.runs import Run
from clusterd.types import DeviceId, HostId, JobId
from clusterd.units import counted

HORIZON_S = 30 * 86400.0
"""Time played at most; what has not happened by then is not known."""

ROUND_SHARE = 0.1
"""Least time between two passes in which nothing has happened, as a share of the time played: it bounds the relative
error of a start that waits for time alone, and without it a day would have 2,880 passes."""

GATHER_SHARE = 0.002
"""Time within which events are one batch, as a share of the time played: it bounds the relative error of each start."""

_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(State)


@dataclass(slots=True)
class Course:
    """Starts and ends of jobs in one roll-out."""

    start_s: dict[JobId, float] = field(default_factory=dict)
    end_s: dict[JobId, float] = field(default_factory=dict)
    plan: dict[JobId, str] = field(default_factory=dict)  # and number of devices, at the start
    after: dict[JobId, JobId] = field(default_factory=dict)  # job by whose end or shrinking the start became possible
    watched: Watched | None = None
    free_s: float = math.inf  # since when no job is at the watched place

    def on_batch(self, scheduler: Scheduler, events: Sequence[e.Event], decisions: Sequence[d.Decision]) -> None:
        """Record what one batch decided."""
        if self.watched is not None and math.isinf(self.free_s):
            self.look(scheduler.state, events[-1].at_s)
        freed = [event.job for event in events if isinstance(event, e.AttemptStopped)]
        for decision in decisions:
            if isinstance(decision, d.LaunchAttempt) and decision.job not in self.start_s:
                self.start_s[decision.job] = events[-1].at_s
                devices = counted(sum(place.device is not None for place in decision.ranks), "device")
                self.plan[decision.job] = f"{decision.plan} on {devices}" if decision.plan is not None else devices
                if others := [job for job in freed if job != decision.job]:
                    self.after[decision.job] = others[-1]
            elif isinstance(decision, d.EndJob):
                self.end_s[decision.job] = events[-1].at_s

    def look(self, state: State, at_s: float) -> None:
        """Note the time if no job is at the watched place."""
        if self.watched is not None and at_s >= self.watched.from_s and not self.watched.is_busy(state):
            self.free_s = at_s


@dataclass(frozen=True, slots=True)
class Watched:
    """Hosts or devices that are to be free from some time on."""

    hosts: tuple[HostId, ...] = ()
    devices: tuple[DeviceId, ...] = ()
    from_s: float = -math.inf

    def is_busy(self, state: State) -> bool:
        """True while a job is there."""
        return any(state.jobs_by_host.get(host) for host in self.hosts) or any(d in state.holders for d in self.devices)


def play(
    state: State,
    policy: Policy,
    runs: Iterable[Run],
    now_s: float,
    awaited: Iterable[JobId],
    later: Iterable[tuple[float, PastJob]] = (),
    passes_s: float = math.inf,
    changes: Iterable[e.Event] = (),
    watched: Watched | None = None,
) -> Course:
    """Play a state forward until the awaited jobs are over; changes the state and the runs.

    Args:
        later: jobs that are submitted meanwhile, with their times.
        passes_s: processor time after which the course is cut off; what has not happened by then is not known.
        changes: happen first.
        watched: place of which the course tells when it is free.
    """
    course = Course(watched=watched)
    simulation = LiveSimulation(policy, now_s + HORIZON_S, None, GATHER_SHARE, ROUND_SHARE, course.on_batch, passes_s)
    for number, (at_s, past) in enumerate(later):
        job, name = JobId(f"later {number}"), past.spec.name
        run = Run(job=job, name=name, steps=past.ran_s, speed=Elapsing(), has_steps=False, keeps_state=False)
        simulation.submit(at_s, past.spec, run)
    until = [*awaited]
    simulation.go_on(state, runs, now_s, until, changes)
    if watched is not None and math.isinf(course.free_s) and all(job in course.end_s for job in until):
        # All is over, and nothing happened at the time from which it counts. Of a course that was cut off nobody knows.
        course.look(state, max(watched.from_s, now_s))
    return course


def roll_out(
    state: State,
    policy: Policy,
    draws: Mapping[JobId, Draw],
    now_s: float,
    seed: str,
    awaited: Iterable[JobId] | None = None,
    arrivals: Arrivals | None = None,
    passes_s: float = math.inf,
    changes: Iterable[e.Event] = (),
    watched: Watched | None = None,
) -> Iterator[Course]:
    """Yield one course after another, without end; each draws its run times by its own number.

    Args:
        policy: remembers curves from one course to the next.
        awaited: jobs by whose end a course is over; None: all that are drawn.
        arrivals: jobs that are submitted meanwhile; None: none.
        passes_s, changes, watched: see `play`.
    """
    tables, body = state.performance_tables, _encoder.encode(replace(state, performance_tables={}))
    number = 0
    while True:
        copy = _decoder.decode(body)
        copy.performance_tables = dict(tables)
        random_ = Chance(f"{seed} {number}")
        runs = [draw(random_) for draw in draws.values()]
        later = arrivals.draw(random_) if arrivals is not None else ()
        until = draws if awaited is None else awaited
        yield play(copy, policy, runs, now_s, until, later, passes_s, changes, watched)
        number += 1


def summary(
    courses: Sequence[Course], state: State, jobs: Iterable[JobId], now_s: float, weeks: int = 0
) -> dict[JobId, Forecast]:
    """Forecast of each job by the quantiles of its starts and ends; none of one that most courses never start or end.

    Args:
        state: from which the courses began.
        weeks: from which later submissions were drawn.
    """
    found: dict[JobId, Forecast] = {}
    for job in jobs:
        ends = quantiles([course.end_s.get(job, math.inf) for course in courses])
        starts = None
        if job in state.queue:
            starts = quantiles([course.start_s.get(job, math.inf) for course in courses])
        after = Counter(course.after[job] for course in courses if job in course.after).most_common(1)
        if ends is not None or starts is not None:
            first = state.jobs.get(after[0][0]) if after else None
            name = first.spec.name if first is not None else ""
            found[job] = Forecast(at_s=now_s, rollouts=len(courses), start=starts, end=ends, after=name, weeks=weeks)
    return found


def quantiles(times_s: Sequence[float]) -> Quantiles | None:
    """Quantiles of some points in time; None: most of them never come."""
    ordered = sorted(times_s)
    # Ranks of n + 1: between the smallest and the largest of 20 lie 90% of what comes. In doubt outwards.
    ranks = [share * (len(ordered) + 1) for share in SHARES]
    outer = [math.floor(ranks[0]), math.floor(ranks[1]), round(ranks[2]), math.ceil(ranks[3]), math.ceil(ranks[4])]
    at = [ordered[min(max(rank, 1), len(ordered)) - 1] for rank in outer]
    if math.isinf(at[2]):
        return None
    p5_s, p25_s, p50_s, p75_s, p95_s = (time_s if time_s < math.inf else None for time_s in at)
    return Quantiles(p5_s, p25_s, p50_s or 0.0, p75_s, p95_s)
