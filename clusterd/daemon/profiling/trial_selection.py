"""Selection of trials: the most informative plan for a job, while a trial gains the job more than it costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import anyio.to_thread

from clusterd.core import events as e
from clusterd.core.allocation.migration_cost import RESTART_S
from clusterd.core.estimates.first_fit import memory_conflict
from clusterd.core.ledger import shape_of
from clusterd.core.lifecycle import trials
from clusterd.core.state import Attempt, Job
from clusterd.daemon.journal.engine import Engine
from clusterd.profiling.knowledge import Knowledge
from clusterd.types import JobKind

WARM_UP_STEPS = 3
"""Steps of each generation that are not measured: caches, connections and allocators settle."""

TRIAL_STEPS = 10
TRIAL_STEPS_MOST = 100
TRIAL_S = 1.5
SLOW_TRIAL_STEPS = 4
SLOW_STEP_S = 2.0

MOVE_S = 0.2
"""Assumed downtime of a trial's migrations until the job has migrated once."""

SHARE = 0.05
"""Part of a job's remaining time that trials may cost."""


class TrialSelection:
    """Proposes trials, for one job of a model at a time, until no further one is worth its cost."""

    def __init__(self, engine: Engine, known_of: Callable[[Job, Attempt], Knowledge | None], *, trials: bool) -> None:
        """`trials`: allow jobs to run under other plans."""
        self._engine, self._known_of, self._trials = engine, known_of, trials
        self._state = engine.state
        self._spent_s: dict[str, float] = {}
        self._nothing_to_try: dict[str, tuple[int, int, int]] = {}

    def forget(self, job: str) -> None:
        """Drop the records of a job that is over."""
        self._spent_s.pop(job, None)
        self._nothing_to_try.pop(job, None)

    async def look(self) -> None:
        """Check every running job for a next trial."""
        for job_id in list(self._state.active):
            await self.look_at(self._state.jobs[job_id])

    async def look_at(self, job: Job) -> None:
        """Propose the next trial of one job, or report that there is none."""
        attempt = trials.ready(job)
        if (
            attempt is None
            or job.trials.current is not None
            or not job.inspection.model
            or job.spec.kind is not JobKind.ELASTIC
        ):
            return
        if not job.progress.step_time_s or (not job.trials.is_running and not self._may_begin(job)):
            return
        known = self._known_of(job, attempt)
        if known is None:
            return
        self._note_refused(job, known)
        answer, restarts = None, False
        why = "the rest of the job is too short to repay another"
        held = trials.held(attempt, self._state.hosts)
        known_so_far = (len(known.online.observations), len(known.refused), len(held))
        if not job.trials.is_running and self._nothing_to_try.get(job.id) == known_so_far:
            return  # checked before, and nothing has changed since
        tried = len({o.row.plan for o in known.online.observations}) + len(known.refused)
        if self._is_worth_it(job, self._move_s(job)):
            least = max(job.spec.resources.min_devices, 1)
            shapes = [shape_of(trials.pack(held, n)) for n in range(least, len(held) + 1)]
            ask = partial(known.next_trial, shapes, tried, beside=attempt.plan)
            answer = await anyio.to_thread.run_sync(ask)
            why = "no other plan is worth one"
        if answer is None and self._restarts(job, attempt) and self._is_worth_it(job, self._restart_s(job)):
            # No plan fits in memory beside the training ranks: restart through host memory with a plan of all devices.
            restarts = True
            answer = await anyio.to_thread.run_sync(partial(known.next_trial, [shape_of(held)], tried))
        if answer is None:
            self._nothing_to_try[job.id] = known_so_far
            if job.trials.is_running:
                await self._engine.report(e.TrialProposed(at_s=time.time(), job=job.id, plan=None, why=why))
            return
        choice, why = answer
        steps = SLOW_TRIAL_STEPS if choice.step_time_s > SLOW_STEP_S else TRIAL_STEPS
        # Short steps are measured for longer, so that a brief disturbance of a host is not taken for the plan's speed.
        steps = max(steps, min(round(TRIAL_S / choice.step_time_s), TRIAL_STEPS_MOST))
        extra_s = (steps + WARM_UP_STEPS) * max(choice.step_time_s - job.progress.step_time_s, 0.0)
        extra_s += self._restart_s(job) if restarts else self._move_s(job)
        self._spent_s[job.id] = self._spent_s.get(job.id, 0.0) + extra_s
        await self._engine.post(e.TrialProposed(at_s=time.time(), job=job.id, plan=choice.plan, steps=steps, why=why))

    def _may_begin(self, job: Job) -> bool:
        """True if trials may begin: no other job of the model has any, since all share the results."""
        if job.pinned is not None or not self._trials or not job.spec.trials:
            return False
        others = [self._state.jobs[other] for other in self._state.active]
        return all(not other.trials.is_running or other.inspection.model != job.inspection.model for other in others)

    def _is_worth_it(self, job: Job, move_s: float) -> bool:
        left = (job.inspection.shape or {}).get("steps", 0) - job.progress.step
        left_s = left * (job.progress.step_time_s or 0.0)
        spent_s = self._spent_s.get(job.id, 0.0)
        expected_s = (TRIAL_STEPS + WARM_UP_STEPS) * (job.progress.step_time_s or 0.0) * 0.5 + move_s
        return bool(spent_s + expected_s <= SHARE * (left_s + spent_s))

    def _restarts(self, job: Job, attempt: Attempt) -> bool:
        """True if a second set of the job's ranks does not fit in memory beside the training ones."""
        assert attempt.plan is not None
        return memory_conflict(self._state.hosts, job, attempt, attempt.plan, attempt.devices) is not None

    def _restart_s(self, job: Job) -> float:
        return self._state.restart_costs_s.get(job.inspection.model, RESTART_S)

    def _move_s(self, job: Job) -> float:
        took = [m.downtime_s for m in job.migrations if m.downtime_s is not None]
        return median(took) if took else MOVE_S

    def _note_refused(self, job: Job, known: Knowledge) -> None:
        """Exclude plans that cannot run; trials that were only interrupted may be repeated."""
        known.refused.update(trial.plan for trial in job.trials.finished if trial.is_refused)
        known.refused.update(plan for plan, _ in job.failures.bounds.rejected)
