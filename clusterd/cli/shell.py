"""``clusterd shell``: a shell on reserved devices, or inside a running job."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from typing import Any

import click

from clusterd.cli.common.arguments import complete_job
from clusterd.cli.common.job_options import given_values, reservation_options
from clusterd.cli.common.output import escaped, exit_when_closed, note
from clusterd.client import Client
from clusterd.errors import ClusterError
from clusterd.submission.job_file import command_line_job
from clusterd.submission.submit import send
from clusterd.types import RESERVATION_COMMAND

CHUNK_BYTES = 1 << 15
INPUT_TIMEOUT_S = 24 * 3600.0
"""Time limit for a command to read input; the other connection reports its end."""


@click.command(context_settings={"allow_interspersed_args": False})
@reservation_options("name", "booking", "priority", "time", "container", "mounts", name="shell", time="12h")
@click.option("--no-snapshot", is_flag=True, help="Use this directory itself, not a copy; the hosts must share it.")
@click.option("-d", "--detach", is_flag=True, help="Only reserve, and print the id; clusterd shell ID opens a shell.")
@click.option("--rank", type=click.IntRange(0), default=0, help="Rank of the job to join; default 0.")
@click.argument("arguments", nargs=-1, metavar="[JOB] [COMMAND]...", shell_complete=complete_job)
def shell(arguments: tuple[str, ...], rank: int, **options: Any) -> int:
    """Open a shell inside JOB, or with --gpus or --devices in a reservation that ends with the shell.

    The shell has the devices, environment variables and working directory of a rank, and ends with that rank: with the
    job, or when the job moves. COMMAND is run instead of a shell, and its exit code returned.

    \b
    clusterd shell --gpus 1                    a GPU while the shell is open
    clusterd shell --gpus 1 --time 2h -d       for two hours, detached
    clusterd shell gpt-small -- nvidia-smi     inside a job's rank 0
    """
    if options["gpus"] is None and options["devices"] is None:
        _refuse_reservation(options)
        if not arguments:
            raise click.UsageError("give a JOB to join, or devices to reserve: --gpus N or --devices N")
        job, *argv = arguments
        if argv and argv[0].startswith("-") and argv[0] != "--":
            raise click.UsageError(f"{argv[0]} comes after JOB: put options of clusterd before JOB")
        return _attend(job, argv[1:] if argv[:1] == ["--"] else argv, rank, holds=False)
    request = command_line_job(RESERVATION_COMMAND, given_values(options), interactive=True)
    with Client() as cluster:
        answer = send(cluster, request, snapshot=not options["no_snapshot"], say=note)
    if options["detach"]:
        print(answer["id"])
        return 0
    return _attend(answer["id"], list(arguments), 0, holds=True)


def _warn_when_idle(job: str, on_screen: bool) -> None:
    """Print into the terminal that the job's devices do nothing, each time that this begins."""
    since_s = None
    with contextlib.suppress(ClusterError, OSError), Client() as cluster:  # the shell goes on without a warning
        for row in cluster.stream("wait", job=job):
            before_s, since_s = since_s, row.get("idle_since_s")
            if since_s is not None and since_s != before_s:
                line_end = "\r\n" if on_screen else "\n"  # in raw mode a line feed does not return
                print(f"{line_end}clusterd: {escaped(row['reason'])}", end=line_end, file=sys.stderr, flush=True)


def _refuse_reservation(options: dict[str, Any]) -> None:
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "") is not click.core.ParameterSource.DEFAULT
        if parameter.name in options and given:
            raise click.UsageError(f"{parameter.opts[-1]} applies to a reservation: add --gpus N or --devices N")


def _attend(job: str, argv: list[str], rank: int, *, holds: bool) -> int:
    """Connect terminal or pipes to a command next to a rank; returns its exit code."""
    on_screen = sys.stdin.isatty() and sys.stdout.isatty()
    exit_when_closed(1)
    with Client() as cluster, Client(timeout_s=INPUT_TIMEOUT_S) as typing:
        screen = _screen() if on_screen else None
        stream = cluster.stream("shell", job=job, argv=argv, rank=rank, screen=screen, holds=holds)
        opened = _wait_for_terminal(job, stream)
        if opened is None:
            return 130
        if on_screen and not argv:
            where = f"{opened['host']} ({opened['device'] or 'CPU cores'})"
            note(f"{where}: exit {'releases the devices' if holds else 'leaves the job running'}")
        threading.Thread(target=_warn_when_idle, args=[job, on_screen], daemon=True).start()
        try:
            with _forward_keyboard(typing, opened["terminal"], on_screen):
                end = _print_output(job, stream)
        except KeyboardInterrupt:
            return 130
        except ClusterError as error:
            if on_screen:
                note("")  # ends the line of the prompt
            if holds:
                raise type(error)(f"{error}; job {job} may still hold its devices: clusterd cancel {job}") from None
            raise
    if why := end.get("why"):  # absent from the reply of an older daemon
        note(f"\njob {job} ends: {why}" if on_screen else f"job {job} ends: {why}")
    code = int(end["exit_code"])
    return code if code >= 0 else 128 - code


def _print_output(job: str, stream: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Print the output of the command; returns its last item."""
    out = sys.stdout.buffer
    for item in stream:
        if "exit_code" in item:
            return item
        out.write(item["data"])
        out.flush()
    raise ClusterError(f"job {job}: the shell ended without an exit code")


def _wait_for_terminal(job: str, stream: Iterator[dict[str, Any]]) -> dict[str, Any] | None:
    """The opened terminal; prints the reason while it waits. None: interrupted by the user."""
    try:
        for item in stream:
            if "terminal" in item:
                return item
            note(f"{job} is waiting: {item['waits']}")
    except KeyboardInterrupt:
        note(f"stopped waiting for {job}")
        return None
    raise ClusterError(f"job {job}: the daemon opened no shell")


def _screen() -> dict[str, Any]:
    size = shutil.get_terminal_size()
    return {"term": os.environ.get("TERM", "dumb"), "columns": size.columns, "rows": size.lines}


@contextlib.contextmanager
def _forward_keyboard(cluster: Client, terminal: int, on_screen: bool) -> Iterator[None]:
    """Forward standard input and window-size changes to `terminal` during the block."""
    wakeup_read, wakeup_write = os.pipe()
    threading.Thread(target=_forward_input, args=[cluster, terminal, wakeup_read], daemon=True).start()
    before = termios.tcgetattr(0) if on_screen else None
    if on_screen:
        signal.signal(signal.SIGWINCH, lambda *_: os.write(wakeup_write, b"."))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        if on_screen:
            tty.setraw(0, termios.TCSADRAIN)  # keeps input typed ahead
        yield
    finally:
        if before is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, before)


def _forward_input(cluster: Client, terminal: int, wakeup: int) -> None:
    """Forward input chunk by chunk, each after the previous one was accepted, which keeps order and bounds memory."""
    with contextlib.suppress(ClusterError, OSError):  # the other connection reports the end of the command
        while True:
            ready, _, _ = select.select([0, wakeup], [], [])
            if wakeup in ready:
                os.read(wakeup, 100)
                cluster.call("shell_input", terminal=terminal, screen=_screen())
            if 0 in ready:
                data = os.read(0, CHUNK_BYTES)
                cluster.call("shell_input", terminal=terminal, data=data, end=not data)
                if not data:
                    return
