"""Rows: the jobs, hosts, changes and answers that the daemon sends to clients.

The daemon makes these structs, the terminal UI decodes them, and the tables of docs/json.md are written from them. A
field that an older daemon does not send has a default; one that is unknown is ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType, field, msgpack, to_builtins

from clusterd import protocol

Seconds = Annotated[float, Meta(ge=-1e11, le=1e11)]
"""An instant or duration within 3,000 years: larger values cannot be formatted as dates."""


Row = TypeVar("Row", bound=Struct)


def about(text: str) -> Meta:
    """Meaning of a field, as docs/json.md tells it."""
    return Meta(description=text)


def row_of(kind: type[Row], source: object, /, **others: Any) -> Row:
    """Row of an object: its attributes of the same names, but for the fields that are given."""
    return kind(**{name: getattr(source, name) for name in kind.__struct_fields__ if name not in others}, **others)


def plain(value: Any) -> Any:
    """The maps, lists and values of rows, as they are sent."""
    return to_builtins(value, builtin_types=(bytes,), enc_hook=float)  # of numpy, a number of a performance model


def pack(value: Any) -> bytes:
    """Rows as a part of a frame; text that is no UTF-8 as `protocol.pack` sends it."""
    try:
        return msgpack.encode(value, enc_hook=float)
    except UnicodeEncodeError:
        return protocol.pack(plain(value))


class Promise(Struct, frozen=True, kw_only=True):
    """Expected and promised start of the first blocked job."""

    at_s: Annotated[Seconds | None, about("Expected start; null: none can be foreseen.")] = None
    latest_s: Annotated[Seconds | None, about("Promised start, by time limits; null: some jobs have none.")] = None
    after: Annotated[tuple[str, ...], about("Names of the jobs that it waits for.")] = ()


class Quantiles(Struct, frozen=True):
    """Point in time as a distribution; null: not within the time that roll-outs play."""

    p5_s: Annotated[Seconds | None, about("With 5% by then; to `p95_s`, the 90% interval.")]
    p25_s: Annotated[Seconds | None, about("With 25% by then; to `p75_s`, the 50% interval.")]
    p50_s: Annotated[Seconds, about("As likely before as after.")]
    p75_s: Annotated[Seconds | None, about("With 75% by then.")]
    p95_s: Annotated[Seconds | None, about("With 95% by then.")]


class Forecast(Struct, frozen=True, kw_only=True):
    """Start and end of a job, from roll-outs of the scheduler."""

    at_s: Annotated[Seconds, about("State from which the roll-outs began.")] = 0.0
    rollouts: Annotated[int, about("Number of roll-outs.")] = 0
    start: Annotated[Quantiles | None, about("Start; null: not known, or it has started.")] = None
    end: Annotated[Quantiles | None, about("End; null: not known.")] = None
    after: Annotated[str, about("Job by whose end, or shrinking, it starts most often; empty: none.")] = ""
    weeks: Annotated[int, about("Past weeks from which later submissions are drawn; 0: none are assumed.")] = 0


class Delay(Struct, frozen=True, kw_only=True):
    """By how much later, or earlier, a job would end."""

    job: Annotated[str, about("Number.")]
    name: Annotated[str, about("Name.")]
    user: Annotated[str, about("User.")]
    p50_s: Annotated[
        float | None,
        about("Median of the differences between pairs of roll-outs, in seconds; null: more than what roll-outs play."),
    ]
    p95_s: Annotated[float | None, about("With 95% no more; null: more than what roll-outs play.")]


class Effect(Struct, frozen=True, kw_only=True):
    """Effect of a drain or a claim, from roll-outs with and without it."""

    rollouts: Annotated[int, about("Pairs of roll-outs.")] = 0
    free: Annotated[Quantiles | None, about("Time from which no job is there; null: not known.")] = None
    delays: Annotated[tuple[Delay, ...], about("Jobs that would end a minute or more later, or earlier.")] = ()


class ForecastScore(Struct, frozen=True, kw_only=True):
    """Calibration of past forecasts of one class."""

    what: Annotated[str, about("`start` or `end`.")]
    kind: Annotated[str, about("Kind of the jobs.")]
    horizon: Annotated[str, about("Largest time from the forecast to its median: `10m`, `2h`, `1d` or `later`.")]
    count: Annotated[int, about("Forecasts with an outcome.")] = 0
    within50: Annotated[float, about("Share of outcomes within the 50% interval.")] = 0.0
    within90: Annotated[float, about("Share of outcomes within the 90% interval.")] = 0.0
    width90_s: Annotated[Seconds | None, about("Median width of the 90% interval.")] = None
    pinball_s: Annotated[Seconds, about("Mean pinball loss of the five quantiles.")] = 0.0


class ArrayTask(Struct, frozen=True, kw_only=True):
    """Place of a job in an array or sweep."""

    id: Annotated[str, about("Of the array's first task.")]
    name: Annotated[str, about("Of the array; its tasks have names of their own.")] = ""
    index: Annotated[int, about("Number of the task.")] = 0
    values: Annotated[dict[str, str], about("Of a sweep, by variable.")] = {}
    most: Annotated[int, about("Tasks that may run at once; 0: any number.")] = 0


class Phase(Struct, frozen=True, kw_only=True):
    """One phase of a migration."""

    phase: Annotated[str, about("Name.")]
    seconds: Annotated[Seconds, about("Duration.")]
    note: Annotated[str, about("Detail, as of the bytes that it moved.")] = field(name="what", default="")


class Migration(Struct, frozen=True, kw_only=True):
    """A job's migration from one plan to another, in progress or past."""

    number: Annotated[int, about("From 1 on.")] = 0
    old: Annotated[str, about("Plan before.")] = field(name="from", default="")
    new: Annotated[str, about("Plan afterwards.")] = field(name="to", default="")
    devices: Annotated[tuple[str | None, ...], about("Devices afterwards, by rank.")] = ()
    reason: Annotated[str, about("Why.")] = ""
    started_s: Annotated[Seconds, about("Start.")] = 0.0
    ended_s: Annotated[Seconds | None, about("End; null: under way.")] = None
    step: Annotated[int | None, about("Step at which it switched.")] = None
    phases: Annotated[tuple[Phase, ...], about("Its phases.")] = ()
    network_bytes: Annotated[int, about("Moved over the network.")] = 0
    local_bytes: Annotated[int, about("Moved within hosts.")] = 0
    downtime_s: Annotated[Seconds | None, about("How long training stood still.")] = None
    restarts: Annotated[bool, about("It restarted the job.")] = False
    failure: Annotated[str, about("Why it failed; empty: it did not.")] = ""


