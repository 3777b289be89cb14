"""Rows of jobs, hosts and changes, made from the state: the only view of it that clients get.

The daemon sends them as changes occur; a recording stores them, one JSON object a line, for playback.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
from msgspec import UNSET

from clusterd import rows
from clusterd.core import story
from clusterd.core.allocation.rights import on_loan
from clusterd.core.decisions import Decision, ReleaseBooked
from clusterd.core.estimates.attained_service import is_predictable, steps_left
from clusterd.core.estimates.heterogeneous_speed import believed
from clusterd.core.events import (
    AccountConnected,
    DeviceClaimRemoved,
    DevicesClaimed,
    Event,
    HostConnected,
    HostDisconnected,
    JobEdited,
    JobSubmitted,
    Timer,
    TimerFired,
    TimerKind,
)
from clusterd.core.host import Host
from clusterd.core.ledger import of_ranks
from clusterd.core.lifecycle import idleness
from clusterd.core.queue_order import Order, QueuePlace, listed, only
from clusterd.core.scheduler import NO_SIDE_EFFECTS, SideEffects
from clusterd.core.state import Attempt, Job, Migration, Restart, State
from clusterd.core.timers import account_on
from clusterd.keys import Key, keys_of
from clusterd.types import AttemptState, Device, DeviceClaim, HostId, HostState, JobId, JobSpec
from clusterd.units import duration

Row = dict[str, Any]
"""Fields of an event, a decision, a specification or a link."""

JSON_VERSION = 1
"""Version of the fields of rows, which docs/json.md describes; raised when one is renamed or changes its meaning."""

STARVED_SHARE = 0.25
"""Part of a job's step time in waiting for its input from which on it is told."""

_PASSWORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
"""Parts of names of variables whose values belong into ``[secrets]``."""


@cache
def _shown() -> tuple[Key, ...]:
    """Keys whose values are fields of a job's row."""
    return tuple(key for key in keys_of(JobSpec) if key.row)


def job_row(job: Job, state: State, forecast: rows.Forecast | None = None, **others: Any) -> rows.Job:
    """Row of a job, as `clusterd ls` lists it."""
    last, running, shape = job.attempts[-1] if job.attempts else None, job.attempt, job.inspection.shape or {}
    progress = job.progress
    return rows.row_of(
        rows.Job,
        job,
        **{key.row: key.of(job.spec) for key in _shown()},
        kind=job.spec.kind,
        reason=reason(job, state),
        away=tuple(host.id for host in _away(job, state)),
        array=job.spec.array,
        user=job.spec.user,
        asked_kind=job.spec.resources.kind,
        cores=job.spec.resources.cores_alone,
        plan=str(last.plan) if last and last.plan else None,
        attempt=last.number if last else 0,
        building=dict(job.building),
        devices=last.devices if last else (),
        hosts=last.hosts if last else (),
        holds_devices=running is not None,
        on_loan=_on_loan(job),
        promise=promise_row(job.id, state, forecast),
        forecast=forecast,
        step=progress.step,
        steps=shape.get("steps"),
        first_loss=progress.first_loss,
        loss=progress.loss,
        step_time_s=progress.step_time_s,
        left_s=left_s(job),
        ends_by_s=state.timers.get(Timer(TimerKind.LIMIT, job.id)),
        progressed_s=progress.reported_s,
        idle_since_s=running.idle_since_s if running is not None else None,
        paused_by=running.paused_by if running is not None else None,
        predicted_step_time_s=predicted_step_time_s(job, state),
        profiling=job.trials.is_running,
        trials=len(job.trials.finished),
        predictable=is_predictable(job),
        foreseen_steps=progress.predicted_steps,
        pinned=job.pinned is not None,
        unfit=dict(job.failures.excluded_hosts),
        refused={str(plan): why for plan, why in job.failures.bounds.rejected},
        sees_batch=shape.get("sees_batch", "global"),
        checkpoint=job.checkpoint.path,
        checkpoint_step=job.checkpoint.step,
        checkpoint_failure=job.checkpoint.failure,
        migrating=migration_row(running.migration) if running and running.migration else None,
        migrations=tuple(migration_row(change) for change in job.plan_changes),
        **{"place": UNSET, "edited": UNSET, **others},
    )


