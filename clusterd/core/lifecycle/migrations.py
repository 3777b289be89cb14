"""Bookkeeping of migrations: both sides hold their devices until one side is gone.

Before the switch the attempt is its source ranks, and a failure leaves them untouched. The switch is one step: the
target ranks become the attempt's, the source ranks are retired. Retired ranks hold their devices until their hosts
report them gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from clusterd.core.booked import book, free
from clusterd.core.fair_share import beyond_quota
from clusterd.core.queueing.bookings import claim_against
from clusterd.core.state import Attempt, Former, Holder, Job, Migration, Rank, Restart, Retired, State, Survivors
from clusterd.core.transitions import MigrationState
from clusterd.core.view import Move
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan
from clusterd.types import AttemptState, DeviceId, HostId


def objection(state: State, job: Job, move: Move, now_s: float, after_loss: bool = False) -> str | None:
    """Reason why a migration must not begin now, whoever proposed it; None: it may.

    Memory for source and target ranks side by side is checked separately (`memory_conflict`): without it the job can
    still restart through host memory.

    Args:
        after_loss: ranks died: quotas do not apply, and the target may equal the source.
    """
    attempt = job.attempt
    if attempt is None or attempt.state is not AttemptState.RUNNING:
        return f"{job.spec.name} is {job.state.value}: only a running job can be moved"
    if attempt.plan is None:
        return f"{job.spec.name} is a {job.spec.kind.value} job: only elastic jobs can be moved while they run"
    if attempt.migration is not None or job.resuming is not None:
        return f"{job.spec.name} is being moved already"
    if attempt.retired:
        return f"the ranks of its last migration are not gone yet on {', '.join(_pending(attempt))}"
    own = {*attempt.devices, *attempt.reserved_devices}
    seen: set[DeviceId] = set()
    for place in move.ranks:
        host = state.hosts.get(place.host)
        if host is None:
            return f"{place.host} is not a host of this cluster"
        # A job may leave a drained host or keep what it has there; it gets nothing more.
        if host.unusable is not None and (place.device not in own or host.drained is None):
            return host.unusable
        if place.device is None or place.device not in {d.id for d in host.devices}:
            return f"{place.device} does not exist"
        if place.device in seen:
            return f"{place.device} is named twice"
        claim = claim_against(state.device_claims, job.spec, host, place.device)
        if claim and place.device not in own:
            return f"{place.device} is {claim}"
        holder = state.holders.get(place.device)
        if holder is not None and place.device not in own:
            return f"{place.device} is held by {state.jobs[holder.job].spec.name}"
        seen.add(place.device)
    if after_loss:
        return None
    beyond = beyond_quota(state, job.spec, len(seen - own), now_s) if len(seen) > len(own) else None
    if beyond is not None:
        return beyond
    if is_there(job, move):
        return f"{job.spec.name} runs under {move.plan} on these devices already"
    return None


def is_there(job: Job, move: Move) -> bool:
    """True where the job runs under this plan on these devices already, and is not migrating."""
    attempt = job.attempt
    if attempt is None or attempt.migration is not None:
        return False
    return (attempt.plan, attempt.devices) == (move.plan, tuple(place.device for place in move.ranks))


def begin(state: State, job: Job, move: Move, now_s: float, lost: Iterable[int] = ()) -> Migration:
    """Book what the target ranks need beside the source ranks, of which `lost` are dead."""
    attempt = job.attempt
    assert attempt is not None and attempt.plan is not None, "only jobs under a plan migrate"
    attempt.last_generation += 1
    migration = Migration(
        **_recorded(job, attempt.plan, move, now_s),
        generation=attempt.last_generation,
        lost=tuple(sorted(lost)),
        old_pin=job.pinned,
    )
    _take_lacking(state, attempt, move, migration.generation)
    book(state.hosts, migration.booked.beyond(attempt.booked))
    attempt.migration = migration
    state.index(attempt)
    return migration


def through_memory(state: State, job: Job, attempt: Attempt, move: Move, now_s: float) -> Restart:
    """Reserve the devices of a migration through host memory while the source ranks are being stopped.

    Without the reservation each host's devices would go to other jobs as soon as that host reports its ranks gone.
    """
    assert attempt.plan is not None, "only jobs under a plan migrate"
    _take_lacking(state, attempt, move, attempt.generation)
    attempt.reserved_devices |= {place.device: place.host for place in move.ranks if place.device is not None}
    restart = Restart(**_recorded(job, attempt.plan, move, now_s))
    if job.inspection.shape is not None:  # else only the script knows what it saves
        restart.local_bytes = ModelShape.from_dict(job.inspection.shape).state_bytes
    return restart


def learn_cost(known: dict[str, float], model: str, downtime_s: float) -> None:
    """Update the moving average of a model's downtimes; the newest counts for 0.3, as machines and links change."""
    known[model] = 0.7 * known.get(model, downtime_s) + 0.3 * downtime_s


