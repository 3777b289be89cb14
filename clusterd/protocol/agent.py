"""Messages of agents to the daemon: the reply to its hello, and what they report unasked.

A host may run an agent of another version, or code of somebody who got into it: every field is checked here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from clusterd.exit_reasons import Reason
from clusterd.protocol.frames import Message
from clusterd.protocol.messages import Event, OfAttempt, OfGeneration, OfRank, by_event, from_map, read_event
from clusterd.protocol.rank import FromRank, rank_message


@dataclass(frozen=True)
class ProcessRow:
    """A process on a GPU."""

    pid: int
    user: str | None = None
    memory_bytes: int | None = None
    ours: bool = False  # of an attempt of this agent


@dataclass(frozen=True)
class GpuRow:
    """A GPU, as its driver reports it."""

    uuid: str
    index: int
    name: str
    memory_bytes: int
    exclusive: bool = False
    processes: tuple[ProcessRow, ...] = ()
    unlisted_bytes: int | None = 0  # in use by no process that the driver lists
    compute_capability: str = ""  # "8.0"; empty: not known
    slice: int | None = None  # number of a MIG slice of the GPU; None: the whole GPU
    fault: str = ""  # why it is unfit for jobs: fatal XIDs since boot, uncorrectable ECC errors
    pcie_generation: int = 0  # of its slot; 0: not reported
    pcie_width: int = 0
    nvlinks: int = 0  # that are active
    nvlink_version: int = 0
    nvlink_peers: tuple[str, ...] = ()  # uuids of GPUs of the host that it reaches over NVLink


@dataclass(frozen=True)
class AddressRow:
    """A network address of the host."""

    interface: str
    address: str
    speed_mbit: int = 0


@dataclass(frozen=True)
class InfinibandPort:
    """An active port of a card for InfiniBand or RoCE."""

    card: str
    speed_mbit: int


@dataclass(frozen=True)
class Facts:
    """Facts of a host that scheduling needs; the whole map is kept for display (`clusterd.agent.host.facts`)."""

    boot_id: str
    cpu_cores: int
    memory_bytes: int
    cpu_ids: tuple[int, ...]
    cpu_model: str | None = None
    gpus: tuple[GpuRow, ...] = ()
    addresses: tuple[AddressRow, ...] = ()
    infiniband: tuple[InfinibandPort, ...] = ()
    gpu_error: str | None = None  # why GPUs that may be there are not among `gpus`
    runtimes: dict[str, str] = field(default_factory=dict)  # of containers, each with why it cannot be used, or ""


@dataclass(frozen=True)
class RankRow:
    """State of one rank on the agent's host."""

    rank: int
    state: str  # "running", "exited" or "lost"
    pid: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    reason: Reason | None = None
    at_s: float | None = None
    message: str = ""  # the rank's own, where clusterd's training loop ended it


@dataclass(frozen=True)
class AttemptRow(OfGeneration):
    """One generation of an attempt on the agent's host."""

    ranks: tuple[RankRow, ...]
    kind: str = ""


@dataclass(frozen=True)
class StateSnapshotRow:
    """A state snapshot of one rank in the host's memory."""

    name: str
    step: int
    bytes: int = 0


@dataclass(frozen=True)
class HelloReply:
    """The agent's reply to the daemon's hello: who it is, and all that it runs or has records of."""

    agent: str
    version: str
    boot_id: str
    now_s: float
    facts: dict[str, Any]  # see `Facts`
    attempts: tuple[AttemptRow, ...]
    snapshots: tuple[StateSnapshotRow, ...] = ()
    machine: str = ""
    orphaned: tuple[RankReport, ...] = ()  # of ranks that wait for a migration, whoever heard them before


@dataclass(frozen=True)
class RankExited(OfRank, Event, event="rank_exited"):
    """A rank's process exited."""

    reason: Reason
    exit_code: int | None = None
    signal: int | None = None
    at_s: float | None = None
    message: str = ""


@dataclass(frozen=True)
class Progress(OfGeneration, Event, event="progress"):
    """Steps that an attempt finished since the last report."""

    step: int
    loss: float | None
    step_time_s: float
    steps: tuple[tuple[int, float], ...] = ()  # (step, seconds) under the current plan
    phases: dict[str, float] = field(default_factory=dict)
    device_bytes: int = 0
    host_bytes: int = 0
    overhead_bytes: int = 0  # device memory that no tensor uses; 0: not measured
    plan: str = ""
    samples: int | None = None
    at_s: float | None = None
    last: bool = False
    is_nan: bool | None = None  # there is a loss, and it is not a number


@dataclass(frozen=True)
class StateSnapshotTaken(OfRank, Event, event="snapshot"):
    """A rank wrote a new state snapshot into the host's memory, and waits for its replica."""

    name: str
    step: int
    bytes: int


@dataclass(frozen=True)
class RankReport(OfRank, Event, event="rank_said"):
    """A rank sent a message for the daemon, which `report` checks; it arrives as `FromRank`."""

    said: Any
    at_s: float = 0.0


@dataclass(frozen=True)
class DeviceUse:
    """Use of a GPU; None: its driver does not report it."""

    uuid: str
    busy: float | None = None  # share of the time in which a kernel ran
    memory_used_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None


@dataclass(frozen=True)
class AttemptUse(OfAttempt):
    """Use of a host by the processes of one attempt."""

    cores: float  # busy on average since the last sample
    memory_bytes: int
    device_memory: dict[str, int] = field(default_factory=dict)  # bytes by uuid of the GPU, as its driver tells


@dataclass(frozen=True)
class Usage(Event, event="usage"):
    """Sample of what is in use on the host."""

    cpu_cores: int
    memory_bytes: int
    memory_used_bytes: int
    devices: tuple[DeviceUse, ...] = ()
    attempts: tuple[AttemptUse, ...] = ()


@dataclass(frozen=True)
class FactsChanged(Event, event="facts"):
    """The host's facts changed."""

    facts: dict[str, Any]  # see `Facts`


@dataclass(frozen=True)
class Superseded(Event, event="superseded"):
    """The host follows a newer daemon of the cluster from now on, and refuses this one."""

    by: int  # its epoch


@dataclass(frozen=True)
class SeenByAgent:
    """Newest daemon of a cluster, and the newest event that it named, as an agent has seen them."""

    epoch: int
    event: int
    checksum: str


Report = RankExited | Progress | StateSnapshotTaken | FactsChanged | Usage | FromRank

Sent = RankExited | Progress | StateSnapshotTaken | FactsChanged | Usage | RankReport
_KINDS: dict[str, type[Sent]] = by_event(RankExited, Progress, StateSnapshotTaken, FactsChanged, Usage, RankReport)


def hello_reply(data: Any) -> HelloReply:
    """Check an agent's reply to hello.

    Raises:
        ProtocolError: it is none.
    """
    return from_map(HelloReply, data, "hello")


def report(message: Message) -> Report:
    """Check what an agent reported unasked.

    Raises:
        ProtocolError: it is no message of this protocol; names the message and the field.
    """
    sent = read_event(_KINDS, message)
    return from_rank(sent) if isinstance(sent, RankReport) else sent


def from_rank(sent: RankReport) -> FromRank:
    """Check what a rank sent by its agent.

    Raises:
        ProtocolError: it is no message of a rank.
    """
    return FromRank(sent.job, sent.attempt, sent.generation, sent.rank, rank_message(sent.said), sent.at_s)
