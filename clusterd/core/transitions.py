"""State machines of hosts, jobs, attempts, migrations and trials, each as a table of its legal steps.

A step that is not in its table is a bug of the scheduler: it raises, with the history of the object. The diagrams in
docs/architecture.md are generated from these tables (docs/state_machines.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from clusterd.errors import InvalidTransition
from clusterd.types import AttemptState, HostState, JobState

HISTORY_MAX = 20
"""Past states that an object remembers, for the error message of an illegal step."""

History = list[tuple[str, float]]
"""Past states of a state machine, each with the time of leaving it."""


class MigrationState(StrEnum):
    """Progress of one live migration."""

    PREPARING = "preparing"  # target ranks start and receive the state; the source ranks are the attempt's
    RESUMING = "resuming"  # switched: the target ranks are the attempt's and have not finished a step
    DONE = "done"
    FAILED = "failed"  # before the switch: the source ranks go on
    INTERRUPTED = "interrupted"  # after the switch: the attempt was stopped before the first step


class RestartState(StrEnum):
    """Progress of one restart of a job under another plan."""

    STOPPING = "stopping"  # the ranks leave their state in host memory, or save it, and exit
    STARTING = "starting"  # the next attempt starts from that state
    DONE = "done"
    FAILED = "failed"  # the next attempt could not be started at once


class TrialState(StrEnum):
    """Progress of one trial run of a plan."""

    PROPOSED = "proposed"
    MOVING = "moving"  # the job migrates to the plan
    RUNNING = "running"  # the job trains under the plan and is being timed
    MEASURED = "measured"
    FAILED = "failed"


class SeriesState(StrEnum):
    """Progress of a job's series of trials."""

    IDLE = "idle"
    RUNNING = "running"  # the profiler may propose further trials
    RETURNING = "returning"  # no trial is left; the job has yet to move to the plan where it belongs


JOB: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.CANCELLED, JobState.FAILED}),
    JobState.STARTING: frozenset({JobState.RUNNING, JobState.STOPPING}),
    JobState.RUNNING: frozenset({JobState.STOPPING}),
    # The outcome of the attempt decides; a lost or preempted attempt requeues its job.
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

MIGRATION: Mapping[MigrationState, frozenset[MigrationState]] = {
    MigrationState.PREPARING: frozenset({MigrationState.RESUMING, MigrationState.FAILED}),
    MigrationState.RESUMING: frozenset({MigrationState.DONE, MigrationState.INTERRUPTED}),
    MigrationState.DONE: frozenset(),
    MigrationState.FAILED: frozenset(),
    MigrationState.INTERRUPTED: frozenset(),
}

RESTART: Mapping[RestartState, frozenset[RestartState]] = {
    RestartState.STOPPING: frozenset({RestartState.STARTING, RestartState.FAILED}),
    RestartState.STARTING: frozenset({RestartState.DONE}),
    RestartState.DONE: frozenset(),
    RestartState.FAILED: frozenset(),
}

TRIAL: Mapping[TrialState, frozenset[TrialState]] = {
    TrialState.PROPOSED: frozenset({TrialState.MOVING, TrialState.RUNNING, TrialState.MEASURED, TrialState.FAILED}),
    TrialState.MOVING: frozenset({TrialState.RUNNING, TrialState.MEASURED, TrialState.FAILED}),
    TrialState.RUNNING: frozenset({TrialState.MEASURED, TrialState.FAILED}),
    TrialState.MEASURED: frozenset(),
    TrialState.FAILED: frozenset(),
}

TRIAL_SERIES: Mapping[SeriesState, frozenset[SeriesState]] = {
    SeriesState.IDLE: frozenset({SeriesState.RUNNING}),
    SeriesState.RUNNING: frozenset({SeriesState.RETURNING, SeriesState.IDLE}),
    SeriesState.RETURNING: frozenset({SeriesState.RUNNING, SeriesState.IDLE}),
}

TABLES: Mapping[str, Mapping[Any, frozenset[Any]]] = {
    "Job": JOB,
    "Attempt": ATTEMPT,
    "Host": HOST,
    "Migration": MIGRATION,
    "Restart": RESTART,
    "Trial": TRIAL,
    "Series of trials": TRIAL_SERIES,
}
"""All of them by name; the first state of a table is where objects begin."""

S = TypeVar("S", bound=StrEnum)


class Machine(Protocol[S]):
    """An object with a state and the states that it had before, each with the time of leaving it."""

    state: S
    history: History


def advance(machine: Machine[S], table: Mapping[S, frozenset[S]], state: S, at_s: float, name: str) -> None:
    """Take one step of a state machine and remember the state that it left.

    Args:
        name: of the object, for the error message.
    Raises:
        InvalidTransition: the table has no such step; the message carries the object's history.
    """
    if state not in table[machine.state]:
        former = "".join(f"{was} until {left_s:.3f}, " for was, left_s in machine.history)
        raise InvalidTransition(
            f"{name}: no step from {machine.state.value} to {state.value} at {at_s:.3f} "
            f"(history: {former}then {machine.state.value})"
        )
    machine.history.append((machine.state.value, at_s))
    del machine.history[:-HISTORY_MAX]
    machine.state = state