class Job(Struct, frozen=True, kw_only=True):
    """A job."""

    # fmt: off
    id: Annotated[str, about("Number.")]
    name: Annotated[str, about("Name.")]
    guaranteed: Annotated[bool, about("Has a guarantee.")] = False
    tenant: Annotated[str, about("Tenant whose quota and share count.")] = ""
    comment: Annotated[str, about("Text of the user about it; empty: none.")] = ""
    target_loss: Annotated[float | None, about("Loss at which it ends.")] = None
    asked: Annotated[int, about("Devices asked for.")] = 0
    cores: Annotated[int, about("CPU cores of a command without devices; 0: it has devices.")] = 0
    kind: Annotated[str, about("`command`, `checkpointable` or `elastic`.")] = ""
    state: Annotated[str, about("See above.")]
    reason: Annotated[str, about("Why it is in this state.")] = ""
    away: Annotated[tuple[str, ...], about("Hosts of it that do not answer.")] = ()
    priority: Annotated[int, about("Higher is earlier.")] = 0
    held_by: Annotated[str | None, about("User who holds it in the queue.")] = None
    paused_by: Annotated[str | None, about("User who paused it, where it keeps its devices.")] = None
    array: Annotated[ArrayTask | None, about("Array or sweep that it is a task of.")] = None
    user: Annotated[str, about("Owner.")] = ""
    asked_kind: Annotated[str | None, about("Kind of the devices asked for.")] = None
    plan: Annotated[str | None, about("Parallel plan of the newest attempt.")] = None
    attempt: Annotated[int, about("Number of the newest attempt; 0: none.")] = 0
    building: Annotated[dict[str, Seconds], about("Hosts that build its environment, since when.")] = {}
    devices: Annotated[tuple[str | None, ...], about("Devices of the newest attempt.")] = ()
    hosts: Annotated[tuple[str, ...], about("Hosts of the newest attempt.")] = ()
    holds_devices: Annotated[bool, about("Still holds them.")] = False
    on_loan: Annotated[int, about("Devices beyond its request, which go to whoever waits for them.")] = 0
    promise: Annotated[Promise | None, about("Its reservation: expected and promised start.")] = None
    forecast: Annotated[Forecast | None, about("Start and end by roll-outs; null: not known.")] = None
    step: Annotated[int, about("Newest step.")] = 0
    steps: Annotated[int | None, about("All steps.")] = None
    first_loss: Annotated[float | None, about("Loss of the first step.")] = None
    loss: Annotated[float | None, about("Loss of the newest step.")] = None
    step_time_s: Annotated[Seconds | None, about("Measured duration of a step.")] = None
    left_s: Annotated[float | None, about("Time to the end at this speed.")] = None
    time_limit_s: Annotated[Seconds | None, about("Longest run; null: no limit.")] = None
    begin_s: Annotated[float | None, about("Time before which it is not to start; null: at once.")] = None
    booking: Annotated[str, about("Booking on whose devices it runs; empty: none.")] = ""
    ends_by_s: Annotated[Seconds | None, about("Time at which its time limit ends it; null: it has none, or does not run.")] = None  # noqa: E501
    progressed_s: Annotated[Seconds | None, about("Time of the newest step.")] = None
    idle_since_s: Annotated[Seconds | None, about("Time since when its devices do nothing.")] = None
    predicted_step_time_s: Annotated[Seconds | None, about("Predicted duration of a step.")] = None
    profiling: Annotated[bool, about("A trial under another plan runs.")] = False
    trials: Annotated[int, about("Number of trials so far.")] = 0
    predictable: Annotated[bool, about("Its end is predictable from the loss.")] = False
    foreseen_steps: Annotated[int | None, about("Steps foreseen from the loss.")] = None
    submitted_s: Annotated[Seconds, about("Submission.")] = 0.0
    started_s: Annotated[Seconds | None, about("First start.")] = None
    ended_s: Annotated[Seconds | None, about("End.")] = None
    exit_code: Annotated[int | None, about("Exit code once it is over.")] = None
    pinned: Annotated[bool, about("Its plan is fixed by its owner.")] = False
    unfit: Annotated[dict[str, str], about("Hosts that cannot run it, with the reason.")] = {}
    refused: Annotated[dict[str, str], about("Plans that it cannot run under, with the reason.")] = {}
    sees_batch: Annotated[str, about("`replica`: the script accepts that results depend on the plan; else `global`.")] = "global"  # noqa: E501
    checkpoint: Annotated[str | None, about("Newest checkpoint.")] = None
    checkpoint_step: Annotated[int, about("Its step.")] = 0
    checkpoint_failure: Annotated[str, about("Why no newer one could be written; empty: none failed.")] = ""
    migrating: Annotated[Migration | None, about("Migration under way.")] = None
    migrations: Annotated[tuple[Migration, ...], about("Those that are over.")] = ()
    place: Annotated[int | UnsetType | None, about("Place in the queue; in answers to `jobs`, `job`, `why`.")] = UNSET
    edited: Annotated[str | UnsetType, about("What an edit changed, in the answer to `edit`.")] = UNSET
    # fmt: on

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


