"""Downtime of a live migration, beside a restart, a checkpoint within live processes, and the limits.

    python tests/benchmarks/migration.py [--json] [--sizes 0.25,1,2] [--repeats 5]

Four ranks on two embedded hosts of two CPU devices each; the state is parameters and two moments, all float32.
Everything is measured in one run, one after the other on the same machine.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from plans.layout import layout
from plans.model_shape import LayerShape, ModelShape, ParameterShape
from plans.plan import Plan
from plans.reshard import plan_moves
from tests.benchmarks.report import Report, options, spread
from tests.conftest import RunningCluster, kill_everything_of

HOME = "dp=2,tp=2"
FOUR = ("local0:cpu0", "local0:cpu1", "local1:cpu0", "local1:cpu1")
PAIRS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tp4": ("tp=4", FOUR),
    "zero3": ("dp=4,zero=3", FOUR),
    "pp2 x tp2": ("tp=2,pp=2,accumulation=2", FOUR),
    "2 ranks": ("tp=2", ("local0:cpu0", "local1:cpu0")),
}
SIZES = {"0.25": (512, 7), "1": (1024, 7), "2": (1024, 13)}
"""State in GB: width and depth of the GPT that has it."""

BATCH = 4
JOB = """
kind = "elastic"
command = ["python", "train.py", "--steps", "100000", "--width", "{width}", "--depth", "{depth}", "--batch", "{batch}"]
resources = {{ devices = 4, plan = {{ dp = 2, tp = 2 }} }}
"""


def main() -> None:
    """Measure and print."""
    args = options(__doc__ or "", sizes="0.25,1,2", repeats=5)
    report = Report("migration")
    report.details["pairs"] = {}
    worst: dict[str, list[float]] = {}
    for size in args.sizes.split(","):
        measured = measure_size(size, args.repeats)
        report.details["pairs"][size] = measured
        for name, value in measured["ratios"].items():
            worst.setdefault(name, []).append(value)
    limits = {
        "downtime_vs_restart": 0.05, "downtime_vs_live_checkpoint": 0.25, "transfer_vs_memcpy": 1.5,
        "transfer_vs_wire": 2.0, "network_bytes_vs_bound": 1.0, "peak_memory_vs_plan": 1.3,
    }  # fmt: skip
    for name, limit in limits.items():
        report.add(name, max(worst[name]) if worst.get(name) else None, at_most=limit)
    report.add("plan_70b_s", plan_70b_s(), at_most=5)
    report.show(args.json)


def measure_size(size: str, repeats: int) -> dict[str, Any]:
    """All pairs at one size of the state."""
    width, depth = SIZES[size]
    environment = {"GPT_WIDTH": str(width), "GPT_DEPTH": str(depth), "GPT_BATCH": str(BATCH)}
    baselines = checkpoint_baselines(environment, repeats)
    cluster = RunningCluster(Path(tempfile.mkdtemp(prefix="cl-", dir="/tmp")))
    try:
        cluster.start(hosts=2)
        job = cluster.submit(JOB.format(width=width, depth=depth, batch=BATCH), "gpt")
        cluster.wait_for(job, lambda row: row["step"] >= 2, timeout_s=300.0)
        moves: dict[str, list[dict[str, Any]]] = {}
        peaks: dict[str, float] = {}
        for _ in range(repeats):
            for name, (plan, devices) in PAIRS.items():
                for label, target, places in ((name, plan, devices), (f"{name} and back", HOME, FOUR)):
                    moves.setdefault(label, []).append(migrate(cluster, job, target, places))
        peaks = peak_memory(cluster, job)
        row = cluster.job(job)
        cluster.run("cancel", "--wait", job)
    finally:
        cluster.close()
        kill_everything_of(cluster.directory)
    return summary(moves, baselines, peaks, row)


def migrate(cluster: RunningCluster, job: str, plan: str, devices: tuple[str, ...]) -> dict[str, Any]:
    """One move, as the daemon measured it."""
    step = cluster.job(job)["step"]
    cluster.wait_for(job, lambda row: row["step"] > step and not row["migrating"], timeout_s=120.0)
    with cluster.client() as client:
        done = len(client.call("job", job=job)["migrations"])
    cluster.run("migrate", job, "--plan", plan, "--devices", ",".join(devices), timeout=180)
    row = cluster.wait_for(job, lambda row: len(row["migrations"]) > done and row["migrations"][done]["ended_s"])
    found: dict[str, Any] = row["migrations"][done]
    if found["failure"]:
        raise SystemExit(f"a move failed: {found['failure']}")
    found["bound"] = network_bound(row["shape"], found, row)
    return found


def network_bound(shape: dict[str, Any], move: dict[str, Any], row: dict[str, Any]) -> int:
    """The least that must cross: element by element what a host needs and lacks, counted apart from the planner."""
    model = ModelShape.from_dict(shape)
    earlier = [m for m in row["migrations"] if m["number"] < move["number"] and not m["failure"]]
    old_devices = earlier[-1]["devices"] if earlier else list(FOUR)
    total = 0
    sides = [
        (layout(model, Plan.parse(move["from"])), old_devices),
        (layout(model, Plan.parse(move["to"])), move["devices"]),
    ]
    for number, tensor in enumerate(sides[0][0].tensors):
        for host in {d.partition(":")[0] for d in move["devices"]}:
            masks = []
            for side, devices in sides:
                mask = np.zeros(tensor.shape, dtype=bool)
                for r in np.flatnonzero(side.tensor == number):
                    if devices[side.rank[r]].partition(":")[0] == host:
                        dims = range(len(tensor.shape))
                        mask[tuple(slice(int(side.low[r, d]), int(side.high[r, d])) for d in dims)] = True
                masks.append(mask)
            total += int((masks[1] & ~masks[0]).sum()) * tensor.element_bytes
    return total


def peak_memory(cluster: RunningCluster, job: str) -> dict[str, float]:
    """Peak of each rank that was in a move, as the kernel counted it, of the ranks that run now."""
    peaks = {}
    for place in Path("/proc").iterdir():
        try:
            environment = (place / "environ").read_bytes() if place.name.isdigit() else b""
            if str(cluster.directory).encode() not in environment or f"/{job}.1".encode() not in environment:
                continue
            status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line)
            peaks[place.name] = int(status["VmHWM"].split()[0]) / int(status["VmRSS"].split()[0])
        except (OSError, KeyError, ValueError):
            continue
    return peaks


def checkpoint_baselines(environment: dict[str, str], repeats: int) -> dict[str, Any]:
    """Seconds of (a) a restart and (b) a checkpoint in live processes, by target plan."""
    found: dict[str, Any] = {"live_s": {}, "restart_s": {}}
    with tempfile.TemporaryDirectory(prefix="dcp-") as directory:
        for name, (plan, devices) in PAIRS.items():
            if len(devices) == 4:
                told = ranks("live", HOME, plan, directory, repeats + 1, 4, environment)
                found["live_s"][name] = spread(told["seconds"])
            seconds = []
            for _ in range(max(repeats // 2, 1)):
                saved = ranks("save", HOME, "-", f"{directory}/cold", 1, 4, environment)
                loaded = ranks("load", plan, "-", f"{directory}/cold", 1, len(devices), environment)
                seconds.append(loaded["ready_s"] - saved["asked_s"])
            found["restart_s"][name] = spread(seconds)
    return found


def ranks(mode: str, first: str, second: str, directory: str, repeats: int, count: int, more: dict[str, str]) -> Any:
    """Start the ranks of the baseline as processes, and return what rank 0 told."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = str(Path(__file__).with_name("checkpoint_ranks.py"))
    common = {**os.environ, **more, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, script, mode, first, second, directory, str(repeats)],
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if rank else None,
        )
        for rank in range(count)
    ]
    told = started[0].communicate()[0]
    for process in started:
        process.wait()
    if any(process.returncode for process in started):
        raise SystemExit(f"the baseline failed: {mode} {first} {second}")
    return json.loads(told.splitlines()[-1])


