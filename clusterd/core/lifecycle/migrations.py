"""The life of a migration in the books: devices of both sides are leased until one side is gone.

Before the switch the attempt is the old ranks, and whatever fails leaves them be. The switch is one step: the new ranks
become the attempt's, the old ones are retired. Retired ranks keep their devices until their hosts say they are gone.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from clusterd.core.allocation.first_fit import crowding
from clusterd.core.estimates.attained_service import time_left_s
from clusterd.core.fair_share import beyond_quota
from clusterd.core.ledger import of_ranks
from clusterd.core.state import Attempt, Host, Job, Lease, Migration, Rank, Retired, State
from clusterd.core.view import Move
from clusterd.types import AttemptState, DeviceId, HostId, RankPlace
from plans.model_shape import ModelShape
from plans.plan import Plan


def objection(state: State, job: Job, move: Move, after_loss: bool = False) -> str | None:
    """Why a move must not begin now, whoever wants it; None: it may. After a loss, it may lead to where the job was.

    Whether old and new ranks find memory side by side is asked apart (`crowded`): there is another way then.
    """
    attempt = job.attempt
    if attempt is None or attempt.state is not AttemptState.RUNNING:
        return f"{job.spec.name} is {job.state.value}: only a running job can be moved"
    if attempt.plan is None:
        return f"{job.spec.name} is a {job.spec.kind.value} job: only elastic jobs can be moved while they run"
    if attempt.migration is not None or attempt.resuming:
        return f"{job.spec.name} is being moved already"
    if attempt.retired:
        return f"the ranks of its last move are not gone yet on {', '.join(_pending(attempt))}"
    own = {*attempt.devices, *attempt.kept}
    seen: set[DeviceId] = set()
    for place in move.ranks:
        host = state.hosts.get(place.host)
        if host is None:
            return f"{place.host} is no host of ours"
        # A drained host may be left, and may keep what it has; it may not be given more.
        if host.unusable is not None and (place.device not in own or host.drained is None):
            return host.unusable
        if place.device is None or place.device not in {d.id for d in host.devices}:
            return f"{place.device} does not exist"
        if place.device in seen:
            return f"{place.device} is named twice"
        lease = state.leases.get(place.device)
        if lease is not None and place.device not in own:
            return f"{place.device} is leased to {state.jobs[lease.job].spec.name}"
        seen.add(place.device)
    if after_loss:
        return None
    beyond = beyond_quota(state, job.spec.tenant, len(seen - own)) if len(seen) > len(own) else None
    if beyond is not None:
        return beyond
    if is_there(job, move):
        return f"{job.spec.name} runs under {move.plan} on these devices already"
    return None


def crowded(
    hosts: Mapping[HostId, Host], job: Job, attempt: Attempt, plan: Plan, devices: Container[DeviceId | None]
) -> str | None:
    """Why ranks of `plan` would find no memory beside those that train on these devices; None: they would."""
    shared = [d for d in of_ranks(hosts, attempt) if d.id in devices]
    if not shared or attempt.plan is None or job.shape is None:
        return None
    if one := next((d.id for d in shared if d.exclusive), None):
        return f"{one} takes one process at a time (its compute mode: `nvidia-smi -c 0` as root lets in several)"
    if job.needs_room:
        return "a rank of it ran out of memory before while others were made ready beside it"
    tightest = min(shared, key=lambda d: d.memory_bytes)
    return crowding(ModelShape.from_dict(job.shape), attempt.plan, plan, tightest.kind, tightest.memory_bytes)


def is_there(job: Job, move: Move) -> bool:
    """Whether the job runs so already, and is not on its way elsewhere."""
    attempt = job.attempt
    if attempt is None or attempt.migration is not None:
        return False
    return (attempt.plan, attempt.devices) == (move.plan, tuple(place.device for place in move.ranks))


def begin(state: State, job: Job, move: Move, now_s: float, lost: Iterable[int] = ()) -> Migration:
    """Book what the new ranks need beside the old ones, of which `lost` are dead."""
    attempt = job.attempt
    assert attempt is not None and attempt.plan is not None, "only what runs under a plan is moved"
    attempt.last_generation += 1
    migration = _noted(job, attempt.plan, move, attempt.last_generation, now_s)
    migration.lost = tuple(sorted(lost))
    _lease_lacking(state, attempt, move, migration.generation)
    _book(state, _more(migration.cores, attempt.cores), _more(migration.memory_bytes, attempt.memory_bytes))
    attempt.migration = migration
    return migration


def through_memory(state: State, job: Job, attempt: Attempt, move: Move, now_s: float) -> Migration:
    """Keep the devices that the job will start again on, those that it lacks too; its ranks are being stopped for that.

    Its own would come free host by host, as each says that its ranks are gone, and others would be given them.
    """
    assert attempt.plan is not None, "only what runs under a plan is moved"
    _lease_lacking(state, attempt, move, attempt.generation)
    attempt.kept |= {place.device: place.host for place in move.ranks if place.device is not None}
    migration = _noted(job, attempt.plan, move, 1, now_s)  # the first generation of the next attempt
    if job.shape is not None:  # else the script saves what only it knows
        migration.local_bytes = ModelShape.from_dict(job.shape).state_bytes
    migration.restarts = True
    return migration


def learn_cost(known: dict[str, float], model: str, downtime_s: float) -> None:
    """What moves of a model cost: the newest counts for a third, for machines and links change."""
    known[model] = 0.7 * known.get(model, downtime_s) + 0.3 * downtime_s


def _noted(job: Job, old_plan: Plan, move: Move, generation: int, now_s: float) -> Migration:
    return Migration(
        number=len(job.migrations) + 1,
        generation=generation,
        plan=move.plan,
        ranks={place.rank: Rank(place) for place in move.ranks},
        old_plan=old_plan,
        reason=move.reason,
        started_s=now_s,
        cores=dict(move.cores),
        memory_bytes=dict(move.memory_bytes),
        old_pin=job.pinned,
    )


def _lease_lacking(state: State, attempt: Attempt, move: Move, generation: int) -> None:
    """Lease the devices of a move that are free."""
    for place in move.ranks:
        if place.device is not None and place.device not in state.leases:
            state.leases[place.device] = lease_of(state, attempt, place.device, place.host, generation)


def switch(state: State, job: Job, attempt: Attempt) -> Retired:
    """The new ranks become the attempt's; the old ones are returned, retired."""
    migration = attempt.migration
    assert migration is not None, "nothing to switch to"
    old = Retired(
        ranks=attempt.ranks,
        pending=set(attempt.hosts),
        cores=_more(attempt.cores, migration.cores),
        memory_bytes=_more(attempt.memory_bytes, migration.memory_bytes),
    )
    attempt.retired[attempt.generation] = old
    if attempt.plan is not None:
        attempt.past_plans[attempt.generation] = attempt.plan
    attempt.past[attempt.generation] = {number: rank.place.host for number, rank in attempt.ranks.items()}
    attempt.generation, attempt.plan = migration.generation, migration.plan
    attempt.ranks = {number: Rank(rank.place) for number, rank in migration.ranks.items()}  # how they end is not its
    attempt.cores, attempt.memory_bytes = migration.cores, migration.memory_bytes
    attempt.told_cores = None
    for rank in attempt.ranks.values():
        device = rank.place.device
        if device is not None:
            state.leases[device] = lease_of(state, attempt, device, rank.place.host, attempt.generation)
    attempt.migration, attempt.resuming = None, True
    attempt.orphaned.clear()
    attempt.may_finish.clear()
    attempt.cut_off = attempt.is_too_large = False
    job.migrations.append(migration)
    return old


