"""A simulated machine with GPUs: processes, and an agent that answers the protocol of `clusterd.protocol.requests`.

What a real agent has on disk (records of attempts, epochs, the newest event) survives a restart of the agent and a
reboot; its connections, locks and fences do not.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from clusterd.daemon.hosts.facts import DESCRIPTION
from clusterd.exit_reasons import Reason
from clusterd.protocol import requests as r
from clusterd.protocol.agent import AttemptRow, HelloReply, RankExited, RankRow, Superseded
from clusterd.protocol.frames import VERSION, Message, ProtocolError
from clusterd.protocol.launch import Launched, LaunchRequest, RankSpec, StartedRank
from clusterd.protocol.messages import Done, Event, from_map, to_map
from tests.soak.network import Connection
from tests.soak.training import MODEL, Trainings

AGENT_VERSION = "simulated"
MEMORY_BYTES = 64 << 30
TICK_S = 0.1

Key = tuple[str, int, int]
"""Job, attempt, generation."""


class Refused(Exception):
    """The agent refuses a request."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(eq=False)
class Process:
    """One rank's process, which acts as its arguments say: ``sim SECONDS ok|fail|oom obeys|ignores``."""

    spec: RankSpec
    ends_s: float  # by the monotonic clock, unless something ends it before
    outcome: str
    obeys: bool
    devices: tuple[str, ...]
    is_alive: bool = True
    state: str = "running"  # as the agent reports it
    reason: Reason | None = None
    exit_code: int | None = None
    signal: int | None = None

    def end(self, reason: Reason, exit_code: int | None = None, number: int | None = None) -> None:
        """The process is gone; the agent has yet to see that."""
        if self.is_alive:
            self.is_alive = False
            self.reason, self.exit_code, self.signal = reason, exit_code, number

    def row(self) -> RankRow:
        """The rank in messages to the daemon."""
        return RankRow(self.spec.rank, self.state, 1, self.exit_code, self.signal, self.reason)


@dataclass(eq=False)
class Record:
    """One generation of an attempt on the machine."""

    launch: LaunchRequest
    ranks: dict[int, Process] = field(default_factory=dict)
    is_stopped: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    stopping: asyncio.Task[None] | None = None
    grace_s: float = 0.0

    @property
    def live(self) -> list[Process]:
        """Processes that are there."""
        return [process for process in self.ranks.values() if process.is_alive]

    def row(self) -> AttemptRow:
        """The attempt in messages to the daemon."""
        launch = self.launch
        ranks = tuple(process.row() for process in self.ranks.values())
        return AttemptRow(launch.job, launch.attempt, launch.generation, ranks, launch.kind)


