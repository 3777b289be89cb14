"""Downtime of a live migration, beside a restart, a checkpoint within live processes, and the limits.

    python tests/benchmarks/migration.py [--json] [--sizes 0.25,1,2] [--repeats 5] [--turns 6]
        [--baselines restart,live]

With ``--turns 0`` steps are not compared, ``--baselines`` says which ways by a checkpoint are measured.

Four ranks on two embedded hosts of two CPU devices each; the state is parameters and two moments, all float32.
Limits are measured while the job's ranks are stopped, as they are while bytes are moved.
Everything is measured in one run on the same machine; each figure is the worst pair's, of medians over repeats.

==========================  ============================================================================================
downtime                    from the end of the last old step (the latest rank's) to the start of the first new one
bytes_s                     of that, from the first copy into a store to the last copy out of one: copies, network, the
                            messages between them, checksums
control_s                   the rest: agreement to stop, the words of ranks and agents, the commit, the first samples
downtime_vs_restart         downtime / (save with torch's distributed checkpoint, end, start, load, ready for a step)
downtime_vs_live_checkpoint downtime / (save and load with it in processes that live on, both plans built)
transfer_vs_memcpy          moves within hosts: bytes_s / (the bytes read, copied twice in as many processes)
transfer_vs_wire            moves between hosts: bytes_s / (the bytes sent, over as many loopback connections); bytes_s
                            has the copies of what never leaves its host, too
transfer_vs_limits          any move: bytes_s / (all its bytes copied twice, and then those between hosts sent)
peak_memory_vs_plan         peak of resident memory of any rank during a move / its peak in steps after it, under the
                            larger plan of the two
step_overhead               clusterd.train / plain torch, processor time of a step, dp=4 and ZeRO-3, `train.run` and
                            `train.session`; minus 1
snapshot_overhead           a snapshot every ten steps / none, mean step; minus 1
==========================  ============================================================================================
"""

from __future__ import annotations

import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.limits import memcpy_s, moves_of, network_bound, plan_70b_s, streams_of, wire_s
from tests.benchmarks.overhead import ranks_of, resume, snapshot_overhead, step_overhead, stop
from tests.benchmarks.ranks import started
from tests.benchmarks.report import Report, options, spread
from tests.conftest import RunningCluster, kill_everything_of

HOME = "dp=2,tp=2"
FOUR = ("local0:cpu0", "local0:cpu1", "local1:cpu0", "local1:cpu1")
PAIRS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tp=4": ("tp=4", FOUR),
    "dp=4,zero=3": ("dp=4,zero=3", FOUR),
    "tp=2,pp=2": ("tp=2,pp=2,accumulation=2", FOUR),
    "tp=2": ("tp=2", ("local0:cpu0", "local1:cpu1")),  # of two cores: embedded hosts share them
}
SIZES = {"0.06": (256, 7, 64), "0.25": (512, 7, 64), "1": (1024, 7, 8), "2": (1024, 13, 8)}
"""State in GB: width, depth and context of the GPT that has it; short ones, as what it computes takes longest here."""

BATCH = 4
JOB = """
kind = "elastic"
trials = false
snapshots = 0
command = ["python", "train.py", "--steps", "100000", "--width", "{width}", "--depth", "{depth}", "--batch", "{batch}",
    "--context", "{context}"]
resources = {{ devices = 4, plan = {{ dp = 2, tp = 2 }} }}
"""
AIMS = {
    "downtime_vs_restart": 0.05, "downtime_vs_live_checkpoint": 0.25, "transfer_vs_memcpy": 1.5,
    "transfer_vs_wire": 2.0, "network_bytes_vs_bound": 1.0, "peak_memory_vs_plan": 1.3,
}  # fmt: skip
PHASES = ("prepare", "quiesce", "transfer", "verify", "resume")


