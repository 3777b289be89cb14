"""Handlers of what happens to attempts and their ranks."""

from __future__ import annotations

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.allocation import resize_unmodelled
from clusterd.core.ledger import of_ranks
from clusterd.core.lifecycle import attempts, migrations, recovery
from clusterd.core.lifecycle.trial_events import OnTrials
from clusterd.core.state import Attempt, Host, Job, Migration, Outcome
from clusterd.core.view import Refusal, View
from clusterd.types import AttemptState, HostId, HostState, JobKind, JobState, RankEnd, RankReport, Reason
from clusterd.units import duration

TARGET_TIMES = 3
"""Looks in a row at a loss that is on target."""

STALL_STEPS = 20
"""Times its step time that a job may be without a step, whatever it asks for."""


class OnAttempts(OnTrials):
    """From the launch to the last rank's end, and on from what survives it."""

    def _on_attempt_launched(self, event: e.AttemptLaunched) -> None:
        attempt = self.state.attempt(event.job, event.attempt, event.generation)
        if attempt is None or attempt.state is not AttemptState.LAUNCHING:
            return
        attempt.go(AttemptState.RUNNING)
        job = self.state.jobs[event.job]
        job.go(JobState.RUNNING)
        onward = _under_way(job)
        if onward is not None:
            onward.step = event.restored_step if event.restored_step is not None else job.checkpoint_step
            if job.spec.kind is JobKind.CHECKPOINTABLE:  # whether it tells of steps is its own affair
                self._went_on(job, onward)
        if event.restored_step is not None:
            lost = f"; steps {event.restored_step + 1} to {job.step} are done again" * (job.step > event.restored_step)
            self._hold(job, f"goes on from the snapshot of step {event.restored_step} in memory{lost}")
        self._next_checkpoint(job)
        self._watch_progress(job, self._now_s)
        self._settle(attempt)

    def _went_on(self, job: Job, onward: Migration) -> None:
        """A job that was stopped to start again elsewhere trains there."""
        onward.downtime_s, onward.ended_s = self._now_s - onward.started_s, self._now_s
        stopped_s = sum(seconds for _, seconds, _ in onward.phases)
        onward.phases.append(("start", onward.downtime_s - stopped_s, f"{len(onward.ranks)} new ranks go on from it"))
        if job.model:  # what a script that saves by itself takes says nothing of others
            migrations.learn_cost(self.state.restart_costs_s, job.model, onward.downtime_s)
        self._set_timer(f"settle:{job.id}", self._now_s + resize_unmodelled.SETTLE_S, f"{job.spec.name} was moved")

    def _is_target_reached(self, job: Job, attempt: Attempt) -> None:
        """A job that is good enough ends; one lucky batch is not enough."""
        target = job.spec.target_loss
        if target is None or attempt.state is not AttemptState.RUNNING:
            return
        job.at_target = job.at_target + 1 if job.loss is not None and job.loss <= target else 0
        if job.at_target >= TARGET_TIMES:
            self._stop(attempt, Outcome.TARGET_REACHED, f"its loss reached {target:g} by step {job.step}")

    def _next_checkpoint(self, job: Job) -> None:
        every_s, directory = job.spec.checkpoint_every_s, job.spec.checkpoint_directory
        if every_s is not None and directory is not None:
            self._set_timer(f"checkpoint:{job.id}", self._now_s + every_s, f"{job.spec.name} is saved by the clock")

    def _checkpoint_is_due(self, job: Job | None) -> None:
        """Ask the ranks, unless they are being moved: then the next time will do."""
        attempt = job.attempt if job is not None else None
        if job is None or attempt is None or attempt.state is not AttemptState.RUNNING:
            return
        if attempt.migration is None and not attempt.resuming and job.step > job.checkpoint_step:
            # Two take turns: while one is written the other is whole.
            turn = 1 - int((job.checkpoint or "").endswith("/1"))
            path = job.spec.checkpoint_path(job.id, str(turn))
            reason = f"every {job.spec.checkpoint_every_s:g} s"
            self._to_ranks(d.TakeCheckpoint, attempt, attempt.hosts, reason, path=path)
        self._next_checkpoint(job)

    def _on_launch_failed(self, event: e.LaunchFailed) -> None:
        attempt = self.state.attempt(event.job, event.attempt, event.generation)
        if attempt is None or attempt.state is AttemptState.STOPPING:
            return
        outcome = Outcome.LAUNCH_FAILED
        if event.is_infrastructure:
            devices = of_ranks(self.state.hosts, attempt)
            job = self.state.jobs[event.job]
            if self._try_elsewhere(job, event.host, event.why, devices):
                outcome = Outcome.REFUSED
            elif not event.lasts or job.step:  # where it trained before it may again
                outcome = Outcome.HOST_LOST
        self._stop(attempt, outcome, f"{event.host} did not start it: {event.why}")

    def _on_rank_exited(self, event: e.RankExited) -> None:
        attempt = self.state.attempt(event.job, event.attempt)
        if attempt is None:
            return
        if attempt.generation != event.generation:
            self._coming_rank_exited(attempt, event)
            return
        rank = attempt.ranks.get(event.rank)
        if rank is None or rank.end is not None:
            return
        attempts.take_reports(attempt, [RankReport(rank=event.rank, end=event.end)], self.state.hosts)
        self._leave_out_faulty(event.host)
        if any(r.end is not None and r.end.reason is Reason.CROWDED for r in attempt.ranks.values()):
            self.state.jobs[event.job].needs_room = True
        self._after_end(attempt)

    def _coming_rank_exited(self, attempt: Attempt, event: e.RankExited) -> None:
        """Whoever leads the move says what becomes of it; what its device and its plan are worth is learned here."""
        move = attempt.migration
        if move is not None and move.generation == event.generation:
            for place in (p for p in move.places if p.rank == event.rank):
                attempts.note_fault(place, event.end, self.state.hosts)
                if event.end.reason is Reason.PLAN:
                    self.state.jobs[event.job].cannot_train_under(move.plan, str(event.end))
            self._leave_out_faulty(event.host)

    def _leave_out_faulty(self, host_id: HostId) -> None:
        """Have its devices that failed offered again after some time."""
        host = self.state.hosts.get(host_id)
        for device, fault in host.faults.items() if host is not None else ():
            if fault.is_left_out and f"fault:{device}" not in self.state.timers:
                until_s = self._now_s + attempts.fault_s(fault.times)
                self._set_timer(f"fault:{device}", until_s, f"{device} is left out until then: {fault.why}")

    def _on_rank_orphaned(self, event: e.RankOrphaned) -> None:
        attempt = self.state.attempt(event.job, event.attempt, event.generation)
        if attempt is None or attempt.state is not AttemptState.RUNNING or event.rank not in attempt.ranks:
            return
        attempt.orphaned[event.rank] = event.step
        if event.may_finish:
            attempt.may_finish.add(event.rank)
        attempt.is_too_large |= event.out_of_memory
        if f"recover:{event.job}" not in self.state.timers:
            self._set_timer(
                f"recover:{event.job}", self._now_s + recovery.NOTICE_S, f"rank {event.rank} lost its peers"
            )
        self._recover(attempt)

    def _after_end(self, attempt: Attempt) -> None:
        """A rank ended: wait for those that survive it, or end the attempt."""
        job = self.state.jobs[attempt.job]
        ends = [rank.end for rank in attempt.ranks.values() if rank.end is not None]
        if not any(recovery.may_recover(job, attempt, end) for end in ends) or job.step < 1:
            self._settle(attempt)
            return
        if attempt.migration is not None and not attempt.migration.lost:
            self._give_up_migration(attempt, "a rank that was to be moved died")
        if f"recover:{job.id}" not in self.state.timers:
            job.reason = (
                f"a rank died ({next(end for end in ends if not end.is_success)}); its peers are asked what they hold"
            )
            self._set_timer(f"recover:{job.id}", self._now_s + recovery.NOTICE_S, job.reason)
        self._recover(attempt)

    def _survivors_are_late(self, attempt: Attempt) -> None:
        """Not everyone is known to be dead or waiting: tell them, and at last go on without what they hold."""
        silent = sorted(recovery.undecided(attempt, self.state.hosts))
        if attempt.cut_off:
            self._stop(attempt, Outcome.HOST_LOST, f"ranks died, and ranks {silent} did not say what they hold")
            return
        why = f"ranks {silent} have not noticed that peers are gone" if silent else "ranks died"
        self._cut_off(attempt, why)
        self._set_timer(f"recover:{attempt.job}", self._now_s + recovery.WAIT_FOR_SURVIVORS_S, why)

    def _outlives(self, attempt: Attempt, host: Host) -> bool:
        """Whether ranks on other hosts may have all that is needed; they are asked then."""
        job = self.state.jobs[attempt.job]
        end = RankEnd(reason=Reason.LOST)
        others = [h for h in attempt.hosts if self.state.hosts[h].state is HostState.UP]
        if not others or job.step < 1 or not recovery.may_recover(job, attempt, end):
            return False
        if attempt.migration is not None:
            self._give_up_migration(attempt, f"{host.id} is lost")
        job.reason = f"{host.id} is lost ({host.why}); ranks on {', '.join(others)} are asked what they hold"
        self._cut_off(attempt, job.reason)
        self._set_timer(f"recover:{job.id}", self._now_s + recovery.WAIT_FOR_SURVIVORS_S, job.reason)
        self._recover(attempt)
        return True

    def _recover(self, attempt: Attempt) -> None:
        """Go on from what is left, once it is known what that is."""
        job = self.state.jobs[attempt.job]
        if attempt.state is not AttemptState.RUNNING or attempt.migration is not None:
            return
        if recovery.undecided(attempt, self.state.hosts):
            return
        lost = recovery.dead(attempt, self.state.hosts)
        if not (lost or attempt.is_too_large) or attempt.retired:
            return  # looked at again when the ranks of the last move are gone: their devices are not free before
        self.state.timers.pop(f"recover:{job.id}", None)
        if attempt.resuming:  # what is left came by a move that nobody will report the end of
            attempt.resuming, job.migrations[-1].ended_s = False, self._now_s
        self._give_up_trial(job, "out of memory" if attempt.is_too_large else "ranks died", attempt.is_too_large)
        step = max((attempt.orphaned[rank] for rank in set(attempt.orphaned) - lost), default=0)
        view = View(self.state, self._now_s)
        if lost:
            lost = set(attempt.ranks) - (recovery.outlived_by(attempt, step) - lost)
            answer = recovery.way_on(job, attempt, view, sorted(lost))
        else:
            answer = recovery.way_back(job, attempt, view)
        if isinstance(answer, Refusal):
            self._stop(attempt, Outcome.HOST_LOST, answer.reason)
        elif stale := migrations.objection(self.state, job, answer, after_loss=True):
            self._stop(attempt, Outcome.HOST_LOST, stale)
        else:
            self._begin_migration(
                job, attempt, answer, lost, step, recovery.is_crowded(job, attempt, answer, view.hosts)
            )

    def _on_attempt_stopped(self, event: e.AttemptStopped) -> None:
        host = self.state.hosts.get(event.host)
        if host is not None:
            host.orphans.discard((event.job, event.attempt, event.generation))
            host.strangers.discard((event.job, event.attempt, event.generation))
            if (left := self.state.past_attempt(event.job, event.attempt)) is not None:
                left.given_up.discard(host.id)
        attempt = self.state.attempt(event.job, event.attempt)
        if attempt is not None and attempt.generation == event.generation:
            attempts.take_reports(attempt, event.ranks, self.state.hosts)
            self._leave_out_faulty(event.host)
            self._gone_from(attempt, event.host)
        elif attempt is not None:
            self._retired_gone(attempt, event.generation, event.host)
            if f"recover:{event.job}" in self.state.timers:
                self._recover(attempt)
        self._pass_due = True

    def _on_checkpoint_taken(self, event: e.CheckpointTaken) -> None:
        job = self.state.jobs.get(event.job)
        if job is not None and event.step >= job.checkpoint_step:
            job.checkpoint, job.checkpoint_step = event.path, event.step

    def _on_attempt_progressed(self, event: e.AttemptProgressed) -> None:
        job = self.state.jobs.get(event.job)
        attempt = self.state.attempt(event.job, event.attempt)
        if job is None or attempt is None or event.step < attempt.step:
            return  # old news: what was held back on its way
        attempt.step = event.step
        onward = _under_way(job)
        if onward is not None and onward.step is not None and event.step > onward.step:
            self._went_on(job, onward)
        job.step, job.loss, job.step_time_s = event.step, event.loss, event.step_time_s
        job.progressed_s = event.at_s
        self._watch_progress(job, event.at_s)
        if job.first_loss is None:
            job.first_loss = event.first_loss
        job.lost_in_a_row = 0
        self._is_target_reached(job, attempt)
        if job.trial is not None and job.trial.from_step is None:
            self._pass_due = True

    def _watch_progress(self, job: Job, since_s: float) -> None:
        """One timer for all its steps: when it fires, the newest of them counts."""
        if job.spec.stall_s is not None and f"stall:{job.id}" not in self.state.timers:
            limit_s = _stalled_after_s(job, job.spec.stall_s)
            said = f"{job.spec.name} may be without a step for {duration(limit_s)}"
            self._set_timer(f"stall:{job.id}", since_s + limit_s, said)

    def _may_have_stalled(self, job: Job | None) -> None:
        """Start it again if nothing explains that it makes no steps."""
        attempt = job.attempt if job is not None else None
        if job is None or attempt is None or job.spec.stall_s is None:
            return
        if attempt.state is not AttemptState.RUNNING:
            return  # the launch of the next attempt winds it up again
        changing = attempt.migration is not None or attempt.resuming or attempt.orphaned
        away = any(self.state.hosts[host].state is not HostState.UP for host in attempt.hosts)
        since_s = self._now_s if changing or away else max(job.progressed_s or 0.0, attempt.started_s)
        silent_s = self._now_s - since_s
        if silent_s >= _stalled_after_s(job, job.spec.stall_s):
            after = f"after step {attempt.step}" if attempt.step else "since it was launched"
            said = f"no step for {duration(silent_s)} {after}; its log shows where its ranks were"
            self._stop(attempt, Outcome.HOST_LOST, said)
        else:
            self._watch_progress(job, since_s)


def _stalled_after_s(job: Job, asked_s: float) -> float:
    """Not sooner than steps may take."""
    return max(asked_s, STALL_STEPS * (job.step_time_s or 0.0))


def _under_way(job: Job) -> Migration | None:
    """The move through host memory after which the job has not trained yet."""
    last = job.migrations[-1] if job.migrations else None
    return last if last is not None and last.restarts and last.ended_s is None else None
