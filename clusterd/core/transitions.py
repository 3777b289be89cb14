"""The legal steps of each state machine: what is not in these tables is a bug, and says so with its story."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from clusterd.errors import InvalidTransition
from clusterd.types import AttemptState, HostState, JobState

JOB: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.CANCELLED, JobState.FAILED}),
    JobState.STARTING: frozenset({JobState.RUNNING, JobState.STOPPING}),
    JobState.RUNNING: frozenset({JobState.STOPPING}),
    # From STOPPING the outcome decides; a lost attempt puts its job back into the queue.
    JobState.STOPPING: frozenset({JobState.QUEUED, JobState.FINISHED, JobState.FAILED, JobState.CANCELLED}),
    JobState.FINISHED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}

ATTEMPT: Mapping[AttemptState, frozenset[AttemptState]] = {
    AttemptState.LAUNCHING: frozenset({AttemptState.RUNNING, AttemptState.STOPPING}),
    AttemptState.RUNNING: frozenset({AttemptState.STOPPING}),
    AttemptState.STOPPING: frozenset({AttemptState.ENDED}),
    AttemptState.ENDED: frozenset(),
}

HOST: Mapping[HostState, frozenset[HostState]] = {
    HostState.CONNECTING: frozenset({HostState.UP, HostState.LOST}),
    HostState.UP: frozenset({HostState.UNREACHABLE, HostState.CONNECTING}),
    HostState.UNREACHABLE: frozenset({HostState.UP, HostState.LOST, HostState.CONNECTING}),
    HostState.LOST: frozenset({HostState.UP, HostState.CONNECTING}),
}


S = TypeVar("S", bound=Enum)


def step(table: Mapping[S, frozenset[S]], start: S, finish: S, story: str) -> S:
    """`finish`, if the table has the step from `start` to it.

    Raises:
        InvalidTransition: it has not; `story` tells whose machine it is.
    """
    if finish not in table[start]:
        raise InvalidTransition(f"{story}: no step from {start.value} to {finish.value}")
    return finish
