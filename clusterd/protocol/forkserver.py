"""Messages between an agent and its fork servers, and the record of a rank's process, which is on disk too."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from clusterd.exit_reasons import Reason
from clusterd.protocol.messages import Done, Event, Request, by_verb


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, also after its pid was reused: with its start time in clock ticks since boot."""

    pid: int = 0
    start_time: int = 0


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """State of a rank's process, as its fork server writes it."""

    pid: int
    start_time: int
    boot_id: str
    state: str  # "running", "exited" or "lost"
    exit_code: int | None = None
    signal: int | None = None
    reason: Reason | None = None
    at_s: float | None = None  # of the last change
    generation: int = 0
    spawner: ProcessIdentity = ProcessIdentity()
    cgroup: str = ""  # directory of the control group of its generation; "": none


@dataclass(frozen=True)
class ServerState:
    """The fork server's process, its ranks, and exit records that are not on disk, by path of the record."""

    pid: int
    ranks: dict[str, int] = field(default_factory=dict)
    ended: tuple[tuple[str, RankRecord], ...] = ()


@dataclass(frozen=True)
class ServerHello(Request[ServerState], verb="hello"):
    """First request of an agent."""


STREAM_CHANGE = struct.Struct("<Q")
"""Offset in a log at which it changes from stdout, which begins, to stderr or back."""


@dataclass(frozen=True, kw_only=True)
class Spawn(Request[ProcessIdentity], verb="spawn"):
    """Start one rank."""

    generation: int
    kind: str  # a `JobKind`
    mode: str  # "python": run a script in the fork; "exec": execute argv
    argv: tuple[str, ...]
    env: dict[str, str] = field(repr=False)
    cwd: str
    cores: tuple[int, ...]  # that it is pinned to; empty: not pinned
    threads: int
    log: str  # path
    state: str  # path of its record
    stop_marker: str  # path of the mark of a stop
    cgroup: str = ""  # directory of the control group to put it into; "": none
    streams: str = ""  # path of the offsets that tell stdout and stderr in the log apart; "": nothing does
    input: str = ""  # path of the named pipe with its input; "": it has none
    tasks: int = 1  # processes of the command, numbered from `first_task` of all
    first_task: int = 0
    all_tasks: int = 1


@dataclass(frozen=True)
class Shutdown(Request[Done], verb="shutdown"):
    """Exit after the last rank."""


REQUESTS = by_verb(ServerHello, Spawn, Shutdown)


@dataclass(frozen=True)
class Exited(Event, event="exited"):
    """A rank exited; the record is on disk before, unless the disk is full."""

    state: str  # path of the record
    record: RankRecord
