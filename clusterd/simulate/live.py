"""A live state played forward: the running cluster's hosts, jobs, timers and claims, from now on.

The simulation takes a state over in the middle of things: launches, stops and migrations that are under way end as if
they had begun now, and trials are over, as nobody measures them. Hosts stay as they are: none fails or comes back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.state import Attempt, Job, State
from clusterd.core.timers import Timer, TimerKind
from clusterd.core.view import Policy
from clusterd.simulate.cluster import Cluster
from clusterd.simulate.loop import Simulation
from clusterd.simulate.runs import Result, Run
from clusterd.simulate.setting import Setting
from clusterd.simulate.truth import Truth
from clusterd.simulate.workload import Workload
from clusterd.simulate.world import OnBatch
from clusterd.types import AttemptState, JobId, JobSpec

NOT_PLAYED = (TimerKind.STALL, TimerKind.CHECKPOINT, TimerKind.HOST_LOST, TimerKind.ACCOUNT_LOST)
"""Timers that watch for faults, or cause no decision about devices."""


class LiveSimulation(Simulation):
    """One course of a live cluster.

    Args:
        gather_share: events that lie no further apart than this share of the time played so far are one batch; 0: only
            those of one instant.
        round_share: passes in which nothing has happened are at least this share of the time played so far apart; 0: as
            often as the daemon makes them.
    """

    def __init__(
        self,
        policy: Policy,
        horizon_s: float,
        move_s: float | None = None,
        gather_share: float = 0.0,
        round_share: float = 0.0,
        on_batch: OnBatch | None = None,
        passes_s: float = math.inf,
    ) -> None:
        nothing = Setting(Cluster(()), Workload(()), Truth({}), {}, move_s=move_s, horizon_s=horizon_s)
        super().__init__(nothing, policy, on_batch, passes_s)
        self._gather_share, self._round_share, self._from_s = gather_share, round_share, 0.0

    def go_on(
        self,
        state: State,
        runs: Iterable[Run],
        now_s: float,
        awaited: Iterable[JobId],
        changes: Iterable[e.Event] = (),
    ) -> Result:
        """Play until the awaited jobs are over, or the horizon is reached; changes the state and the runs.

        Args:
            runs: of all jobs that hold devices, and of those that may start.
            changes: happen first.
        """
        self.scheduler.state = state
        self.facts = {host.id: host.facts for host in state.hosts.values() if host.facts is not None}
        self.types = {device.id: device.name for facts in self.facts.values() for device in facts.devices}
        self._queue.now_s = self._from_s = now_s
        self._awaited = set(awaited)
        # No pass of its own: what is due is among the timers, and a further pass would decide what the daemon does not.
        first = [replace(change, **self._queue.stamp()) for change in changes]
        for run in runs:
            self.runs[run.job] = run
            job = state.jobs[run.job]
            if job.attempt is None:
                self._usage.waiting[run.job] = run
            else:
                self._usage.running[run.job] = run
                self._take_over(run, job, job.attempt)
                if job.trials.is_running:
                    first.append(e.TrialProposed(**self._queue.stamp(), job=job.id, plan=None))
        for host in state.hosts.values():
            for job_id, attempt, generation in host.orphans:
                about: dict[str, Any] = {"job": job_id, "attempt": attempt, "generation": generation, "host": host.id}
                stop = d.StopAttempt(cause=e.NO_EVENT, reason="", **about, grace_s=0.0)
                self._queue.add(now_s, "stopped", stop)
        for timer, at_s in state.timers.items():
            self._set_timer(timer, at_s)
        if first:
            self._handle(first)
        return self._play(now_s)

    def _gathered_s(self, at_s: float) -> float:
        return self._queue.last_s(at_s + self._gather_share * (at_s - self._from_s))

    def submit(self, at_s: float, spec: JobSpec, run: Run) -> None:
        """Let a job arrive at this time."""
        self._queue.add(at_s, "submitted", (spec, run))

    def _when_submitted(self, payload: tuple[JobSpec, Run]) -> list[e.Event]:
        spec, run = payload
        self.runs[run.job] = self._usage.waiting[run.job] = run
        return [e.JobSubmitted(**self._queue.stamp(), job=run.job, spec=spec)]

    def _take_over(self, run: Run, job: Job, attempt: Attempt) -> None:
        """Let what is under way with an attempt go on from here."""
        now_s, places = self._queue.now_s, [rank.place for _, rank in sorted(attempt.ranks.items())]
        run.attempt, run.devices = attempt.number, len(places)
        about: dict[str, Any] = {"cause": e.NO_EVENT, "reason": "", "job": job.id, "attempt": attempt.number}
        here: dict[str, Any] = {**about, "generation": attempt.generation}
        for generation, retired in attempt.retired.items():
            for host in sorted(retired.pending):
                self._queue.add(now_s, "stopped", d.StopAttempt(**about, generation=generation, host=host, grace_s=0.0))
        if attempt.state is AttemptState.STOPPING:
            for host in sorted(attempt.stop.pending):
                self._queue.add(now_s, "stopped", d.StopAttempt(**here, host=host, grace_s=0.0))
            return
        if attempt.state is AttemptState.LAUNCHING:
            launch = d.LaunchAttempt(**here, plan=attempt.plan, ranks=tuple(places))
            self._queue.add(now_s, "launched", launch)
        if (moving := attempt.migration) is not None:
            migration = d.StartMigration(
                **here,
                plan=moving.old_plan,
                ranks=tuple(places),
                new_generation=moving.generation,
                new_plan=moving.plan,
                new_ranks=moving.places,
            )
            self._queue.add(now_s + self.costs.prepare_s, "verified", migration)
        if job.resuming is not None:
            self._queue.add(now_s, "moved", (d.ResumeAttempt(**here, hosts=attempt.hosts), 0.0))
        self._go(run, attempt.plan, places, max(run.since_s, now_s))

    def _do_SetTimer(self, decision: d.SetTimer) -> None:  # noqa: N802 - named for the decision
        self._set_timer(decision.timer, decision.at_s)

    def _set_timer(self, timer: Timer, at_s: float) -> None:
        if timer.kind in NOT_PLAYED:
            return
        fires_s = at_s
        if timer.kind in (TimerKind.ROUND, TimerKind.SETTLE):
            # On a grid that widens by octaves, so that those of several jobs are one batch.
            played_s = self._round_share * (at_s - self._from_s)
            step_s = 2.0 ** math.floor(math.log2(played_s)) if played_s > 0.0 else 0.0
            fires_s = math.ceil(at_s / step_s) * step_s if step_s else at_s
        self._queue.add(fires_s, "timer", (timer, at_s))
