"""The scheduler: events in, decisions out, and nothing else.

`Scheduler.handle` is the only way to change the state. It never looks at a clock, a socket or a file: time comes with
the events. Each event has one handler function in `clusterd.core.lifecycle`; a scheduling pass follows each batch that
asks for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.core.fair_share import charge
from clusterd.core.lifecycle import (
    accounts,
    attempt_events,
    device_claims,
    device_shares,
    host_events,
    idleness,
    job_events,
    jobs,
    migration_events,
    stopping,
    trial_events,
)
from clusterd.core.lifecycle.context import HOST_LOST_AFTER_S, HandlerContext
from clusterd.core.policies import POLICIES
from clusterd.core.queue_order import Order, QueuePlace, changed, difference, only
from clusterd.core.queueing.arrays import ArrayLimits
from clusterd.core.queueing.bookings import waits_for as waits_for_booking
from clusterd.core.queueing.dependencies import in_vain, waits_for
from clusterd.core.reservations import Reservation
from clusterd.core.state import Outcome, State
from clusterd.core.view import HostAnswers, Policy, Proposal, Refusal, View
from clusterd.types import AttemptState, JobId, JobKind, JobState

__all__ = ["HOST_LOST_AFTER_S", "Batch", "Scheduler"]

SPACING_S_PER_JOB = 1e-4
"""Least time between two passes, per job that is not over: about twice what a pass takes, so that thousands of queued
jobs do not make every request wait for a pass of its own."""

SPACING_LEAST_S = 0.1
"""Shorter times do not put a pass off."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Events that are handled together, and the policy's proposal after the last of them."""

    events: Sequence[e.Event]
    proposal: Proposal | None = None  # None: the policy was not asked, or its proposal was not recorded


@dataclass(frozen=True, slots=True)
class SideEffects:
    """Changes of jobs in a batch that none of its events and decisions names."""

    jobs: frozenset[JobId] = frozenset()  # whose promised start is another one, or is none any more
    order: Mapping[JobId, QueuePlace | None] = field(default_factory=dict)  # see `queue_order.difference`


NO_SIDE_EFFECTS = SideEffects()


