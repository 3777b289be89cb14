"""The default pipeline: classify, order, allocate, place."""

from __future__ import annotations

from clusterd.core.allocate import Grant, allocate
from clusterd.core.order import order
from clusterd.core.view import Proposal, Refusal, Start, View


class Default:
    """Highest priority first, then first come; a job that does not fit lets smaller ones pass (backfill)."""

    name = "default"

    def propose(self, view: View) -> Proposal:
        """Starts for what fits now, in order."""
        proposal = Proposal()
        for job in order(view):
            answer = allocate(job, view)
            if isinstance(answer, Refusal):
                proposal.refusals.append(answer)
                continue
            assert isinstance(answer, Grant)
            where = answer.placement
            view.free.take(where.ranks, where.cores, where.memory_bytes)
            proposal.starts.append(
                Start(job.id, answer.plan, where.ranks, where.cores, where.memory_bytes, answer.reason)
            )
        return proposal
