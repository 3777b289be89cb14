"""The scheduler: events in, decisions out, and nothing else.

`handle` is the only way to change the state. It never looks at a clock, a socket or a file: time comes with the events.
Handlers are found by name: ``RankExited`` goes to ``_on_rank_exited``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from clusterd.core import attempts, elastic, migrations, recovery
from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.policies import POLICIES
from clusterd.core.reconcile import reconcile
from clusterd.core.state import Attempt, Description, Host, Job, Outcome, State
from clusterd.core.view import Move, Policy, Proposal, Refusal, Start, View
from clusterd.types import AttemptState, HostId, HostState, JobId, JobKind, JobState

HOST_LOST_AFTER_S = 120.0
"""An unreachable host's ranks are given up after this; until then they are presumed to go on."""

RECOVERY_S = 20.0
"""After a start of the daemon nothing is placed until each host in use has reported, or for this long."""


class Scheduler:
    """Holds the state and decides; deterministic, so that replaying the journal gives the same decisions."""

    def __init__(self, policy: Policy | None = None, host_lost_after_s: float = HOST_LOST_AFTER_S) -> None:
        self.state = State()
        self.policy = policy or POLICIES["default"]()
        self.host_lost_after_s = host_lost_after_s
        self._out: list[d.Decision] = []
        self._pass_due = False
        self._cause = e.EventId(0)
        self._now_s = 0.0

    def handle(self, *events: e.Event) -> list[d.Decision]:
        """Take in what happened at one instant, and decide once about all of it.

        Events given together are one batch: a single scheduling pass follows the last of them.
        """
        self._out = []
        for event in events:
            self._cause, self._now_s = event.id, event.at_s
            _HANDLERS[type(event)](self, event)
        if self._pass_due:
            self._pass_due = False
            self._pass()
        return self._out

    # --- the pass -----------------------------------------------------------------------------------------------------

    def _pass(self) -> None:
        if not self.state.queue and not self.state.active:
            return
        self._describe_models()
        if self.state.recovering:
            names = ", ".join(sorted(self.state.recovering))
            for job_id in self.state.queue:
                self._hold(self.state.jobs[job_id], f"the daemon has just started and waits to hear from {names}")
            return
        proposal: Proposal = self.policy.propose(View(self.state, self._now_s))
        for move in proposal.moves:
            self._move(move)
        for start in proposal.starts:
            self._start(start)
        for refusal in proposal.refusals:
            job = self.state.jobs[refusal.job]
            if refusal.forever:
                self._end_job(job, JobState.FAILED, refusal.reason, exit_code=None)
            else:
                self._hold(job, refusal.reason)

    def _start(self, start: Start) -> None:
        # Revalidated here, so that no policy, whatever its bugs, can lease a device twice.
        job = self.state.jobs[start.job]
        stale = attempts.objection(self.state, job, start)
        if stale:
            self._hold(job, f"the policy's proposal was refused: {stale}")
            return
        attempt = attempts.begin(self.state, job, start, self._now_s)
        if job.spec.time_limit_s is not None:
            left_s = job.spec.time_limit_s
            self._set_timer(f"limit:{job.id}", self._now_s + left_s, f"{job.spec.name} may run for {left_s:.0f} s")
        self._launch(attempt, start.reason)

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
            )
        )

    def _describe_models(self) -> None:
        for job_id in self.state.queue:
            job = self.state.jobs[job_id]
            if job.description is not Description.NEEDED or job.not_before_s > self._now_s:
                continue
            host = self._host_to_describe(job)
            if host is None:
                self._hold(job, "waits for a host to tell its model on")
                continue
            job.description, job.described_on = Description.ASKED, host.id
            reason = f"{job.spec.name} is new here: its model is built without storage to learn its shape"
            self._decide(d.DescribeModel(cause=self._cause, reason=reason, job=job.id, host=host.id))

    def _host_to_describe(self, job: Job) -> Host | None:
        wanted = job.spec.resources
        usable = [
            h for h in self.state.hosts.values() if h.unusable is None and (not wanted.hosts or h.id in wanted.hosts)
        ]
        # Descriptions asked of a host at once share its few spare cores: take the least busy.
        asked = [j.described_on for j in map(self.state.jobs.__getitem__, self.state.queue) if j.described_on]
        return min(usable, key=lambda h: (asked.count(h.id), h.cores_used, h.id), default=None)

    # --- the daemon and hosts -----------------------------------------------------------------------------------------

    def _on_daemon_started(self, event: e.DaemonStarted) -> None:
        self.state.epoch = event.epoch
        for host in self.state.hosts.values():
            if host.state is not HostState.LOST:
                host.go(HostState.CONNECTING, event.at_s, "the daemon has just started")
            host.orphans.clear()
        for job_id in self.state.queue:
            job = self.state.jobs[job_id]
            if job.description is Description.ASKED:  # whoever was asked has no one to answer to
                job.description, job.described_on = Description.NEEDED, None
        for job_id in self.state.active:  # whoever led these moves is gone; the old ranks go on, or wait to be told
            attempt = attempts.running(self.state, job_id)
            if attempt.migration is not None:
                self._give_up_migration(attempt, "the daemon ended in the middle of it")
        busy = {host for job in self.state.active for host in attempts.running(self.state, job).all_hosts}
        self.state.recovering = {h for h in busy if self.state.hosts[h].state is HostState.CONNECTING}
        if self.state.recovering:
            self._set_timer("recovery", event.at_s + RECOVERY_S, "hosts in use are heard first")
        for host_id in sorted(self.state.recovering):
            self._set_timer(f"host-lost:{host_id}", event.at_s + self.host_lost_after_s, f"{host_id} has ranks of ours")
        self._pass_due = True

    def _on_timer_fired(self, event: e.TimerFired) -> None:
        self.state.timers.pop(event.timer, None)
        kind, _, about = event.timer.partition(":")
        if kind == "recovery":
            self.state.recovering.clear()
        elif kind == "host-lost":
            self._give_up(HostId(about))
        elif kind == "recover":
            job = self.state.jobs.get(JobId(about))
            if job is not None and job.attempt is not None and job.attempt.state is AttemptState.RUNNING:
                silent = sorted(recovery.undecided(job.attempt, self.state.hosts))
                self._stop(job.attempt, Outcome.HOST_LOST, f"ranks died, and ranks {silent} did not say what they hold")
        elif kind == "limit":
            job = self.state.jobs.get(JobId(about))
            if job is not None and job.attempt is not None and job.attempt.state is not AttemptState.STOPPING:
                self._stop(job.attempt, Outcome.TIME_LIMIT, f"its time limit of {job.spec.time_limit_s:.0f} s is over")
        self._pass_due = True

    def _on_host_added(self, event: e.HostAdded) -> None:
        self.state.hosts[event.host] = Host(event.host, since_s=event.at_s, why="not connected yet")

    def _on_host_removed(self, event: e.HostRemoved) -> None:
        del self.state.hosts[event.host]
        self.state.recovering.discard(event.host)
        self._pass_due = True

    def _on_host_drained(self, event: e.HostDrained) -> None:
        self.state.hosts[event.host].drained = (
            " ".join(filter(None, (event.by and f"by {event.by}", event.why))) or "drained"
        )
        self._pass_due = True

    def _on_host_undrained(self, event: e.HostUndrained) -> None:
        self.state.hosts[event.host].drained = None
        self._pass_due = True

    def _on_host_connected(self, event: e.HostConnected) -> None:
        host = self.state.hosts.get(event.host)
        if host is None:
            return
        host.go(HostState.UP, event.at_s)
        host.facts = event.facts
        self.state.recovering.discard(host.id)
        self.state.timers.pop(f"host-lost:{host.id}", None)
        found = reconcile(self.state, host, event.attempts)
        for job_id, number, generation in found.orphans:
            host.orphans.add((job_id, number))
            reason = f"{host.id} still runs attempt {number} of job {job_id}, which is over"
            self._stop_on(host.id, job_id, number, generation, 5.0, reason)
        for attempt in found.stopping:
            self._stop_on(host.id, attempt.job, attempt.number, attempt.generation, self._grace_s(attempt), attempt.why)
        for attempt, generation in found.retired:
            reason = f"generation {generation} of attempt {attempt.number} is over"
            self._stop_on(host.id, attempt.job, attempt.number, generation, self._grace_s(attempt), reason)
        for attempt in found.unlaunched:
            self._launch(attempt, f"{host.id} had not started attempt {attempt.number} when contact was lost")
        for attempt in found.ended:
            job = self.state.jobs[attempt.job]
            if job.migrations and job.migrations[-1].failure and attempt.migration is None and not attempt.resuming:
                # Whoever was to tell its ranks that the move is off may have had no way to.
                self._abort(
                    attempt, job.migrations[-1].generation, (host.id,), f"{host.id} is back after a failed move"
                )
            if attempt.resuming and host.id in attempt.hosts:
                self._resume(attempt, f"{host.id} is back after the switch")
            self._after_end(attempt)
        self._pass_due = True

    def _on_host_disconnected(self, event: e.HostDisconnected) -> None:
        host = self.state.hosts.get(event.host)
        if host is None:
            return
        if host.state is not HostState.UP:
            host.why = event.why
            return
        host.go(HostState.UNREACHABLE, event.at_s, event.why)
        for job_id in self.state.queue:
            job = self.state.jobs[job_id]
            if job.described_on == host.id and job.description is Description.ASKED:
                job.description, job.described_on = Description.NEEDED, None
        if any(self.state.attempts_on(host.id)):
            until_s = event.at_s + self.host_lost_after_s
            self._set_timer(f"host-lost:{host.id}", until_s, f"{host.id} is unreachable: {event.why}")
        for attempt in list(self.state.attempts_on(host.id)):
            if attempt.orphaned:
                self._recover(attempt)
        self._pass_due = True

    def _on_host_changed(self, event: e.HostChanged) -> None:
        if event.host in self.state.hosts:
            self.state.hosts[event.host].facts = event.facts
            self._pass_due = True

    def _give_up(self, host_id: HostId) -> None:
        host = self.state.hosts.get(host_id)
        if host is None or host.state is HostState.UP:
            return
        host.go(HostState.LOST, self._now_s, host.why)
        self.state.recovering.discard(host_id)
        for attempt in list(self.state.attempts_on(host_id)):
            if attempt.state is not AttemptState.STOPPING:
                self._stop(attempt, Outcome.HOST_LOST, f"{host_id} is lost: {host.why}")
            self._gone_from(attempt, host_id)
            for generation in list(attempt.retired):
                self._retired_gone(attempt, generation, host_id)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def _on_job_submitted(self, event: e.JobSubmitted) -> None:
        spec = event.spec
        job = Job(event.job, spec, priority=spec.priority, submitted_s=event.at_s, queued_s=event.at_s)
        if spec.kind is JobKind.ELASTIC:
            job.description = Description.NEEDED
        self.state.jobs[job.id] = job
        self.state.queue[job.id] = None
        self._pass_due = True

    def _on_job_cancelled(self, event: e.JobCancelled) -> None:
        job = self.state.jobs[event.job]
        reason = f"cancelled by {event.by}" if event.by else "cancelled"
        if job.state is JobState.QUEUED:
            self._end_job(job, JobState.CANCELLED, reason, exit_code=None)
        elif job.attempt is not None and job.attempt.state is not AttemptState.STOPPING:
            self._stop(job.attempt, Outcome.CANCELLED, reason)
        elif job.attempt is not None:
            job.attempt.outcome, job.attempt.why = Outcome.CANCELLED, reason
        self._pass_due = True

    def _on_job_reprioritised(self, event: e.JobReprioritised) -> None:
        self.state.jobs[event.job].priority = event.priority
        self._pass_due = True

    def _on_model_described(self, event: e.ModelDescribed) -> None:
        job = self.state.jobs[event.job]
        if not job.state.is_final:
            job.shape, job.description, job.described_on = event.shape, Description.DONE, None
            self._pass_due = True

    def _on_model_not_described(self, event: e.ModelNotDescribed) -> None:
        job = self.state.jobs[event.job]
        if job.state is not JobState.QUEUED:
            return
        job.description, job.described_on = Description.NEEDED, None
        if event.is_infrastructure:
            self._lost_once_more(job, event.why)
        else:
            self._end_job(job, JobState.FAILED, event.why, exit_code=1)
        self._pass_due = True

    # --- attempts -----------------------------------------------------------------------------------------------------

    def _on_attempt_launched(self, event: e.AttemptLaunched) -> None:
        attempt = self.state.attempt(event.job, event.attempt, event.generation)
        if attempt is None or attempt.state is not AttemptState.LAUNCHING:
            return
        attempt.go(AttemptState.RUNNING)
        job = self.state.jobs[event.job]
        job.go(JobState.RUNNING)
        self._settle(attempt)

    def _on_launch_failed(self, event: e.LaunchFailed) -> None:
        attempt = self.state.attempt(event.job, event.attempt, event.generation)
        if attempt is None or attempt.state is AttemptState.STOPPING:
            return
        outcome = Outcome.HOST_LOST if event.is_infrastructure else Outcome.LAUNCH_FAILED
        self._stop(attempt, outcome, f"{event.host} did not start it: {event.why}")

    def _on_rank_exited(self, event: e.RankExited) -> None:
        attempt = self.state.attempt(event.job, event.attempt, event.generation)
        if attempt is None or attempt.ranks[event.rank].end is not None:
            return
        attempt.ranks[event.rank].end = event.end
        self._after_end(attempt)

    def _on_rank_orphaned(self, event: e.RankOrphaned) -> None:
        attempt = self.state.attempt(event.job, event.attempt, event.generation)
        if attempt is None or attempt.state is not AttemptState.RUNNING:
            return
        attempt.orphaned[event.rank] = event.step
        if f"recover:{event.job}" not in self.state.timers:
            until_s = event.at_s + recovery.WAIT_FOR_SURVIVORS_S
            self._set_timer(f"recover:{event.job}", until_s, f"rank {event.rank} lost its peers")
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
            self._set_timer(f"recover:{job.id}", self._now_s + recovery.WAIT_FOR_SURVIVORS_S, job.reason)
        self._recover(attempt)

    def _recover(self, attempt: Attempt) -> None:
        """Go on from what is left, once it is known what that is."""
        job = self.state.jobs[attempt.job]
        if attempt.state is not AttemptState.RUNNING or attempt.migration is not None:
            return
        if recovery.undecided(attempt, self.state.hosts):
            return
        lost = recovery.dead(attempt, self.state.hosts)
        if not lost:
            return
        self.state.timers.pop(f"recover:{job.id}", None)
        answer = recovery.way_on(job, attempt, View(self.state, self._now_s))
        if isinstance(answer, Refusal):
            self._stop(attempt, Outcome.HOST_LOST, answer.reason)
        elif stale := migrations.objection(self.state, job, answer, after_loss=True):
            self._stop(attempt, Outcome.HOST_LOST, stale)
        else:
            self._begin_migration(job, attempt, answer, lost)

    def _on_attempt_stopped(self, event: e.AttemptStopped) -> None:
        host = self.state.hosts.get(event.host)
        if host is not None:
            host.orphans.discard((event.job, event.attempt))
        attempt = self.state.attempt(event.job, event.attempt)
        if attempt is not None and attempt.generation == event.generation:
            attempts.take_reports(attempt, event.ranks)
            self._gone_from(attempt, event.host)
        elif attempt is not None:
            self._retired_gone(attempt, event.generation, event.host)
        self._pass_due = True

    def _on_attempt_progressed(self, event: e.AttemptProgressed) -> None:
        job = self.state.jobs.get(event.job)
        if job is None or self.state.attempt(event.job, event.attempt) is None:
            return
        job.step, job.loss, job.step_time_s = event.step, event.loss, event.step_time_s
        if job.first_loss is None:
            job.first_loss = event.first_loss
        job.lost_in_a_row = 0

    # --- migrations ---------------------------------------------------------------------------------------------------

    def _on_migration_requested(self, event: e.MigrationRequested) -> None:
        job = self.state.jobs.get(event.job)
        if job is None:
            return
        answer = elastic.requested(job, View(self.state, event.at_s), event.plan, event.devices, event.by)
        if isinstance(answer, Refusal):
            self._hold(job, answer.reason)
            return
        if event.pin:
            job.pinned = True
        self._move(answer)

    def _on_job_unpinned(self, event: e.JobUnpinned) -> None:
        job = self.state.jobs.get(event.job)
        if job is not None:
            job.pinned = False
            self._pass_due = True

    def _move(self, move: Move) -> None:
        job = self.state.jobs[move.job]
        stale = migrations.objection(self.state, job, move)
        if stale:
            self._hold(job, f"a move was refused: {stale}")
            return
        self._begin_migration(job, attempts.running(self.state, job.id), move)

    def _begin_migration(self, job: Job, attempt: Attempt, move: Move, lost: Iterable[int] = ()) -> None:
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
        old_generation = attempt.generation
        retired = migrations.switch(self.state, job, attempt)
        self._resume(attempt, f"the whole state of step {event.step} is there: {migration.reason}")
        for host_id in sorted(retired.pending):
            reason = f"its state has moved to generation {attempt.generation}"
            self._stop_on(host_id, job.id, attempt.number, old_generation, self._grace_s(attempt), reason)

    def _resume(self, attempt: Attempt, reason: str) -> None:
        self._decide(
            d.ResumeAttempt(
                cause=self._cause,
                reason=reason,
                job=attempt.job,
                attempt=attempt.number,
                generation=attempt.generation,
                hosts=attempt.hosts,
            )
        )

    def _on_migration_finished(self, event: e.MigrationFinished) -> None:
        attempt = self.state.attempt(event.job, event.attempt, event.generation)
        if attempt is None or not attempt.resuming:
            return
        attempt.resuming = False
        job = self.state.jobs[event.job]
        job.migrations[-1].downtime_s, job.migrations[-1].ended_s = event.downtime_s, event.at_s
        self._pass_due = True

    def _on_migration_failed(self, event: e.MigrationFailed) -> None:
        attempt = self._migrating(event.job, event.attempt, event.generation)
        if attempt is None:
            return
        lost = attempt.migration.lost if attempt.migration is not None else ()
        self._give_up_migration(attempt, f"{event.phase}: {event.why}")
        if lost:  # there is nothing to go back to
            self._stop(
                attempt, Outcome.HOST_LOST, f"ranks {list(lost)} died, and going on without them failed: {event.why}"
            )
        self._pass_due = True

    def _give_up_migration(self, attempt: Attempt, why: str) -> None:
        """Back to the old ranks: they are told to go on, the new ones to go."""
        job = self.state.jobs[attempt.job]
        assert attempt.migration is not None
        generation = attempt.migration.generation
        retired = migrations.fail(job, attempt, why, self._now_s)
        reason = f"the move to {job.migrations[-1].plan} failed ({why}); {attempt.plan} goes on"
        job.reason = reason
        self._abort(attempt, generation, attempt.hosts, reason)
        for host_id in sorted(retired.pending):
            self._stop_on(host_id, job.id, attempt.number, generation, 0.0, reason)

    def _abort(self, attempt: Attempt, new_generation: int, hosts: tuple[HostId, ...], reason: str) -> None:
        self._decide(
            d.AbortMigration(
                cause=self._cause,
                reason=reason,
                job=attempt.job,
                attempt=attempt.number,
                generation=attempt.generation,
                new_generation=new_generation,
                hosts=hosts,
            )
        )

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
        attempt.outcome, attempt.why = outcome, why
        attempt.pending = set(attempt.hosts)
        attempt.go(AttemptState.STOPPING)
        job.go(JobState.STOPPING)
        job.reason = why
        self.state.timers.pop(f"limit:{job.id}", None)
        self.state.timers.pop(f"recover:{job.id}", None)
        for host_id in attempt.hosts:
            self._stop_on(host_id, attempt.job, attempt.number, attempt.generation, self._grace_s(attempt), why)

    def _grace_s(self, attempt: Attempt) -> float:
        return self.state.jobs[attempt.job].spec.grace_s

    def _stop_on(self, host: HostId, job: JobId, number: int, generation: int, grace_s: float, reason: str) -> None:
        self._decide(
            d.StopAttempt(
                cause=self._cause,
                reason=reason,
                job=job,
                attempt=number,
                generation=generation,
                host=host,
                grace_s=grace_s,
            )
        )

    def _gone_from(self, attempt: Attempt, host_id: HostId) -> None:
        """Nothing of the attempt is left on the host, or the host is given up: free what it held there."""
        if attempt.state is not AttemptState.STOPPING or host_id not in attempt.pending:
            return
        attempt.pending.discard(host_id)
        attempts.release(self.state, attempt, host_id)
        if not attempt.pending and not attempt.retired:
            self._conclude(attempt)

    def _retired_gone(self, attempt: Attempt, generation: int, host_id: HostId) -> None:
        gone = migrations.gone(self.state, attempt, generation, host_id)
        if gone and attempt.state is AttemptState.STOPPING and not attempt.pending and not attempt.retired:
            self._conclude(attempt)

    def _conclude(self, attempt: Attempt) -> None:
        attempt.go(AttemptState.ENDED)
        attempt.ended_s = self._now_s
        job = self.state.jobs[attempt.job]
        verdict = attempts.judge(job, attempt)
        if verdict.state is not JobState.QUEUED:
            self._end_job(job, verdict.state, verdict.reason, verdict.exit_code)
            return
        self.state.active.pop(job.id, None)
        self.state.queue[job.id] = None
        job.go(JobState.QUEUED)
        job.queued_s = self._now_s
        if verdict.is_infrastructure:
            self._lost_once_more(job, verdict.reason)
        else:
            job.own_failures += 1
            job.reason = verdict.reason
        if job.state is JobState.QUEUED:
            reason = f"{verdict.reason}; queued again"
            self._decide(d.RequeueJob(cause=self._cause, reason=reason, job=job.id, attempt=attempt.number))
        self._pass_due = True

    def _lost_once_more(self, job: Job, why: str) -> None:
        """Queue again after a fault that was not the job's, slower each time; give up when it never gets anywhere."""
        job.lost_in_a_row += 1
        if job.lost_in_a_row > attempts.LOST_IN_A_ROW_MAX:
            self._end_job(
                job, JobState.FAILED, f"lost {job.lost_in_a_row} times in a row without a step: {why}", exit_code=1
            )
            return
        job.reason = why
        delay_s = attempts.retry_delay_s(job.lost_in_a_row)
        if delay_s:
            job.not_before_s = self._now_s + delay_s
            self._set_timer(
                f"retry:{job.id}", job.not_before_s, f"{job.spec.name} is tried again after {delay_s:.0f} s"
            )

    def _end_job(self, job: Job, state: JobState, reason: str, exit_code: int | None) -> None:
        job.go(state)
        job.reason, job.exit_code, job.ended_s = reason, exit_code, self._now_s
        self.state.queue.pop(job.id, None)
        self.state.active.pop(job.id, None)
        self.state.timers.pop(f"retry:{job.id}", None)
        self._decide(d.EndJob(cause=self._cause, reason=reason, job=job.id, state=state.value, exit_code=exit_code))
        self._pass_due = True

    # --- saying it ----------------------------------------------------------------------------------------------------

    def _hold(self, job: Job, reason: str) -> None:
        if job.reason != reason:  # said once: a job that waits for the same thing for a day is one line of history
            job.reason = reason
            self._decide(d.HoldJob(cause=self._cause, reason=reason, job=job.id))

    def _set_timer(self, timer: str, at_s: float, reason: str) -> None:
        self.state.timers[timer] = at_s
        self._decide(d.SetTimer(cause=self._cause, reason=reason, timer=timer, at_s=at_s))

    def _decide(self, decision: d.Decision) -> None:
        self._out.append(decision)


def _handlers() -> dict[type[e.Event], Callable[[Scheduler, e.Event], None]]:
    """Every event kind with its method; a kind without one fails at import, not in the night."""
    return {
        kind: getattr(Scheduler, "_on_" + re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower())
        for name, kind in e.EVENTS.items()
    }


_HANDLERS = _handlers()
