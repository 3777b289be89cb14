"""Evacuation of drained hosts, live or, for checkpointable jobs, by saving and starting again elsewhere."""

from __future__ import annotations

from collections.abc import Container

from clusterd.core.allocation.as_requested import at_some_size
from clusterd.core.allocation.resize_unmodelled import book, drained
from clusterd.core.state import Attempt
from clusterd.core.view import Move, View
from clusterd.types import AttemptState, HostState, JobId, JobKind


def evacuations(view: View, skip: Container[JobId]) -> list[Move]:
    """Migrations off drained hosts, live or by a restart; `skip`: jobs that another allocator handles."""
    return [*drained(view, skip), *off_drained(view)]


def off_drained(view: View) -> list[Move]:
    """Restarts of checkpointable jobs elsewhere, each under the best of the job's plans that fits.

    Nobody is asked to save before there is room, and that is kept for the job while it does.
    """
    moves: list[Move] = []
    for job in view.running:
        attempt = job.attempt
        if job.spec.kind is not JobKind.CHECKPOINTABLE or attempt is None or not _can_save(attempt, view):
            continue
        leaving = view.leaving(attempt)
        most = view.quotas.left(job.spec.tenant) + len(attempt.devices)
        found = at_some_size(job, view.free.without(attempt), most) if leaving else None
        if found is None or found.plan is None:
            continue
        reason = f"{leaving}: it saves, and starts again as {found.reason}"
        where = found.placement
        move = Move(job.id, found.plan, where.ranks, where.cores, where.memory_bytes, reason, may_restart=True)
        view.quotas.take(job.spec.tenant, len(move.ranks) - len(attempt.devices))
        book(view.free, move, attempt)
        moves.append(move)
    return moves


def _can_save(attempt: Attempt, view: View) -> bool:
    """True where the attempt runs and all of its hosts are up."""
    there = all(host in view.hosts and view.hosts[host].state is HostState.UP for host in attempt.hosts)
    return there and attempt.state is AttemptState.RUNNING
