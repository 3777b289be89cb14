"""Events and decisions as sentences for people.

A line says what happened to a job or a host, without naming it: tables and logs have a column for that. Lines that
recur for everything that runs (timers, progress, steps of a migration) are routine, and shown on request only.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.lifecycle import device_shares, idleness
from clusterd.core.state import Migration, State
from clusterd.core.timers import TimerKind
from clusterd.plans.plan import Plan
from clusterd.types import HostId, HostState, JobKind, JobSpec, RankPlace, Resources
from clusterd.units import counted, duration, size


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the story."""

    text: str
    is_routine: bool = False


def of_event(event: e.Event, state: State) -> Line:
    """Line about an event.

    Args:
        state: as of the event, or later: plans and hosts of a migration are looked up in it.
    """
    match event:
        case e.DaemonStarted():
            return Line("the daemon started")
        case e.SettingsReloaded():
            return Line("an operator changed tenants or limits")
        case e.ClockSet(by_s=by_s):
            return Line(f"the head node's clock was set {'forward' if by_s > 0 else 'back'} by {duration(abs(by_s))}")
        case e.TimerFired(timer=timer) if timer.kind is TimerKind.HOST_LOST:
            return Line(f"{timer.about} is given up: it has not answered for too long")
        case e.TimerFired(timer=timer):
            return Line(f"timer {timer}", is_routine=True)
    if (host := getattr(event, "host", None)) is not None and getattr(event, "job", None) is None:
        return _of_host(event, host, state)
    return _of_job(event) or _of_attempt(event, state)


def _of_host(event: e.Event, host: HostId, state: State) -> Line:
    match event:
        case e.HostAdded():
            return Line("added to the cluster")
        case e.HostRemoved():
            return Line("removed from the cluster")
        case e.HostDrained(by=by, why=why, jobs_stay=jobs_stay):
            stay = ", once its jobs have ended" if jobs_stay else ""
            return Line(f"drained{_by(by)}{stay}{f': {why}' if why else ''}")
        case e.HostUndrained(by=by):
            return Line(f"in service again{_by(by)}")
        case e.HostConnected(facts=facts):
            gpus = sum(device.kind == "cuda" for device in facts.devices)
            has = [counted(gpus, "GPU")] if gpus else []
            return Line(f"connected: {', '.join([*has, counted(facts.cpu_cores, 'CPU core')])}")
        case e.HostDisconnected(why=why, at_s=at_s):
            known = state.hosts.get(host)
            was_up = known is None or (HostState.UP.value, at_s) in known.history
            why = why.removeprefix(f"{host}: ")
            return Line(f"connection lost: {why}" if was_up else f"no connection: {why}", is_routine=not was_up)
        case e.AccountConnected(account=account):
            return Line(f"{account} can run jobs here", is_routine=True)
        case e.AccountDisconnected(account=account, why=why):
            return Line(f"{account} cannot run jobs here: {why}")
    return Line(f"devices, or other people's processes on them, changed on {host}", is_routine=True)