SEARCHED = ("comment",)
"""Fields of a job that people write and search: shown by `show`, found by `ls`, columns and filters of `top`."""


class JobBefore(Struct, frozen=True, kw_only=True):
    """The job just before a queued one, and why it comes first."""

    job: Annotated[str, about("Its number.")] = ""
    name: Annotated[str, about("Its name.")]
    criterion: Annotated[str, about("Criterion that puts it there.")] = ""
    why: Annotated[str, about("That criterion in words.")]


class Place(Struct, frozen=True, kw_only=True):
    """Place of a job in the queue."""

    place: Annotated[int | None, about("Place from 1 on in the order of the newest scheduling pass; null: none.")] = (
        None
    )
    ahead: Annotated[tuple[str, ...], about("Names of the jobs before it.")] = ()
    after: Annotated[JobBefore | None, about("The job just before it; null for the first.")] = None


class Rank(Struct, frozen=True, kw_only=True):
    """One rank of an attempt, and how it ended."""

    rank: Annotated[int, about("Number.")]
    host: Annotated[str, about("Its host.")] = ""
    device: Annotated[str | None, about("Its device; null: CPU cores alone.")] = None
    end: Annotated[str | None, about("How it ended.")] = None


class Attempt(Struct, frozen=True, kw_only=True):
    """One run of a job."""

    number: Annotated[int, about("From 1 on, raised at each start.")]
    generation: Annotated[int, about("Raised at each migration.")] = 0
    state: Annotated[str, about("`starting`, `running`, `stopping` or `ended`.")] = ""
    plan: Annotated[str | None, about("Parallel plan.")] = None
    cores: Annotated[dict[str, int], about("CPU cores by host.")] = {}
    build_times_s: Annotated[dict[str, float], about("Time that the environment took to build, by host.")] = {}
    versions: Annotated[dict[str, dict[str, str]], about("Versions of Python, torch, CUDA and driver, by host.")] = {}
    started_s: Annotated[Seconds, about("Start.")] = 0.0
    start: Annotated[tuple[Phase, ...], about("Phases up to the first step of an elastic job.")] = ()
    ended_s: Annotated[Seconds | None, about("End.")] = None
    why: Annotated[str, about("Reason of its end.")] = ""
    ranks: Annotated[tuple[Rank, ...], about("Its ranks.")] = ()


