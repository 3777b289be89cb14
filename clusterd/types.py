"""Value types of jobs, hosts, devices and ranks that cross package boundaries.

All are frozen; names end with units. The scheduler's mutable state is in `clusterd.core.state`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, NewType

from clusterd import keys as k
from clusterd.exit_reasons import Reason as Reason
from clusterd.keys import CONTAINER_RUNTIMES as CONTAINER_RUNTIMES
from clusterd.keys import Edit, Key
from clusterd.plans.plan import Plan
from clusterd.units import has_capability

JobId = NewType("JobId", str)
HostId = NewType("HostId", str)
DeviceId = NewType("DeviceId", str)
"""``HOST:gpu0``, ``HOST:gpu0.2`` (a MIG slice) or ``HOST:cpu1``: unique in the cluster, readable in a command line."""


TEMPLATE_NAMES = ("job", "dp", "tp", "pp", "zero", "accumulation", "devices", "hosts")
"""Placeholders in braces in a checkpointable job's command, filled in at its start."""


QUEUED, RUNNING = Edit.QUEUED, Edit.RUNNING


class JobKind(StrEnum):
    """Kind of a job; each allows more than the one above it."""

    COMMAND = "command"  # only run: a black box
    CHECKPOINTABLE = "checkpointable"  # restarted from its checkpoint at another size
    ELASTIC = "elastic"  # uses clusterd.train: any plan, live migration


class Reclaim(StrEnum):
    """Measures against jobs whose devices do nothing, each harder than the one above it."""

    SHELLS = "shells"  # shells end, nothing is done to other jobs
    SHRINK = "shrink"  # elastic jobs keep one device
    SUSPEND = "suspend"  # and jobs that can go on later are held in the queue
    END = "end"


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