def next_number(job: Job) -> int:
    """Number of the job's next migration or restart."""
    return len(job.migrations) + len(job.restarts) + 1


def _recorded(job: Job, old_plan: Plan, move: Move, now_s: float) -> dict[str, Any]:
    """Fields of a new `PlanChange`."""
    return {
        "number": next_number(job),
        "plan": move.plan,
        "ranks": {place.rank: Rank(place) for place in move.ranks},
        "old_plan": old_plan,
        "reason": move.reason,
        "started_s": now_s,
        "booked": move.booked,
    }


def _take_lacking(state: State, attempt: Attempt, move: Move, generation: int) -> None:
    """Take those devices of a migration that are free."""
    for place in move.ranks:
        if place.device is not None and place.device not in state.holders:
            state.holders[place.device] = Holder(place.host, attempt.job, attempt.number, generation)


def switch(state: State, job: Job, attempt: Attempt, now_s: float) -> Retired:
    """Make the target ranks the attempt's; returns the retired source ranks."""
    migration = attempt.migration
    assert migration is not None, "nothing to switch to"
    old = Retired(attempt.ranks, set(attempt.hosts), attempt.booked.beyond(migration.booked))
    attempt.retired[attempt.generation] = old
    hosts = {number: rank.place.host for number, rank in attempt.ranks.items()}
    attempt.former[attempt.generation] = Former(attempt.plan, hosts)
    attempt.generation, attempt.plan = migration.generation, migration.plan
    attempt.ranks = {
        number: Rank(rank.place) for number, rank in migration.ranks.items()
    }  # without exits seen before the switch
    attempt.booked = migration.booked
    attempt.announced_cores = None
    for rank in attempt.ranks.values():
        device = rank.place.device
        if device is not None:
            state.holders[device] = Holder(rank.place.host, attempt.job, attempt.number, attempt.generation)
    attempt.migration, attempt.survivors = None, Survivors()
    state.index(attempt)
    migration.go(MigrationState.RESUMING, now_s)
    job.migrations.append(migration)
    return old


def fail(state: State, job: Job, attempt: Attempt, why: str, now_s: float) -> Retired:
    """End the migration before its switch; returns the retired target ranks."""
    migration = attempt.migration
    assert migration is not None, "nothing to give up"
    pending = {rank.place.host for rank in migration.ranks.values()}
    new = Retired(migration.ranks, pending, migration.booked.beyond(attempt.booked))
    attempt.retired[migration.generation] = new
    migration.go(MigrationState.FAILED, now_s)
    migration.failure, migration.ended_s = why, now_s
    attempt.migration = None
    state.index(attempt)
    job.migrations.append(migration)
    return new


def gone(state: State, attempt: Attempt, generation: int, host: HostId) -> bool:
    """Free what retired ranks held on a host that reported them gone; False: they were not awaited there."""
    retired = attempt.retired.get(generation)
    if retired is None or host not in retired.pending:
        return False
    retired.pending.discard(host)
    held = attempt.held_on(host)
    for rank in retired.ranks.values():
        place = rank.place
        if place.host == host and place.device is not None and place.device not in held:
            holder = state.holders.get(place.device)
            if holder is not None and holder.job == attempt.job:
                del state.holders[place.device]
    known = state.hosts.get(host)
    if known is not None:
        free(known, retired.booked)
    if not retired.pending:
        del attempt.retired[generation]
    state.index(attempt)
    return True


def _pending(attempt: Attempt) -> list[str]:
    return sorted({str(host) for retired in attempt.retired.values() for host in retired.pending})