def memcpy_s(size: int) -> float:
    """Seconds to copy so many bytes once, warm, with all cores: what the bytes cost within one host."""
    parts = os.cpu_count() or 1
    source = np.ones(size // parts, dtype=np.uint8)
    pairs = [(source.copy(), source.copy()) for _ in range(parts)]

    def copy(pair: tuple[Any, Any]) -> None:
        np.copyto(pair[1], pair[0])

    best = []
    for _ in range(5):
        threads = [threading.Thread(target=copy, args=(pair,)) for pair in pairs]
        started_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best.append(time.perf_counter() - started_s)
    return statistics.median(best)


def wire_s(size: int) -> float:
    """Seconds to send so many bytes over one loopback connection."""
    data, into = mmap.mmap(-1, max(size, 1)), mmap.mmap(-1, max(size, 1))
    data[:] = b"\1" * len(data)
    into[:] = b"\1" * len(into)
    seconds = []
    for _ in range(3):
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def receive(listener: socket.socket = listener) -> None:
                connection, _ = listener.accept()
                with connection, memoryview(into) as view:
                    done = 0
                    while done < size and (got := connection.recv_into(view[done : done + (4 << 20)])):
                        done += got

            thread = threading.Thread(target=receive)
            thread.start()
            with socket.create_connection(listener.getsockname()) as sender, memoryview(data) as view:
                started_s = time.perf_counter()
                sender.sendall(view[:size])
                thread.join()
                seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds)


