"""True progress of jobs, and the results of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from clusterd.plans.plan import Plan
from clusterd.simulate.truth import ModelTruth
from clusterd.simulate.workload import Arrival
from clusterd.types import JobId


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A scheduled fault, repair or drain of a host."""

    at_s: float
    host: int  # number, in the order of the cluster
    kind: str  # "down", "up", "drain", "undrain"


class Speed(Protocol):
    """True speed of a job."""

    @property
    def parameters(self) -> int:
        """Parameters of its model, by which migrations are priced."""

    def pace_s(self, plan: Plan | None, hosts: Sequence[Sequence[str]]) -> float | None:
        """Seconds per step of a plan with these device types on each host; None: it is not known to run there."""


@dataclass(slots=True, kw_only=True)
class Run:
    """True progress of one job; of one without steps, a step is a second."""

    job: JobId
    name: str
    steps: float  # from start to end
    speed: Speed
    has_steps: bool = True  # and reports them
    keeps_state: bool = True  # it goes on from its last step after it was stopped for others
    done: float = 0.0  # steps
    saved: float = 0.0  # steps that a fault does not take away
    rate: float = 0.0  # steps per second; 0: it stands
    since_s: float = 0.0  # from when on it goes at this rate; may lie ahead
    version: int = 0  # of the rate: foreseen ends of older ones are void
    attempt: int = 0
    devices: int = 0  # held now
    first_start_s: float | None = None
    end_s: float | None = None
    waited_s: float = 0.0  # without devices
    device_s: float = 0.0
    moves: int = 0
    restarts: int = 0
    refused: str = ""

    def go_to(self, now_s: float) -> None:
        """Count the steps made until this time."""
        if self.rate > 0 and now_s > self.since_s:
            self.done = min(self.done + (now_s - self.since_s) * self.rate, self.steps)
            self.since_s = now_s


@dataclass(slots=True, kw_only=True)
class TraceRun(Run):
    """True progress of a job of a trace."""

    arrival: Arrival
    model: ModelTruth


@dataclass(slots=True)
class Result:
    """Result of one simulated run."""

    policy: str
    runs: list[TraceRun]
    ended_s: float  # the last event, or the horizon
    started_s: float  # the first arrival
    device_s: float  # leased, in all
    idle_s: float  # of devices that nobody held while a job waited, in all
    devices: int
    passes: int
    pass_s: list[float]
    failed: dict[str, str] = field(default_factory=dict)  # jobs that the scheduler gave up, and why
    stuck: dict[str, str] = field(default_factory=dict)  # jobs that would wait for ever, and what for
