"""Trial runs: a running job takes a few real steps under another plan, so that its speed there is measured.

A trial is a migration on devices that the job holds already; no progress is lost. Devices that the tried plan leaves
idle stay reserved for the job, and are used again or given back when nothing is left to try.
"""

from __future__ import annotations

from collections.abc import Mapping

from clusterd.core import ledger
from clusterd.core.estimates.first_fit import ChosenPlan, choose
from clusterd.core.host import Host
from clusterd.core.placement.place import place_on
from clusterd.core.state import Attempt, Job, State, Trial
from clusterd.core.transitions import TrialState
from clusterd.core.view import Move
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan
from clusterd.types import AttemptState, Device, DeviceId, HostId
from clusterd.units import duration

WORTH_CHANGING = 0.03
"""Share of the step time that another plan must save to be worth a migration."""


def ready(job: Job) -> Attempt | None:
    """The attempt, if all its ranks train and it is in the middle of nothing else."""
    attempt = job.attempt
    if attempt is None or attempt.plan is None or attempt.state is not AttemptState.RUNNING:
        return None
    busy = attempt.migration or job.resuming or attempt.retired or attempt.survivors.steps
    # Without this a rank that died would fail one migration back after the other, until its peers have reported.
    died = any(rank.end is not None for rank in attempt.ranks.values())
    return None if busy or died or job.progress.step < 1 else attempt


def fail(job: Job, trial: Trial, why: str, now_s: float, is_refused: bool = False) -> None:
    """End the current trial without a measurement.

    Args:
        is_refused: the plan cannot run: it is not tried again.
    """
    trial.go(TrialState.FAILED, now_s)
    trial.failure, trial.is_refused = why, is_refused
    job.trials.finished.append(trial)
    job.trials.current = None


def move_for(job: Job, attempt: Attempt, plan: Plan, hosts: Mapping[HostId, Host], reason: str) -> Move | str:
    """Migration of the job to `plan` on devices that it holds, or the reason why there is none."""
    if job.inspection.shape is None:
        return "its model has not been inspected"
    mine = held(attempt, hosts)
    if plan.ranks > len(mine):
        return f"{plan} needs {plan.ranks} devices, the job holds {len(mine)}"
    chosen = pack(mine, plan.ranks)
    memory_bytes = min(d.memory_bytes for d in chosen)
    shape = ModelShape.from_dict(job.inspection.shape)
    answer = choose(shape, plan.ranks, chosen[0].kind, memory_bytes, plan, job.failures.bounds)
    if not isinstance(answer, ChosenPlan):
        return answer.reason
    where = place_on(job, chosen)
    return Move(job.id, plan, where.ranks, where.booked, reason)


def best_plan(job: Job, attempt: Attempt, state: State) -> tuple[Plan, str] | None:
    """Fastest known plan on all devices that the job holds, and by what; None: the current one, or they are mixed."""
    mine = held(attempt, state.hosts)
    table = state.performance_tables.get(job.inspection.model)
    if table is None or attempt.plan is None or len({device.name for device in mine}) != 1:
        return None  # the pass places jobs on mixed devices
    shape = ledger.shape_of(mine)
    best = table.best(mine[0].name, shape)
    if best is None or best.plan == attempt.plan:
        return None
    now = table.of(attempt.plan, mine[0].name, shape)
    if now is not None and best.step_time_s >= (1.0 - WORTH_CHANGING) * now.step_time_s:
        return None
    instead = f", {duration(now.step_time_s)} with {attempt.plan}" if now is not None else ""
    return best.plan, f"the fastest known for its devices, {duration(best.step_time_s)} a step{instead}"


def held(attempt: Attempt, hosts: Mapping[HostId, Host]) -> list[Device]:
    """Devices of the job's ranks, by rank, then its reserved ones."""
    mine = [(rank.place.host, rank.place.device) for rank in attempt.ranks.values()]
    reserved = [(host, device) for device, host in attempt.reserved_devices.items()]
    return ledger.held(hosts, dict.fromkeys((*mine, *reserved)))


def release_devices(state: State, attempt: Attempt) -> None:
    """Give back the devices reserved for trials."""
    reserved, attempt.reserved_devices = attempt.reserved_devices, {}
    for device, host in reserved.items():
        holder = state.holders.get(device)
        if holder is not None and holder.job == attempt.job and device not in attempt.held_on(host):
            del state.holders[device]


def reserve_devices(attempt: Attempt, move: Move) -> None:
    """Reserve the devices of the job that a trial's migration leaves idle."""
    used = {place.device for place in move.ranks}
    mine: dict[DeviceId, HostId] = {
        rank.place.device: rank.place.host for rank in attempt.ranks.values() if rank.place.device is not None
    }
    attempt.reserved_devices = {d: h for d, h in {**attempt.reserved_devices, **mine}.items() if d not in used}


def pack(devices: list[Device], count: int) -> list[Device]:
    """The first `count` of these devices on as few hosts as possible, in their order within a host."""
    by_host: dict[str, list[Device]] = {}
    for device in devices:
        by_host.setdefault(device.host, []).append(device)
    large_enough = [some for some in by_host.values() if len(some) >= count]
    if large_enough:
        return min(large_enough, key=len)[:count]
    order = sorted(by_host.values(), key=len, reverse=True)
    return [device for some in order for device in some][:count]
