"""Context of one batch of events: the state, the time, and the decisions made so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from clusterd.core import decisions as d
from clusterd.core.events import NO_EVENT, EventId, Timer, TimerKind
from clusterd.core.state import Attempt, Job, State
from clusterd.types import HostId, JobId

HOST_LOST_AFTER_S = 120.0
"""An unreachable host's ranks are given up after this; until then they are presumed to go on."""


@dataclass(slots=True)
class HandlerContext:
    """Argument of every event handler: it reads and changes `state` and appends to `decisions`.

    Attributes:
        cause: event being handled; each decision names it.
        now_s: time of that event.
        pass_due: a scheduling pass follows the batch.
    """

    state: State = field(default_factory=State)
    host_lost_after_s: float = HOST_LOST_AFTER_S
    decisions: list[d.Decision] = field(default_factory=list)
    cause: EventId = NO_EVENT
    now_s: float = 0.0
    pass_due: bool = False

    def decide(self, decision: d.Decision) -> None:
        """Add a decision to the answer."""
        self.decisions.append(decision)

    def set_timer(self, kind: TimerKind, about: str, at_s: float, reason: str) -> None:
        """Set or replace a timer."""
        timer = Timer(kind, about)
        self.state.timers[timer] = at_s
        self.decide(d.SetTimer(cause=self.cause, reason=reason, timer=timer, at_s=at_s))

    def has_timer(self, kind: TimerKind, about: str) -> bool:
        """True while this timer is set."""
        return Timer(kind, about) in self.state.timers

    def cancel_timer(self, kind: TimerKind, about: str) -> None:
        """Remove a timer, if it is set."""
        self.state.timers.pop(Timer(kind, about), None)

    def hold(self, job: Job, reason: str) -> None:
        """Record why a job is in its state; one decision per change, not per pass."""
        if job.reason != reason:
            job.reason = reason
            self.decide(d.HoldJob(cause=self.cause, reason=reason, job=job.id))

    def stop_ranks(
        self,
        host: HostId,
        key: tuple[JobId, int, int],
        grace_s: float,
        reason: str,
        keep: bool = False,
        done: bool = False,
        save: str | None = None,
    ) -> None:
        """Stop the ranks of one generation on one host.

        Args:
            key: job, number of the attempt, generation.
            keep, done, save: see `StopAttempt`.
        """
        job, attempt, generation = key
        self.decide(
            d.StopAttempt(
                cause=self.cause,
                reason=reason,
                job=job,
                attempt=attempt,
                generation=generation,
                host=host,
                grace_s=grace_s,
                keep=keep,
                done=done,
                save=save,
            )
        )

    def to_ranks(
        self, kind: type[d.ToRanks], attempt: Attempt, hosts: tuple[HostId, ...], reason: str, **fields: Any
    ) -> None:
        """Send a message to the ranks of the attempt's current generation on these hosts."""
        key: dict[str, Any] = {"job": attempt.job, "attempt": attempt.number, "generation": attempt.generation}
        self.decide(kind(cause=self.cause, reason=reason, **key, hosts=hosts, **fields))
