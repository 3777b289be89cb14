"""Targets of migrations of elastic jobs whose speed is not known: devices, and a plan that fits them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from clusterd.core.booked import Booked
from clusterd.core.estimates.first_fit import ChosenPlan, Impossible, choose, memory_conflict
from clusterd.core.host import Host
from clusterd.core.ledger import Ledger
from clusterd.core.placement.place import candidates, fitting, place_on
from clusterd.core.queueing.bookings import claim_against
from clusterd.core.state import Attempt, Job
from clusterd.core.view import Move, Refusal, View
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan
from clusterd.types import Device, HostId


def first_that_works(
    job: Job,
    devices: list[Device],
    prefer: list[Device],
    count: int,
    requested: Plan | None,
    reason: str,
    hosts: Mapping[HostId, Host] | None,
) -> Move | None:
    """Migration to `count` of these devices, or to fewer where no plan uses that many; None: no plan fits."""
    for size in range(min(count, len(devices)), 0, -1):
        plan = requested if requested is not None and requested.ranks == size else None
        group = plan.tp if plan else 1
        chosen = spread(devices, size, group, prefer)
        if len(chosen) == size:
            answer = move_to(job, chosen, plan, reason, hosts)
            if isinstance(answer, Move):
                return answer
    return None


def move_to(
    job: Job, chosen: list[Device], requested: Plan | None, reason: str, hosts: Mapping[HostId, Host] | None
) -> Move | Refusal:
    """Migration to these devices; `hosts`: where the source ranks train until the switch; None: they do not train."""
    memory_bytes = min(d.memory_bytes for d in chosen)
    answer: ChosenPlan | Impossible = choose(
        ModelShape.from_dict(job.inspection.shape or {}),
        len(chosen),
        chosen[0].kind,
        memory_bytes,
        requested,
        job.failures.bounds,
    )
    if isinstance(answer, Impossible):
        return Refusal(job.id, answer.reason)
    if hosts is not None and job.attempt is not None:
        conflict = memory_conflict(hosts, job, job.attempt, answer.plan, {d.id for d in chosen})
        if conflict is not None:
            return Refusal(job.id, conflict)
    where = place_on(job, chosen)
    return Move(job.id, answer.plan, where.ranks, where.booked, f"{answer.plan}: {reason}")


def spread(devices: Iterable[Device], count: int, group: int, prefer: list[Device]) -> list[Device]:
    """Pick `count` devices in groups that stay on one host, preferred ones first; fewer if there are not enough."""
    mine = {d.id for d in prefer}
    by_host: dict[HostId, list[Device]] = {}
    for device in devices:
        by_host.setdefault(device.host, []).append(device)
    chosen: list[Device] = []
    order = sorted(by_host, key=lambda h: (-sum(d.id in mine for d in by_host[h]), -len(by_host[h]), h))
    for host in order:
        here = sorted(by_host[host], key=lambda d: (d.id not in mine, d.id))
        take = min(len(here) - len(here) % group, count - len(chosen))
        chosen += here[: max(take, 0)]
    return chosen


def may_stay(job: Job, device: Device, view: View) -> bool:
    """True where nothing keeps a running job from staying on a device of its own."""
    host = view.hosts[device.host]
    claim = claim_against(view.claims, job.spec, host, device.id)
    return host.unusable is None and not host.is_faulty(device.id) and not claim


def free_for(job: Job, own: list[Device], free: Ledger) -> list[Device]:
    """Free devices of the job's kind that it may use beside its own: none outside of its booking."""
    if job.spec.booking:
        return []
    kind = own[0].kind if own else ""
    return [device for host in candidates(job, free) for device in fitting(job, host, kind)]


def book(free: Ledger, move: Move, attempt: Attempt) -> None:
    """Take the resources of a migration beyond what the job has booked already."""
    mine = set(attempt.devices)
    new = [place for place in move.ranks if place.device not in mine]
    more, hosts = move.booked.beyond(attempt.booked), {place.host for place in new}
    cores = {host: count for host, count in more.cores.items() if host in hosts}
    free.take_places(new, Booked(cores, more.memory_bytes))
