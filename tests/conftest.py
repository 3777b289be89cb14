"""A real daemon with embedded hosts, for end-to-end tests."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from clusterd.client import Client
from clusterd.errors import ClusterError
from tests.hang import HANG_S
from tests.leftovers import Session

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Shared machines pause for longer than any deadline on an example. In CI the examples are always the same, so that a
# failed run can be repeated.
settings.register_profile("clusterd", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("clusterd")

# A shell ignores these signals in what it starts in the background, and so would every program under test.
for _number in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

REPOSITORY = Path(__file__).parent.parent

LEFT_S = 30.0
"""Time for processes that were ended to be gone at the end of a session."""
GPT = REPOSITORY / "examples" / "gpt"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave further parameters of some tests to `make test-all`."""
    seen: Counter[str] = Counter()
    for item in items:
        if (mark := item.get_closest_marker("slow_after")) is not None:
            function = item.nodeid.partition("[")[0]
            seen[function] += 1
            if seen[function] > mark.args[0]:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the last test of a session that leaves processes, shared memory, directories or ports behind."""
    session = Session()
    session.begin()
    yield
    session.end()
    directory = tmp_path_factory.getbasetemp()
    until(lambda: not session.left(directory), LEFT_S, lambda: "left behind: " + "; ".join(session.left(directory)))


class RunningCluster:
    """A separate daemon, driven by the command line as by a user."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {**os.environ, "CLUSTERD_STATE_DIR": str(directory), "NO_COLOR": "1"}
        for name in ("CLUSTERD_SOCKET", "CLUSTERD_CONFIG", "MAKEFLAGS", "MAKELEVEL"):
            self.environment.pop(name, None)
        self.socket = directory / "clusterd.sock"

    def run(self, *arguments: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run one command; if it fails, fail the test with its output."""
        options.setdefault("timeout", HANG_S)
        options.setdefault("cwd", self.directory)
        done = subprocess.run(
            [sys.executable, "-m", "clusterd", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            **options,
        )
        if check and done.returncode:
            raise AssertionError(
                f"clusterd {' '.join(arguments)} -> {done.returncode}\n{done.stdout}{done.stderr}{self.log()}"
            )
        return done

    def start(self, hosts: int = 0, devices: int = 2) -> None:
        local = ["--local", str(hosts), "--devices", str(devices)] if hosts else []
        self.run("start", *local)

    def client(self) -> Client:
        return Client(self.socket, timeout_s=HANG_S)

    def call(self, verb: str, **args: Any) -> Any:
        with self.client() as client:
            return client.call(verb, **args)

    @property
    def pid(self) -> int:
        return int(self.call("status")["pid"])

    def kill(self) -> None:
        """Kill the daemon with SIGKILL, as the kernel's out-of-memory killer does."""
        pid = self.pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid))

    def submit(self, text: str, name: str = "job") -> str:
        """Submit a job file with this content; its workdir is the example GPT unless it says otherwise.

        It is queued even if no host can ever serve it: some tests need a job that waits.
        """
        file = self.directory / f"{name}.toml"
        workdir = "" if "workdir" in text else f'workdir = "{GPT}"\n'
        file.write_text(f'name = "{name}"\n{workdir}python = "{sys.executable}"\n{text}')
        return self.run("submit", "--wait-for-hosts", str(file)).stdout.strip()

    def submit_script(self, script: str, name: str, *, devices: int = 1, trials: bool = False) -> str:
        """Submit an elastic job whose working directory has only this script."""
        work = self.directory / "work"
        work.mkdir(exist_ok=True)
        (work / "train.py").write_text(script)
        text = (
            f'kind = "elastic"\ntrials = {json.dumps(trials)}\nworkdir = "{work}"\ncommand = ["python", "train.py"]\n'
        )
        return self.submit(f"{text}resources = {{ devices = {devices} }}\n", name)

    def job(self, job: str) -> dict[str, Any]:
        row: dict[str, Any] = self.call("job", job=job)
        return row

    def wait_for(self, job: str, wanted: Callable[[dict[str, Any]], bool], timeout_s: float = HANG_S) -> dict[str, Any]:
        """Wait until the job's row satisfies the condition; return it."""
        row: dict[str, Any] = {}

        def look() -> bool:
            nonlocal row
            row = self.job(job)
            return wanted(row)

        until(look, timeout_s, lambda: f"{row.get('state')}: {row.get('reason')}\n{self.log()}\n{self.story(job)}")
        return row

    def story(self, job: str) -> str:
        """Output of `clusterd why` and of the job's ranks, for the message of a failed test."""
        message = [self.run("why", job, check=False).stdout]
        for log in sorted(self.directory.glob(f"local/*/agent/attempts/{job}.*/*.log")):
            message += [f"--- {log.relative_to(self.directory)}", *log.read_text(errors="replace").splitlines()[-8:]]
        return "\n".join(message)

    def wait_until_up(self, count: int) -> None:
        until(lambda: sum(h["state"] == "up" for h in self.call("hosts")) == count, 30.0, self.log)

    def log(self) -> str:
        file = self.directory / "daemon.log"
        return "\n".join(file.read_text().splitlines()[-15:]) if file.exists() else ""

    def close(self) -> None:
        """Stop the daemon, its agents and their processes, and wait until they are gone."""
        try:
            pid = self.pid
        except ClusterError:
            pid = 0
        if pid:
            os.kill(pid, signal.SIGTERM)
            until(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid))
        kill_everything_of(self.directory)
        for owner in Path("/dev/shm").glob("clusterd-*/owner"):  # killed agents leave their files
            with contextlib.suppress(FileNotFoundError):  # removed by an agent of another test
                if owner.read_bytes().startswith(os.fsencode(self.directory)):
                    shutil.rmtree(owner.parent, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)


