"""Migrations of elastic jobs without a performance model: off drained hosts, after a loss, and back to their size."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from clusterd.core.estimates.can_migrate import can_migrate
from clusterd.core.estimates.first_fit import ChosenPlan, Impossible, choose, memory_conflict
from clusterd.core.estimates.heterogeneous_speed import in_proportion
from clusterd.core.host import Host
from clusterd.core.ledger import Ledger, of_ranks
from clusterd.core.placement.place import candidates, fitting, place_on
from clusterd.core.state import Attempt, Job
from clusterd.core.view import Move, Refusal, View
from clusterd.types import AttemptState, Device, DeviceId, HostId, JobId
from plans.legality import check
from plans.model_shape import ModelShape
from plans.plan import Plan

_UNLIMITED = 1 << 30


def requested(job: Job, view: View, plan: Plan | None, devices: tuple[DeviceId, ...], by: str) -> Move | Refusal:
    """Migration that a user asked for, or the reason why it cannot be made."""
    attempt = job.attempt
    if attempt is None or attempt.plan is None or attempt.state is not AttemptState.RUNNING:
        description = f"{job.spec.name} ({job.spec.kind.value}) is {job.state.value}"
        return Refusal(job.id, f"{description}: only elastic jobs that run can be moved")
    requested = plan or attempt.plan
    count = requested.ranks
    own = of_ranks(view.hosts, attempt)
    if devices:
        known = {d.id: d for h in view.hosts.values() for d in h.devices}
        missing = [d for d in devices if d not in known]
        if missing:
            return Refusal(job.id, f"there is no device {missing[0]}: clusterd host ls")
        chosen = [known[d] for d in devices]
    else:
        here = [d for d in own if _may_stay(d, view)]
        usable = [*here, *(d for h in candidates(job, view.free) for d in h.devices if own and d.kind == own[0].kind)]
        chosen = _spread(usable, count, requested.tp, prefer=here)
        if len(chosen) < count:  # tensor-parallel shards across hosts: slow, but the user asked for it
            chosen = _spread(usable, count, 1, prefer=here)
    if len(chosen) != count:
        return Refusal(job.id, f"{requested} needs {count} devices, {len(chosen)} are given or free for it")
    several = check(requested, kinds={d.kind for d in chosen})
    if several:
        return Refusal(job.id, "; ".join(several))
    if plan is None or not plan.shares:  # a user's own shares stay
        batch = ModelShape.from_dict(job.shape or {}).global_batch
        requested = in_proportion(view.performance_tables.get(job.model), requested, chosen, batch)
    return _move(job, chosen, requested, f"asked for by {by}" if by else "asked for", None)


def must_leave(job: Job, view: View) -> str:
    """Reason to migrate a running elastic job off drained hosts now; empty: there is none."""
    attempt = can_migrate(job, view, forced=True)
    return view.leaving(attempt) if attempt is not None else ""


def drained(view: View, skip: Container[JobId] = ()) -> list[Move]:
    """Migrations of elastic jobs off drained hosts: the same plan elsewhere, or a smaller one on the devices left.

    Args:
        skip: jobs that another allocator handles.
    """
    moves: list[Move] = []
    for job in view.running:
        reason = "" if job.id in skip else must_leave(job, view)
        if not reason:
            continue
        attempt = job.attempt
        assert attempt is not None and attempt.plan is not None
        own = of_ranks(view.hosts, attempt)
        here = [d for d in own if _may_stay(d, view)]
        free = _free_for(job, own, view.free)
        move = first_that_works(job, [*here, *free], here, len(own), attempt.plan, reason, view.hosts)
        least = job.spec.resources.devices if job.spec.guaranteed else 1
        if move is not None and len(move.ranks) >= min(least, len(own)):
            book(view.free, move, attempt)
            moves.append(move)
    return moves


def after_loss(job: Job, attempt: Attempt, view: View, why: str) -> Move | None:
    """Migration of a job whose ranks died: to as many devices as it had, its own and free ones, or to fewer.

    CPU cores do not count: they may be lent to other jobs, which give them back in the next pass.
    """
    own = of_ranks(view.hosts, attempt)
    here = [d for d in own if _may_stay(d, view)]
    kind = own[0].kind if own else ""
    free = [d for h in candidates(job, view.free) for d in fitting(job, replace(h, cores=_UNLIMITED), kind)]
    return first_that_works(job, [*here, *free], here, len(attempt.ranks), attempt.plan, why, None)


def growth(view: View, waiting: Iterable[int], skip: Container[JobId] = ()) -> list[Move]:
    """Migrations that give idle devices to jobs that hold fewer than they asked for, oldest job first.

    Args:
        waiting: number of devices that each queued job waits for. A job does not grow while one of them could start
            without the devices that the job holds; a wider one waits for the job's end, which growth brings nearer.
        skip: jobs that another allocator handles.
    """
    moves: list[Move] = []
    total = sum(len(h.devices) for h in view.hosts.values() if h.unusable is None)
    needs = [count for count in waiting if count > 0]
    for job in sorted(view.running, key=lambda j: (-j.priority, j.submitted_s)):
        table = view.performance_tables.get(job.model)
        if job.id in skip or (table is not None and table.is_whole):
            continue
        attempt = can_migrate(job, view)
        asked = max(job.spec.resources.devices, 1)
        if attempt is None or len(attempt.ranks) >= asked:
            continue
        own = of_ranks(view.hosts, attempt)
        if any(count <= total - len(own) for count in needs):
            continue
        free = _free_for(job, own, view.free)[: view.quotas.left(job.spec.tenant)]
        if not free:
            continue
        requested = job.spec.resources.plan if len(own) + len(free) >= asked else None
        reason = f"{len(free)} devices are free, and it asked for {asked}"
        move = first_that_works(
            job, [*own, *free], own, min(len(own) + len(free), asked), requested, reason, view.hosts
        )
        if move is not None and len(move.ranks) > len(own):
            book(view.free, move, attempt)
            view.quotas.take(job.spec.tenant, len(move.ranks) - len(own))
            moves.append(move)
    return moves


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
        chosen = _spread(devices, size, group, prefer)
        if len(chosen) == size:
            answer = _move(job, chosen, plan, reason, hosts)
            if isinstance(answer, Move):
                return answer
    return None


def _move(
    job: Job, chosen: list[Device], requested: Plan | None, reason: str, hosts: Mapping[HostId, Host] | None
) -> Move | Refusal:
    """Migration to these devices; `hosts`: where the source ranks train until the switch; None: they do not train."""
    memory_bytes = min(d.memory_bytes for d in chosen)
    answer: ChosenPlan | Impossible = choose(
        ModelShape.from_dict(job.shape or {}), len(chosen), chosen[0].kind, memory_bytes, requested, job.bounds
    )
    if isinstance(answer, Impossible):
        return Refusal(job.id, answer.reason)
    if hosts is not None and job.attempt is not None:
        conflict = memory_conflict(hosts, job, job.attempt, answer.plan, {d.id for d in chosen})
        if conflict is not None:
            return Refusal(job.id, conflict)
    where = place_on(job, chosen)
    return Move(job.id, answer.plan, where.ranks, where.cores, where.memory_bytes, f"{answer.plan}: {reason}")


def _spread(devices: Iterable[Device], count: int, group: int, prefer: list[Device]) -> list[Device]:
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


def _may_stay(device: Device, view: View) -> bool:
    host = view.hosts[device.host]
    return host.unusable is None and not host.is_faulty(device.id) and device.id not in host.claimed


def _free_for(job: Job, own: list[Device], free: Ledger) -> list[Device]:
    """Free devices of the job's kind that it may use beside its own."""
    kind = own[0].kind if own else ""
    return [device for host in candidates(job, free) for device in fitting(job, host, kind)]


def book(free: Ledger, move: Move, attempt: Attempt) -> None:
    """Take the resources of a migration beyond what the job has booked already."""
    mine = set(attempt.devices)
    new = [p for p in move.ranks if p.device not in mine]
    cores = {p.host: max(move.cores.get(p.host, 0) - attempt.cores.get(p.host, 0), 0) for p in new}
    memory = {p.host: max(move.memory_bytes.get(p.host, 0) - attempt.memory_bytes.get(p.host, 0), 0) for p in new}
    free.take_places(new, cores, memory)