_TRAINED = (JobKind.CHECKPOINTABLE, JobKind.ELASTIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources that a job requests; a field has the keys that set it."""

    # fmt: off
    devices: Annotated[
        int,
        Key(k.GPUS, 'Number of GPUs, or "a100:2"; 0.5 is one with share = 2.', "0", name="gpus", edit=QUEUED,
            option="--gpus", sbatch="--gpus"),
        Key(k.COUNT, "Number of devices of any kind, CPU devices too, in the place of gpus.", edit=QUEUED,
            option="--devices", row="asked"),
        Key(k.COUNT, "GPUs on each of the nodes.", "none", name="gpus_per_node", option="--gpus-per-node"),
        Key(k.COUNT, "Devices on each of the nodes.", "none", name="devices_per_node",
            option="--devices-per-node"),
    ] = 0
    kind: str | None = None  # "cuda", "cpu", or None: any
    device_name: Annotated[str, Key(k.TEXT, 'Part of the GPU\'s name, as in "a100".', "any", name="gpu_type",
                                    edit=QUEUED, option="--gpu-type")] = ""
    device_memory_bytes: Annotated[int, Key(k.SIZE, "Least memory of each GPU, or of the part of one, as in "
                                            "40GB.", "any", name="gpu_memory", edit=QUEUED, option="--gpu-memory")] = 0
    compute_capability: Annotated[str, Key(k.CAPABILITY, 'Of each GPU, as in ">=8.0" or ">=8.0,<9".', "any",
                                           edit=QUEUED, option="--compute-capability")] = ""
    cpus: Annotated[int, Key(k.COUNT, "Cores in all, beside those of CPU devices.", "one per device or task",
                             edit=QUEUED,
                             option="--cpus")] = 0
    memory_bytes: Annotated[int, Key(k.SIZE, "Host memory in all, as in 64GB.", "no limit", name="memory",
                                     edit=QUEUED, option="--memory")] = 0
    nodes: Annotated[int, Key(k.whole(1), "Hosts, with the command started on each, and the request spread evenly.",
                              edit=QUEUED, option="--nodes", sbatch="--nodes")] = 1
    tasks: Annotated[int, Key(k.whole(1), "Processes of a command in all, each with a RANK; as many on each node.",
                              edit=QUEUED, option="--ntasks")] = 1
    hosts: Annotated[tuple[HostId, ...], Key(k.TEXTS, "Run on these hosts only.", "any", edit=QUEUED,
                                             option="--host")] = ()
    exclude: Annotated[tuple[HostId, ...], Key(k.TEXTS, "Never run on these hosts.", "none", edit=QUEUED,
                                               option="--exclude", sbatch="--exclude")] = ()
    constraint: Annotated[tuple[str, ...], Key(k.LABELS, "Labels that each host has.", "none", edit=QUEUED,
                                               option="--constraint")] = ()
    min_devices: Annotated[int, Key(k.COUNT, "Least size of an elastic job.", "any", edit=RUNNING),
                           Key(k.COUNT, "The same as min_devices.", "any", name="min_gpus")] = 0
    max_devices: Annotated[int, Key(k.COUNT, "Largest size of an elastic job.", "any", edit=RUNNING),
                           Key(k.COUNT, "The same as max_devices.", "any", name="max_gpus"),
                           Key(k.YES_OR_NO, "false: never beyond the request.", "true", name="grow")] = 0
    share: Annotated[int, Key(k.whole(1, expected="a number of jobs, 1 for none beside it"), "Jobs that may be on the "
                              "device of a command at a time, itself included, each on its part of the memory.",
                              edit=QUEUED, option="--share")] = 1
    plan: Annotated[Plan | None, Key(k.PLAN, 'Plan of an elastic job until a faster one is known: { dp = 2, tp = 2 } '
                                     'or "dp=2,tp=2".',
                                     "clusterd chooses", kinds=_TRAINED, edit=QUEUED)] = None
    plans: Annotated[tuple[Plan, ...], Key(k.PLANS, "Plans under which a checkpointable job may run, the first "
                                           "preferred.", "none")] = ()
    # fmt: on

    def admits(self, kind: str, name: str, memory_bytes: int, compute_capability: str) -> bool:
        """True where a device of this kind, name, memory and compute capability serves the request."""
        if self.kind not in (None, kind) or memory_bytes < self.device_memory_bytes * self.share:
            return False
        if self.compute_capability and not has_capability(compute_capability, self.compute_capability):
            return False
        return not self.device_name or self.device_name.lower() in name.lower()

    @property
    def cores(self) -> int:
        """Cores in all, beside those of CPU devices: each task has one where none are asked for; 0: one per device."""
        of_tasks = self.tasks if self.tasks > 1 and (not self.devices or self.kind == "cuda") else 0
        return self.cpus or of_tasks

    @property
    def cores_alone(self) -> int:
        """Cores of a command without devices; 0: it has devices."""
        return 0 if self.devices else max(self.cores, self.nodes)

    @property
    def per_node(self) -> int:
        """Devices of a command on each of its hosts."""
        return self.devices // max(self.nodes, 1)


_INT_MAX = (1 << 31) - 1
_LIMIT = k.within(0, _INT_MAX)
_QUOTA = k.within(0, (1 << 63) - 1, "it must be a number of devices")
_BUDGET = k.limited(k.NUMBER, lambda x: 0 <= x <= sys.float_info.max, "it must be a number of hours", schema={"ge": 0})
_ABOVE_ZERO = k.limited(
    k.NUMBER, lambda x: 0 < x <= sys.float_info.max, "it must be a number above 0", schema={"gt": 0}
)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Quota and share of one tenant."""

    # fmt: off
    quota: Annotated[int | None, Key(_QUOTA, "Most devices that its jobs hold at a time.", "no limit")] = None
    share: Annotated[float, Key(_ABOVE_ZERO, "Weight among the tenants that compete for devices.")] = 1.0
    device_hours: Annotated[float | None, Key(_BUDGET, "Device-hours that its jobs may use in a calendar month.",
                                              "no limit")] = None
    members: Annotated[tuple[str, ...] | None, Key(k.NAMES, 'Users and "@groups" that may submit for it.',
                                                   'operators, of "default" everybody')] = None
    # fmt: on


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one user; operators have none but `devices` and `device_hours`."""

    # fmt: off
    priority: Annotated[int, Key(k.within(-(1 << 31), _INT_MAX), "Highest priority that may be given to a job.")] = 0
    guaranteed_devices: Annotated[int, Key(_LIMIT, "Devices that the guaranteed jobs that are not over may ask for, "
                                           "together.")] = 0
    devices: Annotated[int | None, Key(_LIMIT, "Devices that the jobs may hold at a time.", "no limit")] = None
    device_hours: Annotated[float | None, Key(_BUDGET, "Device-hours that the jobs may use in a calendar month.",
                                              "no limit")] = None
    queued_jobs: Annotated[int, Key(_LIMIT, "Jobs that may be queued.")] = 10_000
    booked_device_hours: Annotated[int, Key(_LIMIT, "Device-hours of the bookings that begin in any seven days.")] = 0
    # fmt: on


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

    # fmt: off
    name: Annotated[str, Key(k.NAME, "Up to 63 letters, digits, '.', '_' and '-'.", "the file's name", edit=QUEUED,
                             option="--name", sbatch="--job-name", row="name")]
    kind: Annotated[JobKind, Key(k.one_of(JobKind), "checkpointable: saves on request and resumes. elastic: written "
                                 "with clusterd.train; any plan, live migration.")] = JobKind.COMMAND
    command: Annotated[tuple[str, ...], Key(
        k.TEXTS, 'Words, the program first, as in ["python", "train.py"]; required. {job}, {index}, variables of a '
        "sweep and, for checkpointable jobs, the dimensions of a plan, {dp}, are filled in.")]
    workdir: Annotated[str | None, Key(  # in which the job runs, or its packed copy
        k.TEXT, "Directory that is sent, relative to this file, as it is when the job is submitted: what git does "
        "not ignore, else all but secrets; never what .clusterdignore names.", "the file's directory")] = None
    snapshot: str | None = None  # sha256 of the workdir's content; None: run in `workdir` itself
    commit: str = ""  # of git, of the workdir as submitted; "-dirty" at its end where files differ from it
    python: Annotated[str | None, Key(k.TEXT, "Interpreter or virtual environment on the hosts.",
                                      "see environments.md", option="--python")] = None
    uv: Annotated[str, Key(k.TEXT, "uv.lock or pyproject.toml in the workdir, from which each host builds an "
                           "environment.", "none", option="--uv")] = ""
    requirements: Annotated[str, Key(k.TEXT, "requirements.txt in the workdir, from which each host builds an "
                                     "environment, in the place of uv.", "none", option="--requirements")] = ""
    container: Annotated[str, Key(k.CONTAINER, 'Image that the command runs in: "docker:IMAGE", "podman:IMAGE", '
                                  '"apptainer:IMAGE" or a .sif file.', "none", option="--container")] = ""
    mounts: Annotated[tuple[str, ...], Key(k.PATHS, "Directories of the host in the container: "
                                           "SOURCE[:TARGET[:ro]].", "none", option="--mount")] = ()
    clean_env: Annotated[bool, Key(k.YES_OR_NO, "true: none of the variables that the account's login sets up on the "
                                   "hosts.", option="--clean-env")] = False
    env: Annotated[dict[str, str], Key(
        k.ENV, "Environment variables; $NAME is filled in from the login. They are in clear in the journal and its "
        "backups: what must not be belongs into secrets.", "none")] = field(default_factory=dict)
    secrets: Annotated[tuple[str, ...], Key(  # names only; values are not in the journal
        k.SECRETS, 'Variables that no log, list or journal shows: "env:NAME" from the submitting shell, "file:PATH" '
        "from a file.", "none")] = ()
    output: Annotated[str, Key(
        k.OUTPUT, "File for stdout and stderr, in the workdir or elsewhere on the host, as in logs/%x-%j.out: %x is "
        "the name, %j the id, %A and %a are id and index of an array, %N is the host. clusterd get fetches it.",
        "none: clusterd logs has them", kinds=(JobKind.COMMAND, JobKind.CHECKPOINTABLE), sbatch="--output")] = ""
    ports: Annotated[tuple[int, ...], Key(k.PORTS, "Ports that the job serves, for clusterd forward.", "none")] = ()
    datasets: Annotated[dict[str, str], Key(
        k.DATASETS, 'Folders that clusterd.train reads from wherever they are: "HOST:/folder", or "/folder" on '
        "every host.", "none")] = field(default_factory=dict)
    priority: Annotated[int, Key(k.WHOLE, "Higher goes first, and preempts.", edit=RUNNING, option="--priority")] = 0
    guaranteed: Annotated[bool, Key(k.YES_OR_NO, "Never slower than what it asks for, while it runs.", edit=QUEUED,
                                    option="--guaranteed", row="guaranteed")] = False
    preemptible: Annotated[bool, Key(k.YES_OR_NO, "A command that may be stopped for other jobs and begins anew.",
                                     edit=QUEUED, option="--preemptible")] = False
    tenant: Annotated[str, Key(k.TEXT, "Tenant whose quota and share count; the submitter must be a member.",
                               row="tenant")] = "default"
    comment: Annotated[str, Key(k.TEXT, "Text about the job, which clusterd show prints and clusterd ls TEXT finds.",
                                "none", edit=RUNNING, option="--comment", sbatch="--comment", row="comment")] = ""
    user: str = ""
    account: str = ""  # on the hosts, under which it runs; "": the daemon's own
    after: Annotated[tuple[JobId, ...], Key(
        k.JOBS, 'Jobs, by id, name or pattern, that must have finished; the id of an array is all of it; "JOB:any": '
        'be over; "JOB:failed"; "JOB:corr": its task of this index; "singleton": earlier jobs of this name.', "none",
        edit=QUEUED, option="--after")] = ()
    begin_s: Annotated[float | None, Key(k.POINT_IN_TIME, 'Not started before this time, as in "mon 9:00" or "+2h".',
                                         "at once", name="begin", edit=QUEUED, option="--begin", row="begin_s")] = None
    hold: Annotated[bool, Key(k.YES_OR_NO, "Queued, and started only once clusterd release lets it.", option="--hold",
                              sbatch="--hold")] = False
    booking: Annotated[str, Key(k.TEXT, "Number of a booking of yours: starts on its devices once it begins, and ends "
                                "with it.", "none", edit=QUEUED, option="--booking", row="booking")] = ""
    time_limit_s: Annotated[float | None, Key(k.DURATION, "Longest run, as in 12h; jobs that can save do so before it.",
                                              "none", name="limits.time", edit=RUNNING, option="--time",
                                              row="time_limit_s")] = None
    limit_signal: Annotated[str, Key(k.LIMIT_SIGNAL, "Sent to its processes so long before the time limit ends them; "
                                     "B: to the first of each rank alone.", "none", name="limits.signal", edit=RUNNING,
                                     option="--signal")] = ""
    stall_s: Annotated[float | None, Key(k.DURATION, "An elastic job without a step for so long is restarted from its "
                                         "newest state.", "never", name="limits.stall", edit=RUNNING)] = None
    grace_s: Annotated[float, Key(k.DURATION, "Between the request to stop and SIGKILL.", name="limits.grace",
                                  edit=RUNNING)] = 30.0
    retries: Annotated[int, Key(k.RETRIES, "Times that the job is queued again after failures of its own; lost hosts "
                                "do not count.", name="limits.retries", edit=RUNNING)] = 0
    retry_on: Annotated[tuple[int, ...], Key(k.CODES, "Exit codes after which the job is queued again however often.",
                                             "none", name="limits.retry_on", edit=RUNNING)] = ()
    stops_on_nan: Annotated[bool, Key(k.ON_NAN, "What to do once the loss is not a number.",
                                      name="limits.on_nan")] = False
    waits_for_hosts: Annotated[bool, Key(k.YES_OR_NO, "Accept the job though no host of the cluster can serve it yet.",
                                         name="wait_for_hosts", option="--wait-for-hosts")] = False
    trials: Annotated[bool, Key(k.YES_OR_NO, "false: no steps under other plans to measure their speed.")] = True
    snapshot_every: Annotated[int | None, Key(
        k.whole(0, expected="a number of steps, or 0 for none"), "Steps between copies of the state on a second host; "
        "0: none.", "automatic", name="snapshots", kinds=_TRAINED)] = None
    target_loss: Annotated[float | None, Key(k.NUMBER, "Ends the job when its loss reaches this.", "none",
                                             kinds=_TRAINED, row="target_loss")] = None
    checkpoint_directory: Annotated[str | None, Key(
        k.TEXT, "Folder that all its hosts share, for the last and periodic checkpoints.", "none",
        name="checkpoints.directory", kinds=_TRAINED)] = None
    checkpoint_every_s: Annotated[float | None, Key(k.DURATION, "Time between two checkpoints.", "only at the end",
                                                    name="checkpoints.every")] = None
    restore: str | None = None  # checkpoint to start from: "/folder", "HOST:/folder"; a request may name a job
    restore_step: int = 0  # its step; 0: unknown
    continues: JobId | None = None  # job whose training it goes on with: its seed, and {job} in its command
    steps: int | None = None  # of an elastic job, instead of the number in its script
    interactive: bool = False  # a person waits for it: before others of its priority
    is_attached: bool = False  # that person's command shows its stdout and stderr apart
    reads_input: bool = False  # and passes its input on
    array: ArrayTask | None = None  # None: submitted alone
    resources: Resources = field(default_factory=Resources)
    # fmt: on

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
    """Devices that are kept from the scheduler for some time: by an operator, or for jobs of whoever booked them."""

    id: str
    devices: tuple[DeviceId, ...]
    from_s: float
    until_s: float | None = None  # None: until it is removed
    reason: str
    by: str = ""
    drain: bool = False  # jobs that cannot move are stopped and queued again at its start
    owner: str = ""  # of a booking: user whose jobs may run there; empty: an operator's claim, for no job
    # of a booking: devices that none of its jobs has used yet, since when they could; None: not yet
    unused: dict[DeviceId, float | None] = field(default_factory=dict)

    def is_active(self, now_s: float) -> bool:
        """True between start and end."""
        return self.from_s <= now_s and (self.until_s is None or now_s < self.until_s)

    def __str__(self) -> str:
        if self.owner:
            return f"booked by {self.owner} (booking {self.id}){f': {self.reason}' if self.reason else ''}"
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
    message: str = ""  # from the rank, if the training loop ended it, or from its agent

    @property
    def is_success(self) -> bool:
        """True if it exited by itself with 0; a rank that stopped on request has not finished."""
        return self.exit_code == 0 and self.reason is not Reason.STOPPED

    def __str__(self) -> str:
        if self.reason is Reason.SIGNAL:
            return f"killed by signal {self.signal}" + (f": {self.message}" if self.message else "")
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