def _on_loan(job: Job) -> int:
    """Devices that a running elastic job holds beyond its request; they go to whoever waits for them."""
    if job.attempt is None or job.attempt.plan is None or job.pinned is not None:
        return 0
    return on_loan(job, len(job.attempt.devices))


def promise_row(job: JobId, state: State, forecast: rows.Forecast | None = None) -> rows.Promise | None:
    """Expected and promised start of a queued job, and the jobs that it waits for; None: it has no reservation.

    A forecast by roll-outs is the only expected start that is shown where there is one.
    """
    promise = state.reservation
    if promise is None or promise.job != job:
        return None
    after = tuple(state.jobs[other].spec.name for other in promise.after)
    at_s = promise.at_s if promise.is_foreseen else None
    at_s = forecast.start.p50_s if forecast is not None and forecast.start is not None else at_s
    return rows.Promise(at_s=at_s, latest_s=promise.latest_s, after=after)


def order(state: State) -> Order:
    """Places of the jobs that wait, by the last scheduling pass; without those that it did not consider."""
    return only(state.order, {job for job in state.queue if state.jobs[job].held_by is None})


def places(state: State) -> dict[JobId, int]:
    """Place of each job that has one, from 1 on."""
    return {job: place for place, job in enumerate(listed(order(state)), 1)}


def place_row(job: JobId, state: State) -> rows.Place:
    """Place of a queued job, names of the jobs before it, and why the last of them is."""
    waiting = order(state)
    if job not in waiting:
        return rows.Place()
    jobs = listed(waiting)
    ahead = tuple(state.jobs[other].spec.name for other in jobs[: jobs.index(job)])
    previous, criterion = waiting[job]
    after: rows.JobBefore | None = None
    if previous is not None and criterion is not None:
        after = rows.JobBefore(job=previous, name=ahead[-1], criterion=criterion.value, why=criterion.sentence)
    return rows.Place(place=len(ahead) + 1, ahead=ahead, after=after)


def left_s(job: Job) -> float | None:
    """Seconds to the end at the current speed; None if the number of steps or the speed is unknown."""
    steps = steps_left(job)
    return steps * job.progress.step_time_s if steps is not None and job.progress.step_time_s is not None else None


def _away(job: Job, state: State) -> list[Host]:
    """Hosts of a running or stopping job that do not answer."""
    if job.attempt is None:
        return []
    return [host for name in job.attempt.hosts if not (host := state.hosts[name]).reaches(job.spec.account)]


def reason(job: Job, state: State) -> str:
    """Reason of the job's state; hosts of a running job that do not answer come first."""
    attempt, away = job.attempt, _away(job, state)
    if job.building and not away:
        builds = ", ".join(f"{host} since {_clock(since_s)}" for host, since_s in job.building.items())
        return f"building its environment on {builds}"
    if attempt is not None and attempt.paused_by is not None and not away:
        return f"paused by {attempt.paused_by}, its devices are kept: clusterd unpause {job.id}; {job.reason}"
    if attempt is None or not away:
        return "; ".join([*(_troubles(job, attempt, state) if attempt is not None else ()), job.reason])
    account = attempt.account
    silence = " and ".join(_silence(host, account) for host in away)
    watched: list[tuple[TimerKind, str]] = [(TimerKind.HOST_LOST, host.id) for host in away]
    watched += [(TimerKind.ACCOUNT_LOST, account_on(host.id, account)) for host in away]
    until = [at_s for timer in watched if (at_s := state.timers.get(Timer(*timer))) is not None]
    until_at = f"if that lasts until {_clock(min(until))}, " if until else ""
    if attempt.state is AttemptState.STOPPING:
        then = f"; {until_at}it is over without an answer" if until else ""
        return f"{silence}: whether its ranks there have ended is not known{then}; {job.reason}"
    recovers = attempt.migration is not None and attempt.migration.lost
    if recovers or all(host.has_lost(account) for host in away):
        return f"{silence}: the job goes on without it; {job.reason}"
    then = f"; {until_at}the job goes on without them" if until else ""
    return f"{silence}: its ranks there are presumed to go on{then}"