class Decision(Struct, frozen=True, kw_only=True):
    """A decision and its reason."""

    cause: Annotated[int, about("`id` of the event behind it.")] = 0
    at_s: Annotated[Seconds, about("Its time.")] = 0.0
    kind: Annotated[str, about("Its name, as in the journal.")]
    job: Annotated[str | None, about("Job that it is about.")] = None
    host: Annotated[str | None, about("Host that it is about.")] = None
    reason: Annotated[str, about("Its reason.")] = ""
    text: Annotated[str, about("The sentence about it.")] = ""
    routine: Annotated[bool, about("True for what recurs for everything that runs.")] = False

    @property
    def sentence(self) -> str:
        """The decision as a sentence; its reason where an older daemon sent none."""
        return self.text or self.reason


class PlacedJob(Job, frozen=True, kw_only=True):
    """A job, with the fields of its `Place`."""

    place: int | None = None
    ahead: tuple[str, ...] = ()
    after: JobBefore | None = None


class JobDetail(PlacedJob, frozen=True, kw_only=True):
    """Everything about one job."""

    spec: Annotated[dict[str, Any], about("Keys of the job file, with units.")] = {}
    command: Annotated[str, about("Its command as it is typed; of a batch script the script.")] = ""
    shape: Annotated[dict[str, Any] | None, about("Description of its model.")] = None
    attempts: Annotated[tuple[Attempt, ...], about("Its attempts.")] = ()
    decisions: Annotated[tuple[Decision, ...], about("The newest decisions about it, oldest first.")] = ()


class Explanation(PlacedJob, frozen=True, kw_only=True):
    """A job, and why it is in its state."""

    holders: Annotated[dict[str, int], about("Devices that jobs hold, by name; several of a name have their id.")] = {}
    holders_left_s: Annotated[dict[str, float], about("Time to the end of these, where it is known.")] = {}
    holders_most_s: Annotated[dict[str, float], about("Time to the time limit of running jobs, by name.")] = {}
    core_holders: Annotated[dict[str, int], about("CPU cores that jobs hold, by name.")] = {}
    misfits: Annotated[tuple[str, ...], about("Hosts that do not fit it, with the reason.")] = ()
    unusable: Annotated[tuple[str, ...], about("Hosts and devices that are unusable now, with the reason.")] = ()
    decisions: Annotated[tuple[Decision, ...], about("The newest decisions about it, oldest first.")] = ()


