"""Attempts and ranks of this host: their files, and the state read from these files."""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clusterd import protocol
from clusterd.agent.host import processes
from clusterd.agent.host.home import read_json, write_json
from clusterd.agent.host.rank_input import RankInput
from clusterd.agent.log import log_line
from clusterd.durable_files import write_durably
from clusterd.exit_reasons import Reason
from clusterd.protocol.agent import AttemptRow, RankRow
from clusterd.protocol.forkserver import ProcessIdentity, RankRecord
from clusterd.protocol.launch import LaunchRequest
from clusterd.protocol.messages import from_map, to_map


class Refused(Exception):
    """The agent refuses a request; programs read `kind`, people the message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Rank:
    """State of one rank. `state` is "running" until the sweep for left-over processes after its exit is done."""

    rank: int
    pid: int = 0
    start_time: int = 0
    boot_id: str = ""
    state: str = "lost"  # "running", "exited", "lost"
    exit_code: int | None = None
    signal: int | None = None
    reason: Reason | None = None
    at_s: float | None = None
    spawner: ProcessIdentity = field(default_factory=ProcessIdentity)  # its fork server
    message: str | None = None  # error message that the rank wrote before it exited
    cgroup: str = ""  # directory of the control group of its generation
    end: RankRecord | None = None  # exit record not yet reported
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)  # proves a process to be this rank

    def take(self, record: RankRecord) -> None:
        """Set the fields from a record."""
        self.pid, self.start_time, self.boot_id = record.pid, record.start_time, record.boot_id
        self.state, self.exit_code, self.signal = record.state, record.exit_code, record.signal
        self.reason, self.at_s, self.spawner = record.reason, record.at_s, record.spawner
        self.cgroup = record.cgroup

    def lost(self, at_s: float) -> RankRecord:
        """Record of a rank whose process disappeared without an exit status."""
        return RankRecord(
            pid=self.pid, start_time=self.start_time, boot_id=self.boot_id, state="lost", reason=Reason.LOST, at_s=at_s,
            cgroup=self.cgroup,
        )  # fmt: skip

    def row(self) -> RankRow:
        """The rank in messages to the daemon."""
        return RankRow(
            self.rank,
            self.state,
            pid=self.pid,
            exit_code=self.exit_code,
            signal=self.signal,
            reason=self.reason,
            at_s=self.at_s,
            message=self.message or "",
        )


@dataclass
class Attempt:
    """One generation of an attempt on this host."""

    directory: Path
    launch: LaunchRequest  # as accepted, without secrets; without variables where an earlier agent accepted it
    login: dict[str, str] = field(default_factory=dict, repr=False)  # variables that its processes start with
    input: RankInput | None = None  # of its first process; None where an earlier agent launched it
    ranks: dict[int, Rank] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # over launching and stopping
    stopping: asyncio.Task[list[int]] | None = None
    grace_s: float = 0.0  # of the stop that is under way
    stop_asked: asyncio.Event = field(default_factory=asyncio.Event)  # aborts a launch that is under way
    unmarked_stop_s: float | None = None  # wall time of a stop whose marker could not be written
    is_paused: bool = False  # its containers, as far as this agent knows
    is_shortened: bool = False  # its logs were trimmed after it ended

    @property
    def job(self) -> str:
        """Id of the job."""
        return self.launch.job

    @property
    def attempt(self) -> int:
        """Number of the attempt."""
        return self.launch.attempt

    @property
    def generation(self) -> int:
        """Generation of the lease under which the ranks run."""
        return self.launch.generation

    @property
    def name(self) -> str:
        """Name of the attempt's directory, as `home.attempt_name` forms it."""
        return self.directory.name

    @property
    def running(self) -> bool:
        """True while a rank runs or the sweep after its exit is unfinished."""
        return any(rank.state == "running" for rank in self.ranks.values())

    @property
    def sessions(self) -> set[int]:
        """Session ids of the ranks; a session outlives its rank while any process is left in it."""
        return {rank.pid for rank in self.ranks.values() if rank.pid and rank.boot_id == processes.boot_id()}

    @property
    def cgroups(self) -> set[Path]:
        """Directories of the ranks' control groups; as its name has the attempt in it, none is another attempt's."""
        return {Path(rank.cgroup) for rank in self.ranks.values() if rank.cgroup}

    @property
    def held(self) -> set[str]:
        """Uuids of the devices of the running ranks."""
        running = {rank.rank for rank in self.ranks.values() if rank.state == "running"}
        devices = [spec.device for spec in self.launch.ranks if spec.rank in running]
        return {uuid for device in devices for uuid in device.uuid.split(",")}

    @property
    def stop_marker(self) -> Path:
        """Path of the marker written before a stop sends its first signal, so that an exit is classified as a stop."""
        return self.directory / "stop.json"

    @property
    def stopped(self) -> bool:
        """True if a stop of this generation, or a later one, was requested."""
        if self.stop_asked.is_set():
            return True
        marker = read_json(self.stop_marker)
        return marker is not None and int(marker.get("generation", 0)) >= self.generation

    def judged(self, end: RankRecord) -> RankRecord:
        """Exit record with reason "stopped" if the rank exited after a stop whose marker could not be written."""
        if self.unmarked_stop_s is None or end.state != "exited" or (end.at_s or 0.0) < self.unmarked_stop_s:
            return end
        return replace(end, reason=Reason.STOPPED)

    def log(self, rank: int) -> Path:
        """Path of the output of `rank`."""
        return self.directory / f"rank-{rank:d}.log"

    def streams(self, rank: int) -> Path:
        """Path of the offsets at which the log of `rank` changes between stdout and stderr."""
        return self.directory / f"rank-{rank:d}.streams"

    def rank_file(self, rank: int) -> Path:
        """Path of the rank file of the protocol, which the rank reads."""
        return self.directory / f"rank-{rank:d}.json"

    def state_file(self, rank: int) -> Path:
        """Path of the record of the rank's process."""
        return self.directory / f"rank-{rank:d}.state.json"

    @property
    def steps(self) -> Path:
        """Path of the training steps: one JSON object per line, appended by rank 0."""
        return self.directory / "steps.jsonl"

    def store(self) -> None:
        """Write the launch to disk, where a restarted agent finds it.

        Without the job's variables, as people put passwords there: a repeated launch and a terminal bring them again.
        """
        write_durably(self.directory / "launch.msgpack", protocol.pack(to_map(replace(self.launch, env={}))))

    def keep_record(self, record: bytes) -> None:
        """Replace the daemon's record of the job; on a full disk the older one stays, and the ranks go on."""
        self.launch = replace(self.launch, record=record)
        try:
            self.store()
        except OSError as error:
            log_line(f"agent: cannot write the launch in {self.directory}: {error}")

    def record_end(self, rank: int, exit_code: int, reason: Reason, at_s: float) -> None:
        """Write the exit record of a rank whose process was never started."""
        record = RankRecord(
            pid=0,
            start_time=0,
            boot_id=processes.boot_id(),
            state="exited",
            exit_code=exit_code,
            reason=reason,
            at_s=at_s,
            generation=self.generation,
        )
        write_json(self.state_file(rank), to_map(record))
        self.ranks[rank].take(record)

    def read_rank(self, rank: int) -> RankRecord | None:
        """Record of a rank of this generation; None if there is none."""
        stored = read_json(self.state_file(rank))
        if stored is None or stored.get("generation") != self.generation:
            return None
        try:
            return from_map(RankRecord, stored, "record")
        except protocol.ProtocolError as error:
            log_line(f"agent: cannot read {self.state_file(rank)}: {error}")
            return None

    @property
    def rank_rows(self) -> tuple[RankRow, ...]:
        """The ranks in messages to the daemon, in their order."""
        return tuple(self.ranks[rank].row() for rank in sorted(self.ranks))

    def row(self) -> AttemptRow:
        """The generation in messages to the daemon."""
        return AttemptRow(self.job, self.attempt, self.generation, self.rank_rows, self.launch.kind)


