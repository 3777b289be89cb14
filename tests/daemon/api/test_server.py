"""Any input on the socket is answered or refused in one line; daemon and journal stay intact."""

from __future__ import annotations

import grp
import os
import resource
import shutil
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import anyio
import msgpack
import pytest

from clusterd import protocol
from clusterd.core import events as e
from clusterd.core.scheduler import Scheduler
from clusterd.core.state import State
from clusterd.daemon.access import Access
from clusterd.daemon.api.server import Server
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.journal.journal import Journal, Statement
from clusterd.daemon.storage.archive import Archive
from clusterd.errors import ClusterError, DaemonAbsent, UsageError
from clusterd.types import HostId, JobId, JobSpec
from tests.conftest import RunningCluster, until

SPEC = {"name": "x", "command": ["true"]}


def test_garbage_and_half_frames(cluster: RunningCluster) -> None:
    """A browser, a scanner, a client that dies in the middle."""
    cluster.start()
    chunks = (
        b"GET / HTTP/1.0\r\n\r\n",
        b"\x00",
        b"\xff" * 100,
        struct.pack("!I", 2) + b"\xc1\xc1",
        struct.pack("!I", 3) + msgpack.packb([1, 2]),
        struct.pack("!I", 1000) + b"half",
    )
    for piece in chunks:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(cluster.socket))
            client.sendall(piece)
            client.shutdown(socket.SHUT_WR)
            try:
                assert client.recv(100) == b""
            except ConnectionResetError:
                pass  # cut off before everything was read
    assert cluster.call("status")["jobs"] == {}


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("verb", "arguments", "message"),
    [
        ("job", {"job": None}, "job: job: Expected `str`, got `null`"),
        ("cancel", {"job": 1}, "cancel: job: Expected `str`, got `int`"),
        ("watch", {"after": "x"}, "watch: after: Expected `int | null`, got `str`"),
        ("history", {"limit": "x"}, "history: limit: Expected `int`"),
        ("host_drain", {"host": "local0", "why": 5}, "host_drain: why: Expected `str`, got `int`"),
        ("submit", {"spec": SPEC, "secrets": {"KEY": {}}}, "Expected `str`, got `object`"),
        ("submit", {"spec": SPEC, "secrets": [1]}, "submit: secrets: Expected `object | null`, got `array`"),
        ("submit", {"spec": {**SPEC, "resources": {"kind": "tpu"}}}, "resources.kind is 'tpu'; it must be cuda or cpu"),
        ("logs", {"job": "1", "after": 5}, "logs: after: Expected `object | null`, got `int`"),
        ("status", {"peer": 1}, "multiple values for argument 'peer'"),
        ("host_add", {"address": "a", "accept": "b"}, "host_add: accept: Expected `array`, got `str`"),
        ("report", {"since_s": 2.0**63}, "report: since_s is 9.22337e+18: give a number from -1e+11 to 1e+11"),
        ("report", {"since_s": float("nan")}, "report: since_s is nan: give a number from"),
        ("claim_add", {"devices": [], "reason": "x", "for_s": float("inf")}, "claim_add: for_s is inf"),
        ("history", {"limit": 2**63}, "history: limit is 9.22337e+18: give a number from -9.0072e+15 to 9.0072e+15"),
        ("usage", {"minutes": -(2**63)}, "usage: minutes is -9.22337e+18"),
        ("submit", {"spec": {**SPEC, "retries": 2**63}}, "submit: spec.retries is 9.22337e+18"),
        ("host_drain", {"host": "local0", "why": "x" * 5000}, "host_drain: why has 5000 letters; it may have 4096"),
        ("submit", {"spec": {**SPEC, "command": ["x" * 200_000]}}, "submit: spec.command has 200000 letters"),
    ],
)
def test_arguments_of_another_type(cluster: RunningCluster, verb: str, arguments: dict[str, Any], message: str) -> None:
    """A reason of a drain that was no text was in the journal for ever, and ended the daemon at every start."""
    cluster.start()
    with pytest.raises(UsageError) as refused, cluster.client() as client:
        list(client.stream(verb, **arguments))
    assert message in str(refused.value)
    assert cluster.call("status")["jobs"] == {}


