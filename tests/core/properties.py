"""Properties of the core beyond `clusterd.core.invariants`: promises to users, and replay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from clusterd.core import decisions as d
from clusterd.core.events import Event
from clusterd.core.performance_table import evenly
from clusterd.core.queueing.dependencies import is_satisfied, split
from clusterd.core.scheduler import Batch, Scheduler
from clusterd.core.state import Attempt, Job, State
from clusterd.core.view import Policy
from clusterd.daemon.journal import codec
from clusterd.types import AttemptState, HostState, JobId, JobState


def broken(state: State) -> list[str]:
    """Every promise about a state that is not kept, in words."""
    wrong = [f"{h.id} books less than nothing" for h in state.hosts.values() if h.cores_used < 0]
    held = {holder.job for holder in state.holders.values()}
    for job in state.jobs.values():
        attempt = job.attempt
        if job.state.is_final and (
            job.id in held or any(a.reserved_devices or a.retired or a.migration for a in job.attempts)
        ):
            wrong.append(f"job {job.id} is {job.state.value}, and still holds something")
        if job.state is JobState.QUEUED and not job.reason:
            wrong.append(f"job {job.id} waits without a reason")
        awaited = [(state.jobs[job], condition) for job, condition in map(split, job.spec.after) if job in state.jobs]
        early = [other.id for other, condition in awaited if not is_satisfied(other, condition)]
        if early and job.attempts:
            wrong.append(f"job {job.id} was started before {', '.join(early)} had finished")
        if attempt is not None:
            wrong += _of_attempt(state, job, attempt)
    return wrong


def _of_attempt(state: State, job: Job, attempt: Attempt) -> list[str]:
    who, wrong = f"attempt {job.id}.{attempt.number}", []
    if attempt.state is AttemptState.STOPPING and not attempt.stop.pending and not attempt.retired:
        wrong.append(f"{who} is being stopped, and nobody has to say any more that it is")
    waited_for = set(attempt.stop.pending).union(*(retired.pending for retired in attempt.retired.values()))
    for name in sorted(waited_for):
        host = state.hosts.get(name)
        if host is None or host.state is HostState.LOST:
            wrong.append(f"{who} waits for a word of {name}, which is lost")
    trains = attempt.plan if attempt.state is AttemptState.RUNNING and attempt.migration is None else None
    if trains is not None and job.pinned is not None and evenly(trains) != evenly(job.pinned):
        wrong.append(f"{who} is pinned to {job.pinned}, and runs under {trains}")
    given = {attempt.generation, *attempt.retired} | ({attempt.migration.generation} if attempt.migration else set())
    if max(given) > attempt.last_generation or attempt.generation in attempt.retired:
        wrong.append(f"{who} has generations {sorted(given)}, of {attempt.last_generation} that were given out")
    return wrong


class Generations:
    """Check that each generation is granted once, and none after a newer one."""

    def __init__(self) -> None:
        self._newest: dict[JobId, tuple[int, int]] = {}

    def follow(self, decided: Iterable[d.Decision]) -> None:
        """Asserts it of these decisions."""
        for decision in decided:
            if isinstance(decision, d.LaunchAttempt):
                new, is_again = (decision.attempt, decision.generation), True  # a launch may be asked for again
            elif isinstance(decision, d.StartMigration):
                new, is_again = (decision.attempt, decision.new_generation), False
            else:
                continue
            before = self._newest.get(decision.job, (0, 0))
            assert new > before or (is_again and new == before), f"{decision} after {before}"
            self._newest[decision.job] = new


def replayed(log: Sequence[Batch], policy: Policy | None = None, snapshot_at: int = 0) -> State:
    """The state that a daemon has which starts with this journal, and with a snapshot after so many batches."""
    kept = [([(type(x).__name__, codec.encode(x)) for x in batch.events], batch.proposal) for batch in log]
    scheduler = Scheduler(policy)
    for number, (rows, proposal) in enumerate(kept):
        if number == snapshot_at:
            state = codec.state(codec.encode(scheduler.state))
            scheduler = Scheduler(policy)
            scheduler.state = state
        events: list[Event] = [codec.event(kind, body) for kind, body in rows]
        body = None if proposal is None else codec.encode(proposal)
        scheduler.replay(Batch(events, None if body is None else codec.proposal(body)))
    return scheduler.state
