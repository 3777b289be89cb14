"""Process beside the daemon that plays roll-outs, at the lowest priority on one core.

It answers requests on its input by messages on its output, until the daemon is gone.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import msgspec

from clusterd.core import events as e
from clusterd.core.performance_table import PerformanceTable
from clusterd.core.policies import POLICIES
from clusterd.core.state import Inspection, InspectionState, Job, State
from clusterd.core.timers import Timer, TimerKind
from clusterd.core.view import Policy
from clusterd.forecasting import Answer, Change, PastJob, Request, WhatIf, WhatIfAnswer, message, read_message
from clusterd.process_attributes import collect_seldom
from clusterd.rows import Delay, Effect
from clusterd.simulate.arrivals import Arrivals
from clusterd.simulate.remaining import Draw, courses_of
from clusterd.simulate.rollout import Course, Watched, quantiles, roll_out, summary
from clusterd.types import JobId, JobKind

LEAST_DELAY_S = 60.0
"""Delays that are shorter are left out, but for those that one roll-out in twenty has."""

LEAST_ROLLOUTS = 5
"""Roll-outs that are made at least, each cut off after its share of the time: of fewer there are no quantiles."""

_requests = msgspec.msgpack.Decoder(Request)
_states = msgspec.msgpack.Decoder(State)
_past = msgspec.msgpack.Decoder(list[PastJob])
_table = msgspec.msgpack.Decoder(PerformanceTable)


def answer(request: Request, policy: Policy) -> Answer:
    """Forecasts of all jobs that are not over, or of the what-ifs."""
    tables = {model: _table.decode(body) for model, body in request.tables.items()}
    state = replace(_states.decode(request.state), performance_tables=tables)
    arrivals = Arrivals(_past.decode(request.past), request.now_s)
    if request.what_ifs:
        cpu_s = request.cpu_s / len(request.what_ifs)
        found = tuple(_what_if(each, state, request, policy, cpu_s, arrivals) for each in request.what_ifs)
        return Answer(what_ifs=found)
    if request.change is not None:
        return Answer(effect=_effect(request.change, state, request, policy, arrivals))
    draws = courses_of(state, request.now_s)
    courses = _in_time(request, request.cpu_s, state, policy, draws, draws, arrivals)
    return Answer(
        jobs={str(job): one for job, one in summary(courses, state, draws, request.now_s, arrivals.weeks).items()}
    )


def _in_time(
    request: Request,
    cpu_s: float,
    state: State,
    policy: Policy,
    draws: Mapping[JobId, Draw],
    awaited: Iterable[JobId],
    arrivals: Arrivals,
    changes: Sequence[e.Event] = (),
    watched: Watched | None = None,
) -> list[Course]:
    """Courses until their number, or the processor time, is used up, or the daemon is gone."""
    parent, begun_s = os.getppid(), time.process_time()
    each_s = cpu_s / LEAST_ROLLOUTS
    rolled = roll_out(state, policy, draws, request.now_s, "", awaited, arrivals, each_s, changes, watched)
    courses: list[Course] = []
    for course in islice(rolled, request.rollouts):
        courses.append(course)
        if os.getppid() != parent:
            sys.exit(0)
        if len(courses) >= LEAST_ROLLOUTS and time.process_time() - begun_s > cpu_s:
            break
    return courses


def _what_if(
    wanted: WhatIf, state: State, request: Request, policy: Policy, cpu_s: float, arrivals: Arrivals
) -> WhatIfAnswer:
    """Forecast of one job if it were submitted now."""
    with_it, job = _with(wanted, state, request.now_s)
    draws = courses_of(with_it, request.now_s)
    courses = _in_time(request, cpu_s, with_it, policy, draws, [job], arrivals)
    plans = Counter(course.plan[job] for course in courses if job in course.plan)
    return WhatIfAnswer(
        forecast=summary(courses, with_it, [job], request.now_s, arrivals.weeks).get(job),
        plan=plans.most_common(1)[0][0] if plans else "",
    )


def _effect(change: Change, state: State, request: Request, policy: Policy, arrivals: Arrivals) -> Effect:
    """Effect of a change, by pairs of roll-outs with and without it, in which each job has the same run time."""
    now_s, draws = request.now_s, courses_of(state, request.now_s)
    changes: list[e.Event] = [e.HostDrained(at_s=now_s, host=h, jobs_stay=change.jobs_stay) for h in change.drained]
    watched = Watched(hosts=change.drained)
    if change.claim is not None:
        changes.append(e.DevicesClaimed(at_s=now_s, claim=change.claim))
        watched = Watched(devices=change.claim.devices, from_s=change.claim.from_s)
    play = partial(_in_time, request, request.cpu_s / 2, state, policy, draws, draws, arrivals)
    pairs = list(zip(play(), play(changes, watched), strict=False))
    delays = []
    for job in draws:
        later = sorted(_later_s(with_it.end_s.get(job), without.end_s.get(job)) for without, with_it in pairs)
        p50_s, p95_s = later[len(later) // 2], later[min(math.ceil(0.95 * len(later)), len(later) - 1)]
        if abs(p50_s) >= LEAST_DELAY_S or p95_s >= LEAST_DELAY_S:
            spec = state.jobs[job].spec
            middle_s, most_s = (delay_s if math.isfinite(delay_s) else None for delay_s in (p50_s, p95_s))
            delays.append(Delay(job=job, name=spec.name, user=spec.user, p50_s=middle_s, p95_s=most_s))
    free = quantiles([with_it.free_s for _, with_it in pairs])
    return Effect(rollouts=len(pairs), free=free, delays=tuple(sorted(delays, key=_longest_first)))


def _longest_first(delay: Delay) -> float:
    return -delay.p50_s if delay.p50_s is not None else -math.inf


def _later_s(with_it_s: float | None, without_s: float | None) -> float:
    """Seconds by which a job ends later; infinite: it does not within the time played."""
    if with_it_s is None:
        return 0.0 if without_s is None else math.inf
    return with_it_s - without_s if without_s is not None else 0.0


def _with(wanted: WhatIf, state: State, now_s: float) -> tuple[State, JobId]:
    """The state with the job in its queue, as if it had been submitted a moment ago, before the next pass."""
    job_id, spec = JobId("new"), wanted.spec
    job = Job(job_id, spec, priority=spec.priority, submitted_s=now_s, queued_s=now_s, created_s=now_s)
    if spec.kind is JobKind.ELASTIC:
        job.inspection = Inspection(InspectionState.DONE, shape=wanted.shape, model=wanted.model, ended_s=now_s)
    jobs: Mapping[JobId, Job] = state.jobs
    timers = {**state.timers, Timer(TimerKind.PASS): now_s}  # on an idle cluster nothing else would begin one
    queue = {**state.queue, job_id: None}
    return replace(state, jobs={**jobs, job_id: job}, queue=queue, timers=timers, passed_s=None), job_id


def main() -> None:
    """Answer requests until the daemon closes the input."""
    os.nice(19)
    collect_seldom()
    policies: dict[str, Policy] = {}
    while (body := read_message(sys.stdin.buffer)) is not None:
        request = _requests.decode(body)
        policy = policies.setdefault(request.policy, POLICIES[request.policy]())
        sys.stdout.buffer.write(message(answer(request, policy)))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
