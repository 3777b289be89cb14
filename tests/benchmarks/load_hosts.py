"""Simulated hosts of `load.py`, all in one process, and the daemon that reaches them over a Unix socket instead of SSH.

python -m tests.benchmarks.load_hosts serve SOCKET HOSTS DEVICES
python -m tests.benchmarks.load_hosts daemon SOCKET
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from clusterd import protocol
from clusterd.daemon import main as daemon_main
from clusterd.protocol import requests as r
from clusterd.protocol.agent import AttemptUse, DeviceUse, Progress, Usage
from clusterd.ssh.bootstrap import AgentStream
from tests.soak.daemon import Enrolment
from tests.soak.host import AGENT_VERSION, MEMORY_BYTES, Machine

REPORT_EVERY_S = 10.0
"""Interval of an agent's samples, and of the progress of its ranks."""

LINES_PER_S = 5.0
FIRST_STEP = b'{"step": 1, "loss": 3.0}\n'
LINE = b"a line of output, as a training script prints one after a few steps\n"


class BusyHost(Machine):
    """A host whose ranks make steps and write logs."""

    def __init__(self, name: str, devices: int, randomness: random.Random) -> None:
        def wrong(what: str) -> None:
            raise AssertionError(what)

        super().__init__(name, devices, randomness, wrong, lambda _name, _probability: False)
        self._begun_s = time.monotonic()

    async def report(self) -> None:
        """Send samples and progress until cancelled."""
        await asyncio.sleep(self._random.uniform(0.0, REPORT_EVERY_S))
        while True:
            live = self.live()
            ours = tuple(AttemptUse(job, number, 0.5, 1 << 30) for (job, number, _), _ in live)
            devices = tuple(DeviceUse(uuid, busy=0.9, memory_used_bytes=8 << 30) for uuid in self.gpus)
            self.emit(Usage(32, MEMORY_BYTES, 8 << 30, devices, ours))
            for (job, attempt, generation), process in live:
                if process.spec.rank == 0:
                    step = int(10 * (time.monotonic() - self._begun_s)) + 1
                    self.emit(Progress(job, attempt, generation, step, 2.0 + 1.0 / step, 0.1))
            await asyncio.sleep(REPORT_EVERY_S)

    async def _read(self, request: r.ReadLog | r.ReadSteps) -> r.Chunk:
        """A log that grows evenly, so that a follower always has something to read."""
        if isinstance(request, r.ReadSteps):
            return r.Chunk(FIRST_STEP[request.offset :], len(FIRST_STEP), len(FIRST_STEP))
        size = int((time.monotonic() - self._begun_s) * LINES_PER_S) * len(LINE)
        count = max(min(request.limit, size - request.offset), 0)
        data = (LINE * (count // len(LINE) + 2))[request.offset % len(LINE) :][:count]
        return r.Chunk(data, request.offset + count, size)

    _verbs = {**Machine._verbs, r.ReadLog.verb: _read, r.ReadSteps.verb: _read}


class _Wire:
    """One connection of the daemon, in the place of `tests.soak.network.Connection`."""

    def __init__(self, host: BusyHost, writer: asyncio.StreamWriter) -> None:
        self.daemon: tuple[str, int] | None = None
        self._host, self._writer = host, writer

    def send(self, message: protocol.Message) -> None:
        self._writer.write(protocol.encode(message))

    def reset(self) -> None:
        self._host.closed(self)  # type: ignore[arg-type]
        self._writer.close()


async def serve(socket: str, count: int, devices: int) -> None:
    """Serve the agents of all hosts; the first frame of a connection names its host."""
    hosts = {name: BusyHost(name, devices, random.Random(name)) for name in map("host{:04}".format, range(count))}

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = hosts[(await protocol.read(reader))["name"]]
        wire: Any = _Wire(host, writer)
        host.accept(wire)
        try:
            while True:
                host.receive(wire, await protocol.read(reader))
        except (asyncio.IncompleteReadError, OSError):
            wire.reset()

    server = await asyncio.start_unix_server(connected, socket, backlog=count)
    async with server:
        await asyncio.gather(server.serve_forever(), *(host.report() for host in hosts.values()))


def run_daemon(socket: str) -> int:
    """The daemon as `clusterd start` runs it, but for SSH."""

    @asynccontextmanager
    async def connect(route: Any) -> AsyncIterator[str]:
        yield route.name

    @asynccontextmanager
    async def attach(host: str, *_rest: Any, **_options: Any) -> AsyncIterator[AgentStream]:
        reader, writer = await asyncio.open_unix_connection(socket)
        writer.write(protocol.encode({"name": host}))
        try:
            yield AgentStream(reader, writer, "")  # type: ignore[arg-type]
        finally:
            writer.close()

    doubles = {
        "clusterd.daemon.main.Dialer": lambda _keys: SimpleNamespace(connect=connect),
        "clusterd.daemon.main.HostKeyEnrolment": Enrolment,
        "clusterd.ssh.host.attach": attach,
        "clusterd.ssh.host.bundle": lambda: SimpleNamespace(version=AGENT_VERSION),
    }
    with ExitStack() as stack:
        for name, double in doubles.items():
            stack.enter_context(mock.patch(name, double))
        return daemon_main.main([])


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.run(serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
    else:
        sys.exit(run_daemon(sys.argv[2]))