def test_a_client_that_never_reads(cluster: RunningCluster) -> None:
    """Such a client delays nobody else."""
    cluster.start()
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.connect(str(cluster.socket))
        deaf.setblocking(False)
        frame = protocol.encode({"id": 1, "verb": "status"})
        try:
            while True:
                deaf.send(frame)
        except BlockingIOError:
            pass
        assert cluster.call("status")["jobs"] == {}


@pytest.mark.parametrize(("soft", "hard", "clients"), [(64, 2048, 300), (64, 64, 100)])
def test_many_clients_stay_connected(cluster: RunningCluster, soft: int, hard: int, clients: int) -> None:
    """The daemon serves as many clients as the system allows; one more waits and delays nobody."""
    cluster.run("start", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))
    with cluster.client() as first, ExitStack() as others:
        pid = first.call("status")["pid"]
        connected = [others.enter_context(cluster.client()) for _ in range(clients)]
        if hard > clients:
            assert connected[-1].call("status")["pid"] == pid
        else:
            until(lambda: "no client can be let in now: [Errno 24] Too many open files" in cluster.log())
        assert first.call("status")["pid"] == pid
    assert cluster.call("status")["pid"] == pid


@pytest.fixture(name="common")
def common_() -> Iterator[Path]:
    """A directory that everybody may pass; pytest's own are for one user."""
    made = Path(tempfile.mkdtemp(prefix="cl-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def listen(path: Path) -> None:
    """Serve as a daemon of the test user's group."""

    async def run() -> None:
        group = grp.getgrgid(os.getgid()).gr_name
        async with await Server(path, group, Access(State), {}, {}).listen():
            pass

    anyio.run(run)


def test_the_group_of_the_socket_gets_to_it(common: Path) -> None:
    """Also the second time, when its directory is there."""
    path = common / "run" / "clusterd.sock"
    for _ in range(2):
        listen(path)
        assert [stat.S_IMODE(place.stat().st_mode) for place in (path.parent, path)] == [0o750, 0o660]
        assert path.parent.stat().st_gid == path.stat().st_gid == os.getgid()


@pytest.mark.parametrize("closed", [".", "run"])
def test_a_group_that_would_not_get_to_the_socket_is_refused(common: Path, closed: str) -> None:
    """A runtime directory is its user's alone."""
    path = common / "run" / "clusterd.sock"
    path.parent.mkdir()
    (common / closed).chmod(0o700)
    with pytest.raises(UsageError, match=rf"socket_group: {(common / closed).resolve()} does not let group .* pass"):
        listen(path)
    assert not path.exists()


def test_the_socket_is_removed_under_the_daemon(cluster: RunningCluster) -> None:
    """A logout took the runtime directory: it comes back, and who was connected stays so."""

    def listens() -> bool:  # a moment after the file is there
        with suppress(DaemonAbsent):
            cluster.client().close()
            return True
        return False

    cluster.start()
    with cluster.client() as client:
        pid = client.call("status")["pid"]
        cluster.socket.unlink()
        until(listens)
        assert client.call("status")["pid"] == pid == cluster.pid


@pytest.mark.slow
def test_a_log_that_is_kept_in_part_is_read_whole(
    local_cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 MB without a newline: 16 MiB are on the head node, the rest comes from its host; gone with it, it is said."""
    made = "import sys; sys.stdout.buffer.write(b'a' * 4_000_000 + b'b' * 16_000_000)"
    job = local_cluster.run("run", "-d", "--", "python3", "-c", made).stdout.strip()
    followed = local_cluster.run("logs", "-f", job).stdout
    local_cluster.run("wait", job)
    for log in (followed, local_cluster.run("logs", job).stdout):
        assert (len(log), log.count("a"), log[:1], log[-1]) == (20_000_000, 4_000_000, "a", "b")
    local_cluster.run("host", "remove", "local0", "local1")
    assert "clusterd start --local 2, adds it again" in local_cluster.run("host", "add", "local1", check=False).stderr
    log = local_cluster.run("logs", job).stdout
    assert "[clusterd: 3.1 MiB of this log are on local" in log
    assert log.count("b" * 1_000_000) == 16


@pytest.mark.slow
def test_the_end_of_a_log_is_read_wherever_it_is(local_cluster: RunningCluster) -> None:
    """On its host while the job runs, on the head node after that, where a long log is kept in part."""

    def end(job: str) -> tuple[bytes, int]:
        with local_cluster.client() as client:
            chunks = list(client.stream("logs", job=job, rank=0, last_bytes=10))
        return b"".join(piece["data"] for piece in chunks), chunks[-1]["offset"] if chunks else 0

    made = "import sys; sys.stdout.write('a' * 20_000_000 + 'the very end'); sys.stdout.flush(); sys.stdin.readline()"
    done = local_cluster.directory / "done"
    script = f'python3 -c "{made}" < /dev/null; until [ -e {done} ]; do sleep 0.05; done'
    job = local_cluster.run("run", "-d", "--", "sh", "-c", script).stdout.strip()
    until(lambda: local_cluster.job(job)["state"] == "running")
    until(lambda: end(job) == (b"e very end", 20_000_012))
    done.touch()
    local_cluster.run("wait", job)
    assert end(job) == (b"e very end", 20_000_012)


def test_rows_beside_an_event_that_is_set_aside_go_at_the_next_start(tmp_path: Any) -> None:
    """A job with a secret comes in one batch with an event that raises; another one with a secret is that event."""
    journal = Journal(tmp_path / "journal.db")
    engine = Engine(journal, Scheduler())
    submitted = e.JobSubmitted(at_s=2.0, job=JobId("1"), spec=JobSpec(name="job", command=("true",)))
    unknown = e.JobReprioritised(at_s=2.0, job=JobId("9"), priority=1)

    def secret(job: str) -> list[Statement]:
        return [("INSERT INTO secrets VALUES (?, ?, ?)", (job, "KEY", "hush"))]

    async def run() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(engine.run)
            await engine.post(e.HostAdded(at_s=1.0, host=HostId("a")))
            group.start_soon(engine.post, submitted, secret("1"))
            with pytest.raises(ClusterError, match="cannot handle this JobReprioritised"):
                await engine.post(unknown, secret("9"))
            group.cancel_scope.cancel()

    anyio.run(run)
    again = Engine(journal, Scheduler())
    assert again.restore() == 2
    assert list(again.scheduler.state.jobs) == ["1"]
    archive = Archive(tmp_path, journal)
    anyio.run(archive.keep_secrets_of, again.scheduler.state.jobs)
    assert anyio.run(archive.secrets, "1") == {"KEY": "hush"}
    assert anyio.run(archive.secrets, "9") == {}
    journal.close()


@pytest.mark.slow
def test_finished_jobs_come_in_pages(local_cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A year of them would not fit into a frame; the client puts the pages together."""
    jobs = [local_cluster.run("run", "-d", "--", "true").stdout.strip() for _ in range(3)]
    for job in jobs:
        local_cluster.run("wait", job)
    running = local_cluster.run("run", "-d", "--", "sleep", "1000").stdout.strip()
    with local_cluster.client() as client:
        every = [row["id"] for row in client.all_jobs()]
        assert every == sorted(every, key=int) and every[-4:] == [*jobs, running]
        assert [row["id"] for row in client.call("jobs", all=True, before=jobs[2])][-2:] == jobs[:2]
        assert client.call("jobs", all=True, before="1") == []
    local_cluster.run("cancel", running)
