"""Preemption for a queued job without a performance model: running elastic jobs shrink for it.

A job that is guaranteed, or has a higher priority, may take devices from running elastic jobs that are neither pinned
nor guaranteed; each of these keeps at least one, and gets lost devices back when no other job can use them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from clusterd.core.allocation.resize_unmodelled import first_that_works
from clusterd.core.estimates.can_migrate import can_migrate
from clusterd.core.ledger import of_ranks
from clusterd.core.placement.place import candidates, kinds_for
from clusterd.core.state import Job
from clusterd.core.view import Move, View
from clusterd.types import AttemptState, DeviceId, JobKind


def preempt_for(job: Job, view: View, count: int) -> list[Move]:
    """Migrations that free devices where a queued job may use them; empty where they would not suffice.

    A command's devices are of one host, and nobody's of two kinds. Takes from the lowest priority first, and from the
    youngest among equals.
    """
    victims = [v for v in view.running if _yields(v, job) and can_migrate(v, view) is not None]
    victims.sort(key=lambda v: (v.priority, -v.submitted_s))
    if not victims:
        return []
    hosts = [h.host.id for h in candidates(job, view.free)]
    coming = [device for other in view.running for device in leaving(other)]
    found: list[list[Move]] = []
    for place in [[host] for host in hosts] if job.spec.kind is JobKind.COMMAND else [hosts]:
        for kind in kinds_for(job):
            wanted = {d.id for host in place for d in view.hosts[host].devices if d.kind == kind}
            missing = count - sum(d.id in wanted for host in place for d in view.free.on_host(host).devices)
            missing -= sum(device in wanted for device in coming)
            if missing <= 0:
                return []
            found.append(_yielded(job, victims, view, missing, wanted))
    enough = [moves for moves in found if moves]
    return min(enough, key=lambda moves: (max(view.jobs[m.job].priority for m in moves), len(moves)), default=[])


def _yielded(job: Job, victims: Iterable[Job], view: View, missing: int, wanted: Collection[DeviceId]) -> list[Move]:
    """Migrations of victims that free this many of the wanted devices; empty where they would not suffice."""
    moves: list[Move] = []
    for victim in victims:
        if missing <= 0:
            break
        own = of_ranks(view.hosts, victim.attempt) if victim.attempt is not None else []
        elsewhere = [d for d in own if d.id not in wanted]
        keep = max(len(own) - missing, len(elsewhere), 1)
        if keep == len(own):
            continue
        reason = f"makes room for {job.spec.name}, which {_claim(job)}"
        move = first_that_works(victim, own, elsewhere or own, keep, None, reason, view.hosts)
        if move is not None:
            stays = {place.device for place in move.ranks}
            moves.append(move)
            missing -= sum(d.id in wanted and d.id not in stays for d in own)
    return moves if missing <= 0 else []


def leaving(job: Job) -> set[DeviceId]:
    """Devices that come free once the job's current migration or stop is done."""
    attempt = job.attempt
    if attempt is None:
        return set()
    going = [rank for retired in attempt.retired.values() for rank in retired.ranks.values()]
    stays: set[DeviceId | None] = set(attempt.reserved_devices)
    if attempt.migration is not None:
        going += attempt.ranks.values()
        stays.update(rank.place.device for rank in attempt.migration.ranks.values())
    elif attempt.state is AttemptState.STOPPING:
        going += attempt.ranks.values()
    else:
        stays.update(attempt.devices)
    return {device for rank in going if (device := rank.place.device) is not None and device not in stays}


def _yields(victim: Job, job: Job) -> bool:
    return not victim.spec.guaranteed and (job.spec.guaranteed or job.priority > victim.priority)


def _claim(job: Job) -> str:
    return "is guaranteed" if job.spec.guaranteed else f"has priority {job.priority}"