class Scheduler:
    """Holds the state and decides; deterministic, so that a replay of the journal gives the same decisions.

    Attributes:
        policy: asked for a proposal in each pass.
        proposed: its proposal in the last batch, without refusals that repeat; None: it was not asked.
        side_effects: of the last batch.
    """

    def __init__(self, policy: Policy | None = None, host_lost_after_s: float = HOST_LOST_AFTER_S) -> None:
        self.policy = policy or POLICIES["default"]()
        self.proposed: Proposal | None = None
        self.side_effects = NO_SIDE_EFFECTS
        self._before: tuple[Reservation | None, Order] = (None, {})
        self._answers = HostAnswers()
        self._context = HandlerContext(host_lost_after_s=host_lost_after_s)

    @property
    def state(self) -> State:
        """The state; to be read only."""
        return self._context.state

    @state.setter
    def state(self, state: State) -> None:
        self._context.state, self._context.pass_due = state, False

    def handle(self, *events: e.Event) -> list[d.Decision]:
        """Take in what happened at one instant, and decide once about all of it.

        Events given together are one batch: a single scheduling pass follows the last of them.
        """
        return self.replay(Batch(events))

    def replay(self, batch: Batch) -> list[d.Decision]:
        """Handle a recorded batch again: its recorded proposal applies, whatever the policy would propose today."""
        view = self.begin(batch)
        proposal = batch.proposal
        if view is not None and proposal is None:
            proposal = self.policy.propose(view)
        return self.finish(proposal if view is not None else None)

    def begin(self, batch: Batch) -> View | None:
        """First half of `replay`: take in the events.

        Returns:
            What the policy is to be asked about, which stays true until `finish`; None: it is not asked.
        """
        ctx = self._context
        ctx.decisions = []
        self.proposed = None
        self._before = (ctx.state.reservation, ctx.state.order)
        for event in batch.events:
            ctx.cause, ctx.now_s = event.id, event.at_s
            _HANDLERS[type(event)](ctx, event)
        is_due = batch.proposal is not None or (ctx.pass_due and not _put_off(ctx))
        ctx.pass_due = False
        return self._begin_pass(ctx) if is_due else None

    def finish(self, proposal: Proposal | None) -> list[d.Decision]:
        """Second half of `replay`: decide as proposed; None: the policy was not asked."""
        ctx = self._context
        if proposal is not None:
            self.proposed = replace(proposal, refusals=_apply(ctx, proposal))
            if proposal.starts or proposal.moves:
                charge(ctx.state, ctx.now_s)
            _explain_drained(ctx)
        self.side_effects = self._side_effects()
        return ctx.decisions

    def _side_effects(self) -> SideEffects:
        (promise, order), state = self._before, self.state
        promises = {promise, state.reservation} if promise != state.reservation else set()
        jobs = frozenset(each.job for each in promises if each is not None)
        return SideEffects(jobs, difference(order, state.order) if order is not state.order else {})

    def _begin_pass(self, ctx: HandlerContext) -> View | None:
        """Do what a scheduling pass does without the policy; returns what the policy is to be asked about, if it is."""
        state = ctx.state
        if any(claim.unused for claim in state.device_claims.values()):
            device_claims.refresh(ctx)
        state.order = only(state.order, state.queue)
        charge(state, ctx.now_s)
        if not state.queue and not state.active:
            return None
        state.passed_s = ctx.now_s
        ctx.cancel_timer(TimerKind.PASS, "")
        self._set_round_timer(ctx)
        _fail_unsatisfiable(ctx)
        blocked = _hold_dependents(ctx)
        job_events.describe_models(ctx)
        trial_events.run_trials(ctx)
        if state.recovering:
            names = ", ".join(sorted(state.recovering))
            for job_id in state.queue:
                ctx.hold(state.jobs[job_id], f"the daemon has just started and waits for {names} to report")
            return None
        return View(state, ctx.now_s, blocked, self._answers.of(state.hosts.values()))

    def _set_round_timer(self, ctx: HandlerContext) -> None:
        """Keep a timer for policies that work in rounds, while there are jobs."""
        interval_s = self.policy.interval_s
        if interval_s is not None and Timer(TimerKind.ROUND) not in ctx.state.timers:
            # On a grid: rounds do not drift with the times of events.
            at_s = (ctx.now_s // interval_s + 1.0) * interval_s
            ctx.set_timer(TimerKind.ROUND, "", at_s, f"{self.policy.name} decides again every {interval_s:g} s")


def _put_off(ctx: HandlerContext) -> bool:
    """True if the last pass was too short a time ago for so many jobs: a timer asks for the next one."""
    state = ctx.state
    spacing_s = SPACING_S_PER_JOB * (len(state.queue) + len(state.active))
    if state.passed_s is None or spacing_s <= SPACING_LEAST_S:
        return False
    next_s = state.passed_s + spacing_s
    if not state.passed_s <= ctx.now_s < next_s:
        return False
    if not ctx.has_timer(TimerKind.PASS, ""):
        ctx.set_timer(TimerKind.PASS, "", next_s, f"the last pass was {ctx.now_s - state.passed_s:.2f} s ago")
    return True


def _fail_unsatisfiable(ctx: HandlerContext) -> None:
    """Fail queued jobs that were to start after one that failed, and the jobs that were to start after these."""
    state = ctx.state
    dependents = [state.jobs[job] for job in state.queue if state.jobs[job].spec.after]
    changed = True
    while changed:
        changed = False
        for job in dependents:
            if job.state is JobState.QUEUED and (why := in_vain(job.spec, state.jobs)) is not None:
                jobs.end(ctx, job, JobState.FAILED, why, exit_code=None)
                changed = True


def _hold_dependents(ctx: HandlerContext) -> set[JobId]:
    """Record what held jobs, dependents and tasks of full arrays wait for; returns them, whom policies do not see."""
    blocked: set[JobId] = set()
    arrays = ArrayLimits(ctx.state)
    for job in map(ctx.state.jobs.__getitem__, ctx.state.queue):
        if job.held_by is not None:
            by = f" by {job.held_by}" if job.held_by else ""
            stopped = f"{job.attempts[-1].stop.why}; " if job.attempts and not by else ""
            ctx.hold(job, f"{stopped}held{by}: clusterd release {job.id} lets it start")
            blocked.add(job.id)
        elif (awaited := waits_for(job.spec, ctx.state)) is not None:
            ctx.hold(job, awaited)
            blocked.add(job.id)
        elif job.spec.begin_s is not None and job.spec.begin_s > ctx.now_s and not job.attempts:
            if ctx.state.timers.get(Timer(TimerKind.RETRY, job.id)) != job.spec.begin_s:
                ctx.set_timer(TimerKind.RETRY, job.id, job.spec.begin_s, f"{job.spec.name} may begin")
            ctx.hold(job, "waits for the time at which it is to begin")
            blocked.add(job.id)
        elif (limited := arrays.waits_for(job, ctx.now_s)) is not None:
            ctx.hold(job, limited)
            blocked.add(job.id)
        elif job.spec.booking and (why := waits_for_booking(job.spec, ctx.state.device_claims, ctx.now_s)) is not None:
            ctx.hold(job, why)
            blocked.add(job.id)
    return blocked


def _apply(ctx: HandlerContext, proposal: Proposal) -> list[Refusal]:
    """Turn a proposal into decisions, each checked against the state; returns the refusals that are new."""
    state = ctx.state
    state.order = changed(state.order, proposal.order) if proposal.order else state.order
    if proposal.reservation is not None or proposal.ends_reservation:
        state.reservation = proposal.reservation
    if proposal.again_s is not None:
        ctx.set_timer(TimerKind.ROUND, "", ctx.now_s + proposal.again_s, "jobs wait for devices")
    for job_id in proposal.ends_handovers:
        state.handovers.pop(job_id, None)
    state.handovers.update(proposal.handovers)
    for preempt in proposal.preempts:
        attempt = state.jobs[preempt.job].attempt
        if attempt is not None and attempt.state is not AttemptState.STOPPING:
            stopping.stop(ctx, attempt, Outcome.PREEMPTED, preempt.reason)
    for grant in proposal.grants:
        jobs.grant_cores(ctx, grant)
    for move in proposal.moves:
        if not trial_events.waits_for_trial(ctx, move):
            migration_events.migrate(ctx, move)
    for start in proposal.starts:
        if (objection := jobs.start(ctx, start)) is not None:
            ctx.hold(state.jobs[start.job], f"the policy's proposal was refused: {objection}")
    new: list[Refusal] = []
    for refusal in proposal.refusals:
        job = state.jobs[refusal.job]
        if refusal.is_permanent or refusal.reason != job.reason:
            new.append(refusal)
        if refusal.is_permanent:
            jobs.end(ctx, job, JobState.FAILED, refusal.reason, exit_code=None)
        else:
            ctx.hold(job, refusal.reason)
    state.order = only(state.order, state.queue)  # one that starts now, and is queued again, has to be placed anew
    return new


def _explain_drained(ctx: HandlerContext) -> None:
    """Record what keeps a drained host busy as the reason of the jobs that stay there."""
    drained = {host.id for host in ctx.state.hosts.values() if host.drained is not None}
    claimed = {device: why for host in ctx.state.hosts.values() for device, why in host.claimed.items()}
    for job in map(ctx.state.jobs.__getitem__, ctx.state.active if drained or claimed else ()):
        attempt = job.attempt
        if attempt is None or attempt.state is not AttemptState.RUNNING or attempt.migration or job.resuming:
            continue
        if leaving := sorted(drained.intersection(attempt.hosts)):
            stays = job.spec.kind is JobKind.COMMAND or all(ctx.state.hosts[host].jobs_stay for host in leaving)
            until = "its end" if stays else "devices are free elsewhere, or its end"
            why = " and ".join(str(ctx.state.hosts[host].unusable) for host in leaving)
            ctx.hold(job, f"{why}: it stays there until {until}")
        elif held := sorted(claimed.keys() & set(attempt.devices)) if not job.spec.booking else []:
            until = "its end" if job.spec.kind is JobKind.COMMAND else "devices are free elsewhere, or its end"
            ctx.hold(job, f"{', '.join(held)} is {claimed[held[0]]}: it stays there until {until}")


_HANDLERS: dict[type[e.Event], Callable[[HandlerContext, Any], None]] = {
    e.DaemonStarted: host_events.on_daemon_started,
    e.SettingsReloaded: host_events.on_settings_reloaded,
    e.ClockSet: host_events.on_clock_set,
    e.TimerFired: host_events.on_timer_fired,
    e.HostAdded: host_events.on_host_added,
    e.HostRemoved: host_events.on_host_removed,
    e.HostDrained: host_events.on_host_drained,
    e.HostUndrained: host_events.on_host_undrained,
    e.HostConnected: host_events.on_host_connected,
    e.HostDisconnected: host_events.on_host_disconnected,
    e.HostChanged: host_events.on_host_changed,
    e.DevicesClaimed: device_claims.on_devices_claimed,
    e.DeviceClaimRemoved: device_claims.on_device_claim_removed,
    e.AccountConnected: accounts.on_account_connected,
    e.AccountDisconnected: accounts.on_account_disconnected,
    e.NoticePosted: device_claims.on_notice_posted,
    e.JobSubmitted: job_events.on_job_submitted,
    e.JobCancelled: job_events.on_job_cancelled,
    e.JobReprioritised: job_events.on_job_reprioritised,
    e.JobEdited: job_events.on_job_edited,
    e.JobHeld: job_events.on_job_held,
    e.JobReleased: job_events.on_job_released,
    e.JobRequeued: job_events.on_job_requeued,
    e.JobPaused: job_events.on_job_paused,
    e.JobUnpaused: job_events.on_job_unpaused,
    e.JobsArchived: job_events.on_jobs_archived,
    e.JobRecalled: job_events.on_job_recalled,
    e.ModelDescribed: job_events.on_model_described,
    e.ModelNotDescribed: job_events.on_model_not_described,
    e.SpeedLearned: trial_events.on_speed_learned,
    e.CompletionPredicted: trial_events.on_completion_predicted,
    e.TrialProposed: trial_events.on_trial_proposed,
    e.TrialMeasured: trial_events.on_trial_measured,
    e.EnvironmentBuildStarted: attempt_events.on_environment_build_started,
    e.EnvironmentBuilt: attempt_events.on_environment_built,
    e.AttemptLaunched: attempt_events.on_attempt_launched,
    e.LaunchFailed: attempt_events.on_launch_failed,
    e.RankExited: attempt_events.on_rank_exited,
    e.RankOrphaned: attempt_events.on_rank_orphaned,
    e.AttemptStopped: attempt_events.on_attempt_stopped,
    e.AttemptProgressed: attempt_events.on_attempt_progressed,
    e.DeviceMemoryObserved: device_shares.on_memory_observed,
    e.IdlenessObserved: idleness.on_idleness_observed,
    e.CheckpointTaken: attempt_events.on_checkpoint_taken,
    e.CheckpointFailed: attempt_events.on_checkpoint_failed,
    e.MigrationRequested: migration_events.on_migration_requested,
    e.JobUnpinned: migration_events.on_job_unpinned,
    e.MigrationAdvanced: migration_events.on_migration_advanced,
    e.MigrationVerified: migration_events.on_migration_verified,
    e.MigrationFinished: migration_events.on_migration_finished,
    e.MigrationFailed: migration_events.on_migration_failed,
}
assert set(_HANDLERS) == set(e.EVENTS.values()), "every event has a handler"
