"""Events under the virtual clock: arrivals, completions, finished migrations, faults.

The daemon learns these from agents; here they are computed.

A published scheduler that works in rounds sees arrivals and completions at the next round, so with a round length the
scheduler here does too. A round's decisions take effect at once; a job that completes within a round keeps its devices
to the end of the round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.scheduler import Scheduler
from clusterd.core.view import Policy, Proposal, View
from clusterd.plans.plan import Plan
from clusterd.simulate.event_queue import EventQueue
from clusterd.simulate.runs import Disturbance, Run, TraceRun
from clusterd.simulate.setting import Setting
from clusterd.simulate.truth import ModelTruth
from clusterd.simulate.usage import Usage
from clusterd.simulate.workload import Arrival
from clusterd.types import HostFacts, HostId, JobId, JobKind, JobSpec, RankEnd, RankPlace, RankReport, Reason, Resources

OnBatch = Callable[[Scheduler, Sequence[e.Event], Sequence[d.Decision]], None]

_OK = RankEnd(reason=Reason.EXIT, exit_code=0)
_STOPPED = RankEnd(reason=Reason.STOPPED)
_LOST = RankEnd(reason=Reason.LOST)

_OfAttempt = d.LaunchAttempt | d.StopAttempt | d.StartMigration | d.ResumeAttempt | d.AbortCollectives


class _Timed:
    """A policy, and the processor time of its proposals."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.name, self.interval_s = policy, policy.name, policy.interval_s
        self.seconds: list[float] = []
        self.total_s = 0.0

    def propose(self, view: View) -> Proposal:
        began_s = time.process_time()
        proposal = self.policy.propose(view)
        self.seconds.append(time.process_time() - began_s)
        self.total_s += self.seconds[-1]
        return proposal


