"""Migrations off drained hosts and after the loss of ranks, live or, for checkpointable jobs, by a restart."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from clusterd.core.allocation.migration_targets import book, first_that_works, free_for, may_stay
from clusterd.core.allocation.request_grant import at_some_size
from clusterd.core.estimates.can_migrate import can_migrate
from clusterd.core.ledger import of_ranks
from clusterd.core.placement.place import candidates, fitting
from clusterd.core.state import Attempt, Job
from clusterd.core.view import Move, View
from clusterd.types import AttemptState, HostState, JobId, JobKind

UNLIMITED = 1 << 30


def evacuations(view: View, skip: Container[JobId]) -> list[Move]:
    """Migrations off drained hosts, live or by a restart; `skip`: jobs that another allocator handles."""
    return [*drained(view, skip), *off_drained(view)]


def must_leave(job: Job, view: View) -> str:
    """Reason to migrate a running elastic job off drained hosts now; empty: there is none."""
    attempt = can_migrate(job, view, forced=True)
    return view.leaving(attempt) if attempt is not None else ""


def drained(view: View, skip: Container[JobId] = ()) -> list[Move]:
    """Migrations of elastic jobs off drained hosts: the same plan elsewhere, or a smaller one on the devices left.

    Args:
        skip: jobs that another allocator handles.
    """
    moves: list[Move] = []
    for job in view.running:
        reason = "" if job.id in skip else must_leave(job, view)
        if not reason:
            continue
        attempt = job.attempt
        assert attempt is not None and attempt.plan is not None
        own = of_ranks(view.hosts, attempt)
        here = [d for d in own if may_stay(job, d, view)]
        free = free_for(job, own, view.free)
        move = first_that_works(job, [*here, *free], here, len(own), attempt.plan, reason, view.hosts)
        least = job.spec.resources.devices if job.spec.guaranteed else 1
        if move is not None and len(move.ranks) >= min(least, len(own)):
            book(view.free, move, attempt)
            moves.append(move)
    return moves


def after_loss(job: Job, attempt: Attempt, view: View, why: str) -> Move | None:
    """Migration of a job whose ranks died: to as many devices as it had, its own and free ones, or to fewer.

    CPU cores do not count: they may be lent to other jobs, which give them back in the next pass.
    """
    own = of_ranks(view.hosts, attempt)
    here = [d for d in own if may_stay(job, d, view)]
    kind = own[0].kind if own else ""
    hosts = candidates(job, view.free) if not job.spec.booking else []
    free = [d for h in hosts for d in fitting(job, replace(h, cores=UNLIMITED), kind)]
    return first_that_works(job, [*here, *free], here, len(attempt.ranks), attempt.plan, why, None)


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
        most = view.quotas.left(job.spec) + len(attempt.devices)
        found = at_some_size(job, view.free.without(attempt), most) if leaving else None
        if found is None or found.plan is None:
            continue
        reason = f"{leaving}: it saves, and starts again as {found.reason}"
        where = found.placement
        move = Move(job.id, found.plan, where.ranks, where.booked, reason, may_restart=True)
        view.quotas.take(job.spec, len(move.ranks) - len(attempt.devices))
        book(view.free, move, attempt)
        moves.append(move)
    return moves


def _can_save(attempt: Attempt, view: View) -> bool:
    """True where the attempt runs and all of its hosts are up."""
    there = all(host in view.hosts and view.hosts[host].state is HostState.UP for host in attempt.hosts)
    return there and attempt.state is AttemptState.RUNNING
