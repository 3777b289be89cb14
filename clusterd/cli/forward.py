"""``clusterd forward``, ``ssh-config`` and ``notebook``: ports of a job's host on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from socket import SHUT_WR
from typing import Any

import click

from clusterd.cli.common.arguments import complete_job
from clusterd.cli.common.following import until_over
from clusterd.cli.common.job_options import given_values, reservation_options
from clusterd.cli.common.output import note, print_line, state_and_reason
from clusterd.client import Client
from clusterd.errors import ClusterError, UsageError
from clusterd.submission.job_file import Request, command_line_job
from clusterd.submission.submit import send

CHUNK_BYTES = 1 << 18
BACKLOG = 128
INPUT_TIMEOUT_S = 24 * 3600.0
"""Time for the other side to take a chunk; the connection that receives reports its end."""

SSH_PORT = 22


@dataclass(frozen=True)
class Forwarding:
    """A port of a job's host, and the one that stands for it here."""

    remote: int
    local: int  # 0: any free one


@click.command()
@click.argument("job", shell_complete=complete_job)
@click.argument("ports", nargs=-1, metavar="[PORT[:LOCAL]]...")
@click.option("--rank", type=click.IntRange(0), default=0, help="Rank whose host has the port; default 0.")
@click.option("--stdio", is_flag=True, help="Connect standard input and output to the one PORT, as for ssh.")
def forward(job: str, ports: tuple[str, ...], rank: int, stdio: bool) -> int:
    """Make ports of the host of JOB reachable on this machine, until Ctrl-C or the job's end.

    Connections to 127.0.0.1:LOCAL here go to 127.0.0.1:PORT there. Without a PORT: those of the job's file.

    \b
    clusterd forward tensorboard 6006
    clusterd forward nb 8888:18888 6006
    """
    with Client() as cluster:
        row = _not_over(cluster, job)
    wanted = [parsed(text) for text in ports] or [Forwarding(port, port) for port in row["spec"].get("ports", ())]
    if not wanted:
        raise UsageError(f"name a PORT: the file of job {row['id']} has no ports = [...]")
    if stdio:
        if len(wanted) != 1:
            raise click.UsageError("--stdio connects one PORT")
        return _connect_stdio(row["id"], wanted[0].remote, rank)
    with contextlib.ExitStack() as stack:
        for each in wanted:
            listener = stack.enter_context(listening(each.local))
            local = listener.getsockname()[1]
            threading.Thread(target=serve, args=(listener, row["id"], each.remote, rank, note), daemon=True).start()
            note(f"127.0.0.1:{local} is port {each.remote} of {row['name']} ({row['id']})")
        return wait_for_end(row["id"])


def _not_over(cluster: Client, job: str) -> dict[str, Any]:
    """Row of a job whose host can be reached, now or later.

    Raises:
        ClusterError: the job is over.
    """
    row: dict[str, Any] = cluster.call("job", job=job)
    if row["ended_s"] is not None:
        raise ClusterError(
            f"job {row['id']} ({row['name']}) is {row['state']}: only hosts of jobs that run are reached"
        )
    return row


def parsed(text: str) -> Forwarding:
    """Parse ``8888`` or ``8888:18888``.

    Raises:
        UsageError: it is neither.
    """
    remote, colon, local = text.partition(":")
    numbers = [int(part) if part.isascii() and part.isdigit() else -1 for part in (remote, local if colon else remote)]
    if not (0 < numbers[0] < 65536 and 0 <= numbers[1] < 65536):
        raise UsageError(f"{text!r} is no port: write PORT, or PORT:LOCAL, with numbers up to 65535")
    return Forwarding(numbers[0], numbers[1])