def _troubles(job: Job, attempt: Attempt, state: State) -> Iterator[str]:
    """Troubles of a running job whose hosts answer, those first that may end it."""
    if attempt.over_share:
        ends_s = state.timers.get(Timer(TimerKind.SHARE, job.id))
        yield attempt.over_share + (f": it ends at {_clock(ends_s)} if that lasts" if ends_s is not None else "")
    if attempt.idle_since_s is not None:
        ends_s = state.timers.get(Timer(TimerKind.IDLE, job.id))
        step = idleness.described(job.spec, len(attempt.devices), attempt.reclaim)
        then = f", and {step} at {_clock(ends_s)} if that lasts" if ends_s is not None else ""
        yield f"idle: its devices have done nothing since {_clock(attempt.idle_since_s)}{then}"
    if job.checkpoint.failure and attempt.state is not AttemptState.STOPPING:
        yield f"not saved: {job.checkpoint.failure} ({newest_checkpoint(job)})"
    if (waits := job.progress.input_share or 0.0) >= STARVED_SHARE:
        yield f"its devices wait for its data loader {waits:.0%} of the time"


def newest_checkpoint(job: Job) -> str:
    """Step of the newest checkpoint that is complete, for messages."""
    return f"the newest checkpoint: {f'of step {job.checkpoint.step:,}' if job.checkpoint.path is not None else 'none'}"


def _silence(host: Host, account: str) -> str:
    if host.state is HostState.UP:
        return f"the agent of {account} on {host.id} is not connected ({host.why_away(account)})"
    return f"{host.id} is {host.state.value} since {_clock(host.since_s)}{f' ({host.why})' if host.why else ''}"


def _clock(at_s: float) -> str:
    """Time of day; rows are stored, and a relative time would become wrong."""
    return time.strftime("%H:%M:%S", time.localtime(at_s))


def _day(at_s: float) -> str:
    """Day and time of day."""
    return time.strftime("%m-%d %H:%M", time.localtime(at_s))


def predicted_step_time_s(job: Job, state: State) -> float | None:
    """Predicted step time of the job's plan on its devices; None without a prediction."""
    attempt, table = job.attempt, state.performance_tables.get(job.inspection.model)
    if attempt is None or attempt.plan is None or table is None:
        return None
    found = believed(table, attempt.plan, of_ranks(state.hosts, attempt))
    return found.step_time_s if found is not None else None


def migration_row(migration: Migration | Restart) -> rows.Migration:
    """Row of a migration or a restart: plans, reason and cost."""
    return rows.row_of(
        rows.Migration, migration, old=str(migration.old_plan), new=str(migration.plan),
        devices=tuple(place.device for place in migration.places),
        phases=tuple(rows.Phase(phase=name, seconds=took_s, note=note) for name, took_s, note in migration.phases),
        network_bytes=migration.network_bytes if isinstance(migration, Migration) else 0,
        restarts=isinstance(migration, Restart),
    )  # fmt: skip


def attempt_row(attempt: Attempt) -> rows.Attempt:
    """Row of an attempt, as `clusterd show` prints it."""
    ranks = tuple(
        rows.Rank(rank=number, host=rank.place.host, device=rank.place.device, end=str(rank.end) if rank.end else None)
        for number, rank in sorted(attempt.ranks.items())
    )
    plan, cores = str(attempt.plan) if attempt.plan else None, dict(attempt.booked.cores)
    start = tuple(rows.Phase(phase=phase, seconds=seconds) for phase, seconds in attempt.start)
    return rows.row_of(rows.Attempt, attempt, plan=plan, cores=cores, why=attempt.stop.why, ranks=ranks, start=start)