class Device(Struct, frozen=True, kw_only=True):
    """A device of a host and its holder."""

    id: Annotated[str, about("As in `gpu01:gpu0`.")]
    kind: Annotated[str, about("`cuda` or `cpu`.")] = ""
    name: Annotated[str, about("Type of the device.")] = ""
    memory_bytes: Annotated[int, about("Memory.")] = 0
    compute_capability: Annotated[str, about("Of a GPU, as in `8.0`; empty: not reported.")] = ""
    foreign: Annotated[str, about("What others run there; no job gets it while that is set.")] = ""
    job: Annotated[str | None, about("Job that holds it.")] = None
    job_name: Annotated[str | None, about("Name of that job.")] = None
    jobs: Annotated[int, about("Number of jobs on it; more than one share it.")] = 0


class Claim(Struct, frozen=True, kw_only=True):
    """Devices that an operator keeps from the scheduler for some time, or that a user has booked."""

    id: Annotated[str, about("Number.")]
    devices: Annotated[tuple[str, ...], about("Claimed devices.")] = ()
    from_s: Annotated[Seconds, about("Start.")] = 0.0
    until_s: Annotated[Seconds | None, about("End; null: until it is removed.")] = None
    reason: Annotated[str, about("Why; of a booking, its name.")] = ""
    by: Annotated[str, about("User who made it.")] = ""
    owner: Annotated[str, about("Of a booking, the user whose jobs may run there; empty: an operator's claim.")] = ""
    drain: Annotated[bool, about("Jobs that cannot move are stopped at its start.")] = False
    held_by: Annotated[tuple[str, ...] | UnsetType, about("Holders of its devices, in answers to new ones.")] = UNSET


class Host(Struct, frozen=True, kw_only=True):
    """A host."""

    name: Annotated[str, about("Name.")]
    state: Annotated[str, about("See above.")]
    why: Annotated[str, about("Why it is in this state, or what is wrong with it.")] = ""
    since_s: Annotated[Seconds, about("Since when.")] = 0.0
    drained: Annotated[str | None, about("By whom and why it is drained; null: it is not.")] = None
    address: Annotated[str | None, about("Address for other hosts.")] = None
    cpu_cores: Annotated[int | None, about("CPU cores.")] = None
    cores_used: Annotated[int, about("Cores booked by jobs.")] = 0
    memory_bytes: Annotated[int | None, about("Memory.")] = None
    memory_used_bytes: Annotated[int, about("Memory booked by jobs.")] = 0
    labels: Annotated[tuple[str, ...], about("Set by operators.")] = ()
    boot_id: Annotated[str | None, about("Id of its boot.")] = None
    jobs: Annotated[tuple[str, ...], about("Names of its jobs.")] = ()
    devices: Annotated[tuple[Device, ...], about("Its devices.")] = ()
    claims: Annotated[tuple[Claim, ...], about("Claims on them.")] = ()
    link: Annotated[dict[str, Any], about("The daemon's connection: `address`, `state`, `facts`, `failures`.")] = {}

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


class QueuePlace(Struct, frozen=True, array_like=True):
    """Place of a queued job: the job before it, if any, and the criterion that puts that one before it."""

    after: str | None = None
    criterion: str | None = None


class Change(Struct, frozen=True, kw_only=True):
    """One batch of events with every row it touched, as of after the batch."""

    number: Annotated[int, about("`id` of its last event.")]
    at_s: Annotated[Seconds, about("Time of that event.")] = 0.0
    events: Annotated[tuple[dict[str, Any], ...], about("Its events.")] = ()
    decisions: Annotated[tuple[dict[str, Any], ...], about("What was decided.")] = ()
    jobs: Annotated[tuple[Job, ...], about("Rows of the jobs that changed.")] = ()
    hosts: Annotated[tuple[Host, ...], about("Rows of the hosts that changed.")] = ()
    gone: Annotated[tuple[str, ...], about("Hosts that are no longer there.")] = ()
    order: Annotated[
        dict[str, QueuePlace | None], about("Places that changed: the job before, and the criterion.")
    ] = {}
    recovering: Annotated[list[str] | None, about("Hosts to report before anything is placed.")] = None
    notice: Annotated[str | None, about("Notice of an operator to all users; empty: none.")] = None