def main() -> None:
    """Measure and print."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that clusters are closed
    args = options(__doc__ or "", sizes="0.25,1,2", repeats=5, turns=6, baselines="restart,live")
    report = Report("migration")
    report.details["pairs"] = {}
    worst: dict[str, list[float]] = {}
    for size in filter(None, args.sizes.split(",")):
        measured = measure_size(size, args.repeats, args.baselines.split(","))
        report.details["pairs"][size] = measured
        for name, value in measured["ratios"].items():
            worst.setdefault(name, []).append(value)
    for name, limit in AIMS.items():
        report.add(name, max(worst[name]) if worst.get(name) else None, at_most=limit)
    report.add("transfer_vs_limits", max(worst["transfer_vs_limits"]) if worst.get("transfer_vs_limits") else None)
    if args.turns:
        width, depth, _ = SIZES["0.25"]
        steps = step_overhead(width, depth, BATCH, args.turns)
        snapshots = snapshot_overhead(width, depth, BATCH, args.turns)
        report.details["step_overhead"], report.details["snapshot_overhead"] = steps, snapshots
        report.add("step_overhead", max(one["processor_overhead"] for one in steps.values()), at_most=0.02)
        report.add("snapshot_overhead", snapshots["overhead"], at_most=0.03)
    report.add("plan_70b_s", plan_70b_s(), at_most=5)
    report.show(args.json)


def measure_size(size: str, repeats: int, baselines: Sequence[str]) -> dict[str, Any]:
    """All pairs at one size of the state."""
    width, depth, context = SIZES[size]
    environment = {"GPT_WIDTH": str(width), "GPT_DEPTH": str(depth), "GPT_BATCH": str(BATCH)}
    checkpoints = checkpoint_baselines(environment, repeats, baselines)
    cluster = RunningCluster(Path(tempfile.mkdtemp(prefix="cl-", dir="/tmp")))
    try:
        cluster.start(hosts=2)
        job = cluster.submit(JOB.format(width=width, depth=depth, batch=BATCH, context=context), "gpt")
        cluster.wait_for(job, lambda row: row["step"] >= 2, timeout_s=300.0)
        moves: dict[str, list[dict[str, Any]]] = {}
        bounds: dict[Any, tuple[int, list[int]]] = {}
        for _ in range(repeats):
            for name, (plan, devices) in PAIRS.items():
                for label, target, places in ((name, plan, devices), (f"{name} and back", HOME, FOUR)):
                    moves.setdefault(label, []).append(migrate(cluster, job, target, places, bounds))
        row = cluster.job(job)
        cluster.run("cancel", "--wait", job)
    finally:
        cluster.close()
        kill_everything_of(cluster.directory)
    return summary(moves, checkpoints, row)


def migrate(
    cluster: RunningCluster, job: str, plan: str, devices: tuple[str, ...], bounds: dict[Any, tuple[int, list[int]]]
) -> dict[str, Any]:
    """One move, as the daemon measured it, with memory and the limits measured around it.

    Args:
        bounds: bytes that must cross and streams, by move, as far as known.
    """
    row = trained(cluster, job)
    steady = peaks(ranks_of(cluster, job), reset=True)
    done = len(row["migrations"])
    with Watch(cluster, job) as watch:
        cluster.run("migrate", job, "--plan", plan, "--devices", ",".join(devices), "--pin", timeout=900)
        row = cluster.wait_for(job, lambda row: len(row["migrations"]) > done and row["migrations"][done]["ended_s"])
    found: dict[str, Any] = row["migrations"][done]
    if found["failure"]:
        raise SystemExit(f"a move failed: {found['failure']}")
    pids = ranks_of(cluster, job)
    peaks(pids, reset=True)
    trained(cluster, job, steps=4)
    larger = max(*steady.values(), *peaks(pids).values())
    found["peak"] = max(watch.peaks.values()) / larger
    text = next(p["what"] for p in found["phases"] if p["phase"] == "transfer")
    seconds = re.search(r"copied within ([0-9.]+) s", text)
    assert seconds is not None, text
    found["bytes_s"] = float(seconds[1])
    earlier = [m for m in row["migrations"][:done] if not m["failure"]]
    old_devices = earlier[-1]["devices"] if earlier else list(FOUR)
    key = (found["from"], *old_devices, found["to"], *found["devices"])
    if key not in bounds:
        moves = moves_of(row["shape"], found, old_devices)
        bounds[key] = network_bound(row["shape"], found, old_devices), streams_of(moves)
    found["bound"], found["streams"] = bounds[key]
    # At once: what else the machine does changes from minute to minute.
    share = (found["local_bytes"] + found["network_bytes"]) // len(devices)
    pids = ranks_of(cluster, job)
    stop(pids)  # nobody trains while bytes are moved
    found["memcpy_s"] = memcpy_s([share] * len(devices))
    found["wire_s"] = wire_s(found["streams"]) if found["streams"] else 0.0
    resume(pids)
    message = {k: round(found[k], 4) for k in ("downtime_s", "bytes_s", "memcpy_s", "wire_s", "peak")}
    print(f"{found['from']} -> {found['to']}: {message}", file=sys.stderr, flush=True)
    return found


def trained(cluster: RunningCluster, job: str, steps: int = 1) -> dict[str, Any]:
    """The job's row, when more than so many steps were reported after now; the first two may have been made before."""
    step = cluster.job(job)["step"]
    return cluster.wait_for(job, lambda row: row["step"] > step + steps and not row["migrating"], timeout_s=120.0)


class Watch:
    """Peaks of all ranks of a job, old and new, by process, for as long as they live."""

    def __init__(self, cluster: RunningCluster, job: str) -> None:
        self.peaks: dict[int, float] = {}
        self._cluster, self._job = cluster, job
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.1):
            self.peaks.update(peaks(ranks_of(self._cluster, self._job)))


