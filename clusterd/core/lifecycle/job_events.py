"""Handlers of job events: submit, cancel, priority, edits, and the inspection of models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from copy import deepcopy

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.lifecycle import jobs, stopping
from clusterd.core.lifecycle.context import HandlerContext
from clusterd.core.queueing.admission import hosts_without_login
from clusterd.core.queueing.dependencies import split, waits_for
from clusterd.core.queueing.edits import refused_now
from clusterd.core.state import Checkpoint, Inspection, InspectionState, Job, Outcome, State
from clusterd.types import AttemptState, JobId, JobKind, JobState

DESCRIPTIONS_PER_HOST = 2
"""Concurrent inspections on one host: they share the memory and cores that its jobs leave, and a sweep has hundreds."""


def on_job_submitted(ctx: HandlerContext, event: e.JobSubmitted) -> None:
    spec = event.spec
    job = Job(
        event.job, spec, priority=spec.priority, submitted_s=event.at_s, queued_s=event.at_s, created_s=event.at_s
    )
    job.checkpoint, job.progress.step = Checkpoint(spec.restore, spec.restore_step), spec.restore_step
    if spec.kind is JobKind.ELASTIC:
        job.inspection.state = InspectionState.NEEDED
    job.held_by = spec.user if spec.hold else None
    job.reason = "the scheduler has not looked at it yet"
    job.failures.excluded_hosts = hosts_without_login(ctx.state, spec.account)
    ctx.state.jobs[job.id] = job
    ctx.state.queue[job.id] = None
    ctx.pass_due = True


def on_job_cancelled(ctx: HandlerContext, event: e.JobCancelled) -> None:
    job = ctx.state.jobs[event.job]
    how = f"{f' by {event.by}' if event.by else ''}{', at once' if event.now else ''}"
    reason = f"cancelled{how}{f': {event.why}' if event.why else ''}"
    if job.attempt is not None and (event.now or job.attempt.stop.outcome in stopping.ENDS_EARLY):
        stopping.skip_grace(ctx, job.attempt, reason)  # the second request does not wait for what the first one saves
    if job.state is JobState.QUEUED:
        jobs.end(ctx, job, JobState.CANCELLED, f"{reason}{stopping.what_is_saved(job)}", exit_code=None)
    elif job.attempt is not None and job.attempt.state is not AttemptState.STOPPING:
        outcome, why = (Outcome.CANCELLED, reason) if not event.is_over else (Outcome.TARGET_REACHED, event.why)
        stopping.stop(ctx, job.attempt, outcome, why)
    elif job.attempt is not None and job.attempt.stop.outcome is not Outcome.TIME_LIMIT:  # which ends it as surely
        job.attempt.stop.outcome, job.attempt.stop.why = Outcome.CANCELLED, reason
    ctx.pass_due = True


def on_job_reprioritised(ctx: HandlerContext, event: e.JobReprioritised) -> None:
    ctx.state.jobs[event.job].priority = event.priority
    ctx.pass_due = True


def on_job_edited(ctx: HandlerContext, event: e.JobEdited) -> None:
    job = ctx.state.jobs[event.job]
    if job.state.is_final or refused_now(job, event.spec):  # it started, or ended, before this was handled
        return
    limit, resources = (job.spec.time_limit_s, job.spec.limit_signal), job.spec.resources
    job.spec, job.priority = event.spec, event.spec.priority
    if job.state is JobState.QUEUED and job.spec.resources != resources:
        _withdraw_promises(ctx, job)  # they were made for what it asked for before
    if (job.spec.time_limit_s, job.spec.limit_signal) != limit and job.attempt is not None:
        jobs.set_time_limit(ctx, job, job.attempt, asked_before=job.spec.limit_signal == limit[1])
    ctx.pass_due = True


def on_job_held(ctx: HandlerContext, event: e.JobHeld) -> None:
    job = ctx.state.jobs[event.job]
    if job.state is JobState.QUEUED:
        _hold(ctx, job, event.by)


def _hold(ctx: HandlerContext, job: Job, by: str) -> None:
    """Keep the job in the queue; what was promised to it goes to others."""
    job.held_by = by
    _withdraw_promises(ctx, job)
    ctx.pass_due = True


def _withdraw_promises(ctx: HandlerContext, job: Job) -> None:
    """Drop the reservation of the job, and what others hand over to it; a pass gives new ones to whoever is next."""
    ctx.state.handovers.pop(job.id, None)
    if ctx.state.reservation is not None and ctx.state.reservation.job == job.id:
        ctx.state.reservation = None


def on_job_released(ctx: HandlerContext, event: e.JobReleased) -> None:
    job = ctx.state.jobs[event.job]
    if job.held_by is not None:
        job.held_by, job.queued_s = None, ctx.now_s
        ctx.pass_due = True


def on_job_requeued(ctx: HandlerContext, event: e.JobRequeued) -> None:
    job = ctx.state.jobs[event.job]
    if job.state.is_final or job.attempt is None:
        return
    if event.hold:
        job.held_by = event.by
    if job.attempt.state is not AttemptState.STOPPING:
        reason = f"queued again{f' by {event.by}' if event.by else ''}"
        stopping.stop(ctx, job.attempt, Outcome.PREEMPTED, reason)
    ctx.pass_due = True


def on_job_paused(ctx: HandlerContext, event: e.JobPaused) -> None:
    if (attempt := ctx.state.jobs[event.job].attempt) is not None:
        attempt.paused_by = event.by


def on_job_unpaused(ctx: HandlerContext, event: e.JobUnpaused) -> None:
    if (attempt := ctx.state.jobs[event.job].attempt) is not None:
        attempt.paused_by = None


def archivable(state: State, jobs: Iterable[JobId]) -> list[JobId]:
    """Those of the jobs that are over and on which nothing in the state depends.

    A host that was lost before it reported the end may still run ranks of a job: they are recognised, and stopped, by
    the job in the state.
    """
    awaited = {other for queued in state.queue for other, _ in map(split, state.jobs[queued].spec.after)}
    known = [job for job_id in jobs if (job := state.jobs.get(job_id)) is not None and job.state.is_final]
    return [j.id for j in known if j.id not in awaited and not any(a.stop.unconfirmed_hosts for a in j.attempts)]


def on_jobs_archived(ctx: HandlerContext, event: e.JobsArchived) -> None:
    for job_id in archivable(ctx.state, event.jobs):
        ctx.state.jobs.pop(job_id, None)
    models = {job.inspection.model for job in ctx.state.jobs.values()}
    for model in [model for model in ctx.state.performance_tables if model not in models]:
        del ctx.state.performance_tables[model]  # the next job of this model causes a new one


def on_job_recalled(ctx: HandlerContext, event: e.JobRecalled) -> None:
    ctx.state.jobs.setdefault(event.job, deepcopy(event.record))


def on_model_described(ctx: HandlerContext, event: e.ModelDescribed) -> None:
    job = ctx.state.jobs.get(event.job)
    if job is not None and not job.state.is_final:
        job.inspection = Inspection(InspectionState.DONE, shape=event.shape, model=event.model, ended_s=event.at_s)
        job.building.clear()
        ctx.pass_due = True


def on_model_not_described(ctx: HandlerContext, event: e.ModelNotDescribed) -> None:
    job = ctx.state.jobs.get(event.job)
    if job is None or job.state is not JobState.QUEUED:
        return
    host, job.inspection = job.inspection.host, Inspection(InspectionState.NEEDED)
    job.building.clear()
    if event.is_infrastructure and host is not None and jobs.exclude_host(ctx, job, host, event.why):
        job.reason = event.why
    elif event.is_infrastructure and not event.is_permanent:
        jobs.requeue_after_loss(ctx, job, event.why, is_full_disk=event.is_full_disk)
    else:
        jobs.end(ctx, job, JobState.FAILED, event.why, exit_code=1)
    ctx.pass_due = True


def describe_models(ctx: HandlerContext) -> None:
    """Have hosts inspect the models of queued elastic jobs, highest priority first, a few per host."""
    queued = [ctx.state.jobs[job] for job in ctx.state.queue]
    new = [job for job in queued if job.inspection.state is InspectionState.NEEDED and job.not_before_s <= ctx.now_s]
    new = [job for job in new if waits_for(job.spec, ctx.state) is None]
    if not new:
        return
    usable = [host for host in ctx.state.hosts.values() if host.unusable is None]
    asked = Counter(job.inspection.host for job in queued if job.inspection.host is not None)
    open_hosts = [host for host in usable if asked[host.id] < DESCRIPTIONS_PER_HOST]
    for job in sorted(new, key=lambda job: -job.priority):
        host = min(
            (h for h in open_hosts if job.admits(h)),
            key=lambda h: (asked[h.id], h.cores_used, h.id),
            default=None,
        )
        if host is None:
            if not any(job.admits(h) for h in usable):
                ctx.hold(job, "waiting for a host to inspect its model")
            continue
        job.inspection.state, job.inspection.host = InspectionState.ASKED, host.id
        asked[host.id] += 1
        open_hosts = [h for h in open_hosts if asked[h.id] < DESCRIPTIONS_PER_HOST]
        reason = f"{job.spec.name} is new here: its model is built without storage to learn its shape"
        ctx.decide(d.DescribeModel(cause=ctx.cause, reason=reason, job=job.id, host=host.id))