def load(directory: Path) -> Attempt | None:
    """Load the attempt that an earlier agent recorded in `directory`; None if its launch was never accepted.

    Ranks have the state of their records. The caller must check that ranks recorded as running still live.
    """
    try:
        launch = from_map(LaunchRequest, protocol.decode((directory / "launch.msgpack").read_bytes()), "launch")
    except FileNotFoundError:
        return None
    except (OSError, protocol.ProtocolError) as error:
        log_line(f"agent: cannot read the launch in {directory}: {error}")
        return None
    attempt = Attempt(directory, launch)
    for spec in launch.ranks:
        number = spec.rank
        attempt.ranks[number] = rank = Rank(number)
        if record := attempt.read_rank(number):
            rank.take(record)
        if failed := read_json(directory / f"rank-{number}.failed.json"):
            rank.message = failed.get("message")
        if place := read_json(attempt.rank_file(number)):
            rank.token = str(place.get("token", rank.token))
    return attempt


_TAIL_BYTES = 65536


def steps_after(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Complete steps of a steps.jsonl from `offset` on, at most the newest 64 KiB, and the offset where they end."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            start = max(offset if offset <= size else 0, size - _TAIL_BYTES)
            file.seek(start)
            data = file.read(size - start)
    except OSError:
        return [], offset
    whole, newline, _ = data.rpartition(b"\n")
    steps: list[dict[str, Any]] = []
    for line in whole.split(b"\n"):
        try:
            step = json.loads(line)
        except ValueError:
            continue
        if isinstance(step, dict) and "step" in step and "time_s" in step:
            steps.append(step)
    return steps, start + len(whole) + len(newline)
