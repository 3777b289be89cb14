"""Stand between a person's shell and the job of `clusterd run`: input, output, signals and exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from clusterd.cli.common.following import exit_code, over_restarts, show_logs, until_over
from clusterd.cli.common.output import drop_output, is_unread, note, state_and_reason, was_closed
from clusterd.client import Client
from clusterd.errors import ClusterError
from clusterd.types import JobSpec

CHUNK_BYTES = 1 << 18

_PASSED_ON = (signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def has_input() -> bool:
    """True where standard input is a pipe, a file or a socket; what is typed at a terminal is for `clusterd shell`."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # it is closed
        return False
    return stat.S_ISFIFO(kind) or stat.S_ISREG(kind) or stat.S_ISSOCK(kind)


@contextlib.contextmanager
def answered_first() -> Iterator[list[int]]:
    """Let an interrupt wait for the answer to a submission, whose job nobody would know; a second one does not wait.

    Yields:
        Filled by the interrupt that came meanwhile.
    """
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def once(number: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        came.append(number)

    if callable(before):  # else it is ignored, as in the background
        signal.signal(signal.SIGINT, once)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


def attend(answer: dict[str, Any], spec: JobSpec, interrupts: Sequence[int] = ()) -> int:
    """Show the job's log until it ends, and return its exit code; an interrupt cancels the job and waits for its end.

    Args:
        answer: of its submission.
        interrupts: that came before.
    """
    job, name = answer["id"], f"{answer['name']} ({answer['id']})"
    if answer["reason"]:
        note(f"{name}: {answer['reason']}")
    given = _Input(job) if spec.reads_input else None

    def leave(number: int, _frame: object) -> None:
        """Exit and leave the job running, which is no request to cancel, unless it got a part of its input."""
        ended = f"clusterd: ended by {signal.Signals(number).name}"
        if given is not None and given.has_begun and not given.is_over:
            note(f"{ended} before the end of the input of {name}, which is cancelled")
            _cancel(job, "its input was cut off")
        else:
            note(f"{ended}; {name} keeps running: clusterd cancel ends it")
        sys.exit(128 + number)

    def pass_on(number: int, _frame: object) -> None:
        try:
            with Client() as cluster:
                cluster.call("signal", job=job, number=number)
        except ClusterError as error:
            note(f"{signal.Signals(number).name} is not passed on: {error}")

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, leave)
    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    if given is not None:
        threading.Thread(target=given.pass_on, daemon=True).start()
    try:
        if interrupts:
            raise KeyboardInterrupt
        row = _follow(answer, tasks=spec.resources.tasks, nodes=spec.resources.nodes)
    except KeyboardInterrupt:
        note(f"\ncancelling {name}; Ctrl-C again leaves it to the daemon")
        _cancel(job)
        return 130
    if given is not None and given.failure:
        note(f"{name}: {given.failure}")
        return 1
    if row["state"] != "finished":
        note(f"{name} {state_and_reason(row)}")
    return exit_code(row)


def _cancel(job: str, why: str = "") -> None:
    """Cancel a job and wait for its end."""
    try:
        with Client() as cluster:
            cluster.call("cancel", job=job, **({"why": why} if why else {}))
        until_over(job)
    except ClusterError as error:
        note(f"clusterd: {error}")


def _follow(answer: dict[str, Any], tasks: int, nodes: int) -> dict[str, Any]:
    """The job's final row; prints the log of all its nodes until then, while standard output is open."""
    try:
        rank = 0 if tasks == nodes == 1 else None
        show_logs(answer, rank, follow=True, apart=True, labelled=tasks > 1)
    except OSError as error:  # as by `run ... | head`: the job still runs, and its exit code is needed
        if not is_unread(sys.stdout, error) and not was_closed(sys.stdout, error):
            raise
        drop_output(sys.stdout)
        note(f"standard output was closed; {answer['name']} ({answer['id']}) keeps running, Ctrl-C cancels it")
    return until_over(answer["id"])


class _Input:
    """Standard input on its way to a job: piece by piece, each once the command has read most of those before.

    Attributes:
        is_over: all of it is there, or it does not matter any more.
        failure: why not all of it gets there; the job is cancelled.
    """

    def __init__(self, job: str) -> None:
        self.is_over = False
        self.failure = ""
        self._job = job
        self._offset = 0
        self._piece: bytes | None = None

    @property
    def has_begun(self) -> bool:
        """True once the job has some input."""
        return self._offset > 0

    def pass_on(self) -> None:
        """Read and send until the end, across restarts of the daemon."""
        try:
            over_restarts(self._send)
        except (ClusterError, OSError) as error:
            with Client() as cluster:
                row = cluster.call("job", job=self._job)
            if row["state"] in ("starting", "running", "queued"):  # else it has ended without reading all, as it may
                self.failure = f"its input was cut off: {error}"
                _cancel(self._job, self.failure[:200])
        finally:
            self.is_over = True

    def _send(self, cluster: Client) -> None:
        while True:
            if self._piece is None:
                self._piece = os.read(0, CHUNK_BYTES)
            end = not self._piece
            cluster.call("job_input", job=self._job, data=self._piece, offset=self._offset, end=end)
            self._offset += len(self._piece)
            if end:
                return
            self._piece = None
