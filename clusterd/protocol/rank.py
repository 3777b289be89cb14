"""Messages of ranks to the daemon, passed on by their agent.

A rank runs code that clusterd did not write: whatever arrives here is checked before anybody acts on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from clusterd.protocol.frames import Message, ProtocolError
from clusterd.protocol.messages import OfRank, from_map, to_map


@dataclass(frozen=True)
class RankMessage:
    """Base of all messages of a rank."""

    what: ClassVar[str]  # name on the wire

    def __init_subclass__(cls, what: str) -> None:
        cls.what = what

    def to_message(self) -> Message:
        """The message as it is sent."""
        return {"what": self.what, **to_map(self)}


@dataclass(frozen=True)
class Probed(RankMessage, what="probe"):
    """Measured figures of a device and of the links between ranks, before the first step."""

    figures: dict[str, float]


@dataclass(frozen=True)
class Proved(RankMessage, what="proved"):
    """Plans of a family train what one process trains, or differ in a way that the log tells."""

    family: str


@dataclass(frozen=True)
class Orphaned(RankMessage, what="orphaned"):
    """The rank lost its peers or ran out of device memory; it holds its state and waits."""

    step: int  # -1: in the middle of an update
    may_finish: bool = False
    out_of_memory: bool = False


@dataclass(frozen=True)
class Checkpointed(RankMessage, what="checkpointed"):
    """The job's state is whole on disk."""

    step: int
    path: str
    asked: str | None = None  # path of the request, where the script chose another
    bytes: int = 0
    blocked_s: float = 0.0
    write_s: float = 0.0
    on_host: bool = False  # in a directory of the attempt, which other hosts do not see


@dataclass(frozen=True)
class CheckpointFailed(RankMessage, what="checkpoint_failed"):
    """A checkpoint could not be written; training goes on."""

    path: str
    why: str
    step: int = -1


@dataclass(frozen=True)
class Prepared(RankMessage, what="prepared"):
    """The rank is ready for a migration; both sides report the digest of the same copy plan."""

    id: str
    digest: str
    bytes: int = 0
    not_shared: str = ""  # why target ranks on its device cannot read the state from there


@dataclass(frozen=True)
class Quiesced(RankMessage, what="quiesced"):
    """A source rank finished its last step and waits."""

    id: str
    step: int
    at_s: float
    copied: tuple[float, ...] = ()  # begin and end of the copying, wall clock


@dataclass(frozen=True)
class Loaded(RankMessage, what="loaded"):
    """A target rank holds its part of the state."""

    id: str
    step: int
    verified: bool
    bytes_local: int = 0
    bytes_network: int = 0
    bytes_device: int = 0  # of the local ones: copied on the device that source and target rank share
    copied: tuple[float, ...] = ()  # begin and end of the copying, wall clock


@dataclass(frozen=True)
class Resumed(RankMessage, what="resumed"):
    """A source rank trains on after a migration that was aborted."""

    id: str
    step: int


@dataclass(frozen=True)
class Trains(RankMessage, what="trains"):
    """A target rank begins its first step."""

    id: str
    step: int
    at_s: float


@dataclass(frozen=True)
class Failed(RankMessage, what="failed"):
    """The rank's part of a migration failed."""

    id: str
    why: str
    phase: str = ""
    out_of_memory: bool = False
    refused: str = ""


KINDS = {kind.what: kind for kind in RankMessage.__subclasses__()}


@dataclass(frozen=True)
class FromRank(OfRank):
    """A rank's message with the rank that sent it; the agent fills in everything but `message`."""

    message: RankMessage
    at_s: float = 0.0


def rank_message(data: Any) -> RankMessage:
    """Check what a rank sent.

    Raises:
        ProtocolError: it is no message of this protocol.
    """
    kind = data.get("what") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ProtocolError("a rank sent a message of an unknown kind")
    return from_map(KINDS[kind], data, kind)