def fail(job: Job, attempt: Attempt, why: str, now_s: float) -> Retired:
    """The migration is over without a switch; its new ranks are returned, retired."""
    migration = attempt.migration
    assert migration is not None, "nothing to give up"
    new = Retired(
        ranks=migration.ranks,
        pending={rank.place.host for rank in migration.ranks.values()},
        cores=_more(migration.cores, attempt.cores),
        memory_bytes=_more(migration.memory_bytes, attempt.memory_bytes),
    )
    attempt.retired[migration.generation] = new
    migration.failure, migration.ended_s = why, now_s
    attempt.migration = None
    job.migrations.append(migration)
    return new


def gone(state: State, attempt: Attempt, generation: int, host: HostId) -> bool:
    """A host is clean of retired ranks: free what they held there. False when it was not waited for."""
    retired = attempt.retired.get(generation)
    if retired is None or host not in retired.pending:
        return False
    retired.pending.discard(host)
    kept = held_on(attempt, host)
    for rank in retired.ranks.values():
        place = rank.place
        if place.host == host and place.device is not None and place.device not in kept:
            lease = state.leases.get(place.device)
            if lease is not None and lease.job == attempt.job:
                del state.leases[place.device]
    known = state.hosts.get(host)
    if known is not None:
        known.cores_used -= retired.cores.get(host, 0)
        known.memory_used_bytes -= retired.memory_bytes.get(host, 0)
    if not retired.pending:
        del attempt.retired[generation]
    return True


def held_on(attempt: Attempt, host: HostId, without: int | None = None) -> set[DeviceId]:
    """Devices of a host that some rank of the attempt, of whatever generation but `without`, may still use."""
    places: list[RankPlace] = []
    if attempt.state is not AttemptState.STOPPING or host in attempt.pending:
        places += [rank.place for rank in attempt.ranks.values()]
    if attempt.migration is not None:
        places += attempt.migration.places
    for generation, retired in attempt.retired.items():
        if host in retired.pending and generation != without:
            places += [rank.place for rank in retired.ranks.values()]
    held = {place.device for place in places if place.host == host and place.device is not None}
    return held | {device for device, where in attempt.kept.items() if where == host}


def lease_of(state: State, attempt: Attempt, device: DeviceId, host: HostId, generation: int) -> Lease:
    """A claim that ends with the job's time."""
    left_s = time_left_s(state.jobs[attempt.job])
    until_s = attempt.started_s + left_s if left_s is not None else None
    return Lease(device, host, attempt.job, attempt.number, generation, until_s)


def _more(these: Mapping[HostId, int], those: Mapping[HostId, int]) -> dict[HostId, int]:
    """What `these` have beyond `those`, host by host."""
    return {host: more for host, count in these.items() if (more := max(count - those.get(host, 0), 0))}


def _book(state: State, cores: Mapping[HostId, int], memory_bytes: Mapping[HostId, int]) -> None:
    for host, count in cores.items():
        state.hosts[host].cores_used += count
    for host, count in memory_bytes.items():
        state.hosts[host].memory_used_bytes += count


def _pending(attempt: Attempt) -> list[str]:
    return sorted({str(host) for retired in attempt.retired.values() for host in retired.pending})