def host_row(state: State, host: Host, link: Row | None = None) -> rows.Host:
    """Row of a host, as `clusterd host ls` lists it; `link` describes its connection."""
    running = [a for a in state.attempts_on(host.id) if a.state is not AttemptState.ENDED]
    facts, devices = host.facts, {device.id for device in host.devices}
    return rows.row_of(
        rows.Host, host, name=host.id,
        why=why_down(host, link or {}) or host.unknown_attempts_notice or (facts.gpu_error if facts else ""),
        address=facts.address if facts else None, cpu_cores=facts.cpu_cores if facts else None,
        memory_bytes=facts.memory_bytes if facts else None, labels=facts.labels if facts else (),
        boot_id=facts.boot_id if facts else None, jobs=tuple(sorted({state.jobs[a.job].spec.name for a in running})),
        devices=tuple(_device_row(device, state) for device in host.devices),
        claims=tuple(claim_row(claim) for claim in state.device_claims.values() if devices & {*claim.devices}),
        link=link or {},
    )  # fmt: skip


def _device_row(device: Device, state: State) -> rows.Device:
    holder, jobs = state.holders.get(device.id), len(state.jobs_on(device.id))
    name = state.jobs[holder.job].spec.name if holder else None
    return rows.row_of(rows.Device, device, job=holder.job if holder else None, job_name=name, jobs=jobs)


def why_down(host: Host, link: Row) -> str:
    """Reason why a host is not up: that of the newest failure of its link."""
    return host.why if host.state is HostState.UP else repeated(link.get("failures", {})) or host.why


def repeated(failures: Row) -> str:
    """Newest reason of a link's failures, with their number; empty without one."""
    why, times = str(failures.get("why", "")), failures.get("times", 0)
    return f"{why} ({times} times since {_clock(failures['since_s'])})" if times > 1 else why


def claim_row(claim: DeviceClaim, **others: Any) -> rows.Claim:
    """Row of a claim on devices."""
    return rows.row_of(rows.Claim, claim, **{"held_by": UNSET, **others})


def may_still_run(state: State, host: Host) -> list[str]:
    """Attempts that ran on a host when it was lost, and whose end is unconfirmed."""
    if host.state is HostState.UP:
        return []
    given_up = (a for job in state.jobs.values() for a in job.attempts if host.id in a.stop.unconfirmed_hosts)
    return [f"{state.jobs[a.job].spec.name} ({a.job}.{a.number})" for a in given_up]


def unusable(job: Job, state: State, now_s: float) -> list[str]:
    """Hosts and devices that the job may use but that are unusable now, one line with the reason each."""
    hosts = [host for host in state.hosts.values() if job.admits(host)]
    reasons = [host.unusable for host in hosts if host.unusable]
    for host in hosts:
        for device, fault in host.faults.items():
            if fault.is_left_out:
                left_s = max(state.timers.get(Timer(TimerKind.FAULT, device), 0.0) - now_s, 0.0)
                again = f"clusterd host undrain {host.id} offers it again now"
                reasons.append(f"{device} is left out for {duration(left_s)}: {fault.why}; {again}")
        for device, why in host.reported_faults.items():
            reasons.append(f"{device} is left out: {why}; once it is reset, clusterd host undrain {host.id} offers it")
    places = tuple(f"{host.id}:" for host in hosts)
    if job.spec.begin_s is not None and job.spec.begin_s > now_s and not job.attempts:
        reasons.append(f"it is not to begin before {_day(job.spec.begin_s)}")
    own = state.device_claims.get(job.spec.booking)
    if own is not None and not own.is_active(now_s):
        reasons.append(f"its booking {own.id} begins {_day(own.from_s)}, on {', '.join(own.devices)}")
    for claim in state.device_claims.values():
        devices = tuple(d for d in claim.devices if d.startswith(places) and (own is None or d in own.devices))
        if devices and claim is not own:
            only = "" if claim.is_active(now_s) else "; until then only jobs that end before it start there"
            part = ", with its part of the host's cores and memory" if claim.owner else ""
            reasons.append(f"{claimed_until(replace(claim, devices=devices), now_s)}{part}{only}")
    return reasons


def claimed_until(claim: DeviceClaim, now_s: float) -> str:
    """Sentence about the devices of a claim or booking and its time."""
    until = f" until {_day(claim.until_s)}" if claim.until_s is not None else ""
    since = "" if claim.is_active(now_s) else f" from {_day(claim.from_s)}"
    return f"{', '.join(claim.devices)} {'is' if len(claim.devices) == 1 else 'are'} {claim}{since}{until}"


