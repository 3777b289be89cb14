"""Events under the virtual clock: arrivals, completions, finished migrations, faults.

The daemon learns these from agents; here they are computed.

A published scheduler that works in rounds sees arrivals and completions at the next round, so with a round length the
scheduler here does too. A round's decisions take effect at once; a job that completes within a round keeps its devices
to the end of the round.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.performance_table import PerformanceTable
from clusterd.core.scheduler import Scheduler
from clusterd.core.view import Policy, Proposal, View
from clusterd.plans.plan import Plan
from clusterd.simulate.cluster import Cluster
from clusterd.simulate.costs import Costs
from clusterd.simulate.runs import Disturbance, Run
from clusterd.simulate.truth import ModelTruth, Truth, mixed_step_time_s
from clusterd.simulate.workload import Arrival, Workload
from clusterd.types import HostFacts, HostId, JobId, JobKind, JobSpec, RankEnd, RankPlace, RankReport, Reason, Resources

OnBatch = Callable[[Scheduler, Sequence[e.Event], Sequence[d.Decision]], None]

_OK = RankEnd(reason=Reason.EXIT, exit_code=0)
_STOPPED = RankEnd(reason=Reason.STOPPED)


class _Timed:
    """A policy, and the processor time of its proposals."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.name, self.interval_s = policy, policy.name, policy.interval_s
        self.seconds: list[float] = []

    def propose(self, view: View) -> Proposal:
        began_s = time.process_time()
        proposal = self.policy.propose(view)
        self.seconds.append(time.process_time() - began_s)
        return proposal


