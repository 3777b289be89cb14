"""Changing what runs, by simple rules: who grows back, who leaves a drained host, where a job goes on after a loss.

A move is made only while enough of the job is left to pay for it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from math import inf

from clusterd.core.allocation.first_fit import Choice, Impossible, choose
from clusterd.core.estimates.heterogeneous_speed import in_proportion
from clusterd.core.ledger import of_ranks
from clusterd.core.lifecycle import migrations
from clusterd.core.placement.place import Placement, candidates, fitting, place_on
from clusterd.core.state import Attempt, Host, Job
from clusterd.core.view import Free, Move, Refusal, View
from clusterd.types import AttemptState, Device, DeviceId, HostId, HostState, JobId, JobKind
from plans.legality import check
from plans.model_shape import ModelShape
from plans.plan import Plan

WORTH_MOVING_S = 10.0
"""A job that will be over sooner is left where it is."""

SETTLE_S = 2.0
"""Between two moves of one job: what a move brings has to be seen before the next is thought of."""

SETTLE_AFTER_FAILURE_S = 30.0

_PLENTY = 1 << 30


def requested(job: Job, view: View, plan: Plan | None, devices: tuple[DeviceId, ...], by: str) -> Move | Refusal:
    """The move that a person asked for, or why it cannot be made."""
    attempt = job.attempt
    if attempt is None or attempt.plan is None or attempt.state is not AttemptState.RUNNING:
        what = f"{job.spec.name} ({job.spec.kind.value}) is {job.state.value}"
        return Refusal(job.id, f"{what}: only elastic jobs that run can be moved")
    wish = plan or attempt.plan
    count = wish.ranks
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
        chosen = _spread(usable, count, wish.tp, prefer=here)
        if len(chosen) < count:  # shards of a layer across hosts: slow, but it is what was asked for
            chosen = _spread(usable, count, 1, prefer=here)
    if len(chosen) != count:
        return Refusal(job.id, f"{wish} needs {count} devices, {len(chosen)} are given or free for it")
    several = check(wish, kinds={d.kind for d in chosen})
    if several:
        return Refusal(job.id, "; ".join(several))
    if plan is None or not plan.shares:  # shares that somebody wrote down are theirs
        batch = ModelShape.from_dict(job.shape or {}).global_batch
        wish = in_proportion(view.outlooks.get(job.model), wish, chosen, batch)
    return _move(job, chosen, wish, f"asked for by {by}" if by else "asked for", None)


def must_leave(job: Job, view: View) -> str:
    """Why a running elastic job is to be moved off drained hosts now; empty: it is not."""
    attempt = movable(job, view, forced=True)
    return view.leaving(attempt) if attempt is not None else ""


def drained(view: View, skip: Container[JobId] = ()) -> list[Move]:
    """Moves that take elastic jobs off drained hosts: the same plan elsewhere, or a smaller one on what is left.

    Args:
        skip: jobs that are somebody else's business.
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
    """Where a job goes whose ranks died: as many devices as it had, of its own and of free ones, or fewer.

    Cores are not asked for: others may have been lent them, who give them back in the next pass.
    """
    own = of_ranks(view.hosts, attempt)
    here = [d for d in own if _may_stay(d, view)]
    kind = own[0].kind if own else ""
    free = [d for h in candidates(job, view.free) for d in fitting(job, replace(h, cores=_PLENTY), kind)]
    return first_that_works(job, [*here, *free], here, len(attempt.ranks), attempt.plan, why, None)


