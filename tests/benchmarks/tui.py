"""The terminal UI under load: from event to screen, its processor time and memory, and its start against a bare app's.

python tests/benchmarks/tui.py [--json] [--seconds N] [--hosts N] [--devices N] [--jobs N] [--rate N] [--starts N]

A daemon that only pretends feeds a `clusterd top` in a pseudo-terminal of 160x48. Job 1 is on the screen, its step is
the time in milliseconds, so that what is drawn says how old it is; of every value that was sent, the time until it or a
newer one was drawn counts. The real daemon's share is measured apart, with and without somebody who watches.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.cli import resident_mb
from tests.benchmarks.report import Report, options, spread
from tests.conftest import REPOSITORY, RunningCluster
from tests.tui.pretend import STEPS
from tests.tui.terminal import Terminal

BARE = """
from textual.app import App
from textual.widgets import Static
class Bare(App):
    def compose(self):
        yield Static("here it is")
Bare().run()
"""

SHOWN = re.compile(rb"(\d+)/%d" % STEPS)


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pretend(socket: Path, answer: Path, **sizes: int) -> subprocess.Popen[bytes]:
    """Start the pretending daemon; what it sent of job 1 goes to `told`."""
    arguments = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    argv = [sys.executable, "-m", "tests.tui.pretend", str(socket), *arguments]
    process = subprocess.Popen(argv, stdout=answer.open("wb"), cwd=REPOSITORY)
    deadline_s = time.monotonic() + 20
    while not socket.exists():
        if time.monotonic() > deadline_s or process.poll() is not None:
            raise SystemExit("the pretending daemon does not start")
        time.sleep(0.02)
    return process


def top(socket: Path) -> Terminal:
    """`clusterd top` in a terminal of its own."""
    return Terminal([sys.executable, "-m", "clusterd", "top", "--socket", str(socket)], 160, 48)


def measure_load(report: Report, directory: Path, seconds: float, **sizes: int) -> None:
    """Under the full stream of changes."""
    socket, answer = directory / "load.sock", directory / "told"
    daemon = pretend(socket, answer, **sizes)
    terminal = top(socket)
    seen: list[tuple[float, int]] = []
    try:
        terminal.expect(b"/%d" % STEPS)
        pid = terminal.process.pid if terminal.process else 0
        warm_s = time.monotonic() + 3.0
        while time.monotonic() < warm_s:
            terminal.read(0.05)
        started_s, ui_s, daemon_s, terminal.output = time.monotonic(), cpu_s(pid), cpu_s(daemon.pid), b""
        while time.monotonic() < started_s + seconds:
            data = terminal.read(0.05)
            at_ms = time.monotonic() * 1000 % STEPS
            seen += [(at_ms, int(value)) for value in SHOWN.findall(data)]
        elapsed_s = time.monotonic() - started_s
        report.add("ui_cores", (cpu_s(pid) - ui_s) / elapsed_s, at_most=0.5)
        report.add("ui_mb", resident_mb(pid), at_most=150)
        report.details["feeding_cores"] = (cpu_s(daemon.pid) - daemon_s) / elapsed_s
        terminal.type("q")
        terminal.wait()
    finally:
        terminal.close()
        daemon.terminate()
        daemon.wait()
    sent = [int(word) for word in answer.read_text().split()[1:-1]]
    first, last = seen[0][1], max(value for _, value in seen)
    waits: list[float] = []
    drawn = iter(seen)
    at_ms, value = next(drawn)
    for stamp in (stamp for stamp in sent if first < stamp <= last):
        while value < stamp:
            at_ms, value = next(drawn)
        waits.append(at_ms - stamp)
    report.add("event_to_screen_ms_p99", statistics.quantiles(waits, n=100)[98], at_most=200)
    report.details["event_to_screen_ms"] = spread(waits)
    report.details["redraws_per_s"] = len({value for _, value in seen}) / seconds


def measure_start(report: Report, directory: Path, starts: int, **sizes: int) -> None:
    """Cold start to the first full screen, in turns with a bare app."""
    socket = directory / "start.sock"
    daemon = pretend(socket, directory / "start", **sizes)
    ours, bare = [], []
    try:
        for _ in range(starts):
            terminal = top(socket)
            ours.append(terminal.expect(b"/%d" % STEPS))
            terminal.close()
            terminal = Terminal([sys.executable, "-c", BARE], 160, 48)
            bare.append(terminal.expect(b"here it is"))
            terminal.close()
    finally:
        daemon.terminate()
        daemon.wait()
    report.add("start_ratio", statistics.median(ours) / statistics.median(bare), at_most=1.5)
    report.details["start_s"] = {"clusterd top": spread(ours), "bare app": spread(bare)}


def measure_daemon(report: Report, seconds: float, jobs: int, rate: int) -> None:
    """The real daemon at `rate` changes a second over `jobs` queued jobs: what one watcher costs it."""
    cluster = RunningCluster(Path(tempfile.mkdtemp(prefix="cl-", dir="/tmp")))
    shares = []
    try:
        cluster.start()
        pid = cluster.pid
        with cluster.client() as client:
            spec = {"name": "job", "command": ["true"], "waits_for_hosts": True, "resources": {"devices": 64}}
            ids = [row["id"] for row in client.call_many("submit", [{"spec": spec}] * jobs)]
            for watched in (False, True):
                terminal = top(cluster.socket) if watched else None
                if terminal is not None:
                    terminal.expect(b"queued")
                started_s, used_s, count = time.monotonic(), cpu_s(pid), 0
                while (now_s := time.monotonic()) < started_s + seconds:
                    due = int((now_s - started_s) * rate) - count
                    if due:
                        calls = [{"job": ids[(count + n) % jobs], "priority": (count + n) % 7} for n in range(due)]
                        client.call_many("priority", calls)
                        count += due
                    if terminal is not None:
                        while terminal.read(0.0):
                            pass
                    time.sleep(0.01)
                shares.append((cpu_s(pid) - used_s) / (time.monotonic() - started_s))
                if terminal is not None:
                    terminal.close()
    finally:
        cluster.close()
    report.add("daemon_cores_for_a_watcher", shares[1] - shares[0])
    report.details["daemon_cores"] = {"nobody watches": shares[0], "one watches": shares[1], "jobs": jobs, "rate": rate}


def main() -> None:
    """Measure and print."""
    args = options(__doc__ or "", seconds=20.0, hosts=128, devices=8, jobs=2000, rate=500, starts=7)
    report = Report("tui")
    sizes = {"hosts": args.hosts, "devices": args.devices, "jobs": args.jobs}
    with tempfile.TemporaryDirectory(prefix="cl-", dir="/tmp") as name:
        measure_load(report, Path(name), args.seconds, rate=args.rate, **sizes)
        measure_start(report, Path(name), args.starts, **sizes)
    measure_daemon(report, min(args.seconds, 8.0), 200, args.rate)
    report.show(args.json)


if __name__ == "__main__":
    main()
