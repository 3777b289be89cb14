"""Requests of the daemon to an agent, each with the type of its reply; launches are in `launch`."""

from __future__ import annotations

import builtins
from dataclasses import dataclass, field
from typing import Any

from clusterd.protocol.agent import HelloReply, RankRow
from clusterd.protocol.launch import Address, DatasetSpec, LaunchRequest, MigrationRequest
from clusterd.protocol.messages import Done, OfAttempt, OfGeneration, OfRank, Request, by_verb

# ---- attempts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stopped:
    """State of all ranks, and pids of processes that outlived them."""

    ranks: tuple[RankRow, ...]
    swept: tuple[int, ...] = ()


@dataclass(frozen=True)
class StopRanks(OfGeneration, Request[Stopped], verb="stop"):
    """Stop a generation of an attempt; answered when no process of it is left."""

    grace_s: float = 0.0
    reason: str = "stopped"
    keep: bool = False  # leave the state of the last step in the host's memory
    done: bool = False  # the job is over: write the trained result
    save: str | None = None  # write a checkpoint to this directory first; "": to one of the attempt on this host


@dataclass(frozen=True)
class BuiltEnvironment:
    """Interpreter of a built environment, and the seconds that the build took; 0: it was there."""

    python: str  # "": it is not built, and was not to be
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class BuildEnvironment(OfGeneration, Request[BuiltEnvironment], verb="build_environment"):
    """Build the Python environment of a job for an attempt, or find the one that is built; a stop cancels it."""

    uv: str = ""  # uv.lock or pyproject.toml of a project with both, in the workdir
    requirements: str = ""  # instead: a requirements file for pip, in the workdir
    python: str | None = None  # interpreter to build it with
    snapshot: str | None = None  # digest of the submitted workdir
    workdir: str | None = None  # directory on the host, instead
    env: dict[str, str] = field(default_factory=dict, repr=False)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    only_look: bool = False  # do not build it


@dataclass(frozen=True)
class Forgotten:
    """Bytes that were freed."""

    bytes: int


@dataclass(frozen=True)
class ForgetAttempt(OfAttempt, Request[Forgotten], verb="forget"):
    """Remove an attempt's files."""


@dataclass(frozen=True)
class Chunk:
    """A range of a file that grows."""

    data: bytes
    offset: int  # where the next read starts
    size: int  # of the file
    done: bool = False  # its writer ended, and `data` reaches its end


@dataclass(frozen=True, kw_only=True)
class ReadLog(OfAttempt, Request[Chunk], verb="logs"):
    """Read a rank's output."""

    generation: int | None = None  # None: the newest
    rank: int
    offset: int
    limit: int
    streams: bool = False  # instead, where it changes between stdout and stderr: `forkserver.STREAM_CHANGE`


@dataclass(frozen=True, kw_only=True)
class ReadSteps(OfAttempt, Request[Chunk], verb="steps"):
    """Read the training steps, one JSON object a line."""

    generation: int | None = None
    offset: int
    limit: int


@dataclass(frozen=True)
class Record:
    """Sealed record of a launch; empty: a daemon of an earlier version made the launch."""

    data: bytes = field(repr=False)


@dataclass(frozen=True)
class ReadRecord(OfGeneration, Request[Record], verb="record"):
    """Read the record that came with a launch."""


@dataclass(frozen=True)
class FileRow:
    """A file that a job wrote."""

    path: str
    bytes: int
    at_s: float
    is_program: bool = False  # its owner may execute it
    inode: int = 0  # by which a file that several nodes share is one
    name: builtins.bytes = b""  # the path itself, where it has letters that are shown escaped


@dataclass(frozen=True)
class Files:
    """Files of an attempt, and the number of those left out."""

    files: tuple[FileRow, ...]
    more: int = 0


@dataclass(frozen=True)
class ListFiles(OfAttempt, Request[Files], verb="files"):
    """List the files that an attempt wrote, those behind a path in their order."""

    after: str = ""


@dataclass(frozen=True)
class FileChunk:
    """A range of a file, and the file's size."""

    data: bytes
    size: int


@dataclass(frozen=True)
class ReadFile(OfAttempt, Request[FileChunk], verb="file"):
    """Read a file of an attempt."""

    path: str
    offset: int
    limit: int
    written: bool = False  # only if the job wrote it: not as it was submitted
    name: bytes = b""  # of its row, in the place of the path


@dataclass(frozen=True)
class Model:
    """Shape of a model; None: the script did not reach its description."""

    model: dict[str, Any] | None


@dataclass(frozen=True)
class ReadModel(OfAttempt, Request[Model], verb="model"):
    """Read the result of a model's inspection."""

    generation: int | None = None