class World:
    """The cluster and its jobs at one instant of virtual time, and all pending events."""

    def __init__(
        self,
        cluster: Cluster,
        workload: Workload,
        truth: Truth,
        performance_tables: dict[str, PerformanceTable],
        policy: Policy,
        costs: Costs,
        *,
        disturbances: Sequence[Disturbance] = (),
        checkpoint_s: float = 600.0,
        horizon_s: float = float("inf"),
        round_s: float = 0.0,
        whole_steps: bool = False,
        on_batch: OnBatch | None = None,
    ) -> None:
        self.cluster, self.workload, self.truth, self.costs = cluster, workload, truth, costs
        self.performance_tables = performance_tables
        self.policy = _Timed(policy)
        self.scheduler = Scheduler(self.policy)
        self.checkpoint_s, self.horizon_s = checkpoint_s, horizon_s
        self.round_s, self.whole_steps = round_s, whole_steps
        self.facts: dict[HostId, HostFacts] = cluster.facts()
        self.types = {device.id: device.name for facts in self.facts.values() for device in facts.devices}
        self.down: set[HostId] = set()
        self.runs: dict[JobId, Run] = {}
        self.now_s = 0.0
        self._on_batch = on_batch
        self._heap: list[tuple[float, int, str, Any]] = []
        self._number = count()
        self._ids = count(1)
        self._going: dict[JobId, None] = {}  # with devices
        self._waiting: dict[JobId, None] = {}
        self._named: dict[str, JobId] = {}
        self._unfinished = len(workload.arrivals)
        self._device_s = 0.0
        self._idle_s = 0.0
        self._disturbances = disturbances
        self._shapes: dict[str, dict[str, Any]] = {}
        self._ticks = False  # the end of this round is awaited
        self._deferred: dict[HostId, list[d.StopAttempt]] = {}

    def _at(self, at_s: float, kind: str, payload: Any) -> None:
        at_s = max(at_s, self.now_s)
        if at_s > self.now_s and kind != "done":
            at_s = self._observed_s(at_s)
        heapq.heappush(self._heap, (at_s, next(self._number), kind, payload))

    def _observed_s(self, at_s: float) -> float:
        """Time at which the scheduler observes an event: the next round, if rounds are set."""
        return math.ceil(at_s / self.round_s - 1e-9) * self.round_s if self.round_s else at_s

    def _stamp(self) -> dict[str, Any]:
        return {"at_s": self.now_s, "id": e.EventId(next(self._ids))}

    # --- what happens -------------------------------------------------------------------------------------------------

    def _when_arrival(self, payload: tuple[JobId, Arrival]) -> list[e.Event]:
        job, arrival = payload
        model = self.truth.models[arrival.model]
        self._named[arrival.name] = job
        self.runs[job] = Run(arrival, job, model, waited_s=self.now_s - arrival.at_s)
        self._waiting[job] = None
        spec = JobSpec(
            name=arrival.name,
            kind=JobKind.ELASTIC,
            command=("simulated",),
            resources=Resources(devices=arrival.devices, kind="cuda", cpus=arrival.cpus, plan=arrival.plan),
            priority=arrival.priority,
            guaranteed=arrival.guaranteed,
            after=tuple(self._named[name] for name in arrival.after),
            tenant=arrival.tenant,
            user=arrival.tenant,
        )
        declared = arrival.declared_steps if arrival.declared_steps is not None else arrival.steps
        steps = declared if arrival.predictable else 0
        shape = {**self._shape(model), "samples": model.samples or model.global_batch, "steps": steps}
        events: list[e.Event] = [
            e.JobSubmitted(**self._stamp(), job=job, spec=spec),
            e.ModelDescribed(**self._stamp(), job=job, shape=shape, model=arrival.model),
        ]
        if arrival.forecast is not None:
            events.append(e.CompletionPredicted(**self._stamp(), job=job, predictable=arrival.forecast))
        return events

    def _shape(self, model: ModelTruth) -> dict[str, Any]:
        """Model shape without weights, with a layer for each stage of the deepest known pipeline."""
        if model.name not in self._shapes:
            stages = range(max(plan.pp for plan, _, _ in model.step_times_s))
            self._shapes[model.name] = {
                "parameters": [[f"{n}.weight", [1], 1, n] for n in stages],
                "layers": [{"name": str(n)} for n in stages],
                "global_batch": model.global_batch,
            }
        return self._shapes[model.name]

    def _when_launched(self, payload: d.LaunchAttempt) -> list[e.Event]:
        if any(host in self.down for host in payload.hosts):
            return []
        return [
            e.AttemptLaunched(**self._stamp(), job=payload.job, attempt=payload.attempt, generation=payload.generation)
        ]

    def _when_done(self, payload: tuple[JobId, int]) -> list[e.Event]:
        job, version = payload
        run = self.runs[job]
        if run.version != version or self.scheduler.state.jobs[job].attempt is None:
            return []
        run.go_to(self.now_s)
        run.done, run.end_s, run.rate = float(run.arrival.steps), self.now_s, 0.0
        run.version += 1
        if self._observed_s(self.now_s) > self.now_s:
            self._at(self._observed_s(self.now_s), "ended", job)
            return []
        return self._when_ended(job)

    def _when_ended(self, job: JobId) -> list[e.Event]:
        attempt = self.scheduler.state.jobs[job].attempt
        assert attempt is not None, "between rounds nothing is decided"
        about: dict[str, Any] = {"job": job, "attempt": attempt.number, "generation": attempt.generation}
        events: list[e.Event] = [
            e.RankExited(**self._stamp(), **about, host=rank.place.host, rank=number, end=_OK)
            for number, rank in attempt.ranks.items()
        ]
        if self.round_s:
            # Its devices are free at the next round, so the round's policy may assign them.
            events += [e.AttemptStopped(**self._stamp(), **about, host=host, ranks=()) for host in attempt.hosts]
        return events

    def _when_cut_off(self, payload: d.AbortCollectives) -> list[e.Event]:
        """Recovery from replicas is not simulated: after a fault every policy resumes from a snapshot."""
        attempt = self.scheduler.state.attempt(payload.job, payload.attempt, payload.generation)
        if attempt is None:
            return []
        which: dict[str, Any] = {"job": payload.job, "attempt": payload.attempt, "generation": payload.generation}
        return [
            e.RankExited(**self._stamp(), **which, host=rank.place.host, rank=number, end=RankEnd(reason=Reason.LOST))
            for number, rank in attempt.ranks.items()
            if rank.place.host in payload.hosts
        ]

    def _when_stopped(self, payload: d.StopAttempt) -> list[e.Event]:
        run = self.runs[payload.job]
        events: list[e.Event] = []
        attempt = self.scheduler.state.attempt(payload.job, payload.attempt, payload.generation)
        ends: tuple[RankReport, ...] = ()
        if attempt is not None and run.end_s is None:
            here = [n for n, rank in attempt.ranks.items() if rank.place.host == payload.host and rank.end is None]
            ends = tuple(RankReport(rank=n, end=_STOPPED) for n in here)
            if attempt.stop.outcome is not None and attempt.stop.outcome.value == "preempted" and run.done > run.saved:
                run.saved = run.done
                events.append(
                    e.CheckpointTaken(
                        **self._stamp(), job=payload.job, attempt=payload.attempt, step=int(run.done), path="simulated"
                    )
                )
        events.append(
            e.AttemptStopped(
                **self._stamp(),
                job=payload.job,
                attempt=payload.attempt,
                generation=payload.generation,
                host=payload.host,
                ranks=ends,
            )
        )
        return events

    def _when_verified(self, payload: d.StartMigration) -> list[e.Event]:
        attempt = self.scheduler.state.attempt(payload.job, payload.attempt, payload.generation)
        moving = attempt.migration if attempt is not None else None
        if moving is None or moving.generation != payload.new_generation:
            return []
        run = self.runs[payload.job]
        run.go_to(self.now_s)
        run.rate, run.version = 0.0, run.version + 1
        return [
            e.MigrationVerified(
                **self._stamp(),
                job=payload.job,
                attempt=payload.attempt,
                generation=payload.new_generation,
                step=int(run.done),
                network_bytes=0,
                local_bytes=0,
            )
        ]

    def _when_moved(self, payload: tuple[d.ResumeAttempt, float]) -> list[e.Event]:
        start, downtime_s = payload
        attempt = self.scheduler.state.attempt(start.job, start.attempt, start.generation)
        if attempt is None or self.scheduler.state.jobs[start.job].resuming is None:
            return []
        return [
            e.MigrationFinished(
                **self._stamp(),
                job=start.job,
                attempt=start.attempt,
                generation=start.generation,
                downtime_s=downtime_s,
            )
        ]

    def _when_round(self, payload: None) -> list[e.Event]:
        """End of a round: steps begun in it and not completed are lost."""
        for job in self._going:
            run = self.runs[job]
            run.go_to(self.now_s)
            if run.rate > 0 and run.done < run.arrival.steps:
                run.done = math.floor(run.done + 1e-6)
                self._foresee(run)
        self._ticks = False
        if self._going:
            self._tick()
        return []

    def _tick(self) -> None:
        if self.round_s and self.whole_steps and not self._ticks:
            self._ticks = True
            self._at(self.now_s + self.round_s, "round", None)

    def _when_timer(self, payload: tuple[e.Timer, float]) -> list[e.Event]:
        timer, at_s = payload
        if self.scheduler.state.timers.get(timer) != at_s:
            return []
        return [e.TimerFired(**self._stamp(), timer=timer)]

    def _when_disturbance(self, payload: Disturbance) -> list[e.Event]:
        host = list(self.facts)[payload.host]
        if payload.kind == "drain":
            return [e.HostDrained(**self._stamp(), host=host, by="simulation")]
        if payload.kind == "undrain":
            return [e.HostUndrained(**self._stamp(), host=host)]
        if payload.kind == "down":
            self.down.add(host)
            for attempt in self.scheduler.state.attempts_on(host):
                self._fall_back(self.runs[attempt.job])
            return [e.HostDisconnected(**self._stamp(), host=host, why="fault")]
        self.down.discard(host)
        # It rebooted: no rank survives.
        events: list[e.Event] = [e.HostConnected(**self._stamp(), host=host, facts=self.facts[host])]
        for stop in self._deferred.pop(host, []):
            events += self._when_stopped(stop)
        return events

    def _fall_back(self, run: Run) -> None:
        """Handle a fault: the steps since the last snapshot are lost, and the job stops until its next attempt."""
        run.go_to(self.now_s)
        if run.rate > 0:
            every = max(self.checkpoint_s * run.rate, 1e-9)
            run.done = max(run.saved, run.done - (run.done - run.saved) % every)
            run.saved = run.done
        run.rate, run.version = 0.0, run.version + 1

    # --- how a job goes on --------------------------------------------------------------------------------------------

    def _go(self, run: Run, plan: Plan, places: Sequence[RankPlace], from_s: float) -> None:
        """Continue the job under this plan on these devices."""
        by_host: dict[HostId, list[str]] = {}
        for place in places:
            assert place.device is not None
            by_host.setdefault(place.host, []).append(self.types[place.device])
        step_time_s = mixed_step_time_s(run.model, plan, list(by_host.values()))
        if step_time_s is None:
            shape = [len(kinds) for kinds in by_host.values()]
            raise AssertionError(f"{run.arrival.name}: {plan} on {shape} was not on offer, and was chosen")
        run.rate, run.since_s = 1.0 / step_time_s, from_s
        self._foresee(run)
        self._tick()

    def _foresee(self, run: Run) -> None:
        """Schedule the completion of a job at its current rate."""
        run.version += 1
        left_s = (run.arrival.steps - run.done) / run.rate
        self._at(max(run.since_s, self.now_s) + left_s, "done", (run.job, run.version))
