"""Typed rows of the daemon's messages: everything from the socket is validated here before a widget sees it.

Fields that an older daemon does not send have defaults; unknown fields are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]
"""An instant or duration within 3,000 years: larger values cannot be formatted as dates."""


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of a migration."""

    phase: str
    seconds: Seconds
    note: str = msgspec.field(name="what", default="")


class Migration(msgspec.Struct, frozen=True, kw_only=True):
    """A job's migration from one plan to another, in progress or past."""

    number: int = 0
    old: str = msgspec.field(name="from", default="")
    new: str = msgspec.field(name="to", default="")
    devices: tuple[str | None, ...] = ()
    reason: str = ""
    started_s: Seconds = 0.0
    ended_s: Seconds | None = None
    step: int | None = None
    phases: tuple[Phase, ...] = ()
    network_bytes: int = 0
    local_bytes: int = 0
    downtime_s: Seconds | None = None
    restarts: bool = False
    failure: str = ""


class NextPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan the job would get next, its gain, and the cost of the migration."""

    plan: str
    devices: int = 0
    gain: float | None = None
    move_cost_s: Seconds | None = None


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """Expected and promised start of the first blocked job."""

    at_s: Seconds | None = None  # expected; None: none can be foreseen
    latest_s: Seconds | None = None  # promised, by time limits; None: some have none
    after: tuple[str, ...] = ()  # names of the jobs that it waits for


class ArrayTask(msgspec.Struct, frozen=True, kw_only=True):
    """Place of a job in an array or sweep."""

    id: str  # of the array
    name: str = ""
    index: int = 0
    most: int = 0  # tasks that may run at once; 0: any number


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Current state of a job."""

    id: str
    name: str
    state: str
    kind: str = ""
    reason: str = ""
    away: tuple[str, ...] = ()  # hosts of its ranks that do not answer
    priority: int = 0
    held_by: str | None = None
    on_loan: int = 0  # devices beyond its request, which go to whoever waits for them
    promise: Promise | None = None
    place: int | None = None  # in the queue, from 1 on; `Model.place_jobs` sets it
    array: ArrayTask | None = None
    tasks: str = ""  # of a row that stands for a whole array: how many are in which state
    guaranteed: bool = False
    comment: str = ""
    user: str = ""
    tenant: str = ""
    asked: int = 0
    asked_kind: str | None = None
    plan: str | None = None
    attempt: int = 0
    devices: tuple[str | None, ...] = ()
    hosts: tuple[str, ...] = ()
    holds_devices: bool = False
    step: int = 0
    steps: int | None = None
    first_loss: float | None = None
    loss: float | None = None
    step_time_s: Seconds | None = None
    predicted_step_time_s: Seconds | None = None
    next: NextPlan | None = None
    predictable: bool = False
    profiling: bool = False  # trials under other plans are in progress
    trials: int = 0  # so far
    submitted_s: Seconds = 0.0
    started_s: Seconds | None = None
    ended_s: Seconds | None = None
    exit_code: int | None = None
    pinned: bool = False
    checkpoint: str | None = None
    checkpoint_step: int = 0
    migrating: Migration | None = None
    migrations: tuple[Migration, ...] = ()

    @property
    def is_over(self) -> bool:
        """The job has ended."""
        return self.state in ("finished", "failed", "cancelled")

    @property
    def shown_state(self) -> str:
        """State to display: ``moving`` while migrating, ``silent`` while its hosts do not answer."""
        if self.away and self.state == "running":
            return "silent"
        return "moving" if self.migrating is not None and self.state == "running" else self.state


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device of a host and its holder."""

    id: str
    kind: str = ""
    name: str = ""
    memory_bytes: int = 0
    foreign: str = ""
    job: str | None = None
    job_name: str | None = None


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that an operator keeps from the scheduler for some time."""

    id: str
    devices: tuple[str, ...] = ()
    from_s: Seconds = 0.0
    until_s: Seconds | None = None
    reason: str = ""
    by: str = ""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Current state of a host."""

    name: str
    state: str
    why: str = ""
    since_s: Seconds = 0.0
    drained: str | None = None
    claims: tuple[Claim, ...] = ()
    labels: tuple[str, ...] = ()
    address: str | None = None
    cpu_cores: int | None = None
    cores_used: int = 0
    memory_bytes: int | None = None
    memory_used_bytes: int = 0
    jobs: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ()
    link: dict[str, Any] = {}  # facts of the connection; msgspec copies the default

    @property
    def shown_state(self) -> str:
        """State to display: ``drained`` for a drained host that is up."""
        return "drained" if self.state == "up" and self.drained is not None else self.state

    @property
    def free(self) -> int:
        """Devices available for jobs now."""
        if self.state != "up" or self.drained is not None:
            return 0
        return sum(1 for device in self.devices if device.job is None and not device.foreign)

    @property
    def utilisation(self) -> dict[str, float]:
        """Utilisation by GPU, as last reported by the host; empty for CPU devices."""
        facts = self.link.get("facts")
        gpus = facts.get("gpus") if isinstance(facts, dict) else None
        found: dict[str, float] = {}
        for at, gpu in enumerate(gpus if isinstance(gpus, list) else ()):
            if isinstance(gpu, dict) and isinstance(gpu.get("utilisation"), int | float):
                part = f".{gpu['slice']}" if gpu.get("slice") is not None else ""
                found[f"gpu{gpu.get('index', at)}{part}"] = float(gpu["utilisation"])
        return found


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision and its reason."""

    kind: str
    reason: str = ""
    cause: int = 0
    job: str | None = None
    host: str | None = None
    at_s: Seconds = 0.0
    text: str = ""
    routine: bool = False

    @property
    def sentence(self) -> str:
        """The decision as a sentence; its reason where an older daemon sent none."""
        return self.text or self.reason


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """An event; `fields` holds all of its fields."""

    kind: str
    id: int = 0
    at_s: Seconds = 0.0
    job: str | None = None
    host: str | None = None
    text: str = ""
    routine: bool = False
    fields: dict[str, Any] = {}

    @property
    def sentence(self) -> str:
        """The event as a sentence; empty where an older daemon sent none."""
        return self.text


