"""Process beside the daemon that plays roll-outs, at the lowest priority on one core.

It answers requests on its input by messages on its output, until the daemon is gone.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice

import msgspec

from clusterd.core.performance_table import PerformanceTable
from clusterd.core.policies import POLICIES
from clusterd.core.state import Inspection, InspectionState, Job, State
from clusterd.core.view import Policy
from clusterd.forecasting import Answer, PastJob, Request, WhatIf, WhatIfAnswer, message, read_message
from clusterd.simulate.arrivals import Arrivals
from clusterd.simulate.remaining import Draw, courses_of
from clusterd.simulate.rollout import Course, roll_out, summary
from clusterd.types import JobId, JobKind

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
) -> list[Course]:
    """Courses until their number, or the processor time, is used up, or the daemon is gone."""
    parent, begun_s = os.getppid(), time.process_time()
    rolled = roll_out(state, policy, draws, request.now_s, "", awaited, arrivals, cpu_s / LEAST_ROLLOUTS)
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


def _with(wanted: WhatIf, state: State, now_s: float) -> tuple[State, JobId]:
    """The state with the job in its queue, as if it had been submitted a moment ago, before the next pass."""
    job_id, spec = JobId("new"), wanted.spec
    job = Job(job_id, spec, priority=spec.priority, submitted_s=now_s, queued_s=now_s, created_s=now_s)
    if spec.kind is JobKind.ELASTIC:
        job.inspection = Inspection(InspectionState.DONE, shape=wanted.shape, model=wanted.model, ended_s=now_s)
    jobs: Mapping[JobId, Job] = state.jobs
    return replace(state, jobs={**jobs, job_id: job}, queue={**state.queue, job_id: None}, passed_s=None), job_id


def main() -> None:
    """Answer requests until the daemon closes the input."""
    os.nice(19)
    policies: dict[str, Policy] = {}
    while (body := read_message(sys.stdin.buffer)) is not None:
        request = _requests.decode(body)
        policy = policies.setdefault(request.policy, POLICIES[request.policy]())
        sys.stdout.buffer.write(message(answer(request, policy)))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
