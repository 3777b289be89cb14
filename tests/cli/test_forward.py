"""Ports of a job's host, reached from here."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cli.test_bad_input import refused
from tests.conftest import RunningCluster, new_cluster, until

MANY_BYTES = 24 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    """A daemon with one job, on a host inside this machine: what listens here is what listens there."""
    with new_cluster() as made:
        made.start(hosts=1, devices=1)
        made.wait_until_up(1)
        job = made.run("run", "-d", "--no-snapshot", "--name", "serves", "--", "sleep", "6000").stdout.strip()
        made.wait_for(job, lambda row: row["state"] == "running")
        yield made


@contextlib.contextmanager
def server(serve: Callable[[socket.socket], object]) -> Iterator[int]:
    """A server that handles each connection in a thread; its port."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=handle, args=[connection], daemon=True).start()

        def handle(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                serve(connection)

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def forwarded(cluster: RunningCluster, port: int) -> Iterator[int]:
    """`clusterd forward` in a process of its own; the local port."""
    command = [sys.executable, "-m", "clusterd", "forward", "serves", f"{port}:0"]
    with subprocess.Popen(command, env=cluster.environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.match(rf"127\.0\.0\.1:(\d+) is port {port} of serves", line)
        assert found is not None, line
        try:
            yield int(found[1])
        finally:
            process.send_signal(signal.SIGINT)
            process.stderr.close()
            assert process.wait(20) == 130


def received(connection: socket.socket) -> bytes:
    data = bytearray()
    while piece := connection.recv(1 << 16):
        data += piece
    return bytes(data)


def digest_of_all(connection: socket.socket) -> None:
    """Answers with the digest of what came, once there is no more, and then with all of it."""
    data = received(connection)
    connection.sendall(hashlib.sha256(data).digest() + data)


def exchange(local: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", local), timeout=60) as connection:
        sending = threading.Thread(target=lambda: (connection.sendall(data), connection.shutdown(socket.SHUT_WR)))
        sending.start()
        answer = received(connection)
        sending.join()
    return answer


def test_every_byte_arrives_both_ways_after_one_side_has_ended(cluster: RunningCluster) -> None:
    data = random.Random(1).randbytes(MANY_BYTES)
    with server(digest_of_all) as port, forwarded(cluster, port) as local:
        answer = exchange(local, data)
        assert answer[:32] == hashlib.sha256(data).digest()
        assert answer[32:] == data
        assert exchange(local, b"") == hashlib.sha256(b"").digest()


def test_a_server_may_end_first(cluster: RunningCluster) -> None:
    """It says something and ends its output, and reads on."""
    heard = []

    def serve(connection: socket.socket) -> None:
        connection.sendall(b"hello")
        connection.shutdown(socket.SHUT_WR)
        heard.append(received(connection))

    with server(serve) as port, forwarded(cluster, port) as local:
        with socket.create_connection(("127.0.0.1", local), timeout=60) as connection:
            assert received(connection) == b"hello"
            connection.sendall(b"and goodbye")
        until(lambda: heard == [b"and goodbye"])


def test_many_connections_at_once(cluster: RunningCluster) -> None:
    with server(digest_of_all) as port, forwarded(cluster, port) as local, ThreadPoolExecutor(40) as pool:
        sent = [random.Random(seed).randbytes(seed * 997) for seed in range(40)]
        for data, answer in zip(sent, pool.map(lambda data: exchange(local, data), sent), strict=True):
            assert answer == hashlib.sha256(data).digest() + data


def test_a_reader_that_waits_holds_the_writer_back(cluster: RunningCluster) -> None:
    """A server that writes without end is not read into memory; another connection goes on meanwhile."""
    written: list[int] = []  # by connection

    def endless(connection: socket.socket) -> None:
        number = len(written)
        written.append(0)
        while True:
            written[number] += connection.send(b"x" * (1 << 16))

    with (
        server(endless) as port,
        forwarded(cluster, port) as local,
        socket.create_connection(("127.0.0.1", local), timeout=60) as slow,
    ):
        slow.recv(1)
        counts: list[int] = []

        def stands_still() -> bool:
            counts.append(written[0])
            with socket.create_connection(("127.0.0.1", local), timeout=60) as other:
                assert len(other.recv(1 << 16)) > 0
            return len(counts) > 5 and counts[-1] == counts[-4]

        until(stands_still, 60.0)
        assert written[0] < 64 << 20


def test_a_program_that_goes_away_ends_the_connection_there(cluster: RunningCluster) -> None:
    ended = threading.Event()

    def serve(connection: socket.socket) -> None:
        try:
            while connection.recv(1 << 16):
                connection.sendall(b"more" * 1000)
        finally:
            ended.set()

    with server(serve) as port, forwarded(cluster, port) as local:
        connection = socket.create_connection(("127.0.0.1", local), timeout=60)
        connection.sendall(b"x")
        assert connection.recv(4) == b"more"
        connection.close()
        assert ended.wait(30)


def test_a_restart_of_the_daemon_ends_connections_and_not_the_forwarding(cluster: RunningCluster) -> None:
    with server(digest_of_all) as port, forwarded(cluster, port) as local:
        assert exchange(local, b"before")[32:] == b"before"
        cluster.kill()
        cluster.start()
        cluster.wait_until_up(1)
        assert exchange(local, b"after")[32:] == b"after"


def test_nothing_listens_there(cluster: RunningCluster) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # and does not listen
        port = holder.getsockname()[1]
        message = refused(cluster, "forward", "--stdio", "serves", str(port), code=1)
    assert f"nothing listens on port {port} of 127.0.0.1" in message


def test_standard_input_and_output_as_for_ssh(cluster: RunningCluster) -> None:
    data = random.Random(2).randbytes(1 << 20)
    with server(digest_of_all) as port:
        done = subprocess.run(
            [sys.executable, "-m", "clusterd", "forward", "--stdio", "serves", str(port)],
            env=cluster.environment, input=data, capture_output=True, timeout=60, check=True,
        )  # fmt: skip
    assert done.stdout == hashlib.sha256(data).digest() + data


@pytest.mark.parametrize("port", ["0", "x", "70000", "80:x", "80:70000", "-1"])
def test_invalid_ports_are_refused(cluster: RunningCluster, port: str) -> None:
    refused(cluster, "forward", "serves", "--", port, code=2)


def test_a_port_that_is_taken_here(cluster: RunningCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "write PORT:LOCAL" in refused(cluster, "forward", "serves", f"8888:{port}", code=1)


def test_ports_of_the_job_file_are_shown_and_forwarded(cluster: RunningCluster) -> None:
    work = cluster.directory / "work"
    work.mkdir()
    file = cluster.directory / "board.toml"
    text = f'name = "board"\nworkdir = "{work}"\ncommand = ["sleep", "600"]\n'
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    file.write_text(f"{text}ports = [{port}]\n")
    job = cluster.run("submit", str(file)).stdout.strip()
    assert f"ports      {port}" in cluster.run("show", job).stdout
    with socket.create_server(("127.0.0.1", port)):  # so that it is taken here
        assert f"127.0.0.1:{port}: " in refused(cluster, "forward", job, code=1)
    assert "has no ports" in refused(cluster, "forward", "serves", code=2)
    cluster.run("cancel", "--now", job)
    file.write_text(f'{text}ports = ["x"]\n')
    assert "ports: 'x' is no port" in refused(cluster, "submit", str(file), code=2)


def test_a_host_block_for_ssh(cluster: RunningCluster) -> None:
    block = cluster.run("ssh-config", "serves").stdout
    lines = dict(line.strip().split(" ", 1) for line in block.splitlines())
    assert lines["Host"] == "clusterd-serves"
    assert lines["HostKeyAlias"] == "local0"
    command = shlex.split(lines["ProxyCommand"])
    assert command[-5:] == ["--stdio", "--rank", "0", "1", "22"]
    with server(digest_of_all) as port:
        done = subprocess.run(
            [*command[:-1], str(port)], env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]},
            input=b"through it", capture_output=True, timeout=60, check=True,
        )  # fmt: skip
    assert done.stdout[32:] == b"through it"


def test_a_notebook_without_jupyter_says_so_and_with_it_opens(cluster: RunningCluster) -> None:
    """A stand-in for Jupyter: a program of that name, which serves HTTP on the port that it is given."""
    missing = cluster.run("notebook", "--no-snapshot", "--cpus", "1", check=False)
    assert missing.returncode == 1
    assert "has no jupyter beside it" in missing.stderr
    directory = cluster.directory / "env"
    directory.mkdir()
    python = directory / "python3"
    python.symlink_to(sys.executable)
    jupyter = directory / "jupyter"
    jupyter.write_text(
        f"#!{sys.executable}\n"
        "import os, sys, http.server\n"
        'port = next(int(a.partition("=")[2]) for a in sys.argv if a.startswith("--port="))\n'
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        '        body = os.environ["JUPYTER_TOKEN"].encode()\n'
        "        self.send_response(200); self.end_headers(); self.wfile.write(body)\n"
        'http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()\n'
    )
    jupyter.chmod(0o755)
    command = [sys.executable, "-m", "clusterd", "notebook", "--no-snapshot", "--cpus", "1", "--python", str(python)]
    with subprocess.Popen(command, env=cluster.environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/lab\?token=(\S+)", url)
        assert found is not None, url
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert answer.read().decode() == found[2], "it has the token, and nobody else"
        (row,) = [row for row in cluster.call("jobs") if row["name"] == "notebook"]
        assert found[2] not in cluster.run("show", row["id"]).stdout
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    cluster.wait_for(row["id"], lambda row: row["state"] == "cancelled")


def test_a_job_that_is_over_has_no_host_to_reach(cluster: RunningCluster) -> None:
    """Regression: both succeeded, with a port that nobody answers on and a block that leads nowhere."""
    job = cluster.run("run", "-d", "--no-snapshot", "--cpus", "1", "--", "true").stdout.strip()
    cluster.wait_for(job, lambda row: row["ended_s"] is not None)
    for arguments in (("forward", job, "6006:0"), ("ssh-config", job)):
        assert f"job {job} (true) is finished: only hosts of jobs that run" in refused(cluster, *arguments, code=1)
