"""``clusterd notebook``: Jupyter on reserved devices, in a browser of this machine."""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
import time
from dataclasses import replace
from typing import Any

import click

from clusterd.cli.common.job_options import given_values, reservation_options
from clusterd.cli.common.output import note
from clusterd.cli.interactive.forward import listening, serve, wait_for_end
from clusterd.client import Client
from clusterd.errors import ClusterError
from clusterd.submission.job_file import Request, command_line_job
from clusterd.submission.submit import send

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
            print(f"http://127.0.0.1:{listener.getsockname()[1]}/lab?token={token}", flush=True)
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
