"""Trial runs: a running job takes a few real steps under another plan, so that its speed there is known.

A trial is a live migration on devices that the job holds already; no progress is lost. Devices that the tried plan does
not use stay the job's, idle for those steps, and are used again, or given back, when there is nothing more to try.
"""

from __future__ import annotations

from collections.abc import Mapping

from clusterd.core import ledger
from clusterd.core.allocation.first_fit import Choice, choose
from clusterd.core.lifecycle import migrations
from clusterd.core.placement.place import place_on
from clusterd.core.state import Attempt, Host, Job, State
from clusterd.core.view import Move
from clusterd.types import AttemptState, Device, DeviceId, HostId
from plans.model_shape import ModelShape
from plans.plan import Plan

WORTH_CHANGING = 0.03
"""Of the step time: a smaller gain does not pay for another move."""


def ready(job: Job) -> Attempt | None:
    """The attempt, if it trains and nothing else is being done with it."""
    attempt = job.attempt
    if attempt is None or attempt.plan is None or attempt.state is not AttemptState.RUNNING:
        return None
    busy = attempt.migration or attempt.resuming or attempt.retired or attempt.orphaned
    return None if busy or job.step < 1 else attempt


def move_for(job: Job, attempt: Attempt, plan: Plan, hosts: Mapping[HostId, Host], reason: str) -> Move | str:
    """The job under `plan` on devices it holds, or why that cannot be."""
    mine = held(attempt, hosts)
    if plan.ranks > len(mine):
        return f"{plan} needs {plan.ranks} devices, the job holds {len(mine)}"
    chosen = together(mine, plan.ranks)
    memory_bytes = min(d.memory_bytes for d in chosen)
    shape = ModelShape.from_dict(job.shape or {})
    answer = choose(shape, plan.ranks, chosen[0].kind, memory_bytes, plan, job.bounds)
    if not isinstance(answer, Choice):
        return answer.reason
    where = place_on(job, chosen)
    return Move(job.id, plan, where.ranks, where.cores, where.memory_bytes, reason)


def way_back(job: Job, attempt: Attempt, state: State) -> Plan | None:
    """When nothing is left to try: the fastest known plan on all devices that the job holds; None: the one it has."""
    mine = held(attempt, state.hosts)
    outlook = state.outlooks.get(job.model)
    if outlook is None or attempt.plan is None or len({device.name for device in mine}) != 1:
        return None  # of devices of several types the scheduler's pass thinks
    shape = ledger.shape_of(mine)
    best = outlook.best(mine[0].name, shape)
    if best is None or best.plan == attempt.plan:
        return None
    now = outlook.of(attempt.plan, mine[0].name, shape)
    return best.plan if now is None or best.step_time_s < (1.0 - WORTH_CHANGING) * now.step_time_s else None


def held(attempt: Attempt, hosts: Mapping[HostId, Host]) -> list[Device]:
    """Devices of the job's ranks, in their order, and those it keeps."""
    mine = [(rank.place.host, rank.place.device) for rank in attempt.ranks.values()]
    kept = [(host, device) for device, host in attempt.kept.items()]
    return ledger.held(hosts, dict.fromkeys((*mine, *kept)))


def let_go(state: State, attempt: Attempt) -> None:
    """Give back the devices that are kept for trials."""
    kept, attempt.kept = attempt.kept, {}
    for device, host in kept.items():
        lease = state.leases.get(device)
        if lease is not None and lease.job == attempt.job and device not in migrations.held_on(attempt, host):
            del state.leases[device]


def keep(attempt: Attempt, move: Move) -> None:
    """Note, when a trial's move has begun, what of the job's devices it leaves idle."""
    taken = {place.device for place in move.ranks}
    mine: dict[DeviceId, str] = {r.place.device: r.place.host for r in attempt.ranks.values() if r.place.device}
    attempt.kept = {d: h for d, h in {**attempt.kept, **mine}.items() if d not in taken}  # type: ignore[misc]


def together(devices: list[Device], count: int) -> list[Device]:
    """So many of them on as few hosts as can be, the order kept within a host."""
    by_host: dict[str, list[Device]] = {}
    for device in devices:
        by_host.setdefault(device.host, []).append(device)
    exact = [some for some in by_host.values() if len(some) >= count]
    if exact:
        return min(exact, key=len)[:count]
    order = sorted(by_host.values(), key=len, reverse=True)
    return [device for some in order for device in some][:count]