def _of_job(event: e.Event) -> Line | None:
    """Line about what a person did to a job or to devices, or what was found out about a model."""
    match event:
        case e.DevicesClaimed(claim=claim):
            return Line(f"{counted(len(claim.devices), 'device')} {claim}: {', '.join(claim.devices)}")
        case e.DeviceClaimRemoved(claim=claim_id, by=by):
            return Line(f"claim or booking {claim_id} was removed{_by(by)}")
        case e.NoticePosted(text=text, by=by):
            return Line(f"notice{_by(by)}: {text}" if text else f"the notice was taken back{_by(by)}")
        case e.JobSubmitted(spec=spec):
            return Line(f"submitted{_by(spec.user)}: {requested(spec)}")
        case e.JobCancelled(is_over=True, why=why):
            return Line(why)
        case e.JobCancelled(by=by):
            return Line(f"cancel requested{_by(by)}")
        case e.JobReprioritised(priority=priority, by=by):
            return Line(f"priority {priority}, set{_by(by)}")
        case e.JobEdited(what=what, by=by):
            return Line(f"{what}, changed{_by(by)}")
        case e.JobHeld(by=by):
            return Line(f"held in the queue{_by(by)}")
        case e.JobReleased(by=by):
            return Line(f"released{_by(by)}")
        case e.JobRequeued(by=by):
            return Line(f"sent back to the queue{_by(by)}")
        case e.JobPaused(by=by):
            return Line(f"paused{_by(by)}; it keeps its devices")
        case e.JobUnpaused(by=by):
            return Line(f"goes on{_by(by)}")
        case e.JobsArchived(jobs=jobs):
            return Line(f"{counted(len(jobs), 'job')} that ended long ago went to the archive", is_routine=True)
        case e.JobRecalled():
            return Line("read back from the archive", is_routine=True)
        case e.JobUnpinned(by=by):
            return Line(f"unpinned{_by(by)}")
        case e.MigrationRequested(plan=plan, devices=devices, by=by):
            to = [str(plan)] if plan is not None else []
            to += [f"on {', '.join(devices)}"] if devices else []
            return Line(f"a move was asked for{_by(by)}: {' '.join(to) or 'same plan'}", is_routine=True)
        case e.ModelDescribed():
            return Line("its model was inspected", is_routine=True)
        case e.ModelNotDescribed(why=why):
            return Line(f"its model could not be inspected: {why}")
        case e.SpeedLearned(why=why):
            return Line(f"the speed of its model was learned: {why}", is_routine=True)
        case e.CompletionPredicted(steps=steps, why=why):
            ends = f"by its loss it ends at step {steps:,}" if steps is not None else "its loss tells no end"
            return Line(f"{ends}{f': {why}' if why else ''}", is_routine=True)
        case e.TrialProposed(plan=plan, why=why):
            return Line(f"trial of {plan}: {why}", is_routine=True) if plan else Line(f"no more trials: {why}")
        case e.TrialMeasured(plan=plan, shape=shape, step_time_s=took_s, predicted_s=predicted_s):
            predicted = f", predicted {duration(predicted_s)}" if predicted_s is not None else ""
            on = f"{counted(sum(shape), 'device')}{f' of {len(shape)} hosts' if len(shape) > 1 else ''}"
            return Line(f"tried {plan} on {on}: {duration(took_s)} a step{predicted}")
    return None


def not_saved(step: int, why: str) -> str:
    """Sentence about a checkpoint that could not be written."""
    return f"step {step:,} was not saved: {why}"


def _idleness(event: e.IdlenessObserved, state: State) -> str:
    if event.since_s is None:
        return "its devices work again"
    text = f"its devices have done nothing for {duration(event.at_s - event.since_s)}"
    known = state.jobs.get(event.job)
    devices = len(known.attempt.devices) if known is not None and known.attempt is not None else 0
    then = idleness.described(known.spec, devices, event.reclaim) if known is not None else ""
    if event.reclaim_at_s is None or not then:
        return text
    return f"{text}; {then} in {duration(max(event.reclaim_at_s - event.at_s, 0.0))} if that lasts"


def _of_attempt(event: e.Event, state: State) -> Line:
    match event:
        case e.AttemptLaunched(attempt=number, restored_step=step):
            if step is not None:
                return Line(f"continues after step {step:,}, whose state was in host memory")
            return Line(f"all ranks of attempt {number} run", is_routine=True)
        case e.EnvironmentBuildStarted(host=host):
            return Line(f"builds its environment on {host}")
        case e.EnvironmentBuilt(host=host, seconds=seconds):
            return Line(f"its environment on {host} was built in {duration(seconds)}")
        case e.LaunchFailed(host=host, why=why):
            return Line(f"did not start on {host}: {why}")
        case e.RankExited(rank=rank, end=end):
            return Line(f"rank {rank} ended: {end}", is_routine=True)
        case e.RankOrphaned(rank=rank, step=step):
            holds = f"holds the state of step {step:,}" if step >= 0 else "was in the middle of an update"
            return Line(f"rank {rank} lost its peers and {holds}", is_routine=True)
        case e.AttemptStopped():
            return Line("no process of it is left there", is_routine=True)
        case e.AttemptProgressed(step=step, loss=loss, step_time_s=step_s):
            at = f", loss {loss:.4g}" if loss is not None else ""
            return Line(f"step {step:,}{at}, {duration(step_s)} a step", is_routine=True)
        case e.IdlenessObserved():
            return Line(_idleness(event, state))
        case e.DeviceMemoryObserved(used_bytes=used_bytes, part_bytes=part_bytes, device=device):
            if used_bytes <= part_bytes:
                return Line(f"holds no more than its part of the memory of {device}")
            return Line(f"{device_shares.described(event)}; it ends in {duration(device_shares.GRACE_S)} if that lasts")
        case e.CheckpointTaken(step=step):
            return Line(f"checkpoint of step {step:,}", is_routine=True)
        case e.CheckpointFailed():
            return Line(not_saved(event.step, event.why))
        case e.MigrationAdvanced(phase=phase, seconds=seconds, what=what):
            return Line(f"move: {phase} took {duration(seconds)}{f' ({what})' if what else ''}", is_routine=True)
        case e.MigrationVerified(step=step, network_bytes=network, local_bytes=local):
            moved = f"{size(network)} over the network, {size(local)} within hosts"
            return Line(f"move: the state of step {step:,} is complete ({moved})", is_routine=True)
        case e.MigrationFinished(downtime_s=downtime_s):
            return Line(f"{_moved(state, event)}, downtime {duration(downtime_s)}")
        case e.MigrationFailed(phase=phase, why=why):
            return Line(f"a move was undone in {phase}, and the old plan goes on: {why}")
    raise AssertionError(f"no line for {type(event).__name__}")


