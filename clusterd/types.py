"""Values that cross boundaries: jobs, hosts, devices, ranks, and how they end.

All are frozen; units end names. What the scheduler keeps about them, and changes, is in `clusterd.core.state`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NewType

from clusterd.exit_reasons import Reason as Reason
from plans.plan import Plan

JobId = NewType("JobId", str)
HostId = NewType("HostId", str)
DeviceId = NewType("DeviceId", str)
"""``HOST:gpu0`` or ``HOST:cpu1``: unique in the cluster, readable in a command line."""


TEMPLATE_NAMES = ("job", "dp", "tp", "pp", "zero", "accumulation", "devices", "hosts")
"""What stands in braces in a checkpointable job's command, and is filled in when it starts."""


class JobKind(StrEnum):
    """What clusterd may do with a job (more from top to bottom)."""

    COMMAND = "command"  # run it; a black box
    CHECKPOINTABLE = "checkpointable"  # ask it to save, start it again at another size
    ELASTIC = "elastic"  # written with clusterd.train: any plan, live migration


class JobState(StrEnum):
    """Where a job stands; `clusterd.core.transitions` holds the steps between."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """The job is history: it holds nothing and nothing will change."""
        return self in (JobState.FINISHED, JobState.FAILED, JobState.CANCELLED)


class AttemptState(StrEnum):
    """Where one run of a job stands."""

    LAUNCHING = "launching"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class HostState(StrEnum):
    """What the daemon knows of a host right now."""

    CONNECTING = "connecting"  # not heard of since the daemon started, or since it was added
    UP = "up"
    UNREACHABLE = "unreachable"  # was up; its ranks are presumed to go on
    LOST = "lost"  # unreachable for too long: its ranks are given up


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a job asks for."""

    devices: int = 0
    kind: str | None = None  # "cuda", "cpu", or None: any
    cpus: int = 0  # cores in all, beside what CPU devices are made of; 0: one per device, at least one
    memory_bytes: int = 0  # host memory in all; 0: not limited
    plan: Plan | None = None
    plans: tuple[Plan, ...] = ()  # that a checkpointable job can run under, the best first
    hosts: tuple[HostId, ...] = ()  # only these; empty: any


@dataclass(frozen=True, slots=True)
class Tenant:
    """What those who share a cluster have agreed on for one of them."""

    quota: int | None = None  # devices that its jobs may hold at a time; None: all there are
    share: float = 1.0  # of contended devices, beside the shares of the others that want some


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A job as its user described it, complete: nothing is read again after the submit."""

    name: str
    kind: JobKind = JobKind.COMMAND
    command: tuple[str, ...]
    workdir: str | None = None  # where it was submitted from; what runs is the snapshot of it
    snapshot: str | None = None  # sha256 of the workdir's content; None: run in `workdir` itself
    python: str | None = None  # interpreter or virtual environment, on the hosts
    env: dict[str, str] = field(default_factory=dict)
    datasets: dict[str, str] = field(default_factory=dict)  # by name: "HOST:/folder", or "/folder" on every host
    secrets: tuple[str, ...] = ()  # names alone; values are kept apart from the journal
    resources: Resources = field(default_factory=Resources)
    priority: int = 0
    guaranteed: bool = False
    tenant: str = "default"
    user: str = ""
    after: tuple[JobId, ...] = ()  # jobs that must have finished before it starts; in a request, their names too
    time_limit_s: float | None = None
    stall_s: float | None = None  # without a step, after which an elastic job starts again; None: never
    grace_s: float = 30.0  # between being asked to end and being killed
    retries: int = 0  # after failures of its own; lost hosts do not count
    snapshot_every: int | None = None  # steps between copies of the state on a second host; 0: none; None: we choose
    checkpoint_directory: str | None = None  # shared by its hosts, for checkpoints at the end and by the clock
    checkpoint_every_s: float | None = None
    target_loss: float | None = None  # at which the job is done
    trials: bool = True  # it may take a few steps under other plans, to learn how fast they are

    def checkpoint_path(self, job: str, which: str) -> str:
        """One of the job's own directories below the one for checkpoints."""
        return f"{self.checkpoint_directory}/{self.name}-{job}/{which}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU, or a slot of CPU cores."""

    id: DeviceId
    host: HostId
    kind: str  # "cuda" or "cpu"
    uuid: str
    name: str
    memory_bytes: int
    cores: tuple[int, ...] = ()  # of a CPU device
    foreign: str = ""  # who else uses it, in words; not offered while it says so
    exclusive: bool = False  # its driver lets in one process at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One rank and the device it runs on."""

    rank: int
    host: HostId
    device: DeviceId | None  # None: a command on CPU cores alone


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How a rank's process ended."""

    reason: Reason
    exit_code: int | None = None
    signal: int | None = None
    message: str = ""  # the rank's own words, where our training loop ended it

    @property
    def is_success(self) -> bool:
        """It exited by itself, with 0: what was asked to stop, and did so in good order, is not done."""
        return self.exit_code == 0 and self.reason is not Reason.STOPPED

    def __str__(self) -> str:
        if self.reason is Reason.SIGNAL:
            return f"killed by signal {self.signal}"
        if self.reason is Reason.EXIT:
            return f"exit code {self.exit_code}" + (f": {self.message}" if self.message else "")
        if self.reason in (Reason.PLAN, Reason.SCRIPT, Reason.DEVICE_FAULT, Reason.NO_TORCH) and self.message:
            return self.message
        return _ENDS.get(self.reason, str(self.reason))


_ENDS = {
    Reason.OOM: "killed by the kernel: out of host memory",
    Reason.DEVICE_OOM: "out of device memory",
    Reason.DEVICE_FAULT: "its GPU failed",
    Reason.CROWDED: "out of device memory, beside ranks that a move prepared there",
    Reason.PORT: "the rendezvous port was taken",
    Reason.NO_TORCH: "its Python environment has no torch that works there",
    Reason.PLAN: "it cannot train under that plan",
    Reason.SCRIPT: "what it asks for cannot be",
    Reason.DATA: "no host that has its data could be reached",
    Reason.LOST: "vanished without an exit record",
    Reason.STOPPED: "stopped by request",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What an agent says of one rank."""

    rank: int
    end: RankEnd | None  # None: it runs


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReport:
    """What an agent says of its part of an attempt."""

    job: JobId
    attempt: int
    generation: int
    ranks: tuple[RankReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a host is, as far as scheduling cares; the agent's full facts are kept for showing."""

    boot_id: str
    cpu_cores: int
    memory_bytes: int
    address: str  # where other hosts reach it
    interface: str = ""  # that has the address
    link_mbit: int = 0  # its speed, as its driver says; 0: it does not
    devices: tuple[Device, ...] = ()


Json = dict[str, Any]
