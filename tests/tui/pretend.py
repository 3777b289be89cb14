"""A daemon that only pretends: a large cluster, with as many changes a second as are wanted, or with garbage.

python -m tests.tui.pretend SOCKET [--hosts N] [--devices N] [--jobs N] [--rate N] [--log-rate N] [--garbage KIND]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import struct
import sys
import time
from pathlib import Path
from typing import Any

from clusterd import protocol

STEPS = 9_999_999
"""Of job 1 alone, whose step is the time in milliseconds: what is on the screen says how old it is."""


def now_ms() -> int:
    """Of a clock that all processes share."""
    return int(time.monotonic() * 1000) % STEPS


class Pretender:
    """Serves `watch`, `logs` and what the interface asks besides."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._number = 1
        self._started_s = time.time()
        self._turn = itertools.cycle(range(2, args.jobs + 1)) if args.jobs > 1 else itertools.cycle([1])

    def job(self, number: int) -> dict[str, Any]:
        """A row."""
        running = number % 2 == 1
        host = f"host{number % self._args.hosts:03d}"
        return {
            "id": str(number), "name": f"job-{number}", "kind": "elastic", "state": "running" if running else "queued",
            "reason": "dp=2: the fastest known for its devices" if running else "waits for 4 free devices",
            "priority": 0, "guaranteed": False, "user": "ann", "tenant": "default", "asked": 2, "asked_kind": None,
            "plan": "dp=2" if running else None, "attempt": 1, "devices": [f"{host}:gpu0", f"{host}:gpu1"],
            "hosts": [host], "holds_devices": running, "step": now_ms(), "steps": STEPS - (number != 1),
            "first_loss": 10.0,
            "loss": 1 + now_ms() % 1000 / 1000, "step_time_s": 0.1, "submitted_s": self._started_s - number,
            "started_s": self._started_s, "ended_s": None, "exit_code": None, "pinned": False, "migrating": None,
            "migrations": [],
        }  # fmt: skip

    def host(self, number: int) -> dict[str, Any]:
        """A row."""
        name = f"host{number:03d}"
        devices = [
            {
                "id": f"{name}:gpu{n}",
                "kind": "cuda",
                "name": "H100",
                "memory_bytes": 80 << 30,
                "job": str(2 * number + 1),
            }
            for n in range(self._args.devices)
        ]
        return {"name": name, "state": "up", "cpu_cores": 64, "memory_bytes": 1 << 40, "devices": devices}

    def snapshot(self) -> dict[str, Any]:
        """All of it."""
        return {
            "status": {"started_s": self._started_s},
            "jobs": [self.job(n) for n in range(1, self._args.jobs + 1)],
            "hosts": [self.host(n) for n in range(self._args.hosts)],
        }

    def change(self) -> dict[str, Any]:
        """One event about one job; every twentieth about job 1, which is on the screen."""
        self._number += 1
        number = 1 if self._number % 20 == 0 else next(self._turn)
        row = self.job(number)
        if number == 1:
            print(row["step"], flush=False)
        event = {
            "kind": "AttemptProgressed",
            "id": self._number,
            "at_s": time.time(),
            "job": str(number),
            "step": row["step"],
        }
        decisions = [
            {"kind": "HoldJob", "cause": self._number, "job": str(number), "reason": "waits for 4 free devices"}
        ]
        return {
            "number": self._number, "at_s": time.time(), "events": [event], "jobs": [row],
            "decisions": decisions if self._number % 10 == 0 else [], "hosts": [], "gone": [],
        }  # fmt: skip

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client."""
        tasks: list[asyncio.Task[None]] = []
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                request = await protocol.read(reader)
                number, verb = request["id"], request["verb"]
                if verb == "watch":
                    tasks.append(asyncio.create_task(self.watch(number, writer)))
                elif verb == "logs":
                    tasks.append(asyncio.create_task(self.logs(number, writer)))
                else:
                    writer.write(protocol.encode({"id": number, **self.answer(verb)}))
                await writer.drain()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writer.close()

    def answer(self, verb: str) -> dict[str, Any]:
        """Reply to a verb."""
        known: dict[str, Any] = {
            "hello": {"version": "0", "protocol": protocol.VERSION, "user": "ann", "is_operator": True},
            "status": {"started_s": self._started_s},
            "history": {"events": [], "decisions": []},
        }
        if verb in known:
            return {"ok": known[verb]}
        return {"error": {"message": f"this daemon does not know {verb!r}", "exit_code": 2}}

    async def watch(self, number: int, writer: asyncio.StreamWriter) -> None:
        """A snapshot, then changes on time: late ones are sent together."""
        writer.write(protocol.encode({"id": number, "item": {"snapshot": self.snapshot(), "number": self._number}}))
        await writer.drain()
        if self._args.garbage:
            await asyncio.sleep(0.3)
            writer.write(_garbage(self._args.garbage, number))
            await writer.drain()
        due_s = time.monotonic()
        while self._args.rate:
            due_s += 1 / self._args.rate
            await asyncio.sleep(max(due_s - time.monotonic(), 0.0))
            writer.write(protocol.encode({"id": number, "item": self.change()}))
            await writer.drain()

    async def logs(self, number: int, writer: asyncio.StreamWriter) -> None:
        """Lines without end, in pieces of a tenth of a second."""
        count = 0
        while self._args.log_rate:
            lines = self._args.log_rate // 10
            data = b"".join(b"line %d of a log that nobody can read so fast\n" % (count + n) for n in range(lines))
            count += lines
            writer.write(
                protocol.encode({"id": number, "item": {"attempt": 1, "rank": 0, "data": data, "offset": count}})
            )
            await writer.drain()
            await asyncio.sleep(0.1)


def _garbage(kind: str, number: int) -> bytes:
    """Bytes that no daemon of this project sends."""
    return {
        "text": b"HTTP/1.1 400 Bad Request\r\n\r\n",
        "length": struct.pack("!I", 1 << 31) + b"x",
        "msgpack": struct.pack("!I", 4) + b"\xc1\xc1\xc1\xc1",
        "rows": protocol.encode({"id": number, "item": {"number": 5, "jobs": [{"id": 7}], "events": "none"}}),
        "item": protocol.encode({"id": number, "item": 17}),
        "error": protocol.encode({"id": number, "error": "just no"}),
    }[kind]


async def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("socket", type=Path)
    for name, default in (("hosts", 4), ("devices", 8), ("jobs", 20), ("rate", 0), ("log-rate", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--garbage", default="")
    pretender = Pretender(parser.parse_args())
    server = await asyncio.start_unix_server(pretender.connection, str(pretender._args.socket))
    print("ready", flush=True)
    try:
        await server.serve_forever()
    finally:
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