class Minute(msgspec.Struct, frozen=True, kw_only=True):
    """Use of a device in one minute."""

    minute: int
    job: str | None = None
    busy: float | None = None
    memory_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The last minutes of each device, oldest first."""

    devices: dict[str, tuple[Minute, ...]] = {}


class QueuePlace(msgspec.Struct, frozen=True, array_like=True):
    """Place of a queued job: the job before it, if any, and the criterion that puts that one before it."""

    after: str | None = None
    criterion: str | None = None


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The whole state at one instant."""

    jobs: tuple[Job, ...] = ()
    hosts: tuple[Host, ...] = ()
    order: dict[str, QueuePlace] = {}
    status: dict[str, Any] = {}


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One batch of events with every row it touched, as of after the batch."""

    number: int
    at_s: Seconds = 0.0
    events: tuple[dict[str, Any], ...] = ()
    decisions: tuple[Decision, ...] = ()
    jobs: tuple[Job, ...] = ()
    hosts: tuple[Host, ...] = ()
    gone: tuple[str, ...] = ()
    order: dict[str, QueuePlace | None] = {}  # places that changed; None: the job has none any more
    recovering: tuple[str, ...] | None = None  # hosts that must report before anything is placed; None: not reported


Malformed = msgspec.ValidationError

Row = TypeVar("Row")


def read(kind: type[Row], value: Any) -> Row:
    """Convert a message to a row type.

    Raises:
        Malformed: it does not match.
    """
    return msgspec.convert(value, kind)


def read_event(value: dict[str, Any]) -> EventRow:
    """Convert a message to an event.

    Raises:
        Malformed: it does not match.
    """
    known = msgspec.convert(value, EventRow)
    return msgspec.structs.replace(
        known, fields={k: v for k, v in value.items() if k not in ("kind", "text", "routine")}
    )


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of an attempt, and how it ended."""

    rank: int
    host: str = ""
    device: str | None = None
    end: str | None = None


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a job."""

    number: int
    state: str = ""
    plan: str | None = None
    started_s: Seconds = 0.0
    ended_s: Seconds | None = None
    why: str = ""
    ranks: tuple[Rank, ...] = ()


class JobDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a job that its row does not hold."""

    attempts: tuple[Attempt, ...] = ()
    decisions: tuple[Decision, ...] = ()


class RankedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate plan with its prediction."""

    plan: str
    devices: int = 0
    step_time_s: Seconds | None = None
    lower_s: Seconds | None = None
    upper_s: Seconds | None = None
    device_bytes: float | None = None
    fits: bool = True
    why: str = ""
    current: bool = False


class Plans(msgspec.Struct, frozen=True, kw_only=True):
    """Candidate plans of a job, best first."""

    rows: tuple[RankedPlan, ...] = ()
    known: str = ""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A trial run under one plan: measured and predicted step time."""

    plan: str
    devices: int = 0
    step_time_s: Seconds | None = None
    predicted_s: Seconds | None = None
    at_s: Seconds = 0.0


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput of the best plan on this many devices."""

    devices: int
    plan: str = ""
    samples_per_s: float = 0.0


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Performance model of a job's model."""

    model: str | None = None
    trials: tuple[Trial, ...] = ()
    curve: tuple[Throughput, ...] = ()


class JobBefore(msgspec.Struct, frozen=True, kw_only=True):
    """The job just before a queued one, and why it comes first."""

    name: str
    why: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon's explanation of a job's state; decisions oldest first."""

    state: str
    reason: str = ""
    place: int | None = None
    ahead: tuple[str, ...] = ()
    after: JobBefore | None = None
    holders: dict[str, int] = {}
    holders_left_s: dict[str, float] = {}
    unusable: tuple[str, ...] = ()
    unfit: dict[str, str] = {}
    refused: dict[str, str] = {}
    decisions: tuple[Decision, ...] = ()


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Reason why one item of a batch was refused."""

    message: str = ""


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs cancelled in one request."""

    jobs: tuple[Job, ...] = ()
    refused: tuple[Refusal, ...] = ()


class MigrationPreview(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted cost of a requested or proposed migration."""

    old: str = msgspec.field(name="from", default="")
    plan: str = ""
    devices: tuple[str | None, ...] = ()
    local_bytes: int = 0
    network_bytes: int = 0
    predicted_downtime_s: Seconds = 0.0
    crowded: str | None = None  # why source and target ranks do not fit side by side
    migrations: int = 0  # of the job so far
    restarts: bool = False  # the job has its own training loop and restarts


class CheckpointWritten(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was written on request."""

    step: int
    path: str
    blocked_s: Seconds = 0.0


class SubmittedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A submitted job."""

    id: str
    name: str
