"""The default pipeline: classify, order, allocate, place."""

from __future__ import annotations

from clusterd.core.allocation import evacuate_by_restart, preempt_for, resize_unmodelled
from clusterd.core.allocation.migration_cost import DEFAULT_HABITS, Habits
from clusterd.core.allocation.rebalance import Exchange
from clusterd.core.allocation.target_sizes import by_work, shares
from clusterd.core.allocation.unmodelled import Grant, allocate
from clusterd.core.estimates.job_forecast import Curves, Prospect, census, prospect
from clusterd.core.ledger import Room
from clusterd.core.placement.apply_targets import is_settled
from clusterd.core.placement.cpu_cores import Cores
from clusterd.core.placement.heterogeneous_search import Mixing, Mixtures
from clusterd.core.queueing.order import order
from clusterd.core.state import Job
from clusterd.core.view import Proposal, Refusal, Start, View
from clusterd.types import JobId, JobKind, Resources

Alike = tuple[Resources, str, bool, int] | None
"""What decides about a command, beside what is free; None: more than that."""


class Default:
    """Jobs whose speed is known get plans and devices by what these do for the sum of completion times.

    Guaranteed jobs run at least as fast as what they asked for. Others are black boxes and get what they ask for, as
    soon as it is there; who does not fit lets smaller ones pass. Curves are remembered between passes, and nothing
    else: they follow from the state.
    """

    name = "default"
    interval_s: float | None = None

    def __init__(self, habits: Habits = DEFAULT_HABITS) -> None:
        self.habits = habits
        self._curves = Curves()
        self._mixtures = Mixtures()

    def propose(self, view: View) -> Proposal:
        """Moves off drained hosts; starts in order; shrinks for those who wait; growth into what nobody waits for.

        Last the cores, which hold nobody up: they follow the devices.
        """
        there = census(view)
        known: dict[JobId, Prospect] = {}
        for job in [*view.queued, *view.running]:
            curve = self._curves.of(job, view, there)
            if curve is not None:
                known[job.id] = prospect(job, curve, view)
        running = [known[j.id] for j in view.running if j.id in known and is_settled(j)]
        waiting = [known[j.id] for j in view.queued if j.id in known and j.not_before_s <= view.now_s]
        cores = Cores(view, running)
        proposal = Proposal(moves=evacuate_by_restart.evacuations(view, skip=known))
        room = Room(view.free)
        total = room.total + sum(len(p.devices) for p in running)
        ordered = by_work([*running, *waiting])
        sizes = shares(ordered, total)
        mixing = Mixing(self._mixtures, view, room, there)
        steering = Exchange(
            view=view,
            room=room,
            sizes=sizes,
            running=running,
            proposal=proposal,
            habits=self.habits,
            total=max(total, 1),
            behind={p.job.id: rank for rank, p in enumerate(ordered)},
            leaving=sum(len(preempt_for.leaving(job)) for job in view.running),
            mixing=mixing if mixing.groups else None,
            spare=total - sum(sizes.values()),
        )
        steering.evacuate()
        black: list[int] = []
        refused: dict[Alike, Refusal] = {}
        for job in order(view, known):
            p = known.get(job.id)
            if p is None or job.not_before_s > view.now_s:
                black += self._black_box(job, view, room, proposal, refused)
            else:
                steering.admit(p)
        steering.share_out()
        if not any(black):
            steering.grow()
            steering.exchange()
        proposal.moves += resize_unmodelled.growth(view, black, skip={*known, *(move.job for move in proposal.moves)})
        cores.share_out(proposal)
        return proposal

    def _black_box(
        self, job: Job, view: View, room: Room, proposal: Proposal, refused: dict[Alike, Refusal]
    ) -> list[int]:
        """Start it as it asks; the devices that it waits for instead.

        Args:
            refused: in this pass, in which there is only ever less to be had: of thousands alike one is looked at.
        """
        alike = _alike(job, view)
        if (same := refused.get(alike)) is not None:
            proposal.refusals.append(Refusal(job.id, same.reason, same.forever, same.devices))
            return [same.devices]
        answer = allocate(job, view)
        if isinstance(answer, Refusal):
            if alike is not None:
                refused[alike] = answer
            if answer.devices and not proposal.moves:
                proposal.moves += preempt_for.room_for(job, view, answer.devices)
            proposal.refusals.append(answer)
            return [answer.devices]
        assert isinstance(answer, Grant)
        where = answer.placement
        view.quotas.take(job.spec.tenant, sum(place.device is not None for place in where.ranks))
        taken = {place.device for place in where.ranks}
        devices = [d for host in view.free.hosts.values() for d in host.devices if d.id in taken]
        view.free.take(where.ranks, where.cores, where.memory_bytes)
        room.take(devices, where.cores, where.memory_bytes)
        proposal.starts.append(Start(job.id, answer.plan, where.ranks, where.cores, where.memory_bytes, answer.reason))
        return []


def _alike(job: Job, view: View) -> Alike:
    if job.spec.kind is not JobKind.COMMAND or job.unfit or job.not_before_s > view.now_s:
        return None
    return job.spec.resources, job.spec.tenant, job.spec.guaranteed, job.priority