class Status(Struct, frozen=True, kw_only=True):
    """The daemon and its journal."""

    version: Annotated[str, about("Of clusterd.")] = ""
    json_version: Annotated[int, about("Of these rows.")] = 0
    pid: Annotated[int, about("Process.")] = 0
    started_s: Annotated[Seconds | None, about("Start of the daemon.")] = None
    epoch: Annotated[int, about("Raised at each start; agents refuse older ones.")] = 0
    state_dir: Annotated[str, about("Directory of the journal.")] = ""
    workdir_bytes_max: Annotated[int, about("Largest working directory of a job.")] = 0
    socket: Annotated[str, about("Path of the socket.")] = ""
    config: Annotated[str | None, about("File of the settings.")] = None
    policy: Annotated[str, about("Scheduling policy.")] = ""
    accounts: Annotated[str | None, about("Accounts under which jobs of others run: `own` or `shared`.")] = None
    account: Annotated[str, about("Account of the daemon.")] = ""
    jobs: Annotated[dict[str, int], about("Number of jobs by state.")] = {}
    hosts: Annotated[dict[str, str], about("State by host.")] = {}
    devices: Annotated[int, about("Number of devices.")] = 0
    leased: Annotated[int, about("Devices that jobs hold.")] = 0
    events: Annotated[int, about("Number of the newest event.")] = 0
    scheduling_s: Annotated[float, about("Duration of the newest scheduling pass.")] = 0.0
    recovering: Annotated[list[str], about("Hosts that must report before anything is placed.")] = []
    trouble: Annotated[str, about("Why nothing can be written; empty: it can.")] = ""
    notice: Annotated[str, about("Notice of an operator to all users; empty: none.")] = ""
    set_aside: Annotated[int, about("Events set aside.")] = 0
    web: Annotated[dict[str, str] | None, about("Pages for browsers: `url`, `visibility`, `trouble`.")] = None


class Baseline(Struct, frozen=True, kw_only=True):
    """The whole state at one instant."""

    status: Status = Status()
    jobs: tuple[Job, ...] = ()
    hosts: tuple[Host, ...] = ()
    order: dict[str, QueuePlace | None] = {}


class Expectation(Struct, frozen=True, kw_only=True):
    """Start and end of a job, if it were submitted now."""

    name: Annotated[str, about("Name.")]
    devices: Annotated[int, about("Devices asked for.")] = 0
    guaranteed: Annotated[bool, about("With a guarantee.")] = False
    forecast: Annotated[Forecast | None, about("Start and end; null: not known.")] = None
    plan: Annotated[str, about("Plan and devices with which it starts most often.")] = ""
    why: Annotated[str, about("Why nothing is known; empty: something is.")] = ""


class SubmittedJob(Struct, frozen=True, kw_only=True):
    """A job that was submitted, or that a dry run would stop or migrate."""

    id: Annotated[str, about("Number.")]
    name: Annotated[str, about("Name.")]
    reason: Annotated[str, about("Why it is in its state, or would be stopped or migrated.")] = ""


class DryRun(Struct, frozen=True, kw_only=True):
    """Outcome of a submit, if it were now."""

    starts: Annotated[bool, about("It would start at once.")]
    state: Annotated[str, about("State after the pass.")]
    reason: Annotated[str, about("Why.")]
    ranks: Annotated[tuple[dict[str, Any], ...], about("Where it would start: `rank`, `host` and `device` of each.")]
    promise: Annotated[Promise | None, about("Its reservation.")]
    place: Annotated[int | None, about("Place in the queue.")]
    ahead: Annotated[int, about("Number of the jobs before it.")]
    after: Annotated[JobBefore | None, about("The job just before it.")]
    stops: Annotated[tuple[SubmittedJob, ...], about("Jobs that the same pass would stop.")]
    migrates: Annotated[tuple[SubmittedJob, ...], about("Jobs that the same pass would migrate.")]


