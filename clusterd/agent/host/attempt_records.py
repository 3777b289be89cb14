"""Attempts and ranks as this host records them: their files and the state read from these."""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterd import protocol
from clusterd.agent.host import processes
from clusterd.agent.host.home import read_json, write_durably, write_json

Report = dict[str, Any]


class Refused(Exception):
    """A request that is not carried out; `kind` is for programs, the message for a person."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Rank:
    """One rank as this agent sees it. `state` stays "running" until the sweep after its end is done."""

    rank: int
    pid: int = 0
    start_time: int = 0
    boot_id: str = ""
    state: str = "lost"  # "running", "exited", "lost"
    exit_code: int | None = None
    signal: int | None = None
    reason: str | None = None
    at_s: float | None = None
    spawner: tuple[int, int] = (0, 0)  # pid and start time of its fork server
    message: str | None = None  # what the rank said about its failure
    end: dict[str, Any] | None = None  # the record of its end, until that is told
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)  # shown by its processes

    def take(self, record: dict[str, Any]) -> None:
        """Take the fields of a record on disk."""
        self.pid = record["pid"]
        self.start_time = record["start_time"]
        self.boot_id = record["boot_id"]
        self.state = record["state"]
        self.exit_code = record["exit_code"]
        self.signal = record["signal"]
        self.reason = record["reason"]
        self.at_s = record["at_s"]
        spawner = record.get("spawner") or {}
        self.spawner = (spawner.get("pid", 0), spawner.get("start_time", 0))

    def lost(self, at_s: float) -> dict[str, Any]:
        """Record of a rank that vanished without an exit status."""
        return {
            "pid": self.pid,
            "start_time": self.start_time,
            "boot_id": self.boot_id,
            "state": "lost",
            "exit_code": None,
            "signal": None,
            "reason": "lost",
            "at_s": at_s,
        }

    def report(self) -> Report:
        """A RankReport of the protocol."""
        report = {
            "rank": self.rank,
            "pid": self.pid,
            "state": self.state,
            "exit_code": self.exit_code,
            "signal": self.signal,
            "reason": self.reason,
            "at_s": self.at_s,
        }
        return {**report, "message": self.message} if self.message else report


@dataclass
class Attempt:
    """One generation of an attempt on this host."""

    directory: Path
    launch: dict[str, Any]  # the request as accepted, without secrets
    ranks: dict[int, Rank] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # over launching and stopping
    stopping: asyncio.Task[list[int]] | None = None
    grace_s: float = 0.0  # of the stop that is under way
    stop_asked: asyncio.Event = field(default_factory=asyncio.Event)  # a launch under way heeds it
    unmarked_stop_s: float | None = None  # wall time of a stop whose marker the disk did not take
    step: dict[str, Any] | None = None  # the newest line of steps.jsonl
    is_shortened: bool = False  # its logs were looked at since it is over

    @property
    def job(self) -> str:
        """Id of the job."""
        return str(self.launch["job"])

    @property
    def attempt(self) -> int:
        """Number of the attempt."""
        return int(self.launch["attempt"])

    @property
    def generation(self) -> int:
        """Of the lease that it runs under."""
        return int(self.launch["generation"])

    @property
    def name(self) -> str:
        """As `home.attempt_name` has it."""
        return self.directory.name

    @property
    def running(self) -> bool:
        """True while a rank runs or its sweep is unfinished."""
        return any(rank.state == "running" for rank in self.ranks.values())

    @property
    def sessions(self) -> set[int]:
        """Each rank leads one of its own, which outlives it as long as a process is left in it."""
        return {rank.pid for rank in self.ranks.values() if rank.pid and rank.boot_id == processes.boot_id()}

    @property
    def held(self) -> set[str]:
        """Uuids of the devices that its running ranks have."""
        running = {rank.rank for rank in self.ranks.values() if rank.state == "running"}
        devices = [given.get("device") or {} for given in self.launch["ranks"] if int(given["rank"]) in running]
        return {uuid for device in devices for uuid in str(device.get("uuid", "")).split(",")}

    @property
    def stop_marker(self) -> Path:
        """Written before the first signal of a stop, so that whoever reaps a rank knows why it ended."""
        return self.directory / "stop.json"

    @property
    def stopped(self) -> bool:
        """True if a stop of this generation, or a later one, was requested."""
        if self.stop_asked.is_set():
            return True
        marker = read_json(self.stop_marker)
        return marker is not None and int(marker.get("generation", 0)) >= self.generation

    def judged(self, end: dict[str, Any]) -> dict[str, Any]:
        """The record of an end, as it would be if the disk had taken the stop's marker."""
        if self.unmarked_stop_s is None or end["state"] != "exited" or end["at_s"] < self.unmarked_stop_s:
            return end
        return {**end, "reason": "stopped"}

    def log(self, rank: int) -> Path:
        """Output of `rank`."""
        return self.directory / f"rank-{rank:d}.log"

    def rank_file(self, rank: int) -> Path:
        """Rank file of the protocol, read by the rank."""
        return self.directory / f"rank-{rank:d}.json"

    def state_file(self, rank: int) -> Path:
        """Record of the rank's process."""
        return self.directory / f"rank-{rank:d}.state.json"

    @property
    def steps(self) -> Path:
        """One JSON object per training step, appended by rank 0."""
        return self.directory / "steps.jsonl"

    def store(self) -> None:
        """Write the launch down; from here on a new agent knows of it."""
        write_durably(self.directory / "launch.msgpack", protocol.pack(self.launch))

    def record_end(self, rank: int, exit_code: int, reason: str, at_s: float) -> None:
        """Write down the end of a rank that never became a process."""
        record = {
            "pid": 0,
            "start_time": 0,
            "boot_id": processes.boot_id(),
            "state": "exited",
            "exit_code": exit_code,
            "signal": None,
            "reason": reason,
            "at_s": at_s,
            "generation": self.generation,
        }
        write_json(self.state_file(rank), record)
        self.ranks[rank].take(record)

    def read_rank(self, rank: int) -> dict[str, Any] | None:
        """The record of a rank of this generation; None where there is none."""
        record = read_json(self.state_file(rank))
        return record if record is not None and record.get("generation") == self.generation else None

    def report(self) -> Report:
        """An AttemptReport of the protocol."""
        return {
            "job": self.job,
            "attempt": self.attempt,
            "generation": self.generation,
            "kind": self.launch["kind"],
            "ranks": [self.ranks[rank].report() for rank in sorted(self.ranks)],
            "step": self.step,
        }