def listening(local: int) -> socket.socket:
    """A socket that listens on a port of 127.0.0.1.

    Raises:
        ClusterError: the port is taken.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", local))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ClusterError(
            f"127.0.0.1:{local}: {error.strerror}: write PORT:LOCAL with another LOCAL, or PORT:0 for a free one"
        ) from None
    return listener


def wait_for_end(job: str) -> int:
    """Wait until the job is over, also over restarts of the daemon, or the user interrupts."""
    try:
        row = until_over(job)
    except KeyboardInterrupt:
        return 130
    note(f"job {job} is {state_and_reason(row)}")
    return 0


def serve(listener: socket.socket, job: str, port: int, rank: int, say: Callable[[str], None]) -> None:
    """Carry each connection to `listener` to the port, until the listener is closed."""
    said = ""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return

        def carry_one(connection: socket.socket = connection) -> None:
            nonlocal said
            with connection:
                try:
                    carry(job, port, rank, connection.recv, connection.sendall, partial(connection.shutdown, SHUT_WR))
                except ClusterError as error:
                    if str(error) != said:  # a browser tries again and again
                        say(str(error))
                    said = str(error)
                except OSError:
                    pass  # the program here closed its connection: the other side is closed with it

        threading.Thread(target=carry_one, daemon=True).start()


def carry(
    job: str,
    port: int,
    rank: int,
    receive: Callable[[int], bytes],
    write: Callable[[bytes], Any],
    end: Callable[[], Any],
) -> None:
    """Carry one connection to the port: bytes that `receive` returns there, and those from there to `write`.

    Returns when both sides ended their output. Either may end first, and go on reading.

    Raises:
        ClusterError: nothing listens there, or the connection broke. OSError: a side here is closed.
    """
    with Client() as cluster, Client(timeout_s=INPUT_TIMEOUT_S) as sending:
        stream = cluster.stream("forward", job=job, port=port, rank=rank)
        opened = next(stream)
        threading.Thread(target=_send, args=(sending, opened["terminal"], receive), daemon=True).start()
        for item in stream:
            if item.get("data"):
                write(item["data"])
            if item.get("end"):
                with contextlib.suppress(OSError):
                    end()


def _send(cluster: Client, terminal: int, receive: Callable[[int], bytes]) -> None:
    """Send chunk by chunk, each after the one before was taken: a slow reader there slows the writer here."""
    with contextlib.suppress(ClusterError):  # the other connection reports the end
        while True:
            try:
                data = receive(CHUNK_BYTES)
            except OSError:  # reset: there is nobody to read what is still to come
                cluster.call("shell_input", terminal=terminal, abort=True)
                return
            cluster.call("shell_input", terminal=terminal, data=data, end=not data)
            if not data:
                return


def _connect_stdio(job: str, port: int, rank: int) -> int:
    def write(data: bytes) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    carry(job, port, rank, partial(os.read, 0), write, partial(os.close, 1))
    os._exit(0)  # a read from standard input may be under way in a thread


@click.command("ssh-config")
@click.argument("job", shell_complete=complete_job)
@click.option("--port", type=click.IntRange(1, 65535), default=SSH_PORT, show_default=True, help="Port of its sshd.")
@click.option("--rank", type=click.IntRange(0), default=0, help="Rank whose host is meant; default 0.")
def ssh_config(job: str, port: int, rank: int) -> None:
    """Print an OpenSSH Host block by which ssh, scp and VS Code reach the host of JOB as the job's owner.

    The connection goes through clusterd to the host's own sshd, which must let that account in with your key.

    \b
    clusterd ssh-config gpt-small >> ~/.ssh/config
    ssh clusterd-gpt-small
    """
    with Client() as cluster:
        row, status = _not_over(cluster, job), cluster.call("status")
    ranks = {each["rank"]: each["host"] for attempt in row["attempts"][-1:] for each in attempt["ranks"]}
    if rank not in ranks:
        raise ClusterError(f"job {row['id']} ({row['name']}) has no rank {rank} on a host: it is {row['state']}")
    account = row["spec"]["account"] or status["account"]
    for line in host_block(row["name"], row["id"], ranks[rank], account, port, rank):
        print_line(line)


def host_block(name: str, job: str, host: str, account: str, port: int, rank: int) -> Iterator[str]:
    """Lines of the block."""
    program = shutil.which("clusterd")
    command = [program] if program else [sys.executable, "-m", "clusterd"]
    variables = [
        f"{name}={os.environ[name]}"
        for name in ("CLUSTERD_HOST", "CLUSTERD_SOCKET", "CLUSTERD_STATE_DIR")
        if os.environ.get(name)
    ]
    command_line = [*(["env", *variables] if variables else []), *command, "forward", "--stdio", "--rank", str(rank)]
    proxy = shlex.join([*command_line, job, str(port)]).replace("%", "%%")
    yield f"Host clusterd-{name}"
    yield f"    HostName {host}"
    yield f"    HostKeyAlias {host}"
    yield f"    User {account}"
    yield f"    ProxyCommand {proxy}"


START = """
import os, shutil, socket, sys
path = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
program = shutil.which("jupyter", path=path)
if program is None:
    sys.exit(f"clusterd notebook: {sys.executable} on {socket.gethostname()} has no jupyter beside it, nor has PATH: "
             "pip install jupyterlab there, or name another interpreter with --python")
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
print(f"clusterd notebook: port {port}", flush=True)
os.execv(program, [program, "lab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0",
                   *(["--allow-root"] if os.getuid() == 0 else [])])
