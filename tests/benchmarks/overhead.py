"""Steps side by side: two jobs take turns of some seconds, so that both see the same noise of the machine.

Turns are made with SIGSTOP and SIGCONT of the ranks; daemon and agents go on all the time. The cost of a step is the
processor time of all ranks over all turns by their steps: other processes on the machine change step times, but hardly
processor times, and a step that a pause fell into is paid for by the turns on both sides of it.

    python -m tests.benchmarks.overhead [--width 256] [--depth 4] [--batch 32] [--turns 20]
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from tests.benchmarks.ranks import started
from tests.benchmarks.report import Report, options
from tests.conftest import RunningCluster, kill_everything_of, processes_of, until

TURN_STEPS = 20
WINDOW = 10
LOOK_EVERY_S = 2.0
"""Between two looks at a log: reading one takes processor time from the steps, and ours has more to read."""

JOB = """
kind = "elastic"
trials = false
snapshots = {snapshots}
command = ["python", "{script}", "--steps", "100000", "--width", "{width}", "--depth", "{depth}", "--batch", "{batch}"]
resources = {{ devices = 4, plan = {plan} }}
"""

SCRIPTS = {"run": "train.py", "session": str(Path(__file__).with_name("own_loop.py"))}
"""By front door; both run in the folder of the example."""

Times = Callable[[], list[float]]
"""Seconds of all steps so far."""


def step_overhead(width: int, depth: int, batch: int, turns: int) -> dict[str, dict[str, float]]:
    """`clusterd.train` on a running cluster against plain torch, by plan and front door."""
    found = {}
    plans = (("dp", "{ dp = 4 }"), ("zero3", "{ dp = 4, zero = 3 }"))
    for (how, plan), door in product(plans, SCRIPTS):
        cluster = RunningCluster(Path(tempfile.mkdtemp(prefix="cl-", dir="/tmp")))
        plain: list[subprocess.Popen[bytes]] = []
        try:
            cluster.start(hosts=2)
            text = JOB.format(snapshots=0, width=width, depth=depth, batch=batch, plan=plan, script=SCRIPTS[door])
            job = cluster.submit(text, "gpt")
            cluster.wait_for(job, lambda row: row["step"] >= 3, timeout_s=300.0)
            ours = ranks_of(cluster, job)
            stop(ours)
            file = cluster.directory / "plain.steps"
            sizes = {"GPT_WIDTH": str(width), "GPT_DEPTH": str(depth), "GPT_BATCH": str(batch)}
            script = str(Path(__file__).with_name("plain_ranks.py"))
            plain = started([sys.executable, script, how, str(file)], 4, sizes)
            until(lambda f=file: f.exists() and len(plain_times(f)) >= 3, 300.0)  # type: ignore[misc]
            theirs = [p.pid for p in plain]
            stop(theirs)
            found[f"{how} {door}"] = compared(
                (ours, lambda c=cluster, j=job: logged_times(c, j)),  # type: ignore[misc]
                (theirs, lambda f=file: plain_times(f)),  # type: ignore[misc]
                turns,
            )
        finally:
            for process in plain:
                process.kill()
                process.wait()
            close(cluster)
    return found


def snapshot_overhead(width: int, depth: int, batch: int, turns: int) -> dict[str, float]:
    """A job with a snapshot every ten steps against one without any."""
    cluster = RunningCluster(Path(tempfile.mkdtemp(prefix="cl-", dir="/tmp")))
    try:
        cluster.start(hosts=2, devices=4)
        sides = []
        for name, every in (("with", 10), ("without", 0)):
            sizes = {"width": width, "depth": depth, "batch": batch}
            text = JOB.format(snapshots=every, **sizes, plan="{ dp = 2, tp = 2 }", script=SCRIPTS["run"])
            job = cluster.submit(text, name)
            cluster.wait_for(job, lambda row: row["step"] >= 12, timeout_s=300.0)
            pids = ranks_of(cluster, job)
            stop(pids)
            sides.append((pids, lambda j=job: logged_times(cluster, j)))  # type: ignore[misc]
        return compared(sides[0], sides[1], turns)
    finally:
        close(cluster)


def compared(first: tuple[list[int], Times], second: tuple[list[int], Times], turns: int) -> dict[str, float]:
    """Extra cost of a step of the first over one of the second, by processor time and by medians of step times."""
    means: list[list[float]] = [[], []]
    processor_s, steps = [0.0, 0.0], [0, 0]
    for _ in range(turns):
        for number, (pids, times) in enumerate((first, second)):
            done, before_s = len(times()), sum(map(processor_time_s, pids))
            resume(pids)
            while len(times()) < done + TURN_STEPS + 3:
                time.sleep(LOOK_EVERY_S)
            stop(pids)
            # The pause fell into one of the first two: clusterd logs a step while the next one runs.
            processor_s[number] += sum(map(processor_time_s, pids)) - before_s
            steps[number] += len(times()) - done
            fresh = times()[done + 2 : done + 2 + TURN_STEPS]
            means[number] += [statistics.mean(fresh[i : i + WINDOW]) for i in range(0, TURN_STEPS, WINDOW)]
    resume(first[0])
    resume(second[0])
    # Of neighbours, so that what changes in the course of minutes is in both.
    ratios = [a / b - 1 for a, b in zip(*means, strict=True)]
    each_s = [total_s / count for total_s, count in zip(processor_s, steps, strict=True)]
    print(f"windows of ten steps, s: {means}; processor time of a step, s: {each_s}", file=sys.stderr, flush=True)
    return {
        "first_processor_s": each_s[0],
        "second_processor_s": each_s[1],
        "processor_overhead": each_s[0] / each_s[1] - 1,
        "first_s": statistics.median(means[0]),
        "second_s": statistics.median(means[1]),
        "overhead": statistics.median(means[0]) / statistics.median(means[1]) - 1,
        "overhead_of_neighbours": statistics.median(ratios),
        "windows": len(ratios),
        "steps": min(steps),
    }


def processor_time_s(pid: int) -> float:
    """Processor time of all threads of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def plain_times(file: Path) -> list[float]:
    """Of `plain_ranks.py`."""
    return [float(line.split()[0]) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def logged_times(cluster: RunningCluster, job: str) -> list[float]:
    """Of a job's log, as its host has it: asking the daemon for it would take processor time from the steps."""
    for file in (cluster.directory / "local").glob(f"*/agent/attempts/{job}.1/steps.jsonl"):
        lines = file.read_text().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [one["time_s"] for one in found if "time_s" in one]
    return []


def ranks_of(cluster: RunningCluster, job: str) -> list[int]:
    """Processes of all ranks of a job."""
    found = []
    for pid in processes_of(cluster.directory):
        try:
            message = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.startswith(b"CLUSTERD_TAG") and f"/{job}.".encode() in word for word in message):
            found.append(pid)
    return found


def stop(pids: Sequence[int]) -> None:
    """Pause."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def resume(pids: Sequence[int]) -> None:
    """Go on."""
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def close(cluster: RunningCluster) -> None:
    """Leave nothing behind, paused or not."""
    kill_everything_of(cluster.directory)
    cluster.close()
    kill_everything_of(cluster.directory)


def main() -> None:
    """Measure and print."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that clusters are closed
    args = options(__doc__ or "", width=256, depth=4, batch=32, turns=20)
    report = Report("overhead")
    for name, found in step_overhead(args.width, args.depth, args.batch, args.turns).items():
        report.details[name] = found
        report.add(f"step_overhead, {name}", found["processor_overhead"], at_most=0.02)
    report.show(args.json)


if __name__ == "__main__":
    main()
