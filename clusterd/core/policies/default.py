"""The default pipeline: classify, order, allocate, place."""

from __future__ import annotations

from clusterd.core import elastic
from clusterd.core.allocate import Grant, allocate
from clusterd.core.order import order
from clusterd.core.view import Proposal, Refusal, Start, View


class Default:
    """Highest priority first, then first come; a job that does not fit lets smaller ones pass (backfill)."""

    name = "default"
    interval_s: float | None = None

    def propose(self, view: View) -> Proposal:
        """Starts for what fits now, in order; moves that make room, fill it, or leave drained hosts."""
        proposal = Proposal(moves=elastic.drained(view))
        waiting: list[int] = []
        for job in order(view):
            answer = allocate(job, view)
            if isinstance(answer, Refusal):
                room = elastic.room_for(job, view, answer.devices) if answer.devices and not proposal.moves else []
                proposal.moves += room
                proposal.refusals.append(answer)
                waiting.append(answer.devices)
                continue
            assert isinstance(answer, Grant)
            where = answer.placement
            view.free.take(where.ranks, where.cores, where.memory_bytes)
            proposal.starts.append(
                Start(job.id, answer.plan, where.ranks, where.cores, where.memory_bytes, answer.reason)
            )
        proposal.moves += elastic.growth(view, waiting)
        return proposal
