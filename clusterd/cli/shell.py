"""``clusterd shell``: a shell with devices of its own, or inside a job that runs."""

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

from clusterd.cli.completing import complete_job
from clusterd.cli.output import note
from clusterd.client import Client
from clusterd.errors import ClusterError
from clusterd.submission.job_file import command_line_job
from clusterd.submission.submit import send

PIECE_BYTES = 1 << 15
PATIENCE_S = 24 * 3600.0
"""For a command to read what was typed; the other connection tells when it ended."""

HOLDER = ("sleep", "infinity")
"""What runs in a job that is there for shells."""


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--gpus", type=click.IntRange(0), help="Reserve so many GPUs of one host.")
@click.option("--devices", type=click.IntRange(0), help="Reserve so many devices of any kind of one host.")
@click.option("--time", "time_limit", default="12h", show_default=True, help="Give them back after so long.")
@click.option("--host", "hosts", multiple=True, help="Only on this host; may be given again.")
@click.option("--name", default="shell", show_default=True, help="What the reservation is called.")
@click.option("--priority", type=int, default=0, help="Higher goes first; default 0.")
@click.option("--no-snapshot", is_flag=True, help="Be in this directory itself, which the hosts must share.")
@click.option("-d", "--detach", is_flag=True, help="Reserve only, and print the id: clusterd shell ID goes in.")
@click.option("--rank", type=click.IntRange(0), default=0, help="Beside this rank of a job; default 0.")
@click.argument("words", nargs=-1, metavar="[JOB] [COMMAND]...", shell_complete=complete_job)
def shell(words: tuple[str, ...], gpus: int | None, devices: int | None, rank: int, **options: Any) -> int:
    """A shell on a host: inside JOB, or with --gpus or --devices in a reservation that ends with it.

    It has the devices, environment variables and working directory of a rank, and ends with that rank: with the job, or
    when the job moves. With COMMAND, that is run instead of a shell, and its exit code returned.

    \b
    clusterd shell --gpus 1                    a GPU for as long as the shell is open
    clusterd shell --gpus 1 --time 2h -d       for two hours, open or not
    clusterd shell gpt-small -- nvidia-smi     beside a job's rank 0
    """
    if gpus is not None and devices is not None:
        raise click.UsageError("--gpus and --devices are both given; --devices means any kind: give one of them")
    count = gpus if gpus is not None else devices
    if count is None:
        _refuse_reservation(options)
        if not words:
            raise click.UsageError("name a JOB to go into, or say what to reserve: --gpus N, or --devices N")
        job, *argv = words
        if argv and argv[0].startswith("-") and argv[0] != "--":
            raise click.UsageError(f"{argv[0]} comes after JOB: what is meant for clusterd goes before it")
        return _attend(job, argv[1:] if argv[:1] == ["--"] else argv, rank, holds=False)
    kind = "cuda" if gpus is not None else None
    request = command_line_job(
        HOLDER, name=options["name"], devices=count, device_kind=kind, priority=options["priority"],
        time_limit=options["time_limit"], hosts=options["hosts"],
    )  # fmt: skip
    with Client() as cluster:
        answer = send(cluster, request, snapshot=not options["no_snapshot"], say=note)
    if options["detach"]:
        print(answer["id"])
        return 0
    return _attend(answer["id"], list(words), 0, holds=True)


def _refuse_reservation(options: dict[str, Any]) -> None:
    context = click.get_current_context()
    for name in options:
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            option = {"hosts": "host", "time_limit": "time"}.get(name, name.replace("_", "-"))
            raise click.UsageError(f"--{option} is of a reservation: say what to reserve with --gpus N or --devices N")


def _attend(job: str, argv: list[str], rank: int, *, holds: bool) -> int:
    """Be the terminal of a command beside a rank, or its pipes; returns its exit code."""
    on_screen = sys.stdin.isatty() and sys.stdout.isatty()
    with Client() as cluster, Client(timeout_s=PATIENCE_S) as typing:
        screen = _screen() if on_screen else None
        stream = cluster.stream("shell", job=job, argv=argv, rank=rank, screen=screen, holds=holds)
        opened = _opened(job, stream)
        if opened is None:
            return 130
        if on_screen and not argv:
            where = f"{opened['host']} ({opened['device'] or 'CPU cores'})"
            note(f"{where}: exit {'gives it back' if holds else 'leaves the job running'}")
        try:
            with _keyboard(typing, opened["terminal"], on_screen):
                end = _until_it_ends(job, stream)
        except KeyboardInterrupt:
            return 130
        except ClusterError as error:
            if on_screen:
                note("")  # what was said last is a prompt
            if holds:
                raise type(error)(f"{error}; job {job} may still hold its devices: clusterd cancel {job}") from None
            raise
    if why := end.get("why"):  # of which an older daemon says nothing
        note(f"\njob {job} ends: {why}" if on_screen else f"job {job} ends: {why}")
    code = int(end["exit_code"])
    return code if code >= 0 else 128 - code


def _until_it_ends(job: str, stream: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Print what the command says; returns how it ended."""
    out = sys.stdout.buffer
    for item in stream:
        if "exit_code" in item:
            return item
        out.write(item["data"])
        out.flush()
    raise ClusterError(f"job {job}: the shell ended without an exit code")


def _opened(job: str, stream: Iterator[dict[str, Any]]) -> dict[str, Any] | None:
    """The terminal, when there is one; says what it waits for. None: the person waits no longer."""
    try:
        for item in stream:
            if "terminal" in item:
                return item
            note(f"{job} waits: {item['waits']}")
    except KeyboardInterrupt:
        note(f"{job} is given up")
        return None
    raise ClusterError(f"job {job}: the daemon opened no shell")


def _screen() -> dict[str, Any]:
    size = shutil.get_terminal_size()
    return {"term": os.environ.get("TERM", "dumb"), "columns": size.columns, "rows": size.lines}


@contextlib.contextmanager
def _keyboard(cluster: Client, terminal: int, on_screen: bool) -> Iterator[None]:
    """What comes on standard input goes to `terminal`, as do changes of the window's size, until the block ends."""
    listening, ringing = os.pipe()
    threading.Thread(target=_type, args=[cluster, terminal, listening], daemon=True).start()
    before = termios.tcgetattr(0) if on_screen else None
    if on_screen:
        signal.signal(signal.SIGWINCH, lambda *_: os.write(ringing, b"."))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        if on_screen:
            tty.setraw(0, termios.TCSADRAIN)  # what was typed ahead is kept
        yield
    finally:
        if before is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, before)


def _type(cluster: Client, terminal: int, bell: int) -> None:
    """One piece after the other, each when the last was taken: the order is kept, and nothing piles up."""
    with contextlib.suppress(ClusterError, OSError):  # the other connection says what became of the command
        while True:
            ready, _, _ = select.select([0, bell], [], [])
            if bell in ready:
                os.read(bell, 100)
                cluster.call("shell_input", terminal=terminal, screen=_screen())
            if 0 in ready:
                data = os.read(0, PIECE_BYTES)
                cluster.call("shell_input", terminal=terminal, data=data, end=not data)
                if not data:
                    return