def load(directory: Path) -> Attempt | None:
    """The attempt that an earlier agent left in `directory`; None where its launch was never accepted.

    Ranks come as the disk tells: running where their record says so, which is still to be compared with the living.
    """
    try:
        launch = protocol.decode((directory / "launch.msgpack").read_bytes())
    except (OSError, protocol.ProtocolError):
        return None
    attempt = Attempt(directory, launch)
    for given in launch["ranks"]:
        number = int(given["rank"])
        attempt.ranks[number] = rank = Rank(number)
        if record := attempt.read_rank(number):
            rank.take(record)
        if failed := read_json(directory / f"rank-{number}.failed.json"):
            rank.message = failed.get("message")
        if place := read_json(attempt.rank_file(number)):
            rank.token = str(place.get("token", rank.token))
    attempt.step = last_step(attempt.steps)
    return attempt


_TAIL_BYTES = 65536


def steps_after(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The complete steps of a steps.jsonl from `offset` on, the newest 64 KiB of them at most, and where they end."""
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


def last_step(path: Path) -> dict[str, Any] | None:
    """The newest complete step in a steps.jsonl."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            size = file.tell()
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]  # what follows the last newline is not written to its end yet
    except OSError:
        return None
    for line in reversed(lines):
        try:
            step = json.loads(line)
        except ValueError:
            continue
        if isinstance(step, dict) and "step" in step:
            return step
    return None