def peaks(pids: Sequence[int], reset: bool = False) -> dict[int, float]:
    """Peak resident bytes of processes as the kernel counted them, since the last reset; those that are gone: none."""
    found = {}
    for pid in pids:
        place = Path(f"/proc/{pid}")
        try:
            lines = (place / "status").read_text().splitlines()
            found[pid] = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024.0
            if reset:
                (place / "clear_refs").write_text("5")
        except (OSError, StopIteration):
            continue
    return found


def checkpoint_baselines(environment: dict[str, str], repeats: int, which: Sequence[str]) -> dict[str, Any]:
    """Seconds of (a) a restart and (b) a checkpoint in live processes, there and back, by pair."""
    found: dict[str, Any] = {"live_s": {}, "restart_s": {}}
    with tempfile.TemporaryDirectory(prefix="dcp-") as directory:
        for name, (plan, devices) in PAIRS.items():
            if "live" in which and len(devices) == 4:  # live processes cannot become fewer
                for label, ends in ((name, (HOME, plan)), (f"{name} and back", (plan, HOME))):
                    answer = ranks("live", *ends, directory, repeats + 1, 4, environment)
                    found["live_s"][label] = spread(answer["seconds"])
            seconds = []
            for _ in range(max(repeats // 2, 1) if "restart" in which else 0):
                saved = ranks("save", HOME, "-", f"{directory}/cold", 1, 4, environment)
                loaded = ranks("load", plan, "-", f"{directory}/cold", 1, len(devices), environment)
                seconds.append(loaded["ready_s"] - saved["asked_s"])
            if seconds:
                found["restart_s"][name] = spread(seconds)
            print(f"checkpoints, {name}: {found}", file=sys.stderr, flush=True)
    return found


def ranks(mode: str, first: str, second: str, directory: str, repeats: int, count: int, more: dict[str, str]) -> Any:
    """Start the ranks of the baseline, and return what rank 0 told."""
    script = str(Path(__file__).with_name("checkpoint_ranks.py"))
    command = [sys.executable, script, mode, first, second, directory, str(repeats)]
    processes = started(command, count, more, stdout=subprocess.PIPE)
    answer = processes[0].communicate()[0]
    for process in processes:
        process.wait()
    if any(process.returncode for process in processes):
        raise SystemExit(f"the baseline failed: {mode} {first} {second}")
    return json.loads(answer.splitlines()[-1])


def summary(moves: dict[str, list[dict[str, Any]]], baselines: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Medians by pair, and the worst ratio of each kind."""
    ratios: dict[str, list[float]] = {}
    pairs = {}
    for label, found in moves.items():
        last = found[-1]
        network = last["network_bytes"]
        median = {key: statistics.median(m[key] for m in found) for key in ("downtime_s", "bytes_s", "memcpy_s")}
        wire = statistics.median(m["wire_s"] for m in found)
        restart = baselines["restart_s"].get(label.removesuffix(" and back"), {}).get("median")
        live = baselines["live_s"].get(label, {}).get("median")
        mine = {
            "network_bytes_vs_bound": network / last["bound"] if last["bound"] else 1.0 + network,
            "peak_memory_vs_plan": statistics.median(m["peak"] for m in found),
        }
        if restart:
            mine["downtime_vs_restart"] = median["downtime_s"] / restart
        if live:
            mine["downtime_vs_live_checkpoint"] = median["downtime_s"] / live
        mine["transfer_vs_limits"] = median["bytes_s"] / (median["memcpy_s"] + wire)
        if network:
            mine["transfer_vs_wire"] = median["bytes_s"] / wire
        else:
            mine["transfer_vs_memcpy"] = median["bytes_s"] / median["memcpy_s"]
        for name, value in mine.items():
            ratios.setdefault(name, []).append(value)
        pairs[label] = {
            "downtime_s": spread([m["downtime_s"] for m in found]),
            "bytes_s": spread([m["bytes_s"] for m in found]),
            "control_s": statistics.median(m["downtime_s"] - m["bytes_s"] for m in found),
            "phases_s": {
                phase: statistics.median(p["seconds"] for m in found for p in m["phases"] if p["phase"] == phase)
                for phase in PHASES
            },
            "limits_s": {"memcpy": median["memcpy_s"], "wire": wire},
            "local_bytes": last["local_bytes"],
            "network_bytes": network,
            "network_bound": last["bound"],
            "streams": len(last["streams"]),
            "ratios": mine,
        }
    return {
        "pairs": pairs,
        "baselines": baselines,
        "step_time_s": row["step_time_s"],
        "ratios": {name: max(values) for name, values in ratios.items()},
    }


if __name__ == "__main__":
    main()
