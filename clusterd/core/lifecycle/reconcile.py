"""Reconciliation of an agent's report with the state: differences, sorted by the action that they need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from clusterd.core.host import Host
from clusterd.core.lifecycle import attempts
from clusterd.core.state import Attempt, Job, State
from clusterd.types import AttemptReport, AttemptState, HostId, JobId, RankEnd, Reason


@dataclass(slots=True)
class Differences:
    """Attempts by the action they need; those without a list of their own need none."""

    orphans: list[tuple[JobId, int, int]] = field(default_factory=list)  # (job, attempt, generation) to be stopped
    unknown_attempts: list[tuple[JobId, int, int]] = field(default_factory=list)  # newer than this state; they run
    retired: list[tuple[Attempt, int]] = field(default_factory=list)  # former generations to be stopped
    stopping: list[Attempt] = field(default_factory=list)  # being stopped, without a report from this host yet
    unlaunched: list[Attempt] = field(default_factory=list)  # without a report that the launch arrived
    ended: list[Attempt] = field(default_factory=list)  # whose ranks may have exited meanwhile


def _generations(attempt: Attempt, host: HostId) -> set[int]:
    """Generations of the attempt that may have ranks on the host."""
    # A host that was given up is no longer awaited: whatever it still runs is an orphan.
    awaited = attempt.state is not AttemptState.STOPPING or host in attempt.stop.pending
    mine = {attempt.generation} if host in attempt.hosts and awaited else set()
    if attempt.migration is not None:
        mine.add(attempt.migration.generation)
    return mine | {g for g, retired in attempt.retired.items() if host in retired.pending}


def _is_history(state: State, host: HostId, report: AttemptReport) -> bool:
    """True for mere records of a generation that exited in order, or of an attempt that is over.

    An agent keeps them with the logs; there may be thousands.
    """
    attempt = state.past_attempt(report.job, report.attempt)
    if attempt is None or host in attempt.stop.unconfirmed_hosts or any(rank.end is None for rank in report.ranks):
        return False
    return attempt.state is AttemptState.ENDED or report.generation in attempt.former


def _is_ours(state: State, host: HostId, report: AttemptReport) -> bool:
    attempt = state.attempt(report.job, report.attempt)
    return attempt is not None and report.generation in _generations(attempt, host)


def _is_later(state: State, report: AttemptReport) -> bool:
    """True where the attempt is newer than the state, as after a restore from a backup: it must not be stopped."""
    job = state.jobs.get(report.job)
    return job is None or report.attempt > max((a.number for a in job.attempts), default=0)


def is_adoptable(state: State, report: AttemptReport) -> bool:
    """True where the record of this launch may show a job, or a state of one, that is newer than this state.

    Mere records of unknown jobs are not: there may be thousands. An attempt that ended is where its job still waits or
    runs by this state, which would run it again.
    """
    job = state.jobs.get(report.job)
    if job is None:
        return any(rank.end is None for rank in report.ranks)
    return not job.state.is_final and (report.attempt, report.generation) > newest_generation(job)


def newest_generation(job: Job) -> tuple[int, int]:
    """Number of the job's newest attempt, and the last generation that was given out for it."""
    return (job.attempts[-1].number, job.attempts[-1].last_generation) if job.attempts else (0, 0)


def attempts_of(state: State, host: HostId, account: str) -> list[Attempt]:
    """Attempts of an account's jobs on a host."""
    return [a for a in state.attempts_on(host) if a.account == account]


def needs_action(state: State, host: HostId, report: AttemptReport) -> bool:
    """True where the report may need an action; the journal omits the others."""
    if _is_later(state, report):
        return any(rank.end is None for rank in report.ranks)
    return _is_ours(state, host, report) or not _is_history(state, host, report)


def reconcile(state: State, host: Host, account: str, reports: Iterable[AttemptReport]) -> Differences:
    """Update an account's attempts on `host` from its agent's report, and return the actions that remain."""
    found = Differences()
    reported = {(r.job, r.attempt, r.generation): r for r in reports}
    for key, report in reported.items():
        if needs_action(state, host.id, report) and not _is_ours(state, host.id, report):
            (found.unknown_attempts if _is_later(state, report) else found.orphans).append(key)
    for attempt in attempts_of(state, host.id, account):
        found.retired += [(attempt, g) for g, retired in attempt.retired.items() if host.id in retired.pending]
        if host.id not in attempt.hosts:
            continue
        known = reported.get((attempt.job, attempt.number, attempt.generation))
        here = [r for r in attempt.ranks.values() if r.place.host == host.id]
        if attempt.state is AttemptState.STOPPING:
            if known is not None:
                attempts.take_reports(attempt, known.ranks, state.hosts)
            if host.id in attempt.stop.pending:
                found.stopping.append(attempt)
        elif attempt.state is AttemptState.LAUNCHING:
            # Launching twice is harmless, the agent ignores the second; without a launch the job would wait for ever.
            found.unlaunched.append(attempt)
        elif known is None:
            for rank in here:
                rank.end = rank.end or RankEnd(reason=Reason.LOST)
            found.ended.append(attempt)
        else:
            attempts.take_reports(attempt, known.ranks, state.hosts)
            found.ended.append(attempt)
    return found