def crash_host(directory: Path, number: int) -> None:
    """Kill all processes of one embedded host at once, as in a crash whose kernel still closes connections."""
    for pid in _freeze(directory, number):
        os.kill(pid, signal.SIGKILL)


def cut_power(directory: Path, number: int) -> None:
    """Silence one embedded host, as in a power failure: no connection of its ranks is closed."""
    for pid in _freeze(directory, number):
        if b" attach " in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" "):
            os.kill(pid, signal.SIGKILL)  # this process runs on the head node


def _freeze(directory: Path, number: int) -> list[int]:
    home = f"{directory}/local/{number}/".encode()
    mine = []
    for pid in processes_of(directory):
        try:
            if home in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, signal.SIGSTOP)
                mine.append(pid)
        except OSError:
            continue
    return mine


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def processes_of(directory: Path) -> list[int]:
    """Pids of agents, fork servers and ranks of the embedded hosts in the directory."""
    found = []
    for place in Path("/proc").iterdir():
        if not place.name.isdigit() or int(place.name) == os.getpid():
            continue
        try:
            environment = (place / "environ").read_bytes()
        except OSError:
            continue
        if str(directory).encode() + b"/local/" in environment and not _is_zombie(int(place.name)):
            found.append(int(place.name))
    return found


def kill_everything_of(directory: Path) -> None:
    """Send SIGKILL until no process of the directory is left."""

    def nothing_left() -> bool:
        for pid in (left := processes_of(directory)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return not left

    until(nothing_left)


def until(condition: Callable[[], bool], timeout_s: float = HANG_S, explain: Callable[[], str] = lambda: "") -> None:
    """Wait for a condition outside of this process."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s:.0f} s: {explain()}")
        time.sleep(0.02)


@contextlib.contextmanager
def new_cluster() -> Iterator[RunningCluster]:
    """Cluster that is not started, in a directory whose path is short enough for a socket."""
    made = RunningCluster(Path(tempfile.mkdtemp(prefix="cl-", dir="/tmp")))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def cluster() -> Iterator[RunningCluster]:
    """Cluster that is not started."""
    with new_cluster() as made:
        yield made


@pytest.fixture
def local_cluster(cluster: RunningCluster) -> RunningCluster:
    """Started cluster with two embedded hosts of two CPU devices each."""
    cluster.start(hosts=2)
    return cluster


@pytest.fixture(scope="module")
def _cluster_of_module() -> Iterator[RunningCluster]:
    with new_cluster() as made:
        made.start(hosts=2)
        yield made


@pytest.fixture
def shared_cluster(_cluster_of_module: RunningCluster) -> Iterator[RunningCluster]:
    """The same as `local_cluster`, shared by the tests of a module.

    For tests that only use jobs of their own: jobs of earlier tests are over, and hosts are not drained. Claims are the
    test's to remove.
    """
    made = _cluster_of_module
    yield made
    for row in (left := made.call("jobs")):
        made.call("cancel", job=row["id"])
    for row in left:
        made.wait_for(row["id"], lambda row: row["ended_s"] is not None and not row["holds_devices"])
    for host in made.call("hosts"):
        if host["drained"] is not None:
            made.call("host_undrain", host=host["name"])
