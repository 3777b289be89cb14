"""What an agent runs against what we believe it runs: the differences, sorted by what is to be done about them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from clusterd.core.lifecycle import attempts
from clusterd.core.state import Attempt, Host, State
from clusterd.types import AttemptReport, AttemptState, HostId, JobId, RankEnd, Reason


@dataclass(slots=True)
class Found:
    """The differences."""

    orphans: list[tuple[JobId, int, int]] = field(default_factory=list)  # job, attempt, generation: not ours any more
    strangers: list[tuple[JobId, int, int]] = field(default_factory=list)  # they run, and are of a later state
    retired: list[tuple[Attempt, int]] = field(default_factory=list)  # generations that are to be gone
    stopping: list[Attempt] = field(default_factory=list)  # being stopped, and this host has not said it is done
    unlaunched: list[Attempt] = field(default_factory=list)  # the launch did not get there, or we never heard it did
    ended: list[Attempt] = field(default_factory=list)  # ranks ended while we did not look


def _generations(attempt: Attempt, host: HostId) -> set[int]:
    """That may have ranks on the host."""
    # A host that was given up is not waited for any more: what it still runs is to be ended like anything unknown.
    waited_for = attempt.state is not AttemptState.STOPPING or host in attempt.pending
    mine = {attempt.generation} if host in attempt.hosts and waited_for else set()
    if attempt.migration is not None:
        mine.add(attempt.migration.generation)
    return mine | {g for g, retired in attempt.retired.items() if host in retired.pending}


def _is_history(state: State, host: HostId, report: AttemptReport) -> bool:
    """Whether these are records alone, of a generation that left in order, or of an attempt that is over.

    An agent keeps them with the logs; there may be thousands.
    """
    attempt = state.past_attempt(report.job, report.attempt)
    if attempt is None or host in attempt.given_up or not all(rank.end is not None for rank in report.ranks):
        return False
    return attempt.state is AttemptState.ENDED or report.generation in attempt.past


def _is_ours(state: State, host: HostId, report: AttemptReport) -> bool:
    attempt = state.attempt(report.job, report.attempt)
    return attempt is not None and report.generation in _generations(attempt, host)


def _is_later(state: State, report: AttemptReport) -> bool:
    """Whether the state is older than the attempt, as one that was restored from a backup is: not ours to end."""
    job = state.jobs.get(report.job)
    return job is None or report.attempt > max((a.number for a in job.attempts), default=0)


def is_news(state: State, host: HostId, report: AttemptReport) -> bool:
    """Whether anything may have to be done about it; what is not need not be written down."""
    if _is_later(state, report):
        return any(rank.end is None for rank in report.ranks)
    return _is_ours(state, host, report) or not _is_history(state, host, report)


def reconcile(state: State, host: Host, reports: Iterable[AttemptReport]) -> Found:
    """Bring our attempts on `host` up to date with its agent's word, and say what remains to be done."""
    found = Found()
    told = {(r.job, r.attempt, r.generation): r for r in reports}
    for who, report in told.items():
        if is_news(state, host.id, report) and not _is_ours(state, host.id, report):
            (found.strangers if _is_later(state, report) else found.orphans).append(who)
    for attempt in list(state.attempts_on(host.id)):
        found.retired += [(attempt, g) for g, retired in attempt.retired.items() if host.id in retired.pending]
        if host.id not in attempt.hosts:
            continue
        known = told.get((attempt.job, attempt.number, attempt.generation))
        here = [r for r in attempt.ranks.values() if r.place.host == host.id]
        if attempt.state is AttemptState.STOPPING:
            if known is not None:
                attempts.take_reports(attempt, known.ranks, state.hosts)
            if host.id in attempt.pending:
                found.stopping.append(attempt)
        elif attempt.state is AttemptState.LAUNCHING:
            # Launching twice is harmless, the agent keeps to one; not launching at all would wait for ever.
            found.unlaunched.append(attempt)
        elif known is None:
            for rank in here:
                rank.end = rank.end or RankEnd(reason=Reason.LOST)
            found.ended.append(attempt)
        else:
            attempts.take_reports(attempt, known.ranks, state.hosts)
            found.ended.append(attempt)
    return found
