"""Start-up of the command line, durable submits, the daemon's memory, and starting ranks through the fork server.

python tests/benchmarks/cli.py [--json] [--repeats N]
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from clusterd.client import Client
from clusterd.protocol.launch import LaunchRequest, RankSpec
from clusterd.protocol.messages import from_map, to_map
from clusterd.ssh.connection import Dialer
from clusterd.ssh.embedded import EmbeddedHost
from clusterd.ssh.host import HostLink, Leader, LinkCallbacks
from clusterd.ssh.hostkeys import HostKeys
from tests.benchmarks.report import Report, options, spread
from tests.conftest import RunningCluster, kill_everything_of, until

SPEC: dict[str, Any] = {"name": "job", "command": ["true"], "waits_for_hosts": True, "resources": {"devices": 64}}


def timed(argv: list[str], repeats: int, environment: dict[str, str]) -> list[float]:
    """Seconds of each run."""
    seconds = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        subprocess.run(argv, check=True, env=environment, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - started_s)
    return seconds


def resident_mb(pid: int) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"no VmRSS of {pid}")


def measure_command_line(report: Report, cluster: RunningCluster, repeats: int) -> None:
    """A cold `clusterd ls` against a bare interpreter, taken in turns."""
    executable = str(Path(sys.executable).with_name("clusterd"))
    bare, ls = [], []
    for _ in range(repeats):
        bare += timed([sys.executable, "-c", "pass"], 1, cluster.environment)
        ls += timed([executable, "ls"], 1, cluster.environment)
    report.add("cli_start_ratio", statistics.median(ls) / statistics.median(bare), at_most=6)
    report.details["command_line_s"] = {"python -c pass": spread(bare), "clusterd ls": spread(ls)}


def measure_submits(report: Report, cluster: RunningCluster, count: int) -> None:
    """One connection, every submit durable before it is answered; in turns of fifty, and one at a time."""
    with Client(cluster.socket) as client:
        started_s = time.perf_counter()
        for _ in range(count // 50):
            client.call_many("submit", [{"spec": SPEC}] * 50)
        report.add("submits_per_s", count / (time.perf_counter() - started_s), at_least=500)
        alone = []
        for _ in range(50):
            started_s = time.perf_counter()
            client.call("submit", spec=SPEC)
            alone.append(time.perf_counter() - started_s)
        report.details["one_submit_s"] = spread(alone)


async def _rank_starts(directory: Path, repeats: int) -> list[float]:
    """Seconds from the request to the first line of a script that has imported torch."""
    host = EmbeddedHost("bench", directory / "bench")
    await host.start()
    up = asyncio.Event()

    async def route() -> Any:
        return host.route

    link = HostLink(
        "bench", route, Dialer(HostKeys(directory / "known_hosts")), Leader("bench", 1, "bench"),
        LinkCallbacks(on_state=lambda _: None, on_up=lambda _: up.set(), on_event=lambda _: None),
    )  # fmt: skip
    running = asyncio.create_task(link.run())
    try:
        await asyncio.wait_for(up.wait(), 60)
        script = directory / "started.py"
        script.write_text("import torch, time, sys\nopen(sys.argv[1], 'w').write(repr(time.time()))\n")
        seconds = []
        for number in range(repeats + 1):
            answer = directory / f"started-{number}"
            place = {
                "rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1, "master_addr": "127.0.0.1",
                "master_port": 0, "interface": "", "plan": {}, "hosts": 1,
                "device": {"kind": "cpu", "uuid": "", "cores": [], "threads": 1},
            }  # fmt: skip
            launch = LaunchRequest(
                job=f"b{number}", attempt=1, generation=1, kind="elastic", grace_s=1.0, workdir=str(directory),
                ranks=(from_map(RankSpec, place),), argv=("python", str(script), str(answer)), python=sys.executable,
            )  # fmt: skip
            asked_s = time.time()
            await link.request("launch", timeout_s=120.0, **to_map(launch))
            await asyncio.to_thread(until, lambda answer=answer: answer.exists() and bool(answer.read_text()))
            if number:  # the first one starts the fork server
                seconds.append(float(answer.read_text()) - asked_s)
        return seconds
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await host.stop()


def main() -> None:
    """Measure and print."""
    args = options(__doc__ or "", repeats=15, submits=1000)
    report = Report("cli")
    cluster = RunningCluster(Path(tempfile.mkdtemp(prefix="cl-", dir="/tmp")))
    try:
        cluster.start(hosts=2)
        measure_command_line(report, cluster, args.repeats)
        report.add("daemon_idle_mb", resident_mb(cluster.pid))
        measure_submits(report, cluster, args.submits)
        until(lambda: cluster.call("status")["jobs"].get("queued", 0) >= args.submits)
        report.add("daemon_1000_jobs_mb", resident_mb(cluster.pid), at_most=120)
        cold = timed([sys.executable, "-c", "import torch"], 3, {**os.environ, "OMP_NUM_THREADS": "1"})
        warm = asyncio.run(_rank_starts(cluster.directory, args.repeats))
        report.add("rank_start_speedup", statistics.median(cold) / statistics.median(warm), at_least=10)
        report.details["rank_start_s"] = {"python -c import torch": spread(cold), "fork server": spread(warm)}
    finally:
        cluster.close()
        kill_everything_of(cluster.directory)
    report.show(args.json)


if __name__ == "__main__":
    main()