def _moved(state: State, event: e.MigrationFinished) -> str:
    """Phrase for a finished migration: the new plan, its hosts, the reason and the step."""
    job = state.jobs.get(event.job)
    migration = _migration(job.migrations, event.generation) if job is not None else None
    if migration is None:
        return "moved"
    step = f"; continues at step {migration.step + 1:,}" if migration.step is not None else ""
    return f"moved to {_under(migration.plan, migration.places)}: {_why(migration.reason, migration.plan)}{step}"


def _migration(known: list[Migration], generation: int) -> Migration | None:
    return next((m for m in reversed(known) if m.generation == generation and not m.failure), None)


_ROUTINE = (
    d.DescribeModel,
    d.StopAttempt,
    d.ToRanks,
    d.SetTimer,
)
"""Decisions that carry out a part of another one, or precede it."""


def of_decision(decision: d.Decision) -> Line:
    """Line about a decision."""
    reason = decision.reason
    match decision:
        case d.LaunchAttempt():
            saved = ", from a checkpoint" if decision.restore is not None else ""
            return Line((reason if reason.startswith("started") else f"started as {reason}") + saved)
        case d.StartMigration(new_plan=plan, new_ranks=ranks):
            return Line(f"moves to {_under(plan, ranks)}: {_why(reason, plan)}")
        case d.EndJob(state=state):
            between = " " if reason.startswith("on ") else ": "
            return Line(reason if reason.startswith(state) else f"{state}{between}{reason}")
        case d.RequeueJob():
            return Line(f"queued again: {reason}")
    return Line(reason, isinstance(decision, _ROUTINE))


def _why(reason: str, plan: Plan) -> str:
    """The reason of a migration without the plan, which the sentence names already."""
    return (
        reason.removeprefix(f"{plan}: ")
        .replace(f"trial of {plan}: trial ", "trial ")
        .replace(f"trial of {plan}", "trial")
    )


def _under(plan: Plan, places: tuple[RankPlace, ...]) -> str:
    """``dp=2 on gpu01, gpu02``."""
    return f"{plan} on {', '.join(dict.fromkeys(place.host for place in places))}"


def requested(spec: JobSpec) -> str:
    """Request of a job in few words: ``elastic, 4 GPUs, priority 10, guaranteed``."""
    parts = [spec.kind.value] if spec.kind is not JobKind.COMMAND else []
    parts.append(_devices(spec.resources))
    parts += [f"priority {spec.priority}"] if spec.priority else []
    parts += ["guaranteed"] if spec.guaranteed else []
    return ", ".join(parts)


def _devices(wanted: Resources) -> str:
    if not wanted.devices:
        return counted(wanted.cores_alone, "CPU core")
    noun = {"cuda": "GPU", "cpu": "CPU device", None: "device"}[wanted.kind]
    named = f" of type {wanted.device_name}" if wanted.device_name else ""
    return f"{counted(wanted.devices, noun)}{named}"


def _by(user: str) -> str:
    return f" by {user}" if user else ""