class World:
    """The cluster and its jobs at one instant of virtual time, and all pending events."""

    def __init__(self, setting: Setting, policy: Policy, on_batch: OnBatch | None, passes_s: float = math.inf) -> None:
        """`passes_s`: processor time of passes after which the run is cut off."""
        self.passes_s = passes_s
        self.setting, self.costs = setting, setting.costs(policy.name)
        self.policy = _Timed(policy)
        self.scheduler = Scheduler(self.policy)
        self.facts: dict[HostId, HostFacts] = setting.cluster.facts()
        self.types = {device.id: device.name for facts in self.facts.values() for device in facts.devices}
        self.down: dict[HostId, list[d.StopAttempt]] = {}  # stops that wait for the host
        self.runs: dict[JobId, Run] = {}
        self._arrived: list[TraceRun] = []
        self._queue = EventQueue(setting.round_s)
        self._usage = Usage()
        self._on_batch = on_batch
        self._named: dict[str, JobId] = {}
        self._awaited: set[JobId] = set()  # jobs that are not over; without one the run is over
        self._shapes: dict[str, dict[str, Any]] = {}
        self._ticks = False  # the end of this round is awaited

    def _about(self, decision: _OfAttempt) -> dict[str, Any]:
        """Fields of an event that follows from a decision about an attempt."""
        which = {"job": decision.job, "attempt": decision.attempt, "generation": decision.generation}
        return {**self._queue.stamp(), **which}

    # --- what happens -------------------------------------------------------------------------------------------------

    def _when_arrival(self, payload: tuple[JobId, Arrival]) -> list[e.Event]:
        job, arrival = payload
        model = self.setting.truth.models[arrival.model]
        self._named[arrival.name] = job
        late_s = self._queue.now_s - arrival.at_s
        run = TraceRun(
            job=job, name=arrival.name, steps=arrival.steps, speed=model, arrival=arrival, model=model, waited_s=late_s
        )
        self._arrived.append(run)
        self.runs[job] = self._usage.waiting[job] = run
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
            e.JobSubmitted(**self._queue.stamp(), job=job, spec=spec),
            e.ModelDescribed(**self._queue.stamp(), job=job, shape=shape, model=arrival.model),
        ]
        if arrival.forecast is not None:
            events.append(e.CompletionPredicted(**self._queue.stamp(), job=job, predictable=arrival.forecast))
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
        return [e.AttemptLaunched(**self._about(payload))]

    def _when_done(self, payload: tuple[JobId, int]) -> list[e.Event]:
        job, version = payload
        run = self.runs[job]
        if run.version != version or self.scheduler.state.jobs[job].attempt is None:
            return []
        run.go_to(self._queue.now_s)
        run.done, run.end_s, run.rate = run.steps, self._queue.now_s, 0.0
        run.version += 1
        if self._queue.observed_s(self._queue.now_s) > self._queue.now_s:
            self._queue.add(self._queue.observed_s(self._queue.now_s), "ended", job)
            return []
        return self._when_ended(job)

    def _when_ended(self, job: JobId) -> list[e.Event]:
        attempt = self.scheduler.state.jobs[job].attempt
        assert attempt is not None, "between rounds nothing is decided"
        about: dict[str, Any] = {"job": job, "attempt": attempt.number, "generation": attempt.generation}
        events: list[e.Event] = [
            e.RankExited(**self._queue.stamp(), **about, host=rank.place.host, rank=number, end=_OK)
            for number, rank in attempt.ranks.items()
        ]
        if self.setting.round_s:
            # Its devices are free at the next round, so the round's policy may assign them.
            events += [e.AttemptStopped(**self._queue.stamp(), **about, host=host, ranks=()) for host in attempt.hosts]
        return events

    def _when_cut_off(self, payload: d.AbortCollectives) -> list[e.Event]:
        """Recovery from replicas is not simulated: after a fault every policy resumes from a snapshot."""
        attempt = self.scheduler.state.attempt(payload.job, payload.attempt, payload.generation)
        if attempt is None:
            return []
        return [
            e.RankExited(**self._about(payload), host=rank.place.host, rank=number, end=_LOST)
            for number, rank in attempt.ranks.items()
            if rank.place.host in payload.hosts
        ]

    def _when_stopped(self, payload: d.StopAttempt) -> list[e.Event]:
        run = self.runs.get(payload.job)  # None: old ranks of a job that is over
        events: list[e.Event] = []
        attempt = self.scheduler.state.attempt(payload.job, payload.attempt, payload.generation)
        ends: tuple[RankReport, ...] = ()
        if run is not None and attempt is not None and run.end_s is None:
            here = [n for n, rank in attempt.ranks.items() if rank.place.host == payload.host and rank.end is None]
            ends = tuple(RankReport(rank=n, end=_STOPPED) for n in here)
            if (
                attempt.stop.outcome is not None
                and attempt.stop.outcome.value == "preempted"
                and run.keeps_state
                and run.done > run.saved
            ):
                run.saved = run.done
                which: dict[str, Any] = {"job": payload.job, "attempt": payload.attempt, "step": int(run.done)}
                events.append(e.CheckpointTaken(**self._queue.stamp(), **which, path="simulated"))
        return [*events, e.AttemptStopped(**self._about(payload), host=payload.host, ranks=ends)]

    def _when_verified(self, payload: d.StartMigration) -> list[e.Event]:
        attempt = self.scheduler.state.attempt(payload.job, payload.attempt, payload.generation)
        moving = attempt.migration if attempt is not None else None
        if moving is None or moving.generation != payload.new_generation:
            return []
        run = self.runs[payload.job]
        run.go_to(self._queue.now_s)
        run.rate, run.version = 0.0, run.version + 1
        about = {**self._about(payload), "generation": payload.new_generation}
        return [e.MigrationVerified(**about, step=int(run.done), network_bytes=0, local_bytes=0)]

    def _when_moved(self, payload: tuple[d.ResumeAttempt, float]) -> list[e.Event]:
        start, downtime_s = payload
        attempt = self.scheduler.state.attempt(start.job, start.attempt, start.generation)
        if attempt is None or self.scheduler.state.jobs[start.job].resuming is None:
            return []
        return [e.MigrationFinished(**self._about(start), downtime_s=downtime_s)]

    def _when_round(self, payload: None) -> list[e.Event]:
        """End of a round: steps begun in it and not completed are lost."""
        for run in self._usage.running.values():
            run.go_to(self._queue.now_s)
            if run.rate > 0 and run.done < run.steps:
                run.done = math.floor(run.done + 1e-6)
                self._foresee(run)
        self._ticks = False
        if self._usage.running:
            self._tick()
        return []

    def _tick(self) -> None:
        if self.setting.round_s and self.setting.whole_steps and not self._ticks:
            self._ticks = True
            self._queue.add(self._queue.now_s + self.setting.round_s, "round", None)

    def _when_timer(self, payload: tuple[e.Timer, float]) -> list[e.Event]:
        timer, at_s = payload
        if self.scheduler.state.timers.get(timer) != at_s:
            return []
        return [e.TimerFired(**self._queue.stamp(), timer=timer)]

    def _when_disturbance(self, payload: Disturbance) -> list[e.Event]:
        host = list(self.facts)[payload.host]
        if payload.kind == "drain":
            return [e.HostDrained(**self._queue.stamp(), host=host, by="simulation")]
        if payload.kind == "undrain":
            return [e.HostUndrained(**self._queue.stamp(), host=host)]
        if payload.kind == "down":
            self.down.setdefault(host, [])
            for attempt in self.scheduler.state.attempts_on(host):
                self._fall_back(self.runs[attempt.job])
            return [e.HostDisconnected(**self._queue.stamp(), host=host, why="fault")]
        # It rebooted: no rank survives.
        events: list[e.Event] = [e.HostConnected(**self._queue.stamp(), host=host, facts=self.facts[host])]
        for stop in self.down.pop(host, []):
            events += self._when_stopped(stop)
        return events

    def _fall_back(self, run: Run) -> None:
        """Handle a fault: the steps since the last snapshot are lost, and the job stops until its next attempt."""
        run.go_to(self._queue.now_s)
        if run.rate > 0:
            every = max(self.setting.checkpoint_s * run.rate, 1e-9)
            run.done = max(run.saved, run.done - (run.done - run.saved) % every)
            run.saved = run.done
        run.rate, run.version = 0.0, run.version + 1

    # --- how a job goes on --------------------------------------------------------------------------------------------

    def _go(self, run: Run, plan: Plan | None, places: Sequence[RankPlace], from_s: float) -> None:
        """Continue the job under this plan on these devices."""
        by_host: dict[HostId, list[str]] = {}
        for place in places:
            if place.device is not None:
                # A device may be lost while its host still runs the rank.
                by_host.setdefault(place.host, []).append(self.types.get(place.device, "lost"))
        step_time_s = run.speed.pace_s(plan, list(by_host.values()))
        if step_time_s is None:
            shape = [len(kinds) for kinds in by_host.values()]
            raise AssertionError(f"{run.name}: {plan} on {shape} was not on offer, and was chosen")
        run.rate, run.since_s = 1.0 / step_time_s, from_s
        self._foresee(run)
        self._tick()

    def _foresee(self, run: Run) -> None:
        """Schedule the completion of a job at its current rate."""
        run.version += 1
        left_s = (run.steps - run.done) / run.rate
        self._queue.add(max(run.since_s, self._queue.now_s) + left_s, "done", (run.job, run.version))
