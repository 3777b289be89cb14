"""The virtual clock: events go to the scheduler, and its decisions are carried out against the truth.

All events of one instant are one batch, as in the daemon. Progress is reported with each batch and at completion, not
step by step.
"""

from __future__ import annotations

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

NOT_SIMULATED = (
    d.DescribeModel, d.HoldJob, d.AbortMigration, d.ReleaseBooked, d.SignalRanks, d.TakeCheckpoint, d.UseCores,
)  # fmt: skip
"""Decisions without effect on the virtual clock: jobs come with their model, nobody is told, and migrations and
hosts do not fail in these ways. Any other decision must have a method here."""


class Simulation(World):
    """One workload under one policy."""

    # --- the clock ----------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Run until every job is over, no event is pending, or the horizon is reached."""
        start_s = self.setting.workload.arrivals[0].at_s
        self._begin(start_s)
        for number, arrival in enumerate(self.setting.workload.arrivals, 1):
            self._queue.add(arrival.at_s, "arrival", (JobId(str(number)), arrival))
            self._awaited.add(JobId(str(number)))
        for one in self.setting.disturbances:
            self._queue.add(one.at_s, "disturbance", one)
        return self._play(start_s)

    def _play(self, start_s: float) -> Result:
        """Go from event to event until no awaited job is left."""
        end_s = start_s
        turns = idle = 0
        while (at_s := self._queue.next_s()) is not None and self._awaited and idle < IDLE_MAX:
            turns = turns + 1 if at_s == self._queue.now_s else 0
            if turns > TURNS_MAX:
                raise ArithmeticError(f"{self.policy.name} changes its mind for ever at {at_s:.3f} s: no time passes")
            if at_s > self.setting.horizon_s or self.policy.total_s > self.passes_s:
                end_s = min(self.setting.horizon_s, at_s)
                self._advance(end_s)
                break
            events: list[e.Event] = []
            at_s = self._gathered_s(at_s)
            self._advance(at_s)
            for kind, payload in self._queue.take_until(at_s):
                events += getattr(self, f"_when_{kind}")(payload)
            if events:
                self._handle([*self._progress(), *events])
                if self._usage.running or not self._queue.has_only_timers():
                    end_s, idle = at_s, 0
                else:
                    idle += 1
        over = {run.name: self.scheduler.state.jobs[run.job] for run in self.runs.values() if run.end_s is None}
        failed = {name: job.reason for name, job in over.items() if job.state.is_final}
        is_cut = end_s >= self.setting.horizon_s
        stuck = {name: job.reason for name, job in over.items() if not (job.state.is_final or is_cut)}
        return Result(
            policy=self.policy.name,
            runs=self._arrived,
            ended_s=end_s,
            started_s=start_s,
            device_s=self._usage.device_s,
            idle_s=self._usage.idle_s,
            devices=len(self.types),
            passes=len(self.policy.seconds),
            pass_s=self.policy.seconds,
            failed=failed,
            stuck=stuck,
        )

    def _gathered_s(self, at_s: float) -> float:
        """Time of the last event in the batch of one at this time."""
        return at_s

    def _begin(self, at_s: float) -> None:
        self._queue.now_s = at_s
        first: list[e.Event] = [e.DaemonStarted(**self._queue.stamp(), epoch=1)]
        first += [e.HostAdded(**self._queue.stamp(), host=host) for host in self.facts]
        first += [e.HostConnected(**self._queue.stamp(), host=host, facts=facts) for host, facts in self.facts.items()]
        first += [
            e.SpeedLearned(**self._queue.stamp(), model=model, table=table, why="trial runs")
            for model, table in self.setting.performance_tables.items()
        ]
        self._handle(first)

    def _advance(self, at_s: float) -> None:
        """Advance the clock: running jobs make progress, waiting jobs accumulate waiting time."""
        passed_s = at_s - self._queue.now_s
        if passed_s > 0:
            leased = len(self.scheduler.state.holders)
            self._usage.add(passed_s, leased, len(self.types) - leased)
            self._queue.now_s = at_s

    def _progress(self) -> list[e.Event]:
        events: list[e.Event] = []
        for run in self._usage.running.values():
            run.go_to(self._queue.now_s)
            if run.rate > 0 and run.done > 0 and run.has_steps:
                events.append(
                    e.AttemptProgressed(
                        **self._queue.stamp(),
                        job=run.job,
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
        self._usage.start(run)
        delay_s = self.costs.start_s if decision.attempt == 1 else self.costs.restart_s
        run.restarts += decision.attempt > 1
        run.first_start_s = self._queue.now_s if run.first_start_s is None else run.first_start_s
        run.attempt, run.devices = decision.attempt, len(decision.ranks)
        self._queue.add(self._queue.now_s, "launched", decision)
        self._go(run, decision.plan, decision.ranks, self._queue.now_s + delay_s)

    def _do_StopAttempt(self, decision: d.StopAttempt) -> None:  # noqa: N802
        run, job = self.runs.get(decision.job), self.scheduler.state.jobs.get(decision.job)
        attempt = job.attempt if job is not None else None
        if run is not None and attempt is not None and attempt.generation == decision.generation and run.end_s is None:
            if attempt.stop.outcome is not None and attempt.stop.outcome.value != "preempted":
                self._fall_back(run)
            run.go_to(self._queue.now_s)
            run.rate, run.version = 0.0, run.version + 1
        if decision.host in self.down:
            self.down[decision.host].append(decision)
        else:
            self._queue.add(self._queue.now_s, "stopped", decision)

    def _do_RequeueJob(self, decision: d.RequeueJob) -> None:  # noqa: N802
        run = self.runs[decision.job]
        self._usage.requeue(run)
        if not run.keeps_state:
            run.done = run.saved = 0.0

    def _do_EndJob(self, decision: d.EndJob) -> None:  # noqa: N802
        self._awaited.discard(decision.job)
        if (run := self.runs.get(decision.job)) is None:
            return  # a job that cannot start in this course, and is not to any more
        self._usage.end(run)
        if run.end_s is None:
            run.refused = decision.reason

    def _do_StartMigration(self, decision: d.StartMigration) -> None:  # noqa: N802
        run = self.runs[decision.job]
        run.moves += 1
        run.devices = max(run.devices, len(decision.new_ranks))
        self._queue.add(self._queue.now_s + self.costs.prepare_s, "verified", decision)

    def _do_ResumeAttempt(self, decision: d.ResumeAttempt) -> None:  # noqa: N802
        run = self.runs[decision.job]
        attempt = self.scheduler.state.jobs[decision.job].attempt
        assert attempt is not None and attempt.plan is not None
        places = [rank.place for _, rank in sorted(attempt.ranks.items())]
        before = attempt.former[max(attempt.former)]
        assert before.plan is not None
        old = Side(before.plan, list(before.hosts.values()))
        new = Side(attempt.plan, [place.host for place in places])
        downtime_s = self.costs.downtime_s(run.speed.parameters, old, new)
        run.devices = len(places)
        self._queue.add(self._queue.now_s + downtime_s, "moved", (decision, downtime_s))
        self._go(run, attempt.plan, places, self._queue.now_s + downtime_s)

    def _do_AbortCollectives(self, decision: d.AbortCollectives) -> None:  # noqa: N802
        self._queue.add(self._queue.now_s, "cut_off", decision)

    def _do_SetTimer(self, decision: d.SetTimer) -> None:  # noqa: N802
        self._queue.add(decision.at_s, "timer", (decision.timer, decision.at_s))
