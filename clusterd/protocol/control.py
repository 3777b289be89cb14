"""Messages between an agent and its ranks: a rank's requests, and events in both directions.

Ranks run code of users: the agent checks what arrives against these classes before it looks at it. What a rank reports
to the daemon is in `rank`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from clusterd.protocol.launch import Address, MigrationRequest
from clusterd.protocol.messages import Done, Event, OfRank, Request, by_event, by_verb

# ---- events of the agent -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stop(Event, event="stop"):
    """Finish the step and exit."""

    reason: str = ""
    deadline_s: float = 0.0
    keep: bool = False  # leave the state of the last step in the host's memory
    done: bool = False  # the job is over: write the trained result
    save: str | None = None  # as in `StopRanks`


@dataclass(frozen=True)
class BeginMigration(Event, event="move"):
    """Prepare to hand the state over."""

    move: MigrationRequest


@dataclass(frozen=True)
class OfMigration:
    """Base of events about a migration under way."""

    move: str  # its id


@dataclass(frozen=True)
class Quiesce(OfMigration, Event, event="quiesce"):
    """Finish the step and publish the state."""


@dataclass(frozen=True)
class Abort(OfMigration, Event, event="abort"):
    """The migration failed: train on."""


@dataclass(frozen=True)
class Resume(OfMigration, Event, event="resume"):
    """The migration switched: target ranks train."""


@dataclass(frozen=True)
class TakeCheckpoint(Event, event="checkpoint"):
    """Write the state to disk."""

    path: str


@dataclass(frozen=True)
class UseCores(Event, event="cores"):
    """Use another number of CPU threads from the next step on."""

    each: int


@dataclass(frozen=True)
class PeersLost(Event, event="peers_lost"):
    """Other ranks are gone; collectives with them would not end."""

    reason: str = ""


@dataclass(frozen=True)
class SegmentMade(Event, event="room"):
    """A segment exists that will be filled: it may be mapped."""

    name: str
    path: str
    move: str = ""


@dataclass(frozen=True)
class SegmentPublished(Event, event="segment"):
    """The part of one source rank is complete in a segment."""

    move: str
    name: str  # of the source rank's segment
    path: str  # where it can be read on this host
    meta: dict[str, Any]
    where: str  # "outbox": of a source rank on this host; "inbox": fetched; "device": a description of its memory
    source: int | None = None  # the source rank


@dataclass(frozen=True)
class OfSharedDevice(OfMigration):
    """Base of messages between a source and a target rank on one device."""

    source: int
    target: int
    why_not: str = ""  # the source rank's device memory could not be opened


@dataclass(frozen=True)
class DeviceOpened(OfSharedDevice, Event, event="device_opened"):
    """A target rank has opened the device memory of a source rank, or says why not."""


@dataclass(frozen=True)
class FetchFailed(Event, event="fetch_failed"):
    """A segment of another host could not be fetched."""

    move: str
    name: str
    why: str


@dataclass(frozen=True)
class Connected(Event, event="connected"):
    """The rank is connected to an agent; raised within the rank, never sent."""


TO_RANKS = by_event(
    Stop, BeginMigration, Quiesce, Abort, Resume, TakeCheckpoint, UseCores, PeersLost, SegmentMade, SegmentPublished,
    FetchFailed, DeviceOpened,
)  # fmt: skip

# ---- events of a rank --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready(Event, event="ready"):
    """The rank trains; repeated to each new agent."""


@dataclass(frozen=True)
class Report(Event, event="said"):
    """A message of `clusterd.protocol.rank`, for the daemon, which checks it."""

    said: dict[str, Any]


@dataclass(frozen=True)
class FailedEvent(Event, event="failed"):
    """As `ReportFailure`, of ranks that an agent of an earlier version started."""

    reason: str
    message: str


OF_RANKS = by_event(Ready, Report, FailedEvent)

# ---- requests of a rank ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankIdentity(OfRank):
    """Base of first messages on a connection: the rank, and its proof."""

    token: str = field(repr=False)


@dataclass(frozen=True)
class RankHello(RankIdentity, Request[Done], verb="rank_hello"):
    """First message of a rank."""

    pid: int = 0


@dataclass(frozen=True)
class DataHello(RankIdentity, Request[Done], verb="data_hello"):
    """First message of a connection over which a rank's process reads data sets."""


@dataclass(frozen=True)
class SegmentReply:
    """Path of a segment; `kind` is "shm" or "file"."""

    path: str
    kind: str = "file"


@dataclass(frozen=True)
class MakeSegment(Request[SegmentReply], verb="segment"):
    """Make a segment for this rank to fill."""

    name: str
    bytes: int


@dataclass(frozen=True)
class PublishSegment(Request[Done], verb="publish"):
    """A segment is complete; of a state snapshot, the reply comes when it has a replica."""

    name: str
    meta: dict[str, Any] = field(default_factory=dict)
    wait: bool = True  # False: for no replica


@dataclass(frozen=True)
class FetchSource:
    """Ranges of another host's segment."""

    name: str
    address: Address
    ranges: tuple[tuple[int, int], ...]  # offset and length
    offset: int  # in the inbox
    source: int | None = None  # rank that fills the segment


@dataclass(frozen=True)
class FetchSegments(Request[SegmentReply], verb="fetch"):
    """Make this host's inbox of a migration and fill it from other hosts."""

    move: str
    name: str
    bytes: int
    sources: tuple[FetchSource, ...]


@dataclass(frozen=True)
class SegmentsReply:
    """Segments of a migration that were published, and all that exist."""

    segments: tuple[SegmentPublished, ...] = ()
    rooms: tuple[SegmentMade, ...] = ()


@dataclass(frozen=True)
class ListSegments(Request[SegmentsReply], verb="segments"):
    """List a migration's segments, for a rank that connected later."""

    move: str


@dataclass(frozen=True)
class ReportDeviceOpened(OfSharedDevice, Request[Done], verb="device_opened"):
    """Tell a source rank on this host that its device memory was opened, or why not."""


@dataclass(frozen=True)
class ReportFailure(Request[Done], verb="failed"):
    """The rank is about to exit; the agent records why."""

    reason: str
    message: str


@dataclass(frozen=True)
class GpuState:
    """State of a rank's GPU by its driver."""

    fault: str = ""  # why it is unfit; empty: it is fit, as far as the driver says
    foreign_bytes: int = 0  # of its memory, held by processes outside the queue


@dataclass(frozen=True)
class InspectGpu(Request[GpuState], verb="gpu"):
    """Ask the driver about the rank's GPU after an error of unknown cause."""


@dataclass(frozen=True)
class Flush(Request[Done], verb="flush"):
    """Answered once the rank's earlier reports are on their way to the daemon."""


FileReference = tuple[int, str]
"""Size and version of a file of a data set."""


@dataclass(frozen=True)
class DataReply:
    """Entry at a path, or bytes of a file; all absent: nothing is there."""

    file: FileReference | None = None
    folder: dict[str, FileReference | None] | None = None  # None: a folder
    data: bytes | None = None


@dataclass(frozen=True)
class LookUpData(Request[DataReply], verb="data_look"):
    """Look up a path of a data set."""

    dataset: str
    path: str


@dataclass(frozen=True)
class ReadData(Request[DataReply], verb="data_read"):
    """Read a range of a file of a data set."""

    dataset: str
    path: str
    file: FileReference
    offset: int
    length: int


REQUESTS = by_verb(
    RankHello, DataHello, MakeSegment, PublishSegment, FetchSegments, ListSegments, ReportDeviceOpened, ReportFailure,
    InspectGpu, Flush, LookUpData, ReadData,
)  # fmt: skip
