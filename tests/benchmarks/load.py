"""The daemon under the load of a large lab: 1,000 hosts, 12,000 jobs, watchers, followers of logs, a stream of submits.

python tests/benchmarks/load.py [--json] [--quick] [--hosts N] [--devices N] [--queued N] [--rate N] [--seconds N]
                                [--watchers N] [--followers N] [--events N]

One real daemon; its hosts are simulated by one other process, which it reaches over a Unix socket, so that the cost of
SSH is not in the figures. Every device runs a job. "Steady": running jobs report progress, and clients look at jobs.
"Submits": a further client submits as fast as it is answered. The restart is after a kill with this load, and after a
history of `--events` events.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from clusterd.client import Client
from clusterd.errors import ClusterError
from tests.benchmarks import load_history
from tests.benchmarks.cli import resident_mb
from tests.benchmarks.load_clients import SPEC
from tests.benchmarks.report import Report, arguments, spread
from tests.benchmarks.tui import cpu_s
from tests.conftest import REPOSITORY, until

QUICK = {"hosts": 50, "queued": 300, "rate": 200, "seconds": 5.0, "watchers": 5, "followers": 5, "events": 20_000}
WAIT_S = 600.0
WARM_UP_S = 5.0
"""After the baselines: what changed meanwhile reaches the watchers late."""

LOOKS_PER_S = 50.0
LIST_EVERY = 100
"""Of so many requests of the client that measures one asks for the rows of all jobs."""


class Load:
    """The processes of one measurement."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self.directory, self._stack = directory, stack
        self.socket = directory / "clusterd.sock"
        self._hosts_socket = directory / "hosts.sock"
        self.daemon: subprocess.Popen[str] | None = None

    def module(self, name: str, *words: object, **options: Any) -> subprocess.Popen[str]:
        """Start a module of this benchmark."""
        argv = [sys.executable, "-m", f"tests.benchmarks.{name}", *map(str, words)]
        environment = {**os.environ, "CLUSTERD_STATE_DIR": str(self.directory / "state")}
        for unwanted in ("CLUSTERD_SOCKET", "CLUSTERD_CONFIG"):
            environment.pop(unwanted, None)
        process = subprocess.Popen(
            argv, cwd=REPOSITORY, env={**environment, "CLUSTERD_SOCKET": str(self.socket)}, text=True, **options
        )
        self._stack.callback(_end, process)
        return process

    def start_hosts(self, count: int, devices: int) -> None:
        """Start the process of the simulated hosts."""
        self.module("load_hosts", "serve", self._hosts_socket, count, devices)
        until(self._hosts_socket.exists)

    def start_daemon(self) -> float:
        """Start the daemon; returns the seconds until it answers."""
        begun_s = time.perf_counter()
        self.daemon = self.module("load_hosts", "daemon", self._hosts_socket)
        until(self._answers, WAIT_S)
        return time.perf_counter() - begun_s

    def _answers(self) -> bool:
        assert self.daemon is not None
        if self.daemon.poll() is not None:
            raise SystemExit("the daemon ended")
        try:
            with Client(self.socket) as client:
                return bool(client.call("status"))
        except ClusterError:
            return False

    def kill_daemon(self) -> None:
        """Kill the daemon."""
        assert self.daemon is not None
        self.daemon.kill()
        self.daemon.wait()

    @contextlib.contextmanager
    def clients(self, mode: str, number: int, waits: bool = False) -> Iterator[dict[str, Any]]:
        """Run clients meanwhile; the yielded map has their answer afterwards. `waits`: until they are ready."""
        answer: dict[str, Any] = {}
        process = self.module("load_clients", mode, self.socket, number, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if waits:
            assert process.stdout is not None
            process.stdout.readline()
        yield answer
        output, _ = process.communicate("")
        answer.update(json.loads(output))


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def measure(report: Report, load: Load, name: str, seconds: float, jobs: int) -> None:
    """Look at jobs as people and their scripts do; the daemon's processor time meanwhile."""
    assert load.daemon is not None
    pid, waits = load.daemon.pid, defaultdict(list)
    begun_s, used_s, count = time.monotonic(), cpu_s(load.daemon.pid), 0
    with Client(load.socket, timeout_s=WAIT_S) as client:
        while time.monotonic() < begun_s + seconds:
            verb = "jobs" if count % LIST_EVERY == LIST_EVERY - 1 else ("status", "job", "why", "hello")[count % 4]
            wanted = {"job": str(count % jobs + 1)} if verb in ("job", "why") else {}
            called_s = time.monotonic()
            client.call(verb, **wanted)
            waits[verb].append(time.monotonic() - called_s)
            count += 1
            time.sleep(max(begun_s + count / LOOKS_PER_S - time.monotonic(), 0.0))
    short = [1000 * wait_s for verb, values in waits.items() if verb != "jobs" for wait_s in values]
    report.add(f"{name}_call_ms_p50", statistics.median(short))
    report.add(f"{name}_call_ms_p99", p99(short), at_most=50)
    report.add(f"{name}_cores", (cpu_s(pid) - used_s) / (time.monotonic() - begun_s), at_most=1)
    report.details[f"{name}_call_s"] = {verb: spread(values) for verb, values in waits.items()}


def p99(values: Sequence[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(values, n=100)[98] if len(values) > 1 else max(values, default=0.0)


def lag(report: Report, name: str, lags: list[tuple[float, float]], window: tuple[float, float]) -> None:
    """Time from a change to a watcher, of what arrived in the window."""
    found = [1000 * lag_s for at_s, lag_s in lags if window[0] <= at_s <= window[1]]
    report.add(f"{name}_event_lag_ms_p99", p99(found) if found else None, at_most=250)
    if found:
        report.details[f"{name}_event_lag_ms"] = spread(found)


def fill(report: Report, load: Load, hosts: int, devices: int, queued: int) -> None:
    """Add hosts and jobs until every device runs a job, and the others wait."""
    running = hosts * devices
    with Client(load.socket, timeout_s=WAIT_S) as client:
        begun_s = time.perf_counter()
        client.call_many("host_add", [{"address": f"host{n:04}", "accept": []} for n in range(hosts)])
        until(lambda: all(state == "up" for state in client.call("status")["hosts"].values()), WAIT_S)
        report.details["hosts_up_s"] = time.perf_counter() - begun_s
        begun_s = time.perf_counter()
        client.call_many("submit", [{"spec": {**SPEC, "name": f"job-{n}"}} for n in range(running)])
        until(lambda: client.call("status")["jobs"].get("running", 0) == running, WAIT_S)
        report.details["jobs_started_s"] = time.perf_counter() - begun_s
        begun_s = time.perf_counter()
        client.call_many("submit", [{"spec": {**SPEC, "name": f"late-{n}"}} for n in range(queued)])
        report.details["jobs_queued_s"] = time.perf_counter() - begun_s


def journal_bytes_per_event(directory: Path) -> float:
    """Size of a dead daemon's journal over the number of its events."""
    with contextlib.closing(sqlite3.connect(directory / "journal.db")) as db:
        (count,) = db.execute("SELECT max(id) FROM events").fetchone()
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return sum(file.stat().st_size for file in directory.glob("journal*")) / int(count)


def measure_history(report: Report, load: Load, events: int) -> None:
    """Start on the journal of years."""
    state = load.directory / "state"
    shutil.rmtree(state)
    state.mkdir()
    load_history.write(state, events)
    report.add("history_bytes_per_event", journal_bytes_per_event(state))
    report.add("history_restart_s", load.start_daemon(), at_most=10)
    assert load.daemon is not None
    report.add("history_mb", resident_mb(load.daemon.pid))
    report.details["history_events"] = events
    load.kill_daemon()


def measure_load(report: Report, load: Load, args: Any) -> None:
    """The daemon with hosts, jobs and clients."""
    load.start_hosts(args.hosts, args.devices)
    load.start_daemon()
    assert load.daemon is not None
    fill(report, load, args.hosts, args.devices, args.queued)
    jobs = args.hosts * args.devices + args.queued
    report.details["jobs_mb"] = resident_mb(load.daemon.pid)
    windows = {}
    started_s = time.perf_counter()
    with (
        load.clients("watch", args.watchers, waits=True) as watched,
        load.clients("follow", args.followers) as followed,
    ):
        report.add("baselines_s", time.perf_counter() - started_s)
        time.sleep(WARM_UP_S)
        begun_s = time.time()
        measure(report, load, "steady", args.seconds, jobs)
        windows["steady"] = (begun_s, time.time())
        with load.clients("submit", args.rate) as submitted:
            begun_s = time.time()
            measure(report, load, "submits", args.seconds, jobs)
            windows["submits"] = (begun_s, time.time())
        report.add("daemon_mb", resident_mb(load.daemon.pid), at_most=400)
    for name, window in windows.items():
        lag(report, name, watched["lags"], window)
    report.add("submits_per_s", submitted["submitted"] / submitted["seconds"], at_least=1000)
    report.details["watched_bytes"] = watched["bytes"]
    report.details["followed"] = followed
    load.kill_daemon()
    report.add("journal_bytes_per_event", journal_bytes_per_event(load.directory / "state"))
    report.add("restart_s", load.start_daemon(), at_most=10)
    load.kill_daemon()


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="a small setting that ends within a minute")
    for name, default in {
        "hosts": 1000, "devices": 2, "queued": 10_000, "rate": 1000, "seconds": 30.0, "watchers": 20,
        "followers": 20, "events": 1_000_000,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=type(default), default=default)
    if "--quick" in sys.argv:
        parser.set_defaults(**QUICK)
    args = parser.parse_args()
    report = Report("load")
    directory = Path(tempfile.mkdtemp(prefix="cl-", dir="/tmp"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        load = Load(directory, stack)
        measure_load(report, load, args)
        if args.events:
            measure_history(report, load, args.events)
    report.details |= {name: getattr(args, name) for name in ("hosts", "devices", "queued", "watchers", "followers")}
    report.show(args.json)


if __name__ == "__main__":
    main()
