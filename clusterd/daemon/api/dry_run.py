"""Dry runs: the scheduler's own pass over a copy of its state in which jobs have been submitted."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import anyio.to_thread

from clusterd import projection, rows
from clusterd.core import decisions as d
from clusterd.core.events import JobSubmitted
from clusterd.core.scheduler import Scheduler
from clusterd.core.state import State
from clusterd.core.view import Policy
from clusterd.daemon.journal import codec
from clusterd.types import JobId


async def rehearse(scheduler: Scheduler, events: Sequence[JobSubmitted]) -> list[rows.DryRun]:
    """Outcome for each of these jobs if they were submitted now; nothing is kept or carried out."""
    state, policy = codec.encode(scheduler.state), deepcopy(scheduler.policy)
    return await anyio.to_thread.run_sync(outcomes, state, policy, events)


def outcomes(state: bytes, policy: Policy, events: Sequence[JobSubmitted]) -> list[rows.DryRun]:
    """Outcome for each job; changes `policy`."""
    copy = Scheduler(policy)
    copy.state = codec.state(state)
    copy.state.passed_s = None  # a submit may have to wait for its pass: this is that pass
    decisions = copy.handle(*events)
    changes = _changes(copy.state, decisions, {event.job for event in events})
    return [_outcome(copy.state, event.job, decisions, changes) for event in events]


def _outcome(
    state: State, job: JobId, decisions: Sequence[d.Decision], changes: dict[str, tuple[rows.SubmittedJob, ...]]
) -> rows.DryRun:
    """State of a submitted job after the pass: where it starts, or its place in the queue and what it waits for."""
    known, start = state.jobs[job], d.LaunchAttempt.match(decisions, job=job)
    place = projection.place_row(job, state)
    return rows.DryRun(
        starts=start is not None, state=known.state.value, reason=start.reason if start is not None else known.reason,
        ranks=codec.plain(start.ranks) if start is not None else (), promise=projection.promise_row(job, state),
        place=place.place, ahead=len(place.ahead), after=place.after, **changes,
    )  # fmt: skip


def _changes(
    state: State, decisions: Sequence[d.Decision], submitted: set[JobId]
) -> dict[str, tuple[rows.SubmittedJob, ...]]:
    """Running jobs that the pass stops, and those that it migrates, live or through host memory."""
    changes: dict[str, dict[JobId, rows.SubmittedJob]] = {"stops": {}, "migrates": {}}
    for decision in decisions:
        if isinstance(decision, d.StopAttempt | d.StartMigration) and decision.job not in submitted:
            job = state.jobs[decision.job]
            stops = isinstance(decision, d.StopAttempt) and (job.attempt is None or not job.attempt.pending_restart)
            row = rows.SubmittedJob(id=job.id, name=job.spec.name, reason=decision.reason)
            changes["stops" if stops else "migrates"].setdefault(job.id, row)
    return {kind: tuple(affected.values()) for kind, affected in changes.items()}
