"""Handlers of what happens to running attempts that are moved, and of the wish to move them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.allocation import resize_unmodelled
from clusterd.core.allocation.unmodelled import objection_to_size
from clusterd.core.lifecycle import attempts, migrations, trials
from clusterd.core.lifecycle.stopping import Stopping
from clusterd.core.state import Attempt, Job, Outcome
from clusterd.core.view import Move, Refusal, View
from clusterd.types import AttemptState, JobId, JobKind


class OnMigrations(Stopping):
    """From the wish to the last word of the new ranks."""

    def _on_migration_requested(self, event: e.MigrationRequested) -> None:
        job = self.state.jobs.get(event.job)
        if job is None:
            return
        if job.spec.kind is JobKind.CHECKPOINTABLE:
            self._restart_as(job, event)
            return
        answer = resize_unmodelled.requested(job, View(self.state, event.at_s), event.plan, event.devices, event.by)
        if isinstance(answer, Refusal):
            self._hold(job, answer.reason)
            return
        self._give_up_trial(job, f"{event.by or 'its user'} moves it")
        if event.pin and migrations.is_there(job, answer):
            job.pinned = answer.plan
            self._hold(job, f"pinned to {answer.plan} where it is, by {event.by or 'its user'}")
            return
        if self._move(replace(answer, may_restart=True)) and (event.pin or job.pinned is not None):
            job.pinned = answer.plan

    def _restart_as(self, job: Job, event: e.MigrationRequested) -> None:
        """What cannot be moved alive is asked to save, stopped, and started again at another size."""
        attempt = job.attempt
        if attempt is None or attempt.state is not AttemptState.RUNNING or event.plan is None:
            self._hold(job, f"{job.spec.name} is {job.state.value}: only a running job can be given another size")
            return
        stale = objection_to_size(job, View(self.state, event.at_s), event.plan)
        if stale:
            self._hold(job, f"it was not started again as {event.plan}: {stale}")
            return
        job.pinned = event.plan
        self._stop(attempt, Outcome.PREEMPTED, f"{event.by or 'its user'} wants it under {event.plan}: it saves, stops")
        self._pass_due = True

    def _give_up_trial(self, job: Job, why: str, is_refused: bool = False) -> None:
        """Something matters more than learning, or there is no more to learn from this plan."""
        if job.trial is not None:
            job.trial.failure, job.trial.is_refused = why, is_refused
            job.trials.append(job.trial)
            job.trial = None
        job.tried = job.tried or job.being_tried  # it may be left under that plan, and is not to stay so
        job.being_tried = False

    def _on_job_unpinned(self, event: e.JobUnpinned) -> None:
        job = self.state.jobs.get(event.job)
        if job is not None:
            job.pinned = None
            self._pass_due = True

    def _move(self, move: Move) -> bool:
        """Begin it, unless something is in the way; whether it was begun."""
        job = self.state.jobs[move.job]
        stale = migrations.objection(self.state, job, move)
        if stale:
            self._hold(job, f"a move was refused: {stale}")
            return False
        attempt = attempts.running(self.state, job.id)
        full = migrations.crowded(self.state.hosts, job, attempt, move.plan, {place.device for place in move.ranks})
        saves = job.spec.kind is JobKind.CHECKPOINTABLE
        if full is None and not saves:
            self._begin_migration(job, attempt, move)
        elif move.may_restart:
            why = move.reason if saves else f"{move.reason}; through host memory: {full}"
            self._stop(attempt, Outcome.PREEMPTED, why)
            attempt.onward = migrations.through_memory(self.state, job, attempt, move, self._now_s)
        else:
            self._hold(job, f"a move was refused: {full}")
            return False
        return True

    def _begin_migration(
        self,
        job: Job,
        attempt: Attempt,
        move: Move,
        lost: Iterable[int] = (),
        step: int | None = None,
        makes_room: bool = False,
    ) -> None:
        old_plan, old_ranks = attempt.plan, tuple(rank.place for _, rank in sorted(attempt.ranks.items()))
        migration = migrations.begin(self.state, job, move, self._now_s, lost)
        job.reason = move.reason
        assert old_plan is not None
        self._decide(
            d.StartMigration(
                cause=self._cause,
                reason=move.reason,
                job=job.id,
                attempt=attempt.number,
                generation=attempt.generation,
                plan=old_plan,
                ranks=old_ranks,
                new_generation=migration.generation,
                new_plan=move.plan,
                new_ranks=migration.places,
                lost=migration.lost,
                step=step,
                makes_room=makes_room,
            )
        )

    def _migrating(self, job: JobId, attempt: int, generation: int) -> Attempt | None:
        """The attempt that is on its way to this generation."""
        known = self.state.attempt(job, attempt)
        is_it = known is not None and known.migration is not None and known.migration.generation == generation
        return known if is_it else None

    def _on_migration_advanced(self, event: e.MigrationAdvanced) -> None:
        attempt = self._migrating(event.job, event.attempt, event.generation)
        if attempt is not None and attempt.migration is not None:
            attempt.migration.phases.append((event.phase, event.seconds, event.what))
            return
        job = self.state.jobs.get(event.job)
        if job is not None and job.migrations and job.migrations[-1].generation == event.generation:
            job.migrations[-1].phases.append((event.phase, event.seconds, event.what))  # what comes after the switch

    def _on_migration_verified(self, event: e.MigrationVerified) -> None:
        attempt = self._migrating(event.job, event.attempt, event.generation)
        if attempt is None or attempt.migration is None or attempt.state is not AttemptState.RUNNING:
            return
        job = self.state.jobs[event.job]
        migration = attempt.migration
        migration.step, migration.network_bytes, migration.local_bytes = (
            event.step,
            event.network_bytes,
            event.local_bytes,
        )
        if job.trial is None:
            job.tried = False
        old_generation = attempt.generation
        retired = migrations.switch(self.state, job, attempt)
        job.reason += self._pin_is_over(job, migration.plan)
        self._resume(attempt, f"the whole state of step {event.step} is there: {migration.reason}")
        reason = f"its state has moved to generation {attempt.generation}"
        self._retire(attempt, old_generation, retired, self._grace_s(attempt), reason)

    def _on_migration_finished(self, event: e.MigrationFinished) -> None:
        attempt = self.state.attempt(event.job, event.attempt, event.generation)
        if attempt is None or not attempt.resuming:
            return
        attempt.resuming = False
        job = self.state.jobs[event.job]
        job.migrations[-1].downtime_s, job.migrations[-1].ended_s = event.downtime_s, event.at_s
        migrations.learn_cost(self.state.move_costs_s, job.model, event.downtime_s)
        if job.trial is None:
            trials.let_go(self.state, attempt)
        # What could not be thought of so soon after this move is thought of then.
        self._set_timer(f"settle:{job.id}", event.at_s + resize_unmodelled.SETTLE_S, f"{job.spec.name} was moved")
        self._pass_due = True

    def _on_migration_failed(self, event: e.MigrationFailed) -> None:
        attempt = self._migrating(event.job, event.attempt, event.generation)
        if attempt is None:
            return
        migration = attempt.migration
        lost = migration.lost if migration is not None else ()
        if event.out_of_memory and migration is not None:
            beside = {place.device for place in migration.places}.intersection(attempt.devices)
            self.state.jobs[event.job].needs_room |= bool(beside)
        if event.refused and migration is not None:
            self.state.jobs[event.job].cannot_train_under(migration.plan, event.refused)
        why = event.why
        if event.host is not None:
            why = f"{event.host} did not start it: {event.why}"
            if event.host not in attempt.hosts:
                self.state.jobs[event.job].unfit[event.host] = event.why
        self._give_up_migration(attempt, f"{event.phase}: {why}")
        if attempt.orphaned:  # there is nothing to go back to
            who = f"ranks {list(lost)} died" if lost else f"{attempt.plan} ran out of memory"
            self._stop(attempt, Outcome.HOST_LOST, f"{who}, and going on failed: {why}")
        self._pass_due = True
