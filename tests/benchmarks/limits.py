"""Limits of the machine: memory copies and loopback TCP in as many processes as a migration has, and bounds."""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from clusterd.plans.layout import layout
from clusterd.plans.model_shape import LayerShape, ModelShape, ParameterShape
from clusterd.plans.packing import Packing
from clusterd.plans.plan import Plan
from clusterd.plans.reshard import Transfers, plan_transfers

ROUNDS = 3
CHUNK_BYTES = 4 << 20

_fork = multiprocessing.get_context("fork")


def memcpy_s(parts: Sequence[int]) -> float:
    """Seconds to copy so many bytes twice, each part by a process of its own, from warm memory to warm memory."""

    def copier(size: int) -> Callable[[], None]:
        first, second, third = (np.ones(size, dtype=np.uint8) for _ in range(3))

        def copy() -> None:
            np.copyto(second, first)
            np.copyto(third, second)

        return copy

    return _together([(copier, size) for size in parts])


def wire_s(parts: Sequence[int]) -> float:
    """Seconds to send so many bytes over loopback TCP, each part over a connection between two processes of its own."""
    work: list[tuple[Callable[[Any], Callable[[], None]], Any]] = []
    for size in parts:
        listener = socket.create_server(("127.0.0.1", 0))
        sending = socket.create_connection(listener.getsockname())
        receiving, _ = listener.accept()
        listener.close()
        work += [(_sender, (sending, size)), (_receiver, (receiving, size))]
    return _together(work)


def _sender(what: tuple[socket.socket, int]) -> Callable[[], None]:
    connection, size = what
    data = memoryview(np.ones(max(size, 1), dtype=np.uint8))
    return lambda: connection.sendall(data[:size])


def _receiver(what: tuple[socket.socket, int]) -> Callable[[], None]:
    connection, size = what
    into = memoryview(np.ones(max(size, 1), dtype=np.uint8))

    def receive() -> None:
        done = 0
        while done < size:
            done += connection.recv_into(into[done : min(done + CHUNK_BYTES, size)])

    return receive


def _together(work: Sequence[tuple[Callable[[Any], Callable[[], None]], Any]]) -> float:
    """Median over rounds, from the first beginning to the last end, of work that processes do at once.

    Each is made (memory written, so that no page is new) before the clock starts.
    """
    barrier, results = _fork.Barrier(len(work)), _fork.SimpleQueue()

    def run(make: Callable[[Any], Callable[[], None]], argument: Any) -> None:
        do = make(argument)
        spans = []
        for _ in range(ROUNDS):
            barrier.wait()
            began_s = time.perf_counter()
            do()
            spans.append((began_s, time.perf_counter()))
        results.put(spans)

    processes = [_fork.Process(target=run, args=one, daemon=True) for one in work]
    for process in processes:
        process.start()
    spans = [results.get() for _ in processes]
    for process in processes:
        process.join()
    rounds = zip(*spans, strict=True)
    return statistics.median(max(end for _, end in r) - min(began for began, _ in r) for r in map(list, rounds))


def moves_of(shape: dict[str, Any], move: dict[str, Any], old_devices: Sequence[str]) -> Transfers:
    """Transfers that the planner computes for a migration that was made."""
    model = ModelShape.from_dict(shape)
    return plan_transfers(
        layout(model, Plan.parse(move["from"])),
        layout(model, Plan.parse(move["to"])),
        [host_of(d) for d in old_devices],
        [host_of(d) for d in move["devices"]],
        old_devices,
        move["devices"],
    )


def streams_of(moves: Transfers) -> list[int]:
    """Bytes of each connection between hosts."""
    packing = Packing(moves)
    return [fetch.bytes for host in dict.fromkeys(moves.new_hosts) for fetch in packing.fetches(host)]


def network_bound(shape: dict[str, Any], move: dict[str, Any], old_devices: Sequence[str]) -> int:
    """The least that must cross: element by element what a host needs and lacks, counted apart from the planner."""
    model = ModelShape.from_dict(shape)
    sides = [
        (layout(model, Plan.parse(move["from"])), old_devices),
        (layout(model, Plan.parse(move["to"])), move["devices"]),
    ]
    total = 0
    for number, tensor in enumerate(sides[0][0].tensors):
        for host in {host_of(d) for d in move["devices"]}:
            masks = []
            for side, devices in sides:
                mask = np.zeros(tensor.shape, dtype=bool)
                for r in np.flatnonzero(side.tensor == number):
                    if host_of(devices[side.rank[r]]) == host:
                        dims = range(len(tensor.shape))
                        mask[tuple(slice(int(side.low[r, d]), int(side.high[r, d])) for d in dims)] = True
                masks.append(mask)
            total += int((masks[1] & ~masks[0]).sum()) * tensor.element_bytes
    return total


def host_of(device: str) -> str:
    """The host in a device's name."""
    return device.partition(":")[0]


def plan_70b_s() -> float:
    """Planning a 70-billion-parameter move from 512 to 384 ranks, layouts included."""
    width, hidden, layers, vocabulary = 8192, 28672, 80, 32000
    parameters = [ParameterShape("embed.weight", (vocabulary, width), 2, 0, tp_dim=0)]
    shapes = {
        "q": ((width, width), 0), "k": ((1024, width), 0), "v": ((1024, width), 0), "o": ((width, width), 1),
        "gate": ((hidden, width), 0), "up": ((hidden, width), 0), "down": ((width, hidden), 1),
        "norm1": ((width,), -1), "norm2": ((width,), -1),
    }  # fmt: skip
    for i in range(layers):
        parameters += [ParameterShape(f"blocks.{i}.{n}", s, 2, i + 1, tp_dim=dim) for n, (s, dim) in shapes.items()]
    parameters.append(ParameterShape("head.weight", (vocabulary, width), 2, layers + 1, tp_dim=0))
    shape = ModelShape(
        parameters=tuple(parameters), layers=tuple(LayerShape(f"l{i}") for i in range(layers + 2)),
        global_batch=1024, samples=10**6, optimizer_state_ratio=4.0, pipeline=True,
    )  # fmt: skip
    started_s = time.perf_counter()
    plan_transfers(
        layout(shape, Plan(dp=64, tp=8, zero=3)),
        layout(shape, Plan(dp=48, tp=8, zero=3)),
        [f"h{r // 8}" for r in range(512)],
        [f"h{r // 8}" for r in range(384)],
    )
    return time.perf_counter() - started_s
