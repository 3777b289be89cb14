"""When ranks die under an elastic job: those that are left hold its state, and often all of it.

The survivors of a broken collective keep what they have and say so. Once each rank is known to be dead or waiting, the
job is moved to new ranks with the dead left out of the old layout: replicas stand in for them. A survivor that is a
step behind ends that step from the gradients it has, or is left out too. Where the dead held the only copy of
something, there is nothing to move, and the attempt ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clusterd.core.allocation import resize_unmodelled
from clusterd.core.lifecycle import migrations, trials
from clusterd.core.state import Attempt, Host, Job
from clusterd.core.view import Move, Refusal, View
from clusterd.types import AttemptState, HostId, HostState, JobKind, RankEnd, Reason
from plans.layout import layout
from plans.model_shape import ModelShape
from plans.reshard import IncompleteLayout, plan_transfers

NOTICE_S = 5.0
"""For ranks to notice by themselves that a peer is gone; then they are told."""

WAIT_FOR_SURVIVORS_S = 90.0
"""For ranks that were told to say what they hold."""

_SURVIVABLE = (Reason.SIGNAL, Reason.LOST, Reason.OOM, Reason.CROWDED, Reason.DEVICE_FAULT)
"""Ends without a word of the job's own: the code did not fail, something took its process away."""


def may_recover(job: Job, attempt: Attempt, end: RankEnd) -> bool:
    """Whether it is worth waiting for survivors."""
    return (
        job.spec.kind is JobKind.ELASTIC
        and attempt.state is AttemptState.RUNNING
        and attempt.plan is not None
        and len(attempt.ranks) > 1
        and not end.is_success
        and end.reason in _SURVIVABLE
    )


def dead(attempt: Attempt, hosts: Mapping[HostId, Host]) -> set[int]:
    """Ranks that ended, or are on a host that cannot be reached while others say that their peers are gone."""
    return {
        number
        for number, rank in attempt.ranks.items()
        if rank.end is not None or (number not in attempt.orphaned and hosts[rank.place.host].state is not HostState.UP)
    }


def undecided(attempt: Attempt, hosts: Mapping[HostId, Host]) -> set[int]:
    """Ranks that are not known to be dead, and have not said that they wait."""
    return set(attempt.ranks) - dead(attempt, hosts) - set(attempt.orphaned)


def way_back(job: Job, attempt: Attempt, view: View) -> Move | Refusal:
    """The move back to the plan that ran before one that ran out of memory; every rank holds its state and waits."""
    before = attempt.past_plans.get(max(attempt.past_plans, default=0))
    if before is None:
        return Refusal(job.id, f"{attempt.plan} ran out of memory, and no other plan ran before it")
    steps = set(attempt.orphaned.values())
    if min(steps) < 0:
        return Refusal(job.id, f"{attempt.plan} ran out of memory while other ranks changed their parameters")
    if len(steps) != 1:
        return Refusal(job.id, f"{attempt.plan} ran out of memory with ranks at different steps: {sorted(steps)}")
    answer = trials.move_for(job, attempt, before, view.hosts, f"{attempt.plan} ran out of memory: back to {before}")
    return answer if isinstance(answer, Move) else Refusal(job.id, f"{attempt.plan} ran out of memory, and {answer}")


def outlived_by(attempt: Attempt, step: int) -> set[int]:
    """Survivors that hold the state of the end of `step`, or can make it; none, where that step is none."""
    behind = {r for r, at in attempt.orphaned.items() if at == step - 1 and r in attempt.may_finish}
    return {r for r, at in attempt.orphaned.items() if at == step} | behind if step >= 0 else set()


def is_crowded(job: Job, attempt: Attempt, move: Move, hosts: Mapping[HostId, Host]) -> bool:
    """Whether its new ranks may find no memory beside survivors, which hold parameters and optimizer state there."""
    waiting = {attempt.ranks[rank].place.device for rank in attempt.orphaned}
    shared = waiting.intersection(place.device for place in move.ranks)
    return migrations.crowded(hosts, job, attempt, move.plan, shared) is not None


def way_on(job: Job, attempt: Attempt, view: View, lost: Sequence[int]) -> Move | Refusal:
    """New ranks that the survivors' state can be moved to, or why there are none.

    Args:
        lost: ranks that are dead, or whose state is older than others'.
    """
    if len(lost) == len(attempt.ranks):
        return Refusal(job.id, f"no rank is left of {len(attempt.ranks)}")
    move = resize_unmodelled.after_loss(job, attempt, view, f"rank {', '.join(map(str, lost))} died")
    if move is None:
        return Refusal(job.id, "no plan fits the devices that are left")
    assert attempt.plan is not None
    shape = ModelShape.from_dict(job.shape or {})
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