# ---- before a launch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Has:
    """True if it is there."""

    have: bool


@dataclass(frozen=True)
class HasWorkdir(Request[Has], verb="snapshot_has"):
    """Check for a submitted workdir."""

    digest: str


@dataclass(frozen=True)
class PutWorkdir(Request[Done], verb="snapshot_put"):
    """Send a chunk of a workdir's archive."""

    digest: str
    offset: int
    data: bytes = field(repr=False)
    last: bool


@dataclass(frozen=True)
class Port:
    """A TCP port of the host."""

    port: int


@dataclass(frozen=True)
class LeasePort(OfGeneration, Request[Port], verb="port"):
    """Lease a port for the ranks' rendezvous."""


@dataclass(frozen=True)
class ServeDataset(Request[Port], verb="data_serve"):
    """Serve a folder of this host to other hosts."""

    address: str  # of this host, by which others know it
    dataset: str
    path: str
    token: str = field(repr=False)


@dataclass(frozen=True)
class SetDatasets(OfAttempt, Request[Done], verb="data_from"):
    """Tell an attempt's ranks where their data sets are now."""

    datasets: dict[str, DatasetSpec]


@dataclass(frozen=True)
class HostCheck:
    """Results of a host's checks."""

    ends_at_logout: bool | None = None  # ranks are killed when the user logs out
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)  # seconds or an error, by host
    environment: dict[str, Any] | None = None  # None: not checked
    enforced: tuple[str, ...] | None = None  # controllers that limit jobs; None: no control groups, or not known
    lingers: bool | None = None  # the user's service manager outlives logins; None: the agent is of an older version
    kernels: dict[str, dict[str, Any]] = field(default_factory=dict)  # seconds or an error, by uuid of a GPU
    all_reduce: dict[str, Any] | None = None  # likewise, over several GPUs; None: there are none
    access: dict[str, Any] | None = None  # pairs of uuids that do not reach each other's memory, or an error; likewise
    small_pages: bool = False  # of /dev/shm, although the kernel has large ones
    disk_free_bytes: int | None = None  # where jobs write; None: the agent is of an older version
    login_fault: str | None = None  # why jobs do not get the login's variables; empty: they do; None: likewise
    login_note: str = ""  # why they get those of a login without a prompt


@dataclass(frozen=True)
class CheckHost(Request[HostCheck], verb="check"):
    """Check the host, its connections to others, and an environment for jobs."""

    peers: dict[str, Address]
    python: str | None = None
    gpus: tuple[str, ...] = ()  # uuids of those to compute on with that Python


@dataclass(frozen=True)
class WriteInput(OfGeneration, Request[Done], verb="input"):
    """Write to the input of a command's first process; answered when it has been taken."""

    data: bytes = field(repr=False)
    offset: int = 0  # of `data` in all input
    end: bool = False  # nothing comes after it


@dataclass(frozen=True)
class SignalRanks(OfGeneration, Request[Done], verb="signal"):
    """Send a signal to all processes of the ranks' sessions; `first_only`: to the ranks alone."""

    number: int
    first_only: bool = False


# ---- migrations and state snapshots ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServeSegments(Request[Port], verb="fabric"):
    """Serve segments to other agents; an agent may not be asked for its address by a daemon of an earlier version."""

    address: str = ""


@dataclass(frozen=True)
class AdmitReaders(Request[Port], verb="snapshot_admit"):
    """Serve a set of state snapshots to whoever proves a token."""

    set: str
    token: str = field(repr=False)
    address: str = ""


@dataclass(frozen=True)
class Step:
    """Number of a training step."""

    step: int


@dataclass(frozen=True)
class KeepReplica(Request[Step], verb="snapshot_keep"):
    """Fetch a state snapshot from the host of its rank."""

    name: str
    set: str
    token: str = field(repr=False)
    address: Address
    bytes: int


@dataclass(frozen=True)
class ReplicaIsDone(Request[Done], verb="snapshot_kept"):
    """Release the rank that waits for a replica of its state snapshot."""

    name: str


@dataclass(frozen=True)
class Receivers:
    """Number of connected ranks that got the event; others get it when they connect."""

    ranks: int


@dataclass(frozen=True)
class OfMigration(OfGeneration):
    """Base of requests about the ranks of one side of a migration."""

    move: str  # id of the migration


@dataclass(frozen=True)
class MoveRanks(OfGeneration, Request[Receivers], verb="move"):
    """Have source ranks prepare for a migration."""

    move: MigrationRequest


@dataclass(frozen=True)
class QuiesceRanks(OfMigration, Request[Receivers], verb="quiesce"):
    """Have source ranks publish their state."""


@dataclass(frozen=True)
class AbortRanks(OfMigration, Request[Receivers], verb="abort"):
    """Have source ranks train on."""