class Refusal(Struct, frozen=True, kw_only=True):
    """Reason why one item of a batch was refused."""

    job: str = ""
    message: str = ""
    exit_code: int = 1


class Cancelled(Struct, frozen=True, kw_only=True):
    """Jobs cancelled in one request."""

    jobs: tuple[Job, ...] = ()
    refused: tuple[Refusal, ...] = ()


class Array(Struct, kw_only=True):
    """An array or sweep, with its tasks counted."""

    id: Annotated[str, about("Of its first task.")]
    name: Annotated[str, about("Name.")]
    user: Annotated[str, about("Owner.")]
    most: Annotated[int, about("Tasks that may run at once; 0: any number.")]
    tasks: Annotated[int, about("Number of its tasks.")] = 0
    states: Annotated[dict[str, int], about("Number of tasks by state.")] = {}


class MigrationPreview(Struct, frozen=True, kw_only=True):
    """Predicted cost of a requested or proposed migration."""

    job: str = ""
    name: str = ""
    migrations: int = 0  # of the job so far
    stays: bool = False  # it has this plan and these devices already
    plan: str = ""
    old: str = field(name="from", default="")
    devices: tuple[str | None, ...] = ()
    reason: str = ""
    local_bytes: int = 0
    network_bytes: int = 0
    crowded: str | None = None  # why source and target ranks do not fit side by side
    predicted_downtime_s: Seconds = 0.0
    restarts: bool = False  # the job has its own training loop and restarts
    attempt: int = 0  # number of the attempt that ends then


class CheckpointWritten(Struct, frozen=True, kw_only=True):
    """A checkpoint that was written on request."""

    name: str = ""
    step: int
    path: str
    blocked_s: Seconds = 0.0
    write_s: Seconds = 0.0


class RankedPlan(Struct, frozen=True, kw_only=True):
    """A candidate plan with its prediction."""

    plan: Annotated[str, about("The plan.")]
    devices: Annotated[int, about("Number of its devices.")] = 0
    shape: Annotated[str, about("Devices on each host, as in `4+4`.")] = ""
    step_time_s: Annotated[Seconds | None, about("Predicted step time.")] = None
    lower_s: Annotated[Seconds | None, about("Its lower bound.")] = None
    upper_s: Annotated[Seconds | None, about("Its upper bound.")] = None
    device_bytes: Annotated[float | None, about("Memory of a device that it needs.")] = None
    host_bytes: Annotated[float | None, about("Memory of a host that it needs.")] = None
    measured_s: Annotated[Seconds | None, about("Newest measured step time.")] = None
    fits: Annotated[bool, about("It can run.")] = True
    why: Annotated[str, about("Why it cannot.")] = ""
    current: Annotated[bool, about("The job runs under it.")] = False


class Plans(Struct, frozen=True, kw_only=True):
    """Candidate plans of a job, best first."""

    job: str = ""
    name: str = ""
    devices: int = 0
    device_type: str = ""
    rows: tuple[RankedPlan, ...] = ()
    known: str = ""  # how well its model is known, in words


class Trial(Struct, frozen=True, kw_only=True):
    """A trial run under one plan: measured and predicted step time."""

    plan: str
    devices: int = 0
    step_time_s: Seconds | None = None
    predicted_s: Seconds | None = None
    why: str = ""
    failure: str = ""
    from_step: int | None = None


class CurvePoint(Struct, frozen=True, kw_only=True):
    """Throughput of the best plan on this many devices."""

    devices: int
    plan: str = ""
    shape: str = ""
    samples_per_s: float = 0.0
    amount: float | UnsetType = UNSET  # of the resource that the curve is over
    device_type: str | UnsetType = UNSET
    gain: float | UnsetType = UNSET  # by the next unit of it
    lower: float | UnsetType = UNSET
    upper: float | UnsetType = UNSET


