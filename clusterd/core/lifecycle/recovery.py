"""Recovery of an elastic job whose ranks died, from the state that the survivors hold.

Survivors of a broken collective hold their state and report it. Once each rank is known to be dead or waiting, the job
migrates to new ranks with the dead ones left out of the source layout: replicas stand in for them. A survivor that is a
step behind finishes that step from the gradients it has, or is left out too. Where a dead rank held the only copy of
some state, the attempt ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clusterd.core.allocation.evacuation import after_loss
from clusterd.core.estimates.first_fit import memory_conflict
from clusterd.core.host import Host
from clusterd.core.lifecycle import trials
from clusterd.core.state import Attempt, Job
from clusterd.core.view import Move, Refusal, View
from clusterd.plans.layout import layout
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.reshard import IncompleteLayout, plan_transfers
from clusterd.types import AttemptState, HostId, JobKind, RankEnd, Reason

NOTICE_S = 5.0
"""Time for ranks to notice by themselves that a peer is gone, before their collectives are aborted."""

WAIT_FOR_SURVIVORS_S = 90.0
"""Time for ranks whose collectives were aborted to report their state."""

_SURVIVABLE = (Reason.SIGNAL, Reason.LOST, Reason.OOM, Reason.CROWDED, Reason.DEVICE_FAULT)
"""Exit reasons that are not the script's: something took its process away."""


def may_recover(job: Job, attempt: Attempt, end: RankEnd) -> bool:
    """True where waiting for survivors may save the attempt."""
    return (
        job.spec.kind is JobKind.ELASTIC
        and attempt.state is AttemptState.RUNNING
        and attempt.plan is not None
        and len(attempt.ranks) > 1
        and not end.is_success
        and end.reason in _SURVIVABLE
    )


def dead(attempt: Attempt, hosts: Mapping[HostId, Host]) -> set[int]:
    """Ranks that exited, or whose host is unreachable while they have not reported to survive."""
    return {
        number
        for number, rank in attempt.ranks.items()
        if rank.end is not None
        or (number not in attempt.survivors.steps and not hosts[rank.place.host].reaches(attempt.account))
    }


def undecided(attempt: Attempt, hosts: Mapping[HostId, Host]) -> set[int]:
    """Ranks that are neither known to be dead nor reported as waiting."""
    return set(attempt.ranks) - dead(attempt, hosts) - set(attempt.survivors.steps)


def migrate_back(job: Job, attempt: Attempt, view: View) -> Move | Refusal:
    """Migration back to the plan before one that ran out of memory; every rank holds its state and waits."""
    before = attempt.former[max(attempt.former)].plan if attempt.former else None
    if before is None:
        return Refusal(job.id, f"{attempt.plan} ran out of memory, and no other plan ran before it")
    steps = set(attempt.survivors.steps.values())
    if min(steps) < 0:
        return Refusal(job.id, f"{attempt.plan} ran out of memory while other ranks changed their parameters")
    if len(steps) != 1:
        return Refusal(job.id, f"{attempt.plan} ran out of memory with ranks at different steps: {sorted(steps)}")
    answer = trials.move_for(job, attempt, before, view.hosts, f"{attempt.plan} ran out of memory: back to {before}")
    return answer if isinstance(answer, Move) else Refusal(job.id, f"{attempt.plan} ran out of memory, and {answer}")


def usable_survivors(attempt: Attempt, step: int) -> set[int]:
    """Survivors that hold the state of the end of `step`, or can finish that step; none for a negative step."""
    survivors = attempt.survivors
    behind = {r for r, at in survivors.steps.items() if at == step - 1 and r in survivors.can_finish_step}
    return {r for r, at in survivors.steps.items() if at == step} | behind if step >= 0 else set()


def lacks_memory(job: Job, attempt: Attempt, move: Move, hosts: Mapping[HostId, Host]) -> bool:
    """True where target ranks may lack memory beside survivors, which hold parameters and optimizer state."""
    waiting = {attempt.ranks[rank].place.device for rank in attempt.survivors.steps}
    shared = waiting.intersection(place.device for place in move.ranks)
    return memory_conflict(hosts, job, attempt, move.plan, shared) is not None


def migrate_survivors(job: Job, attempt: Attempt, view: View, lost: Sequence[int]) -> Move | Refusal:
    """Migration of the survivors' state to new ranks, or the reason why there is none.

    Args:
        lost: ranks that are dead, or whose state is older than that of others.
    """
    if len(lost) == len(attempt.ranks):
        return Refusal(job.id, f"no rank is left of {len(attempt.ranks)}")
    move = after_loss(job, attempt, view, f"rank {', '.join(map(str, lost))} died")
    if move is None:
        return Refusal(job.id, "no plan fits the devices that are left")
    assert attempt.plan is not None
    shape = ModelShape.from_dict(job.inspection.shape or {})
    hosts = [attempt.ranks[rank].place.host for rank in sorted(attempt.ranks)]
    try:
        plan_transfers(
            layout(shape, attempt.plan).without(lost),
            layout(shape, move.plan),
            hosts,
            [place.host for place in move.ranks],
        )
    except IncompleteLayout as missing:
        return Refusal(job.id, f"ranks {lost} held the only copy of a part of the state: {missing}")
    return move
