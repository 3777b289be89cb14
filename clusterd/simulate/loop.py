"""The virtual clock: events go to the scheduler, and its decisions are carried out against the truth.

All events of one instant are one batch, as in the daemon. Progress is reported with each batch and at completion, not
step by step.
"""

from __future__ import annotations

import heapq

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.simulate.costs import Side
from clusterd.simulate.runs import Result
from clusterd.simulate.world import World
from clusterd.types import JobId

TURNS_MAX = 2000
"""Limit of batches in one instant; a policy beyond it undoes its own decisions in a loop."""

IDLE_MAX = 1000
"""Limit of batches without a running job where only the policy's own timers are pending: it will start no job."""

NOT_SIMULATED = (d.DescribeModel, d.HoldJob, d.AbortMigration, d.TakeCheckpoint, d.UseCores)
"""Decisions without effect on the virtual clock: jobs come with their model, and migrations and hosts do not fail in
these ways. Any other decision must have a method here."""


class Simulation(World):
    """One workload under one policy."""

    # --- the clock ----------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Run until every job is over, no event is pending, or the horizon is reached."""
        start_s = self.workload.arrivals[0].at_s
        self._begin(start_s)
        for number, arrival in enumerate(self.workload.arrivals, 1):
            self._at(arrival.at_s, "arrival", (JobId(str(number)), arrival))
        for one in self._disturbances:
            self._at(one.at_s, "disturbance", one)
        end_s = start_s
        turns = idle = 0
        while self._heap and self._unfinished and idle < IDLE_MAX:
            at_s = self._heap[0][0]
            turns = turns + 1 if at_s == self.now_s else 0
            if turns > TURNS_MAX:
                raise ArithmeticError(f"{self.policy.name} changes its mind for ever at {at_s:.3f} s: no time passes")
            if at_s > self.horizon_s:
                self._advance(self.horizon_s)
                end_s = self.horizon_s
                break
            self._advance(at_s)
            events: list[e.Event] = []
            while self._heap and self._heap[0][0] <= at_s:
                _, _, kind, payload = heapq.heappop(self._heap)
                events += getattr(self, f"_when_{kind}")(payload)
            if events:
                self._handle([*self._progress(), *events])
                if self._going or any(kind != "timer" for _, _, kind, _ in self._heap):
                    end_s, idle = at_s, 0
                else:
                    idle += 1
        over = {run.arrival.name: self.scheduler.state.jobs[run.job] for run in self.runs.values() if run.end_s is None}
        failed = {name: job.reason for name, job in over.items() if job.state.is_final}
        stuck = {name: job.reason for name, job in over.items() if not job.state.is_final and end_s < self.horizon_s}
        return Result(
            policy=self.policy.name,
            runs=list(self.runs.values()),
            ended_s=end_s,
            started_s=start_s,
            device_s=self._device_s,
            idle_s=self._idle_s,
            devices=self.cluster.devices,
            passes=len(self.policy.seconds),
            pass_s=self.policy.seconds,
            failed=failed,
            stuck=stuck,
        )

    def _begin(self, at_s: float) -> None:
        self.now_s = at_s
        first: list[e.Event] = [e.DaemonStarted(**self._stamp(), epoch=1)]
        first += [e.HostAdded(**self._stamp(), host=host) for host in self.facts]
        first += [e.HostConnected(**self._stamp(), host=host, facts=facts) for host, facts in self.facts.items()]
        first += [
            e.SpeedLearned(**self._stamp(), model=model, table=table, why="trial runs")
            for model, table in self.performance_tables.items()
        ]
        self._handle(first)

    def _advance(self, at_s: float) -> None:
        """Advance the clock: running jobs make progress, waiting jobs accumulate waiting time."""
        passed_s = at_s - self.now_s
        if passed_s > 0:
            for job in self._going:
                run = self.runs[job]
                run.device_s += passed_s * run.devices
            for job in self._waiting:
                self.runs[job].waited_s += passed_s
            leased = len(self.scheduler.state.holders)
            self._device_s += passed_s * leased
            if self._waiting:
                self._idle_s += passed_s * (self.cluster.devices - leased)
            self.now_s = at_s

    def _progress(self) -> list[e.Event]:
        events: list[e.Event] = []
        for job in self._going:
            run = self.runs[job]
            run.go_to(self.now_s)
            if run.rate > 0 and run.done > 0:
                events.append(
                    e.AttemptProgressed(
                        **self._stamp(),
                        job=job,
                        attempt=run.attempt,
                        step=int(run.done + 1e-6),
                        loss=None,
                        step_time_s=1.0 / run.rate,
                    )
                )
        return events

    def _handle(self, events: list[e.Event]) -> None:
        decided = self.scheduler.handle(*events)
        for decision in decided:
            if not isinstance(decision, NOT_SIMULATED):
                getattr(self, f"_do_{type(decision).__name__}")(decision)
        if self._on_batch is not None:
            self._on_batch(self.scheduler, events, decided)

    # --- what is decided ----------------------------------------------------------------------------------------------

    def _do_LaunchAttempt(self, decision: d.LaunchAttempt) -> None:  # noqa: N802 - named for the decision
        run = self.runs[decision.job]
        self._waiting.pop(decision.job, None)
        self._going[decision.job] = None
        delay_s = self.costs.start_s if decision.attempt == 1 else self.costs.restart_s
        run.restarts += decision.attempt > 1
        run.first_start_s = self.now_s if run.first_start_s is None else run.first_start_s
        run.attempt, run.devices = decision.attempt, len(decision.ranks)
        self._at(self.now_s, "launched", decision)
        assert decision.plan is not None
        self._go(run, decision.plan, decision.ranks, self.now_s + delay_s)

    def _do_StopAttempt(self, decision: d.StopAttempt) -> None:  # noqa: N802
        run = self.runs[decision.job]
        job = self.scheduler.state.jobs[decision.job]
        attempt = job.attempt
        if attempt is not None and attempt.generation == decision.generation and run.end_s is None:
            if attempt.stop.outcome is not None and attempt.stop.outcome.value != "preempted":
                self._fall_back(run)
            run.go_to(self.now_s)
            run.rate, run.version = 0.0, run.version + 1
        if decision.host in self.down:
            self._deferred.setdefault(decision.host, []).append(decision)
        else:
            self._at(self.now_s, "stopped", decision)

    def _do_RequeueJob(self, decision: d.RequeueJob) -> None:  # noqa: N802
        self._going.pop(decision.job, None)
        self._waiting[decision.job] = None
        self.runs[decision.job].devices = 0

    def _do_EndJob(self, decision: d.EndJob) -> None:  # noqa: N802
        self._going.pop(decision.job, None)
        self._waiting.pop(decision.job, None)
        self._unfinished -= 1
        run = self.runs[decision.job]
        run.devices = 0
        if run.end_s is None:
            run.refused = decision.reason

    def _do_StartMigration(self, decision: d.StartMigration) -> None:  # noqa: N802
        run = self.runs[decision.job]
        run.moves += 1
        run.devices = max(run.devices, len(decision.new_ranks))
        self._at(self.now_s + self.costs.prepare_s, "verified", decision)

    def _do_ResumeAttempt(self, decision: d.ResumeAttempt) -> None:  # noqa: N802
        run = self.runs[decision.job]
        attempt = self.scheduler.state.jobs[decision.job].attempt
        assert attempt is not None and attempt.plan is not None
        places = [rank.place for _, rank in sorted(attempt.ranks.items())]
        before = attempt.former[max(attempt.former)]
        assert before.plan is not None
        old = Side(before.plan, list(before.hosts.values()))
        new = Side(attempt.plan, [place.host for place in places])
        downtime_s = self.costs.downtime_s(run.model.parameters, old, new)
        run.devices = len(places)
        self._at(self.now_s + downtime_s, "moved", (decision, downtime_s))
        self._go(run, attempt.plan, places, self.now_s + downtime_s)

    def _do_AbortCollectives(self, decision: d.AbortCollectives) -> None:  # noqa: N802
        self._at(self.now_s, "cut_off", decision)

    def _do_SetTimer(self, decision: d.SetTimer) -> None:  # noqa: N802
        self._at(decision.at_s, "timer", (decision.timer, decision.at_s))