class Profile(Struct, frozen=True, kw_only=True):
    """Performance model of a job's model."""

    job: str = ""
    name: str = ""
    model: str | None = None
    device_type: str = ""
    known: str = ""
    noise: float = 0.0
    drifts: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = ()
    lines: list[dict[str, Any]] = []
    coefficients: list[dict[str, Any]] = []
    over: str = "devices"
    curve: tuple[CurvePoint, ...] = ()
    html: str | UnsetType = UNSET


class Minute(Struct, frozen=True, kw_only=True):
    """Use of a device in one minute."""

    minute: Annotated[int, about("Minutes since 1970.")]
    job: Annotated[str | None, about("Job that held it.")] = None
    busy: Annotated[float | None, about("Share of the minute in which it worked.")] = None
    memory_bytes: Annotated[int | None, about("Memory in use.")] = None
    power_w: Annotated[float | None, about("Power draw.")] = None
    temperature_c: Annotated[float | None, about("Temperature.")] = None


class Usage(Struct, frozen=True, kw_only=True):
    """Newest sample of each host, and the last minutes of each device, oldest first."""

    hosts: dict[str, dict[str, Any]] = {}
    devices: dict[str, tuple[Minute, ...]] = {}


class UsageReport(Struct, frozen=True, kw_only=True):
    """Use of devices by one group."""

    group: Annotated[str, about("User, tenant, model, host or job.")]
    jobs: Annotated[int, about("Jobs that used devices.")]
    device_hours: Annotated[float, about("Hours of devices that they held.")]
    utilisation: Annotated[float | None, about("Share of these in which a device worked.")]
    idle_device_hours: Annotated[float, about("Of a host: hours of devices that no job held.")]
    outside_device_hours: Annotated[float, about("Hours of devices held outside the queue, by user or host.")]
    submitted: Annotated[int, about("Jobs that were submitted.")]
    waited_s_median: Annotated[float | None, about("Median of their time from submission to start.")]
    waited_s_longest: Annotated[float | None, about("Longest such time.")]
    device_hours_by_day: Annotated[dict[str, float], about("Of `device_hours`, those of each day.")] = {}


class FairShare(Struct, frozen=True, kw_only=True):
    """Use of one user of a tenant lately, and the parts due among those who want devices."""

    tenant: Annotated[str, about("Tenant.")]
    user: Annotated[str, about("User.")]
    device_hours: Annotated[float, about("Device-hours used, of which each half-life takes half.")]
    devices: Annotated[float, about("Devices held now, each by the weight of its type.")]
    month_hours: Annotated[float, about("Device-hours used in this calendar month.")]
    budget_hours: Annotated[
        float | None, about("Device-hours that a month has for the user, or for the tenant if less is left of its own.")
    ]
    budget_left_hours: Annotated[float | None, about("Of them left.")]
    tenant_used: Annotated[float | None, about("Part of what all tenants that want devices have used.")]
    tenant_due: Annotated[float | None, about("Part that is due to the tenant.")]
    user_used: Annotated[float | None, about("Part of what the tenant's users who want devices have used.")]
    user_due: Annotated[float | None, about("Part that is due to the user.")]


class CalendarEntry(Struct, frozen=True, kw_only=True):
    """Use of one host for some time: by a job, a booking, a claim, or its end."""

    what: Annotated[str, about("`running`, `expected` (a job that waits), `booking`, `claim` or `leaves`.")]
    host: Annotated[str, about("Host; empty: not known yet.")] = ""
    devices: Annotated[tuple[str, ...], about("Devices; empty: not known yet, or all.")] = ()
    from_s: Annotated[Seconds, about("Start; of a job that waits, as likely before as after.")] = 0.0
    until_s: Annotated[Seconds | None, about("End; of a job, expected or by its time limit; null: not known.")] = None
    user: Annotated[str, about("User.")] = ""
    job: Annotated[str | None, about("Job.")] = None
    claim: Annotated[str | None, about("Booking or claim.")] = None
    text: Annotated[str, about("The entry in words.")] = ""
