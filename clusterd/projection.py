"""Jobs, hosts and changes as plain rows: what clients see of the state, and all they see.

The daemon sends them as they come; a recording keeps them, one JSON object a line, to be played again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from clusterd.core.decisions import Decision
from clusterd.core.estimates.attained_service import is_predictable, steps_left
from clusterd.core.estimates.heterogeneous_speed import believed
from clusterd.core.events import Event, HostConnected, HostDisconnected, JobSubmitted, Timer, TimerKind
from clusterd.core.ledger import of_ranks
from clusterd.core.state import Attempt, Host, Job, Migration, State
from clusterd.types import AttemptState, HostId, HostState, JobId, JobSpec
from clusterd.units import duration

Row = dict[str, Any]

_PASSWORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
"""Words in names of variables whose values belong into ``[secrets]``."""


def job_row(job: Job, state: State) -> Row:
    """One line of `clusterd ls`."""
    last = job.attempts[-1] if job.attempts else None
    running = job.attempt
    return {
        "id": job.id,
        "name": job.spec.name,
        "kind": job.spec.kind.value,
        "state": job.state.value,
        "reason": reason(job, state),
        "away": [host.id for host in _away(job, state)],
        "priority": job.priority,
        "guaranteed": job.spec.guaranteed,
        "user": job.spec.user,
        "tenant": job.spec.tenant,
        "asked": job.spec.resources.devices,
        "asked_kind": job.spec.resources.kind,
        "plan": str(last.plan) if last and last.plan else None,
        "attempt": last.number if last else 0,
        "devices": list(last.devices) if last else [],
        "hosts": list(last.hosts) if last else [],
        "holds_devices": running is not None,
        "step": job.step,
        "steps": (job.shape or {}).get("steps"),
        "first_loss": job.first_loss,
        "loss": job.loss,
        "step_time_s": job.step_time_s,
        "left_s": left_s(job),
        "progressed_s": job.progressed_s,
        "predicted_step_time_s": predicted_step_time_s(job, state),
        "profiling": job.trials.is_running,
        "trials": len(job.trials.finished),
        "predictable": is_predictable(job),
        "foreseen_steps": job.predicted_steps,
        "target_loss": job.spec.target_loss,
        "submitted_s": job.submitted_s,
        "started_s": job.started_s,
        "ended_s": job.ended_s,
        "exit_code": job.exit_code,
        "pinned": job.pinned is not None,
        "unfit": dict(job.excluded_hosts),
        "refused": {str(plan): why for plan, why in job.rejected_plans},
        "checkpoint": job.checkpoint,
        "checkpoint_step": job.checkpoint_step,
        "migrating": migration_row(running.migration) if running and running.migration else None,
        "migrations": [migration_row(m) for m in job.migrations],
    }


def left_s(job: Job) -> float | None:
    """Until the job is done, as fast as it trains now; None: it does not say how many steps it makes, or makes none."""
    steps = steps_left(job)
    return steps * job.step_time_s if steps is not None and job.step_time_s is not None else None


def _away(job: Job, state: State) -> list[Host]:
    """Hosts of a job that runs, or is being stopped, which do not answer."""
    if job.attempt is None:
        return []
    return [host for name in job.attempt.hosts if (host := state.hosts[name]).state is not HostState.UP]


def reason(job: Job, state: State) -> str:
    """Why the job is where it is; for one that runs where nobody can look, that comes first."""
    attempt, away = job.attempt, _away(job, state)
    if attempt is None or not away:
        return job.reason
    said = " and ".join(_silence(host) for host in away)
    until = [at_s for host in away if (at_s := state.timers.get(Timer(TimerKind.HOST_LOST, host.id))) is not None]
    until_at = f"if that lasts until {_clock(min(until))}, " if until else ""
    if attempt.state is AttemptState.STOPPING:
        then = f"; {until_at}it is over without an answer" if until else ""
        return f"{said}: whether its ranks there have ended is not known{then}; {job.reason}"
    recovers = attempt.migration is not None and attempt.migration.lost
    if recovers or all(host.state is HostState.LOST for host in away):
        return f"{said}: the job goes on without it; {job.reason}"
    then = f"; {until_at}the job goes on without them" if until else ""
    return f"{said}: its ranks there are presumed to go on{then}"


def _silence(host: Host) -> str:
    return f"{host.id} is {host.state.value} since {_clock(host.since_s)}{f' ({host.why})' if host.why else ''}"


def _clock(at_s: float) -> str:
    """Time of day; rows are kept and shown for longer than a span of time would be right."""
    return time.strftime("%H:%M:%S", time.localtime(at_s))


def predicted_step_time_s(job: Job, state: State) -> float | None:
    """What the performance model says of the plan that the job runs under, where it runs; None: it says nothing."""
    attempt, table = job.attempt, state.performance_tables.get(job.model)
    if attempt is None or attempt.plan is None or table is None:
        return None
    found = believed(table, attempt.plan, of_ranks(state.hosts, attempt))
    return found.step_time_s if found is not None else None


def migration_row(migration: Migration) -> Row:
    """One move of a job: from, to, why, and what it cost."""
    return {
        "number": migration.number,
        "from": str(migration.old_plan),
        "to": str(migration.plan),
        "devices": [place.device for place in migration.places],
        "reason": migration.reason,
        "started_s": migration.started_s,
        "ended_s": migration.ended_s,
        "step": migration.step,
        "phases": [{"phase": name, "seconds": seconds, "what": what} for name, seconds, what in migration.phases],
        "network_bytes": migration.network_bytes,
        "local_bytes": migration.local_bytes,
        "downtime_s": migration.downtime_s,
        "restarts": migration.restarts,
        "failure": migration.failure,
    }


def attempt_row(attempt: Attempt) -> Row:
    """One attempt of `clusterd show`."""
    return {
        "number": attempt.number,
        "generation": attempt.generation,
        "state": attempt.state.value,
        "plan": str(attempt.plan) if attempt.plan else None,
        "cores": dict(attempt.cores),
        "started_s": attempt.started_s,
        "ended_s": attempt.ended_s,
        "why": attempt.why,
        "ranks": [
            {
                "rank": number,
                "host": rank.place.host,
                "device": rank.place.device,
                "end": str(rank.end) if rank.end else None,
            }
            for number, rank in sorted(attempt.ranks.items())
        ],
    }


def host_row(state: State, host: Host, link: Row | None = None) -> Row:
    """One line of `clusterd host ls`; `link` is what the connection says of itself."""
    running = [a for a in state.attempts_on(host.id) if a.state is not AttemptState.ENDED]
    return {
        "name": host.id,
        "state": host.state.value,
        "why": host.why or host.unknown_attempts_notice,
        "since_s": host.since_s,
        "drained": host.drained,
        "address": host.facts.address if host.facts else None,
        "cpu_cores": host.facts.cpu_cores if host.facts else None,
        "cores_used": host.cores_used,
        "memory_bytes": host.facts.memory_bytes if host.facts else None,
        "memory_used_bytes": host.memory_used_bytes,
        "boot_id": host.facts.boot_id if host.facts else None,
        "jobs": sorted({state.jobs[a.job].spec.name for a in running}),
        "devices": [
            {
                "id": device.id,
                "kind": device.kind,
                "name": device.name,
                "memory_bytes": device.memory_bytes,
                "foreign": device.foreign,
                "job": lease.job if (lease := state.leases.get(device.id)) else None,
                "job_name": state.jobs[lease.job].spec.name if lease else None,
            }
            for device in host.devices
        ],
        "link": link or {},
    }


def may_still_run(state: State, host: Host) -> list[str]:
    """Attempts that a host had when it was lost; nobody has heard from there since."""
    if host.state is HostState.UP:
        return []
    given_up = (a for job in state.jobs.values() for a in job.attempts if host.id in a.unconfirmed_hosts)
    return [f"{state.jobs[a.job].spec.name} ({a.job}.{a.number})" for a in given_up]


def unusable(job: Job, state: State, now_s: float) -> list[str]:
    """Why nothing of the job can be placed on some of the hosts and devices that it may have, a line each."""
    hosts = [host for host in state.hosts.values() if job.admits(host.id)]
    said = [host.unusable for host in hosts if host.unusable]
    for host in hosts:
        for device, fault in host.faults.items():
            if fault.is_left_out:
                left_s = max(state.timers.get(Timer(TimerKind.FAULT, device), 0.0) - now_s, 0.0)
                again = f"clusterd host undrain {host.id} offers it again now"
                said.append(f"{device} is left out for {duration(left_s)}: {fault.why}; {again}")
    return said


def decision_row(decision: Decision) -> Row:
    """A decision as the journal and the socket show it."""
    return {"kind": type(decision).__name__, **msgspec.to_builtins(decision)}


def event_row(event: Event) -> Row:
    """An event; descriptions of models, which are long, are left out."""
    row = {"kind": type(event).__name__, **msgspec.to_builtins(event)}
    row.pop("shape", None)
    if isinstance(event, JobSubmitted):
        row["spec"] = spec_row(event.spec)
    return row


def spec_row(spec: JobSpec) -> Row:
    """A job as it was submitted; what looks like a password in its environment is not shown to everybody."""
    row: Row = msgspec.to_builtins(spec)
    for name in row["env"]:
        if any(word in name.upper() for word in _PASSWORDS):
            row["env"][name] = "***"
    return row


def no_link(host: HostId) -> Row:
    """Of a host that is reached by nobody: in a simulation, in the past."""
    return {}


def change_row(
    state: State,
    number: int,
    events: Iterable[Event],
    decisions: Iterable[Decision],
    link: Callable[[HostId], Row] = no_link,
) -> Row:
    """One handled batch, with every job and host that it touched as they are now."""
    events, decisions = list(events), list(decisions)
    touched: list[Any] = [*events, *decisions]
    jobs = {JobId(str(job)): None for item in touched if (job := getattr(item, "job", None))}
    hosts = {HostId(str(host)): None for item in touched if (host := getattr(item, "host", None))}
    for event in events:
        if isinstance(event, HostConnected | HostDisconnected):  # the reasons of its jobs change with it
            jobs.update({attempt.job: None for attempt in state.attempts_on(event.host)})
    for job in jobs:
        known = state.jobs.get(job)
        if known is not None and known.attempts:
            hosts.update(dict.fromkeys(known.attempts[-1].hosts))
    return {
        "number": number,
        "at_s": events[-1].at_s if events else 0.0,
        "events": [event_row(event) for event in events],
        "decisions": [decision_row(decision) for decision in decisions],
        "jobs": [job_row(state.jobs[job], state) for job in jobs if job in state.jobs],
        "hosts": [host_row(state, state.hosts[host], link(host)) for host in hosts if host in state.hosts],
        "gone": [host for host in hosts if host not in state.hosts],
        "recovering": sorted(state.recovering),
    }