class Machine:
    """A host with its agent.

    Args:
        wrong: called with a description of what must never happen.
        chance: true with a probability while faults are injected, under the name of the fault.
        trainings: of elastic jobs; None: there are none.
    """

    def __init__(
        self,
        name: str,
        gpus: int,
        randomness: random.Random,
        wrong: Callable[[str], None],
        chance: Callable[[str, float], bool],
        trainings: Trainings | None = None,
    ) -> None:
        self.name = name
        self.gpus = [f"GPU-{name}-{index}" for index in range(gpus)]
        self.records: dict[Key, Record] = {}
        self.slowness = 1.0
        self.is_on = True
        self.boot = 1
        self._random, self._wrong, self._chance = randomness, wrong, chance
        self._trainings = trainings or Trainings(wrong, chance)
        self._epochs: dict[str, int] = {}
        self._events: dict[str, list[Any]] = {}
        self._fences: dict[tuple[str, int], int] = {}
        self._connections: list[Connection] = []
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._port = 20000

    # --- the machine ----------------------------------------------------------------------------------------------

    def live(self) -> list[tuple[Key, Process]]:
        """Processes that are there, with their attempts."""
        return [(key, process) for key, record in self.records.items() for process in record.live]

    def device_names(self, process: Process) -> list[str]:
        """Devices of a process by the names that the scheduler has for them."""
        return [f"{self.name}:gpu{self.gpus.index(uuid)}" for uuid in process.devices]

    def switch_off(self) -> None:
        """All processes end at once, and nobody sees how."""
        self.is_on = False
        for record in self.records.values():
            for process in record.ranks.values():
                process.end(Reason.LOST)
                if process.state == "running":
                    process.state, process.reason = "lost", Reason.LOST
        self._end_agent()

    def switch_on(self) -> None:
        """The machine boots."""
        self.is_on, self.boot, self.slowness = True, self.boot + 1, 1.0
        self._begin_agent()

    def restart_agent(self) -> None:
        """The agent is killed and started again; processes go on."""
        self._end_agent()
        self._begin_agent()

    def _end_agent(self) -> None:
        for connection in list(self._connections):
            connection.reset()
        for task in list(self._tasks):
            task.cancel()
        self._tasks.clear()
        self._fences.clear()

    def _begin_agent(self) -> None:
        for record in self.records.values():
            record.lock, record.stopping = asyncio.Lock(), None
            if record.is_stopped and any(process.state == "running" for process in record.ranks.values()):
                record.stopping = self._start(self._stop(record))
            else:
                for process in record.ranks.values():
                    if process.state == "running":
                        self._start(self._follow(record, process))

    def _start(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    async def _pause(self, most_s: float) -> None:
        await asyncio.sleep(self._random.uniform(0.1, 1.0) * most_s * self.slowness)

    # --- connections ----------------------------------------------------------------------------------------------

    def accept(self, connection: Connection) -> None:
        """A daemon connected."""
        self._connections.append(connection)

    def closed(self, connection: Connection) -> None:
        """A connection is over."""
        if connection in self._connections:
            self._connections.remove(connection)

    def receive(self, connection: Connection, message: Message) -> None:
        """A request came."""
        if connection in self._connections:
            self._start(self._serve(connection, message))
        else:
            self._chance("request over a connection that was given up", 1.0)

    async def _serve(self, connection: Connection, message: Message) -> None:
        if connection.daemon is not None:
            await self._pause(0.02)  # what one connection asks for is served side by side
        try:
            answer = await self._answer(connection, message)
            reply: Message = {"id": message.get("id"), "ok": answer if isinstance(answer, dict) else to_map(answer)}
        except Refused as refused:
            reply = {"id": message.get("id"), "error": {"kind": refused.kind, "message": str(refused)}}
        except ProtocolError as error:
            self._wrong(f"{self.name} was sent a malformed request: {error}")
            return
        if self._chance("reply lost with its connection", 0.004):
            connection.reset()
            return
        connection.send(reply)

    def emit(self, event: Event) -> None:
        """Send an event to every daemon that leads."""
        for connection in list(self._connections):
            daemon = connection.daemon
            if daemon is not None and daemon[1] >= self._epochs.get(daemon[0], 0):
                connection.send(event.to_message())
                if self._chance("event sent twice", 0.03):
                    connection.send(event.to_message())

    async def _answer(self, connection: Connection, message: Message) -> object:
        verb = str(message.get("verb"))
        if verb == r.Challenge.verb:
            known = from_map(r.Challenge, message).daemon
            event = self._events.get(known)
            seen = {"epoch": self._epochs.get(known, 0), "event": event[0], "checksum": event[1]} if event else {}
            return r.ChallengeReply("nonce", seen)
        if verb == r.Hello.verb:
            return self._hello(connection, from_map(r.Hello, message))
        if connection.daemon is None:
            raise Refused("hello", f"{verb} came before hello")
        name, epoch = connection.daemon
        if epoch < self._epochs.get(name, 0):
            raise Refused("stale", f"a newer daemon leads this host; epoch {epoch} is over")
        if message.get("newest") is not None:
            self._events[name] = message["newest"]
        if verb not in self._verbs:
            raise Refused("verb", f"this agent knows no {verb!r}")
        return await self._verbs[verb](self, from_map(r.REQUESTS[verb], message, verb))

    def _hello(self, connection: Connection, hello: r.Hello) -> HelloReply:
        known = self._epochs.get(hello.daemon, 0)
        if hello.protocol != VERSION:
            raise Refused("protocol", "another protocol")
        if hello.epoch < known:
            raise Refused("stale", f"a newer daemon (epoch {known}) leads this host; epoch {hello.epoch} is over")
        if hello.epoch > known:
            self._epochs[hello.daemon] = hello.epoch
            for other in self._connections:
                if other.daemon is not None:
                    other.send(Superseded(hello.epoch).to_message())
        for other in list(self._connections):
            if other is not connection and other.daemon == (hello.daemon, hello.epoch):
                other.reset()
        connection.daemon = (hello.daemon, hello.epoch)
        if hello.newest is not None:
            self._events[hello.daemon] = list(hello.newest)
        return HelloReply(
            agent=f"agent-{self.name}",
            version=AGENT_VERSION,
            boot_id=f"{self.name}-{self.boot}",
            now_s=time.time(),
            facts=self._facts(),
            attempts=tuple(record.row() for record in self.records.values()),
            machine=f"machine-{self.name}",
        )

    def _facts(self) -> Message:
        return {
            "boot_id": f"{self.name}-{self.boot}",
            "cpu_cores": 32,
            "memory_bytes": MEMORY_BYTES,
            "cpu_ids": list(range(32)),
            "gpus": [
                {"uuid": uuid, "index": index, "name": "Simulated GPU", "memory_bytes": 16 << 30}
                for index, uuid in enumerate(self.gpus)
            ],
            "addresses": [{"interface": "eth0", "address": "10.0.0.1", "speed_mbit": 10000}],
        }

    # --- requests -------------------------------------------------------------------------------------------------

    async def _launch(self, request: LaunchRequest) -> Launched:
        if self._chance("launch refused", 0.02):
            raise Refused("host", "the disk of this host is full")
        key = (request.job, request.attempt, request.generation)
        record = self.records.get(key)
        if record is None:
            newest = max((k[2] for k in self.records if k[:2] == key[:2]), default=0)
            if max(newest, self._fences.get(key[:2], 0)) >= request.generation:
                raise Refused("stale", f"generation {request.generation} came after a newer one, or its stop")
            record = self.records[key] = Record(request)
        elif record.launch.born_s != request.born_s:
            raise Refused("environment", "the id was given out again")
        async with record.lock:
            if record.is_stopped and not record.ranks:
                raise Refused("stale", "it was stopped before it started")
            for spec in request.ranks:
                if spec.rank in record.ranks or record.is_stopped:
                    continue
                await self._pause(1.0)
                if not record.is_stopped:
                    self._spawn(key, record, spec)
        for process in record.ranks.values():
            if process.state != "running":  # the daemon may not have heard of it
                self._emit_exit(record.launch, process)
        return Launched(tuple(StartedRank(rank, 1, 1) for rank in record.ranks))

    def _spawn(self, key: Key, record: Record, spec: RankSpec) -> None:
        seconds, outcome, manner = (*record.launch.argv[1:], "1", "ok", "obeys")[:3]
        devices = tuple(uuid for uuid in spec.device.uuid.split(",") if uuid)
        now_s = asyncio.get_running_loop().time()
        process = Process(spec, now_s + float(seconds), outcome, manner == "obeys", devices)
        for other, there in self.live():
            shared = set(devices) & set(there.devices)
            if shared and other[:2] != key[:2]:
                self._wrong(f"{self.name}: {sorted(shared)} run {other} and are given to {key}")
        record.ranks[spec.rank] = process
        if record.launch.kind == "elastic" and record.launch.attempt != DESCRIPTION:
            process.ends_s, process.outcome = inf, "ok"
            self._trainings.join(self, record, process)
        self._start(self._follow(record, process))

    async def _follow(self, record: Record, process: Process) -> None:
        """Let a process run to its end, and report that."""
        left_s = process.ends_s - asyncio.get_running_loop().time()
        while left_s > 0 and process.is_alive:
            await asyncio.sleep(min(left_s, 1.0))
            left_s = process.ends_s - asyncio.get_running_loop().time()
        if process.outcome == "oom":
            process.end(Reason.OOM, number=9)
        else:
            process.end(Reason.EXIT, exit_code=0 if process.outcome == "ok" else 1)
        await self._pause(0.5)  # the sweep for what it left behind
        if not record.is_stopped:
            self._report(record, process)

    def _report(self, record: Record, process: Process) -> None:
        if process.state != "running" or process.reason is None:
            return
        process.state = "exited"
        self._emit_exit(record.launch, process)

    def _emit_exit(self, launch: LaunchRequest, process: Process) -> None:
        assert process.reason is not None
        self.emit(
            RankExited(
                launch.job, launch.attempt, launch.generation, process.spec.rank,
                process.reason, process.exit_code, process.signal, time.time(),
            )
        )  # fmt: skip

    async def _stop_ranks(self, request: r.StopRanks) -> r.Stopped:
        key = (request.job, request.attempt, request.generation)
        record = self.records.get(key)
        if record is None:
            self._fences[key[:2]] = max(request.generation, self._fences.get(key[:2], 0))
            await self._pause(0.1)
            return r.Stopped(())
        record.is_stopped = True
        if record.stopping is None or record.stopping.done():
            record.grace_s = request.grace_s
            record.stopping = self._start(self._stop(record))
        else:
            record.grace_s = min(record.grace_s, request.grace_s)
        await asyncio.shield(record.stopping)
        return r.Stopped(tuple(process.row() for process in record.ranks.values()))

    async def _stop(self, record: Record) -> None:
        async with record.lock:
            begun_s = asyncio.get_running_loop().time()
            patience_s = self._random.uniform(0.0, 5.0)
            while record.live:
                elapsed_s = asyncio.get_running_loop().time() - begun_s
                for process in record.live:
                    if elapsed_s >= record.grace_s or (process.obeys and elapsed_s >= patience_s):
                        if self._chance("process that the kernel cannot end yet", 0.3):
                            continue
                        process.end(Reason.STOPPED, number=9)
                await asyncio.sleep(TICK_S)
            await self._pause(0.2)
            for process in record.ranks.values():
                self._report(record, process)

    async def _forget(self, request: r.ForgetAttempt) -> r.Forgotten:
        for key in [key for key in self.records if key[:2] == (request.job, request.attempt)]:
            if any(process.state == "running" for process in self.records[key].ranks.values()):
                raise Refused("busy", "it still runs here")
            del self.records[key]
        return r.Forgotten(0)

    async def _read(self, request: r.ReadLog | r.ReadSteps) -> r.Chunk:
        if not any(key[:2] == (request.job, request.attempt) for key in self.records):
            raise Refused("unknown", "it was never here")
        return r.Chunk(b"", 0, 0)

    async def _read_model(self, _request: r.ReadModel) -> r.Model:
        return r.Model(MODEL)

    async def _move(self, request: r.MoveRanks) -> r.Receivers:
        return await self._trainings.move(self, request)

    async def _quiesce(self, request: r.QuiesceRanks) -> r.Receivers:
        return await self._trainings.quiesce(self, request)

    async def _resume(self, request: r.ResumeRanks) -> r.Receivers:
        return await self._trainings.resume(self, request)

    async def _abort(self, request: r.AbortRanks) -> r.Receivers:
        return await self._trainings.abort(self, request)

    async def _tell(self, _request: r.SendToRanks) -> r.Receivers:
        return r.Receivers(0)

    async def _lease_port(self, _request: r.LeasePort | r.ServeSegments) -> r.Port:
        self._port += 1
        return r.Port(self._port)

    async def _nothing(self, _request: object) -> Done:
        return Done()

    async def _shutdown(self, _request: r.Shutdown) -> Done:
        raise Refused("busy", "this agent stays")

    _verbs: dict[str, Callable[[Any, Any], Awaitable[object]]] = {
        LaunchRequest.verb: _launch,
        r.StopRanks.verb: _stop_ranks,
        r.ForgetAttempt.verb: _forget,
        r.ReadLog.verb: _read,
        r.ReadSteps.verb: _read,
        r.ReadModel.verb: _read_model,
        r.MoveRanks.verb: _move,
        r.QuiesceRanks.verb: _quiesce,
        r.ResumeRanks.verb: _resume,
        r.AbortRanks.verb: _abort,
        r.SendToRanks.verb: _tell,
        r.DropMigration.verb: _nothing,
        r.ServeSegments.verb: _lease_port,
        r.LeasePort.verb: _lease_port,
        r.Heartbeat.verb: _nothing,
        r.Shutdown.verb: _shutdown,
    }
