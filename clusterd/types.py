"""Value types of jobs, hosts, devices and ranks that cross package boundaries.

All are frozen; names end with units. The scheduler's mutable state is in `clusterd.core.state`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from clusterd.exit_reasons import Reason as Reason
from clusterd.plans.plan import Plan
from clusterd.units import has_capability

JobId = NewType("JobId", str)
HostId = NewType("HostId", str)
DeviceId = NewType("DeviceId", str)
"""``HOST:gpu0``, ``HOST:gpu0.2`` (a MIG slice) or ``HOST:cpu1``: unique in the cluster, readable in a command line."""


TEMPLATE_NAMES = ("job", "dp", "tp", "pp", "zero", "accumulation", "devices", "hosts")
"""Placeholders in braces in a checkpointable job's command, filled in at its start."""


CONTAINER_RUNTIMES = ("docker", "podman", "apptainer")


class JobKind(StrEnum):
    """Kind of a job; each allows more than the one above it."""

    COMMAND = "command"  # only run: a black box
    CHECKPOINTABLE = "checkpointable"  # restarted from its checkpoint at another size
    ELASTIC = "elastic"  # uses clusterd.train: any plan, live migration


class JobState(StrEnum):
    """State of a job; `clusterd.core.transitions` has the allowed transitions."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """True if the job has ended, holds no resources and will not change."""
        return self in (JobState.FINISHED, JobState.FAILED, JobState.CANCELLED)


class AttemptState(StrEnum):
    """State of one attempt."""

    LAUNCHING = "launching"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class HostState(StrEnum):
    """State of a host, as known to the daemon."""

    CONNECTING = "connecting"  # no connection yet since the daemon started or the host was added
    UP = "up"
    UNREACHABLE = "unreachable"  # was up; its ranks are presumed to run
    LOST = "lost"  # unreachable for too long: its ranks are presumed dead


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources that a job requests."""

    devices: int = 0
    kind: str | None = None  # "cuda", "cpu", or None: any
    cpus: int = 0  # total cores beside those of CPU devices; 0: one per device, at least one
    memory_bytes: int = 0  # total host memory; 0: unlimited
    plan: Plan | None = None
    plans: tuple[Plan, ...] = ()  # of a checkpointable job, best first
    hosts: tuple[HostId, ...] = ()  # allowed hosts; empty: any
    nodes: int = 1  # of a command: hosts over which its devices are spread evenly, with one process on each
    device_name: str = ""  # part of the device's name, in any case: "a100"; empty: any
    device_memory_bytes: int = 0  # least memory of each device; 0: any
    compute_capability: str = ""  # conditions on each GPU's: ">=8.0"; empty: any
    constraint: tuple[str, ...] = ()  # labels that each host must have
    min_devices: int = 0  # of an elastic job; 0: as few as it can run on
    max_devices: int = 0  # of an elastic job; 0: as many as make it faster
    share: int = 1  # of a command: jobs that may be on its device at a time, itself included

    def admits(self, kind: str, name: str, memory_bytes: int, compute_capability: str) -> bool:
        """True where a device of this kind, name, memory and compute capability serves the request."""
        if self.kind not in (None, kind) or memory_bytes < self.device_memory_bytes:
            return False
        if self.compute_capability and not has_capability(compute_capability, self.compute_capability):
            return False
        return self.device_name.lower() in name.lower()

    @property
    def per_node(self) -> int:
        """Devices of a command on each of its hosts."""
        return self.devices // max(self.nodes, 1)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Quota and share of one tenant."""

    quota: int | None = None  # devices that its jobs may hold at a time; None: unlimited
    share: float = 1.0  # weight of its share of contended devices
    members: tuple[str, ...] | None = None  # users, and groups as "@group", that may submit for it; None: see `Rights`


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one user; operators have none but `devices`."""

    priority: int = 0  # highest that may be given to a job
    guaranteed_devices: int = 0  # that the guaranteed jobs that are not over ask for, together
    devices: int | None = None  # that the jobs may hold at a time; None: unlimited
    queued_jobs: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayTask:
    """Place of a job in an array: jobs that were submitted together, with an index or values of a sweep each."""

    id: JobId  # of the array's first task; empty in the request for that one
    name: str  # of the array; its tasks have names of their own
    index: int
    values: dict[str, str] = field(default_factory=dict)  # of a sweep, by variable
    most: int = 0  # tasks that may run at once; 0: any number


RESERVATION_COMMAND = ("sleep", "infinity")
"""Command of a job that only reserves devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Complete specification of a job; nothing is read again after the submission."""

    name: str
    kind: JobKind = JobKind.COMMAND
    command: tuple[str, ...]
    workdir: str | None = None  # directory it was submitted from; the job runs in the packed copy
    snapshot: str | None = None  # sha256 of the workdir's content; None: run in `workdir` itself
    commit: str = ""  # of git, of the workdir as submitted; "-dirty" at its end where files differ from it
    python: str | None = None  # interpreter or virtual environment, on the hosts
    uv: str = ""  # uv.lock or pyproject.toml in the workdir, from which hosts build its environment
    requirements: str = ""  # instead: requirements file for pip in the workdir
    container: str = ""  # in which its command runs: "docker:IMAGE", "podman:IMAGE", "apptainer:IMAGE"
    mounts: tuple[str, ...] = ()  # into the container: "SOURCE", "SOURCE:TARGET", "SOURCE:TARGET:ro"
    env: dict[str, str] = field(default_factory=dict)
    datasets: dict[str, str] = field(default_factory=dict)  # by name: "HOST:/folder", or "/folder" on every host
    secrets: tuple[str, ...] = ()  # names only; values are not in the journal
    resources: Resources = field(default_factory=Resources)
    priority: int = 0
    guaranteed: bool = False
    preemptible: bool = False  # a command that may be stopped for other jobs; it begins anew
    tenant: str = "default"
    user: str = ""
    account: str = ""  # on the hosts, under which it runs; "": the daemon's own
    after: tuple[JobId, ...] = ()  # that end before it starts: "12", "12:any"; a request may give names
    time_limit_s: float | None = None
    stall_s: float | None = None  # time without a step before an elastic job is restarted; None: never
    stops_on_nan: bool = False  # fails once its loss is not a number
    grace_s: float = 30.0  # between the stop request and the kill
    retries: int = 0  # after the job's own failures; lost hosts do not count
    retry_on: tuple[int, ...] = ()  # exit codes after which it is queued again, however often
    snapshot_every: int | None = None  # steps between state snapshots on a second host; 0: none; None: automatic
    checkpoint_directory: str | None = None  # shared by its hosts; for final and periodic checkpoints
    checkpoint_every_s: float | None = None
    restore: str | None = None  # checkpoint to start from: "/folder", "HOST:/folder"; a request may name a job
    restore_step: int = 0  # its step; 0: unknown
    continues: JobId | None = None  # job whose training it goes on with: its seed, and {job} in its command
    steps: int | None = None  # of an elastic job, instead of the number in its script
    target_loss: float | None = None  # ends the job when reached
    interactive: bool = False  # a person waits for it: before others of its priority
    waits_for_hosts: bool = False  # accepted though no host of the cluster can serve it yet
    array: ArrayTask | None = None  # None: submitted alone
    ports: tuple[int, ...] = ()  # on which it serves something, for `clusterd forward` and for people
    trials: bool = True  # it may run a few steps under other plans, to measure their speed

    @property
    def is_reservation(self) -> bool:
        """True where its command only holds devices, for a shell beside it."""
        return self.interactive and self.command == RESERVATION_COMMAND

    @property
    def is_built(self) -> bool:
        """True where hosts build its Python environment."""
        return bool(self.uv or self.requirements)

    @property
    def runtime(self) -> str:
        """Runtime of its container; empty: it has none."""
        return self.container.partition(":")[0]

    def checkpoint_path(self, job: str, which: str) -> str:
        """Path of one of the job's checkpoints below its checkpoint directory."""
        return f"{self.checkpoint_directory}/{self.name}-{job}/{which}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU, or a slot of CPU cores."""

    id: DeviceId
    host: HostId
    kind: str  # "cuda" or "cpu"
    uuid: str  # of a MIG slice: "MIG-..."
    name: str
    memory_bytes: int
    cores: tuple[int, ...] = ()  # of a CPU device
    foreign: str = ""  # description of foreign processes on it; not allocated while set
    offered_by: str = ""  # another host of the same machine that offers this GPU
    exclusive: bool = False  # compute mode allows one process at a time
    compute_capability: str = ""  # of a GPU: "8.0"; empty: not reported
    excluded: bool = False  # by the configuration of its host; then `foreign` says so, too
    fault: str = ""  # errors that its driver reports, after which it is unfit for jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClaim:
    """Devices that an operator keeps from the scheduler for some time, as for maintenance or work by hand."""

    id: str
    devices: tuple[DeviceId, ...]
    from_s: float
    until_s: float | None = None  # None: until it is removed
    reason: str
    by: str = ""
    drain: bool = False  # jobs that cannot move are stopped and queued again at its start

    def is_active(self, now_s: float) -> bool:
        """True between start and end."""
        return self.from_s <= now_s and (self.until_s is None or now_s < self.until_s)

    def __str__(self) -> str:
        return f"claimed by {self.by or 'an operator'} (claim {self.id}): {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Placement of one rank: its host and device."""

    rank: int
    host: HostId
    device: DeviceId | None  # None: a command on CPU cores alone


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """Exit of a rank's process."""

    reason: Reason
    exit_code: int | None = None
    signal: int | None = None
    message: str = ""  # from the rank, if the training loop ended it

    @property
    def is_success(self) -> bool:
        """True if it exited by itself with 0; a rank that stopped on request has not finished."""
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
    """Agent's report on one rank."""

    rank: int
    end: RankEnd | None  # None: it is running


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReport:
    """Agent's report on the ranks of an attempt on its host."""

    job: JobId
    attempt: int
    generation: int
    ranks: tuple[RankReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Facts of a host that the scheduler uses."""

    boot_id: str
    cpu_cores: int
    memory_bytes: int
    address: str  # under which other hosts reach it
    interface: str = ""  # network interface with the address
    link_mbit: int = 0  # reported by its driver; 0: unknown
    rdma_mbit: int = 0  # of its slowest active port for InfiniBand or RoCE; 0: it has none
    gpu_link_bytes_per_s: float = 0.0  # between its GPUs, by NVLink or PCIe; 0: unknown
    labels: tuple[str, ...] = ()  # set by operators, for constraints of jobs
    devices: tuple[Device, ...] = ()
    gpu_error: str = ""  # why GPUs that may be there are not offered
    # container runtimes that are installed, each with why it cannot be used; empty: it can
    runtimes: dict[str, str] = field(default_factory=dict)
