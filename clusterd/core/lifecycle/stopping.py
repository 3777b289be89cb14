"""How attempts and moves end: everywhere first, then the books, then what it means for the job."""

from __future__ import annotations

from clusterd.core import decisions as d
from clusterd.core.allocation import resize_unmodelled
from clusterd.core.ledger import of_ranks
from clusterd.core.lifecycle import attempts, migrations, trials
from clusterd.core.lifecycle.handler import Deciding
from clusterd.core.state import Attempt, Job, Migration, Outcome, Retired
from clusterd.core.view import Start
from clusterd.types import AttemptState, HostId, HostState, JobKind, JobState
from plans.model_shape import ModelShape

KEEPING_S = 60.0
"""At least, beside steps and copies, for ranks to leave their state in host memory; then they are killed."""

KEEPING_STEPS = 4
"""That may end before all ranks have heard of it."""

KEEPING_BYTES_PER_S = 1e9
"""Of the whole state, with the making of the memory that it is copied to."""

RESULT_S = 600.0
"""At least, for ranks to write what the job was trained for."""


class Stopping(Deciding):
    """Ends of attempts, and of moves that do not come to their switch."""

    def _settle(self, attempt: Attempt) -> None:
        """Stop the attempt once a rank failed, or every rank ended: stragglers go before devices are free."""
        if attempt.state is AttemptState.STOPPING:
            return
        ends = {r: rank.end for r, rank in attempt.ranks.items() if rank.end is not None}
        failed = [f"rank {r} on {attempt.ranks[r].place.host}: {end}" for r, end in ends.items() if not end.is_success]
        if failed:
            self._stop(attempt, None, failed[0])
        elif len(ends) == len(attempt.ranks):
            self._stop(attempt, None, "all ranks finished")

    def _stop(self, attempt: Attempt, outcome: Outcome | None, why: str) -> None:
        job = self.state.jobs[attempt.job]
        if attempt.migration is not None:
            self._give_up_migration(attempt, why)
        trials.let_go(self.state, attempt)
        job.trial, job.being_tried = None, False
        attempt.outcome, attempt.why = outcome, why
        keep = self._leaves_state(attempt)
        attempt.pending = set(attempt.hosts)
        attempt.go(AttemptState.STOPPING)
        job.go(JobState.STOPPING)
        job.reason = why
        self.state.timers.pop(f"limit:{job.id}", None)
        self.state.timers.pop(f"recover:{job.id}", None)
        done = outcome is Outcome.TARGET_REACHED
        grace_s = self._grace_s(attempt)
        if keep or done:
            grace_s = max(grace_s, _keeping_s(job) if keep else RESULT_S)
        for host_id in attempt.hosts:
            self._stop_on(host_id, attempt.job, attempt.number, attempt.generation, grace_s, why, keep, done)
        for host_id in attempt.hosts:
            if self.state.hosts[host_id].state is HostState.LOST:  # while ranks elsewhere were asked what they hold
                self._gone_from(attempt, host_id)

    def _cut_short(self, attempt: Attempt, why: str) -> None:
        """Of what is being stopped no rank is waited for any longer, nor of what will be."""
        if attempt.cut_short:
            return
        attempt.cut_short = True
        for host_id in sorted(attempt.pending):
            self._stop_on(host_id, attempt.job, attempt.number, attempt.generation, 0.0, why)
        for generation, retired in attempt.retired.items():
            for host_id in sorted(retired.pending):
                self._stop_on(host_id, attempt.job, attempt.number, generation, 0.0, why)

    def _leaves_state(self, attempt: Attempt) -> bool:
        """Whether ranks that are stopped can leave their state, for the job goes on elsewhere, and they all train."""
        job = self.state.jobs[attempt.job]
        trains = attempt.state is AttemptState.RUNNING and not attempt.orphaned
        return attempt.outcome is Outcome.PREEMPTED and job.spec.kind is JobKind.ELASTIC and trains

    def _gone_from(self, attempt: Attempt, host_id: HostId) -> None:
        """Nothing of the attempt is left on the host, or the host is given up: free what it held there."""
        if attempt.state is not AttemptState.STOPPING or host_id not in attempt.pending:
            return
        attempt.pending.discard(host_id)
        if self.state.hosts[host_id].state is HostState.LOST:
            attempt.given_up.add(host_id)
        attempts.release(self.state, attempt, host_id)
        if not attempt.pending and not attempt.retired:
            self._conclude(attempt)

    def _retired_gone(self, attempt: Attempt, generation: int, host_id: HostId) -> None:
        gone = migrations.gone(self.state, attempt, generation, host_id)
        if gone and attempt.state is AttemptState.STOPPING and not attempt.pending and not attempt.retired:
            self._conclude(attempt)

    def _retire(self, attempt: Attempt, generation: int, retired: Retired, grace_s: float, reason: str) -> None:
        """Have ranks of a generation that is not the attempt's end; a lost host is not waited for."""
        for host_id in sorted(retired.pending):
            self._stop_on(host_id, attempt.job, attempt.number, generation, grace_s, reason)
            if self.state.hosts[host_id].state is HostState.LOST:
                self._retired_gone(attempt, generation, host_id)

    def _conclude(self, attempt: Attempt) -> None:
        trials.let_go(self.state, attempt)
        attempt.go(AttemptState.ENDED)
        attempt.ended_s = self._now_s
        job = self.state.jobs[attempt.job]
        devices = of_ranks(self.state.hosts, attempt)
        unfit = attempts.at_fault(attempt)
        if unfit is not None and self._try_elsewhere(job, *unfit, devices):
            attempt.outcome, attempt.why = Outcome.REFUSED, f"{unfit[0]} cannot run it: {unfit[1]}"
        verdict = attempts.judge(job, attempt, devices[0].kind if devices else "cuda")
        if verdict.state is not JobState.QUEUED:
            self._end_job(job, verdict.state, verdict.reason, verdict.exit_code)
            return
        self.state.active.pop(job.id, None)
        self.state.queue[job.id] = None
        job.go(JobState.QUEUED)
        job.queued_s = self._now_s
        if attempt.outcome in (Outcome.PREEMPTED, Outcome.REFUSED):
            job.reason = verdict.reason
        elif verdict.is_infrastructure:
            self._lost_once_more(job, verdict.reason)
        elif verdict.at_most_bytes is not None:
            job.at_most_bytes, job.reason = verdict.at_most_bytes, verdict.reason
        elif verdict.refused is not None:
            job.cannot_train_under(*verdict.refused)
            job.reason = verdict.reason
        else:
            job.own_failures += 1
            job.reason = verdict.reason
            self._wait_before_retry(job, job.own_failures)
        if job.state is JobState.QUEUED:
            again = "starts again at once" if attempt.onward is not None else f"queued again{_from_where(job)}"
            reason = f"{verdict.reason}; {again}"
            self._decide(d.RequeueJob(cause=self._cause, reason=reason, job=job.id, attempt=attempt.number))
            if attempt.onward is not None:
                onward, attempt.onward = attempt.onward, None  # from here on it is the job's
                self._go_onward(job, onward)
        self._pass_due = True

    def _go_onward(self, job: Job, onward: Migration) -> None:
        """Start the job again as it was stopped for, before anybody else is given its devices."""
        left = "it has saved" if job.spec.kind is JobKind.CHECKPOINTABLE else "its state waits in host memory"
        onward.phases.append(("stop", self._now_s - onward.started_s, left))
        job.migrations.append(onward)
        stale = self._start(Start(job.id, onward.plan, onward.places, onward.cores, onward.memory_bytes, onward.reason))
        if stale:
            onward.failure, onward.ended_s = stale, self._now_s
            self._hold(job, f"cannot go on under {onward.plan}: {stale}")

    def _give_up_migration(self, attempt: Attempt, why: str) -> None:
        """Back to the old ranks: they are told to go on, the new ones to go."""
        job = self.state.jobs[attempt.job]
        assert attempt.migration is not None
        generation, old_pin = attempt.migration.generation, attempt.migration.old_pin
        retired = migrations.fail(job, attempt, why, self._now_s)
        until_s = self._now_s + job.calm_s(resize_unmodelled.SETTLE_AFTER_FAILURE_S)
        self._set_timer(f"settle:{job.id}", until_s, f"a move of {job.spec.name} failed")
        wanted = job.pinned  # None: it was unpinned meanwhile
        job.pinned = old_pin if wanted is not None else None
        over = f"; it is not pinned to {wanted} any more" if job.pinned is None and wanted is not None else ""
        reason = f"the move to {job.migrations[-1].plan} failed ({why}); {attempt.plan} goes on{over}"
        job.reason = reason
        self._abort(attempt, generation, attempt.hosts, reason)
        self._retire(attempt, generation, retired, 0.0, reason)


def _from_where(job: Job) -> str:
    """A job never starts over in silence."""
    if job.spec.kind is JobKind.CHECKPOINTABLE:
        return ", to go on from what it saved"
    if not job.step:
        return ""
    if job.checkpoint is not None:
        return f", to go on from a newer snapshot in memory, or from step {job.checkpoint_step} ({job.checkpoint})"
    return ", to go on from a snapshot in memory if one is left: there is no checkpoint on disk"


def _keeping_s(job: Job) -> float:
    state_bytes = ModelShape.from_dict(job.shape).state_bytes if job.shape is not None else 0
    return KEEPING_S + KEEPING_STEPS * (job.step_time_s or 0.0) + state_bytes / KEEPING_BYTES_PER_S