def decision_row(decision: Decision) -> Row:
    """Row of a decision, in the form of the journal, with the sentence about it."""
    return {"kind": type(decision).__name__, **msgspec.to_builtins(decision), **_line(story.of_decision(decision))}


def decision_summary(decision: Decision, at_s: float) -> rows.Decision:
    """Row of a past decision: what it is about, its reason, and the sentence about it."""
    job, host = getattr(decision, "job", None), getattr(decision, "host", None)
    line = _line(story.of_decision(decision))
    return rows.row_of(rows.Decision, decision, at_s=at_s, kind=type(decision).__name__, job=job, host=host, **line)


def event_row(event: Event, state: State) -> Row:
    """Row of an event, without the long description of a model, with the sentence about it."""
    row = {"kind": type(event).__name__, **msgspec.to_builtins(event), **_line(story.of_event(event, state))}
    row.pop("shape", None)
    if isinstance(event, HostConnected | AccountConnected):
        row["adopted"] = [job.id for job in event.adopted]
    row.pop("record", None)
    if isinstance(event, JobSubmitted | JobEdited):
        row["spec"] = spec_row(event.spec)
    return row


def _line(line: story.Line) -> Row:
    return {"text": line.text, "routine": line.is_routine}


def spec_row(spec: JobSpec) -> Row:
    """Row of a job's specification; values of variables that look like passwords are masked."""
    row: Row = msgspec.to_builtins(spec)
    for name in row["env"]:
        if any(part in name.upper() for part in _PASSWORDS):
            row["env"][name] = "***"
    return row


def _is_about_claims(item: Event | Decision) -> bool:
    """True for what changes claims on devices, which rows of hosts show."""
    if isinstance(item, TimerFired):
        return item.timer.kind is TimerKind.CLAIM
    return isinstance(item, DevicesClaimed | DeviceClaimRemoved | ReleaseBooked)


def change_row(
    state: State,
    number: int,
    events: Iterable[Event],
    decisions: Iterable[Decision],
    link: Callable[[HostId], Row] = lambda host: {},
    side_effects: SideEffects = NO_SIDE_EFFECTS,
    forecast: Callable[[Job], rows.Forecast | None] = lambda job: None,
) -> rows.Change:
    """Row of a handled batch, with the current rows of every job and host that it changed."""
    events, decisions = list(events), list(decisions)
    touched: list[Any] = [*events, *decisions]
    jobs = {JobId(str(job)): None for item in touched if (job := getattr(item, "job", None))}
    jobs |= dict.fromkeys(sorted(side_effects.jobs))
    hosts = {HostId(str(host)): None for item in touched if (host := getattr(item, "host", None))}
    if any(map(_is_about_claims, touched)):
        hosts.update(dict.fromkeys(state.hosts))
    for event in events:
        if isinstance(event, HostConnected | HostDisconnected):  # changes the reasons of its jobs too
            jobs.update({attempt.job: None for attempt in state.attempts_on(event.host)})
    for job in jobs:
        known = state.jobs.get(job)
        if known is not None and known.attempts:
            hosts.update(dict.fromkeys(known.attempts[-1].hosts))
    return rows.Change(
        number=number, at_s=events[-1].at_s if events else 0.0,
        events=tuple(event_row(event, state) for event in events),
        decisions=tuple(decision_row(decision) for decision in decisions),
        jobs=tuple(job_row(known, state, forecast(known)) for job in jobs if (known := state.jobs.get(job))),
        hosts=tuple(host_row(state, state.hosts[host], link(host)) for host in hosts if host in state.hosts),
        gone=tuple(host for host in hosts if host not in state.hosts), order=order_row(side_effects.order),
        recovering=sorted(state.recovering), notice=state.notice,
    )  # fmt: skip


def order_row(order: Mapping[JobId, QueuePlace | None]) -> dict[str, rows.QueuePlace | None]:
    """Places of waiting jobs, or changes of them."""
    return {job: rows.QueuePlace(place.after, place.criterion) if place else None for job, place in order.items()}