def summary(
    moves: dict[str, list[dict[str, Any]]], baselines: dict[str, Any], peaks: dict[str, float], row: dict[str, Any]
) -> dict[str, Any]:
    """Medians by pair, and the worst ratio of each kind."""
    ratios: dict[str, list[float]] = {}
    pairs = {}
    for label, found in moves.items():
        name = label.removesuffix(" and back")
        downtime_s = statistics.median(m["downtime_s"] for m in found)
        phases = {
            phase: statistics.median(p["seconds"] for m in found for p in m["phases"] if p["phase"] == phase)
            for phase in ("prepare", "quiesce", "transfer", "verify", "resume")
        }
        last = found[-1]
        local, network = last["local_bytes"], last["network_bytes"]
        pairs[label] = {
            "downtime_s": spread([m["downtime_s"] for m in found]),
            "phases_s": phases,
            "local_bytes": local,
            "network_bytes": network,
            "network_bound": last["bound"],
        }
        restart, live = baselines["restart_s"][name]["median"], baselines["live_s"].get(name, {}).get("median")
        ratios.setdefault("downtime_vs_restart", []).append(downtime_s / restart)
        if live:
            ratios.setdefault("downtime_vs_live_checkpoint", []).append(downtime_s / live)
        if network == 0:
            # Out of the old ranks and into the new ones: each byte is copied twice.
            ratios.setdefault("transfer_vs_memcpy", []).append(downtime_s / (2 * memcpy_s(local)))
        else:
            limit_s = wire_s(network) + 2 * memcpy_s(local + network)
            ratios.setdefault("transfer_vs_wire", []).append(downtime_s / limit_s)
        ratios.setdefault("network_bytes_vs_bound", []).append(network / last["bound"] if last["bound"] else 1.0)
    ratios["peak_memory_vs_plan"] = list(peaks.values())
    return {
        "pairs": pairs,
        "baselines": baselines,
        "step_time_s": row["step_time_s"],
        "ratios": {name: max(values) for name, values in ratios.items() if values},
    }


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
    plan_moves(
        layout(shape, Plan(dp=64, tp=8, zero=3)),
        layout(shape, Plan(dp=48, tp=8, zero=3)),
        [f"h{r // 8}" for r in range(512)],
        [f"h{r // 8}" for r in range(384)],
    )
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
