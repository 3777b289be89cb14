"""What every handler of the scheduler stands on: the state, and the ways to say what is to be done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.estimates.attained_service import time_left_s
from clusterd.core.lifecycle import attempts
from clusterd.core.performance_table import evenly
from clusterd.core.state import Attempt, Job, State
from clusterd.core.view import CoreGrant, Start
from clusterd.types import Device, HostId, HostState, JobId, JobKind, JobState
from plans.plan import Plan


class Deciding:
    """Holds the state, and collects the decisions about one batch of events."""

    def __init__(self) -> None:
        self.state = State()
        self._out: list[d.Decision] = []
        self._pass_due = False
        self._cause = e.EventId(0)
        self._now_s = 0.0

    def _launch(self, attempt: Attempt, reason: str) -> None:
        places = tuple(rank.place for rank in attempt.ranks.values())
        self._decide(
            d.LaunchAttempt(
                cause=self._cause,
                reason=reason,
                job=attempt.job,
                attempt=attempt.number,
                generation=attempt.generation,
                plan=attempt.plan,
                ranks=places,
                restore=self.state.jobs[attempt.job].checkpoint,
            )
        )

    def _start(self, start: Start) -> str | None:
        """Begin an attempt; why not, if not. Asked again here, so that no policy can lease a device twice."""
        job = self.state.jobs[start.job]
        stale = attempts.objection(self.state, job, start)
        if stale:
            return stale
        start = replace(start, reason=f"{start.reason}{self._pin_is_over(job, start.plan)}")
        attempt = attempts.begin(self.state, job, start, self._now_s)
        left_s = time_left_s(job)
        if left_s is not None:
            self._set_timer(f"limit:{job.id}", self._now_s + left_s, f"{job.spec.name} may run for {left_s:.0f} s")
        self._launch(attempt, start.reason)
        return None

    def _pin_is_over(self, job: Job, plan: Plan | None) -> str:
        """An elastic job runs under `plan` from now on; said where that is not what it was pinned to."""
        if job.pinned is None or plan is None or evenly(job.pinned) == evenly(plan):
            return ""
        pinned, job.pinned = job.pinned, None
        return f"; it is not pinned to {pinned} any more"

    def _grant(self, grant: CoreGrant) -> None:
        """Book the cores anew, and tell the ranks."""
        attempt = self.state.jobs[grant.job].attempt
        assert attempt is not None, f"cores for {grant.job}, which does not run"
        for host, count in grant.cores.items():
            self.state.hosts[host].cores_used += count - attempt.cores.get(host, 0)
        attempt.cores, attempt.told_cores = dict(grant.cores), grant.each
        self._to_ranks(d.UseCores, attempt, attempt.hosts, grant.reason, each=grant.each)

    def _stop_on(
        self,
        host: HostId,
        job: JobId,
        number: int,
        generation: int,
        grace_s: float,
        reason: str,
        keep: bool = False,
        done: bool = False,
    ) -> None:
        self._decide(
            d.StopAttempt(
                cause=self._cause,
                reason=reason,
                job=job,
                attempt=number,
                generation=generation,
                host=host,
                grace_s=grace_s,
                keep=keep,
                done=done,
            )
        )

    def _grace_s(self, attempt: Attempt) -> float:
        return 0.0 if attempt.cut_short else self.state.jobs[attempt.job].spec.grace_s

    def _resume(self, attempt: Attempt, reason: str) -> None:
        self._to_ranks(d.ResumeAttempt, attempt, attempt.hosts, reason)

    def _cut_off(self, attempt: Attempt, reason: str) -> None:
        """Tell what is left of the attempt that peers are gone; once."""
        attempt.cut_off = True
        up = tuple(h for h in attempt.hosts if self.state.hosts[h].state is HostState.UP)
        self._to_ranks(d.CutOffSurvivors, attempt, up, reason)

    def _abort(self, attempt: Attempt, new_generation: int, hosts: tuple[HostId, ...], reason: str) -> None:
        self._to_ranks(d.AbortMigration, attempt, hosts, reason, new_generation=new_generation)

    def _to_ranks(
        self, kind: type[d.ToRanks], attempt: Attempt, hosts: tuple[HostId, ...], reason: str, **more: Any
    ) -> None:
        which: dict[str, Any] = {"job": attempt.job, "attempt": attempt.number, "generation": attempt.generation}
        self._decide(kind(cause=self._cause, reason=reason, **which, hosts=hosts, **more))

    def _end_job(self, job: Job, state: JobState, reason: str, exit_code: int | None) -> None:
        job.go(state)
        job.reason, job.exit_code, job.ended_s = reason, exit_code, self._now_s
        self.state.queue.pop(job.id, None)
        self.state.active.pop(job.id, None)
        self.state.timers.pop(f"retry:{job.id}", None)
        self.state.timers.pop(f"stall:{job.id}", None)
        self._decide(d.EndJob(cause=self._cause, reason=reason, job=job.id, state=state.value, exit_code=exit_code))
        self._pass_due = True

    def _lost_once_more(self, job: Job, why: str) -> None:
        """Queue again after a fault that was not the job's, slower each time; give up when it never gets anywhere."""
        last = job.attempts[-1] if job.attempts else None
        if last is not None and job.spec.kind is not JobKind.ELASTIC and attempts.got_on(last, self._now_s):
            job.lost_in_a_row = 0
        job.lost_in_a_row += 1
        if job.lost_in_a_row > attempts.LOST_IN_A_ROW_MAX:
            self._end_job(
                job, JobState.FAILED, f"lost {job.lost_in_a_row} times in a row without a step: {why}", exit_code=1
            )
            return
        job.reason = why
        self._wait_before_retry(job, job.lost_in_a_row)

    def _wait_before_retry(self, job: Job, times: int) -> None:
        delay_s = attempts.retry_delay_s(times)
        if delay_s:
            job.not_before_s = self._now_s + delay_s
            self._set_timer(
                f"retry:{job.id}", job.not_before_s, f"{job.spec.name} is tried again after {delay_s:.0f} s"
            )

    def _try_elsewhere(self, job: Job, host: HostId, why: str, devices: Sequence[Device] = ()) -> bool:
        """Leave a host out that could not start the job; whether others may.

        Where too few would be left none is left out: then the fault may be the job's.

        Args:
            devices: that it was to have.
        """
        job.unfit[host] = why.removeprefix(f"{host}: ")
        kinds = {d.kind for d in devices}
        left = [h for h in self.state.hosts.values() if h.unusable is None and job.admits(h.id)]
        counts = [sum(not kinds or d.kind in kinds for d in h.devices) for h in left]
        together = max if job.spec.kind is JobKind.COMMAND else sum
        if not left or together(counts) < len(devices):
            job.unfit.clear()
            return False
        return True

    def _hold(self, job: Job, reason: str) -> None:
        if job.reason != reason:  # said once: a job that waits for the same thing for a day is one line of history
            job.reason = reason
            self._decide(d.HoldJob(cause=self._cause, reason=reason, job=job.id))

    def _set_timer(self, timer: str, at_s: float, reason: str) -> None:
        self.state.timers[timer] = at_s
        self._decide(d.SetTimer(cause=self._cause, reason=reason, timer=timer, at_s=at_s))

    def _decide(self, decision: d.Decision) -> None:
        self._out.append(decision)