"""
"""Program of the job: finds a free port and becomes Jupyter, which has the token from its environment."""

PORT = re.compile(rb"^clusterd notebook: port (\d+)$", re.MULTILINE)
TRY_EVERY_S = 0.5
LOG_BYTES = 1 << 16


@click.command()
@reservation_options("name", "booking", "priority", "time", name="notebook", time="12h")
@click.option("--python", default="python3", show_default=True, help="Interpreter on the hosts with Jupyter.")
@click.option("--no-snapshot", is_flag=True, help="Use this directory itself, not a copy; the hosts must share it.")
@click.option("--port", "local", type=click.IntRange(0, 65535), default=0, help="Port on this machine; default: free.")
def notebook(python: str, local: int, **options: Any) -> int:
    """Run Jupyter Lab as a job, and print the address that opens it here.

    It ends with Ctrl-C, and its devices are free again. Without --no-snapshot it works on a copy of this directory:
    clusterd get NAME copies what was written there.
    """
    token = secrets.token_urlsafe(24)
    request = command_line_job((python, "-c", START), given_values(options), interactive=True)
    request = Request(replace(request.spec, secrets=("JUPYTER_TOKEN",)), {"JUPYTER_TOKEN": token})
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listening(local))
        cluster = stack.enter_context(Client())
        job = send(cluster, request, snapshot=not options["no_snapshot"], say=note)["id"]
        try:
            port = _port(cluster, job)
            if port is None:
                return 1
            threading.Thread(target=serve, args=(listener, job, port, 0, note), daemon=True).start()
            print_line(f"http://127.0.0.1:{listener.getsockname()[1]}/lab?token={token}")
            sys.stdout.flush()
            return wait_for_end(job)
        except KeyboardInterrupt:
            return 130
        finally:
            with contextlib.suppress(ClusterError):  # it is over already
                cluster.call("cancel", job=job)


def _port(cluster: Client, job: str) -> int | None:
    """Port on which Jupyter serves; None: the job ended before, and its output is printed."""
    reason = ""
    with Client() as watching:
        for row in watching.stream("wait", job=job):
            if row["state"] == "running" or row["ended_s"] is not None:
                break
            if row["reason"] and row["reason"] != reason:
                reason = row["reason"]
                note(f"{job} is waiting: {reason}")
    found = None
    while True:
        row = cluster.call("job", job=job)
        output = _output(cluster, job) if row["attempt"] else b""
        if row["ended_s"] is not None:
            note(output.decode(errors="replace").rstrip() or row["reason"])
            return None
        found = found or PORT.search(output)
        if found is not None and _answers(cluster, job, int(found[1])):
            return int(found[1])
        time.sleep(TRY_EVERY_S)


def _output(cluster: Client, job: str) -> bytes:
    return b"".join(item["data"] for item in cluster.stream("logs", job=job) if item.get("data"))[-LOG_BYTES:]


def _answers(cluster: Client, job: str, port: int) -> bool:
    """True once Jupyter listens."""
    try:
        with Client() as trying:
            for item in trying.stream("forward", job=job, port=port):
                return "terminal" in item
    except ClusterError:
        return False
    return False
