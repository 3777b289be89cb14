"""Launch of ranks: the daemon's request to an agent, and the file by which a rank gets its part of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from clusterd.protocol.messages import OfGeneration, Request

FORK_SERVER_START_TIMEOUT_S = 300.0
"""Longest start of a fork server: importing torch from a cold network file system takes minutes."""

STEPS_VARIABLE = "CLUSTERD_STEPS"
"""Environment variable of a rank: number of steps instead of that in the script."""

SAME_VARIABLE = "CLUSTERD_SAME_LOSS"
"""Environment variable of a rank: the first step from a checkpoint must have the loss that it had for its writer."""

SCHEDULE_VARIABLE = "CLUSTERD_SCHEDULE"
"""Environment variable of a rank: ``script`` for parameter groups and schedule of the script, not of a checkpoint."""

STAGE_VARIABLE = "CLUSTERD_STAGE"
"""Environment variable of a rank: the stage of the script that its job trains."""


@dataclass(frozen=True)
class DeviceSpec:
    """Device of a rank; of a command, all that it holds on its host."""

    kind: str = ""  # "cuda", "cpu", or "": cuda if available
    uuid: str = ""  # several: separated by commas
    cores: tuple[int, ...] = ()  # that the rank is pinned to; empty: not pinned
    threads: int = 0  # of intra-op parallelism; 0: not set


@dataclass(frozen=True)
class DatasetSpec:
    """A data set as seen from one host."""

    path: str | None = None  # on this host
    from_: tuple[Address, ...] = ()  # agents that serve it, where it is not
    token: str = ""


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """One rank of a launch: its place among the ranks, and its device."""

    rank: int
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = ""  # "": ranks need no rendezvous
    master_port: int = 0
    interface: str | None = None  # for the ranks' traffic
    plan: dict[str, Any] | None = None
    device: DeviceSpec = DeviceSpec()
    hosts: int = 1  # number of hosts of all ranks
    node: int | None = None  # of a command: position of this host among them


@dataclass(frozen=True)
class StartedRank:
    """A rank with its process; `pid` is 0 where a stop came first."""

    rank: int
    pid: int
    start_time: int


@dataclass(frozen=True)
class Launched:
    """All ranks of the generation on this host."""

    ranks: tuple[StartedRank, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)  # of Python, torch, ... as far as they are known


@dataclass(frozen=True, kw_only=True)
class ForRanks:
    """Base of launch request and rank file: fields that pass through the agent to every rank."""

    restore: str | None = None  # directory of the checkpoint to restore
    final: str | None = None  # directory of the final checkpoint
    standby: bool = False  # target ranks of a migration
    move: MigrationRequest | None = None
    data_cache: str | None = None  # directory; None: the agent's own
    snapshot_every: int = 0  # steps between state snapshots; 0: none
    probe: bool = False  # measure devices and links first
    proven: tuple[str, ...] = ()  # families of plans that are known to train as one process
    group_token: str = field(default="", repr=False)  # signs objects that ranks send each other
    note: str = ""  # first line of the log of rank 0


@dataclass(frozen=True, kw_only=True)
class LaunchRequest(OfGeneration, ForRanks, Request[Launched], verb="launch"):
    """Ranks of one generation of an attempt to start on a host; agents store it without secrets and variables."""

    kind: str  # a `JobKind`
    argv: tuple[str, ...]
    ranks: tuple[RankSpec, ...]
    born_s: float = 0.0  # when the job was submitted: tells it from another one with its id
    env: dict[str, str] = field(default_factory=dict, repr=False)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    snapshot: str | None = None  # digest of the submitted workdir
    workdir: str | None = None  # directory on the host, instead
    python: str | None = None  # interpreter of the job's environment
    container: str = ""  # "docker:IMAGE", "podman:IMAGE", "apptainer:IMAGE"; "": none
    mounts: tuple[str, ...] = ()  # "SOURCE", "SOURCE:TARGET", "SOURCE:TARGET:ro"
    clean_env: bool = False  # none of the variables of the account's login
    is_attached: bool = False  # somebody waits for its output, stdout and stderr apart
    reads_input: bool = False  # of a command: its first process gets input from who waits
    all_tasks: int = 1  # processes of a command on all of its hosts, where they are its ranks
    grace_s: float = 0.0
    datasets: dict[str, DatasetSpec] = field(default_factory=dict)
    output: str = ""  # file that the log of its first process is; "": the attempt's own
    memory_bytes: int = 0  # of the host, that all ranks on it may use together; 0: not limited
    cores: int = 0  # booked for them on the host; 0: unknown
    record: bytes = field(default=b"", repr=False)  # of the job, sealed, for a daemon with an older journal
    gpu_indices: dict[str, int] = field(default_factory=dict)  # CUDA index by uuid; filled in by the agent


@dataclass(frozen=True, kw_only=True)
class RankFile(RankSpec, ForRanks):
    """Content of a rank's file: its place, and what the job's ranks have in common."""

    job: str
    attempt: int
    generation: int = 0
    token: str = field(default="", repr=False)  # proves to the agent that a process is this rank
    control_socket: str = ""
    directory: str | None = None  # of the attempt on this host
    steps_file: str | None = None
    datasets: dict[str, str | None] = field(default_factory=dict)  # folder on this host by name


Address = tuple[str, int]

PROOF = ".proof"
"""Suffix of a migration's id in the names of segments of its proof."""


@dataclass(frozen=True)
class SideRequest:
    """Source ranks, or target ranks, in the order of their numbers."""

    generation: int
    plan: dict[str, Any]
    hosts: tuple[str, ...]
    devices: tuple[str | None, ...] = ()


@dataclass(frozen=True)
class SnapshotSegments:
    """Segments that ranks published at one step, by rank: their names, and the hosts that have them."""

    names: tuple[str, ...]
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class MigrationRequest:
    """One migration from a plan to another; every rank computes the same copy plan from it."""

    id: str
    shape: dict[str, Any]  # of the model
    old: SideRequest
    new: SideRequest
    token: str = ""  # by which agents let each other read its segments
    lost: tuple[int, ...] = ()  # source ranks that are gone
    step: int | None = None  # with lost ranks: step that survivors must complete, if they can
    proof_s: float = 0.0  # time for source ranks to publish a state and the steps after it; 0: there is no proof
    makes_room: bool = False  # source ranks free their memory before target ranks start
    fabric: dict[str, Address] = field(default_factory=dict)  # where agents serve segments, by host
    host: str | None = None  # of the receiving ranks
    snapshot: SnapshotSegments | None = None  # source of the state, instead of ranks
    sets: dict[str, str] = field(default_factory=dict)  # tokens of the state snapshots that are read, by set