def growth(view: View, waiting: Iterable[int], skip: Container[JobId] = ()) -> list[Move]:
    """Devices that nobody can use go back to jobs that have fewer than they asked for; the oldest first.

    Args:
        waiting: devices that each queued job waits for. A job does not grow while one of them could start without what
            the job holds already; one that needs these too waits for its end, which growing only brings nearer.
        skip: jobs that are somebody else's business.
    """
    moves: list[Move] = []
    total = sum(len(h.devices) for h in view.hosts.values() if h.unusable is None)
    needs = [count for count in waiting if count > 0]
    for job in sorted(view.running, key=lambda j: (-j.priority, j.submitted_s)):
        outlook = view.outlooks.get(job.model)
        if job.id in skip or (outlook is not None and outlook.is_whole):
            continue
        attempt = movable(job, view)
        asked = max(job.spec.resources.devices, 1)
        if attempt is None or len(attempt.ranks) >= asked:
            continue
        own = of_ranks(view.hosts, attempt)
        if any(count <= total - len(own) for count in needs):
            continue
        free = _free_for(job, own, view.free)[: view.quotas.left(job.spec.tenant)]
        if not free:
            continue
        wish = job.spec.resources.plan if len(own) + len(free) >= asked else None
        reason = f"{len(free)} devices are free, and it asked for {asked}"
        move = first_that_works(job, [*own, *free], own, min(len(own) + len(free), asked), wish, reason, view.hosts)
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
    wish: Plan | None,
    reason: str,
    hosts: Mapping[HostId, Host] | None,
) -> Move | None:
    """A move to `count` of these devices, or to fewer where no plan uses that many."""
    for size in range(min(count, len(devices)), 0, -1):
        plan = wish if wish is not None and wish.ranks == size else None
        group = plan.tp if plan else 1
        chosen = _spread(devices, size, group, prefer)
        if len(chosen) == size:
            answer = _move(job, chosen, plan, reason, hosts)
            if isinstance(answer, Move):
                return answer
    return None


def _move(
    job: Job, chosen: list[Device], wish: Plan | None, reason: str, hosts: Mapping[HostId, Host] | None
) -> Move | Refusal:
    """`hosts`: where the old ranks train until the switch; None: they need not, or do not any more."""
    memory_bytes = min(d.memory_bytes for d in chosen)
    answer: Choice | Impossible = choose(
        ModelShape.from_dict(job.shape or {}), len(chosen), chosen[0].kind, memory_bytes, wish, job.bounds
    )
    if isinstance(answer, Impossible):
        return Refusal(job.id, answer.reason)
    if hosts is not None and job.attempt is not None:
        full = migrations.crowded(hosts, job, job.attempt, answer.plan, {d.id for d in chosen})
        if full is not None:
            return Refusal(job.id, full)
    where: Placement = place_on(job, chosen)
    return Move(job.id, answer.plan, where.ranks, where.cores, where.memory_bytes, f"{answer.plan}: {reason}")


def _spread(devices: Iterable[Device], count: int, group: int, prefer: list[Device]) -> list[Device]:
    """`count` devices in groups that stay on one host, those that the job has first; fewer if there are not so many."""
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


def movable(job: Job, view: View, forced: bool = False) -> Attempt | None:
    """The attempt, if the job may be moved now and a move would pay."""
    attempt = job.attempt
    if attempt is None or attempt.plan is None or job.spec.kind is not JobKind.ELASTIC:
        return None
    if attempt.state is not AttemptState.RUNNING or attempt.migration or attempt.resuming or attempt.retired:
        return None
    if job.step < 1 or any(h not in view.hosts or view.hosts[h].state is not HostState.UP for h in attempt.hosts):
        return None
    last = job.migrations[-1] if job.migrations else None
    since_s = view.now_s - last.ended_s if last is not None and last.ended_s is not None else inf
    if since_s < job.calm_s(SETTLE_AFTER_FAILURE_S):
        return None
    if forced:
        return attempt
    # Trials follow one another; who needs the job's devices does not wait for the last of them.
    settling = last is not None and view.now_s - (last.ended_s or last.started_s) < SETTLE_S and not job.being_tried
    if job.pinned is not None or settling:
        return None
    left = (job.shape or {}).get("steps", 0) - job.step
    return attempt if left * (job.step_time_s or 0.0) >= WORTH_MOVING_S else None


def _may_stay(device: Device, view: View) -> bool:
    host = view.hosts[device.host]
    return host.unusable is None and not host.is_faulty(device.id)


def _free_for(job: Job, own: list[Device], free: Free) -> list[Device]:
    """Devices of its kind that the job may have beside its own."""
    kind = own[0].kind if own else ""
    return [device for host in candidates(job, free) for device in fitting(job, host, kind)]


def book(free: Free, move: Move, attempt: Attempt) -> None:
    """Take what the move books beside what the job has booked already."""
    mine = set(attempt.devices)
    new = [p for p in move.ranks if p.device not in mine]
    cores = {p.host: max(move.cores.get(p.host, 0) - attempt.cores.get(p.host, 0), 0) for p in new}
    memory = {p.host: max(move.memory_bytes.get(p.host, 0) - attempt.memory_bytes.get(p.host, 0), 0) for p in new}
    free.take(new, cores, memory)