@dataclass(frozen=True)
class ResumeRanks(OfMigration, Request[Receivers], verb="resume"):
    """Have target ranks train."""

    record: bytes = field(default=b"", repr=False)  # as of `LaunchRequest`


@dataclass(frozen=True)
class SendToRanks(OfGeneration, Request[Receivers], verb="tell"):
    """Send ranks another event of `clusterd.protocol.control`."""

    message: dict[str, Any]


@dataclass(frozen=True)
class DropMigration(Request[Done], verb="drop"):
    """Drop the segments of a migration, or of a set of state snapshots."""

    move: str


# ---- terminals ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Screen:
    """Kind and size of a user's terminal."""

    columns: int
    rows: int
    term: str = "dumb"


@dataclass(frozen=True)
class Terminal:
    """Name of a terminal."""

    terminal: str


@dataclass(frozen=True)
class OpenTerminal(OfRank, Request[Terminal], verb="terminal_open"):
    """Run a command, or a shell, beside a rank."""

    argv: tuple[str, ...]
    secrets: dict[str, str] = field(repr=False)
    screen: Screen | None = None  # None: pipes
    env: dict[str, str] = field(default_factory=dict, repr=False)  # the job's variables, which agents do not store


@dataclass(frozen=True)
class OpenPort(OfRank, Request[Terminal], verb="port_open"):
    """Connect to a port of the host's 127.0.0.1; the connection is read and written like a terminal."""

    port: int


@dataclass(frozen=True)
class OfTerminal:
    """Base of requests about an open terminal."""

    terminal: str


@dataclass(frozen=True)
class Output:
    """New output, and the exit code once the output is complete."""

    data: bytes
    exit_code: int | None = None
    end: bool = False  # of a port: there will be no more output, and input is still taken


@dataclass(frozen=True)
class ReadTerminal(OfTerminal, Request[Output], verb="terminal_read"):
    """Wait for output."""


@dataclass(frozen=True)
class WriteTerminal(OfTerminal, Request[Done], verb="terminal_write"):
    """Write input, resize the window, or end piped input."""

    data: bytes | None = field(default=None, repr=False)
    screen: Screen | None = None
    end: bool = False


@dataclass(frozen=True)
class HoldTerminal(OfTerminal, Request[Done], verb="terminal_hold"):
    """Keep a terminal open."""


@dataclass(frozen=True)
class CloseTerminal(OfTerminal, Request[Done], verb="terminal_close"):
    """Hang up."""


# ---- the agent itself --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChallengeReply:
    """Nonce that the next hello answers, and the newest event that the daemon's cluster named; empty: none."""

    nonce: str
    seen: dict[str, Any] = field(default_factory=dict)  # see `clusterd.protocol.agent.SeenByAgent`
    identity: str = ""  # of the agent and its machine; empty: the agent is of an older version


@dataclass(frozen=True)
class Challenge(Request[ChallengeReply], verb="challenge"):
    """First request on a connection."""

    daemon: str = ""


@dataclass(frozen=True)
class Hello(Request[HelloReply], verb="hello"):
    """Prove the cluster's key and lead the host from now on."""

    protocol: int  # version
    daemon: str
    epoch: int
    proof: str | None = field(default=None, repr=False)  # None: the agent sent no nonce
    newest: tuple[int, str] | None = None  # id and checksum of the newest event


@dataclass(frozen=True)
class FactsReply:
    """Facts of the host; `clusterd.agent.host.facts` returns more, for display."""

    boot_id: str


@dataclass(frozen=True)
class Facts(Request[FactsReply], verb="facts"):
    """Find the host's facts out again."""


@dataclass(frozen=True)
class Heartbeat(Request[Done], verb="heartbeat"):
    """Show that the agent does not hang."""


@dataclass(frozen=True)
class Shutdown(Request[Done], verb="shutdown"):
    """Exit, unless something runs here."""

    force: bool = False


REQUESTS = by_verb(
    LaunchRequest, BuildEnvironment, StopRanks, ForgetAttempt, ReadLog, ReadSteps, ReadRecord, ListFiles, ReadFile,
    ReadModel, HasWorkdir, PutWorkdir, LeasePort, ServeDataset, SetDatasets, CheckHost, ServeSegments, AdmitReaders,
    KeepReplica, ReplicaIsDone, MoveRanks, QuiesceRanks, AbortRanks, ResumeRanks, SendToRanks, DropMigration,
    WriteInput, SignalRanks,
    OpenTerminal, OpenPort, ReadTerminal, WriteTerminal, HoldTerminal, CloseTerminal, Facts, Heartbeat, Shutdown,
)  # fmt: skip
