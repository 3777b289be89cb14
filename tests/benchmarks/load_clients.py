"""Clients of `load.py` in a process of their own; each prints one JSON object when its standard input ends.

python -m tests.benchmarks.load_clients watch SOCKET COUNT
python -m tests.benchmarks.load_clients follow SOCKET COUNT
python -m tests.benchmarks.load_clients submit SOCKET RATE

Watchers print a line first, when each of them has its baseline.
"""

from __future__ import annotations

import asyncio
import json
import select
import struct
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from clusterd import protocol
from clusterd.client import Client

BATCH_MAX = 256
WAIT_S = 600.0
SPEC: dict[str, Any] = {"command": ["sim", "1000000"], "workdir": "/work", "resources": {"devices": 1}}


class _Change(msgspec.Struct):
    """All of an item that is decoded: the clients must not take the processor from the daemon."""

    at_s: float | None = None
    number: int = 0


class _Reply(msgspec.Struct):
    item: _Change | None = None


_decoder = msgspec.msgpack.Decoder(_Reply)


async def _frames(socket: str, verb: str, **arguments: Any) -> Any:
    reader, writer = await asyncio.open_unix_connection(socket)
    writer.write(protocol.encode({"id": 1, "verb": verb, **arguments}))
    while True:
        (length,) = struct.unpack("!I", await reader.readexactly(4))
        yield await reader.readexactly(length)


async def _until_input_ends() -> None:
    await asyncio.to_thread(sys.stdin.read)


async def watch(socket: str, count: int) -> dict[str, Any]:
    """Seconds from each change to its arrival at each of `count` watchers, with when it arrived."""
    lags: list[tuple[float, float]] = []
    received = ready = 0

    async def one() -> None:
        nonlocal received, ready
        is_ready = False
        async for frame in _frames(socket, "watch"):
            received += len(frame)
            item = _decoder.decode(frame).item
            if item is not None and item.number and not is_ready:
                is_ready, ready = True, ready + 1
                if ready == count:
                    print("ready", flush=True)
            elif item is not None and item.at_s:
                now_s = time.time()
                lags.append((now_s, now_s - item.at_s))

    tasks = [asyncio.create_task(one()) for _ in range(count)]
    await _until_input_ends()
    for task in tasks:
        task.cancel()
    return {"lags": lags, "bytes": received}


async def follow(socket: str, count: int) -> dict[str, Any]:
    """Bytes of the logs of the first `count` jobs."""
    received = 0

    async def one(job: int) -> None:
        nonlocal received
        async for frame in _frames(socket, "logs", job=str(job), follow=True, last_bytes=0):
            received += len(frame)

    tasks = [asyncio.create_task(one(job + 1)) for job in range(count)]
    await _until_input_ends()
    return {"bytes": received, "ended": sum(task.done() for task in tasks)}


def submit(socket: str, rate: int) -> dict[str, Any]:
    """Submit at a rate, several at a time if the daemon cannot keep up, until the input ends or has something."""
    begun_s, count = time.monotonic(), 0
    with Client(Path(socket), timeout_s=WAIT_S) as client:
        while not select.select([sys.stdin], [], [], 0.0)[0]:
            due = min(int((time.monotonic() - begun_s) * rate) - count, BATCH_MAX)
            if due <= 0:
                time.sleep(1.0 / rate)
                continue
            client.call_many("submit", [{"spec": {**SPEC, "name": f"late-{count + n}"}} for n in range(due)])
            count += due
    return {"submitted": count, "seconds": time.monotonic() - begun_s}


if __name__ == "__main__":
    mode, path, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if mode == "submit":
        answer = submit(path, number)
    else:
        answer = asyncio.run({"watch": watch, "follow": follow}[mode](path, number))
    print(json.dumps(answer))
