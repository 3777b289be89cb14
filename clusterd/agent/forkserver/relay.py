"""Relay between the tasks of a command and its log: input as it arrives, stdout and stderr told apart.

It runs in the fork that would otherwise execute the command, as the leader of the rank's session, and its tasks are its
children. It ends as its tasks end, with their exit code or by their signal, so that whoever judges the rank sees the
command itself.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from clusterd.agent.host.rank_input import FRAME
from clusterd.protocol.forkserver import STREAM_CHANGE

CHUNK_BYTES = 1 << 16

PIPE_BYTES_MAX = 1 << 20
"""Most that a pipe holds, so that a task can have left in it."""

OTHERS_S = 5.0
"""Once a task has failed, the others have this long after SIGTERM: they would wait for it for ever."""

LOST_OUTPUT = 120
"""Exit code of tasks that succeeded where the log did not take their output, as Python's."""

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are sent to all processes of a session, so to the tasks as well; their end is the relay's."""


class Relay:
    """Tasks of one command, and their pipes.

    Args:
        streams: path of the file of offsets (`STREAM_CHANGE`); empty: stdout and stderr stay as they are.
        input_pipe: path of a named pipe with input for the first task; empty: there is none.
        labels: lines have the number of their task before them.
        ends_others: once a task has failed, the others are ended.

    Attributes:
        statuses: wait statuses by process, in the order of their ends.
    """

    def __init__(
        self, streams: str = "", input_pipe: str = "", *, labels: bool = False, ends_others: bool = True
    ) -> None:
        self._labels, self._ends_others = labels, ends_others
        self._streams = os.open(streams, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if streams else -1
        # Open for writing too: else a pipe without a writer, as after the death of an agent, is at its end.
        self._pipe = os.open(input_pipe, os.O_RDWR | os.O_NONBLOCK) if input_pipe else -1
        self._selector = selectors.DefaultSelector()
        self._is_stderr = self._has_lost_output = False
        self.statuses: dict[int, int] = {}
        self._running: set[int] = set()
        self._lines: dict[int, tuple[bool, bytes, bytearray]] = {}  # by pipe: stderr, prefix, begun line
        self._framed, self._unwritten = bytearray(), bytearray()
        self._input = -1
        self._left = -1  # bytes of the current piece that are still to come

    def run(self, start: Callable[[Mapping[str, str]], NoReturn], tasks: Sequence[Mapping[str, str]]) -> int:
        """Run `start` in a fork for each of the tasks; return the wait status of the first that failed, or 0.

        Without one, that of `LOST_OUTPUT` if the log did not take all that the tasks wrote.

        Args:
            tasks: environment of each.
        """
        wake_read, wake_write = os.pipe()
        for end in (wake_read, wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(wake_read, selectors.EVENT_READ)
        for number, env in enumerate(tasks):
            prefix = b"%s: " % env["SLURM_PROCID"].encode() if self._labels else b""
            self._start(start, env, prefix, has_input=self._pipe >= 0 and number == 0)
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_IGN)
        if self._input >= 0:
            self._selector.register(self._pipe, selectors.EVENT_READ)
        failed_s = None
        while self._running and (failed_s is None or time.monotonic() - failed_s < OTHERS_S):
            for key, _ in self._selector.select(None if failed_s is None else 0.1):
                if key.fd == wake_read:
                    os.read(wake_read, 4096)
                elif key.fd == self._pipe:
                    self._take_input()
                elif key.fd == self._input:
                    self._give_input()
                else:
                    self._take_output(key.fd)
            self._reap()
            if self._ends_others and failed_s is None and any(self.statuses.values()):
                failed_s = time.monotonic()
                for pid in self._running:
                    os.kill(pid, signal.SIGTERM)
        for pipe in list(self._lines):  # programs that a task left in the background may hold them open, and go on
            for _ in range(PIPE_BYTES_MAX // CHUNK_BYTES):
                if not self._take_output(pipe):
                    break
        for is_stderr, prefix, begun in self._lines.values():
            self._write(b"%s%s\n" % (prefix, begun) if begun else b"", is_stderr)
        return next(filter(None, self.statuses.values()), LOST_OUTPUT << 8 if self._has_lost_output else 0)

    def _start(
        self, start: Callable[[Mapping[str, str]], NoReturn], env: Mapping[str, str], prefix: bytes, *, has_input: bool
    ) -> None:
        given: list[tuple[int, int]] = []  # descriptor, and that of the task it becomes
        if has_input:
            source, self._input = os.pipe()
            os.set_blocking(self._input, False)
            given.append((source, 0))
        for number in (1, 2) if self._streams >= 0 or prefix else ():
            output, sink = os.pipe()
            os.set_blocking(output, False)
            self._lines[output] = (number == 2, prefix, bytearray())
            self._selector.register(output, selectors.EVENT_READ)
            given.append((sink, number))
        pid = os.fork()
        if pid == 0:
            try:
                for descriptor, number in given:
                    os.dup2(descriptor, number)
                start(env)
            finally:
                os._exit(126)
        for descriptor, _ in given:
            os.close(descriptor)
        self._running.add(pid)

    def _reap(self) -> None:
        for pid in list(self._running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._running.discard(pid)
                self.statuses[pid] = status

    def _take_output(self, pipe: int) -> bool:
        """Copy what a pipe has into the log; false where it has no more."""
        is_stderr, prefix, begun = self._lines[pipe]
        try:
            data = os.read(pipe, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if prefix:
            begun += data
            *whole, rest = begun.split(b"\n")
            begun[:] = rest
            whole += [rest] if rest and not data else []
            shown = b"".join(b"%s%s\n" % (prefix, line) for line in whole)
        else:
            shown = data
        self._write(shown, is_stderr)
        if not data or self._has_lost_output:  # a task that writes more is told by a broken pipe
            self._selector.unregister(pipe)
            os.close(pipe)
            del self._lines[pipe]
        return pipe in self._lines

    def _write(self, data: bytes, is_stderr: bool) -> None:
        """Write to the log, unless its disk is, or was, full."""
        sink = 2 if is_stderr and self._streams < 0 else 1
        try:
            if self._streams >= 0 and data and is_stderr != self._is_stderr:
                # Before the data, so that whoever reads these first knows of each change.
                os.write(self._streams, STREAM_CHANGE.pack(os.fstat(1).st_size))
                self._is_stderr = is_stderr
            while data and not self._has_lost_output:
                data = data[os.write(sink, data) :]
        except OSError:
            self._has_lost_output = True

    def _take_input(self) -> None:
        """Read from the pipe of input while the task reads its own."""
        self._framed += os.read(self._pipe, CHUNK_BYTES)
        while self._left >= 0 or len(self._framed) >= FRAME.size:
            if self._left < 0:
                (self._left,) = FRAME.unpack_from(self._framed)
                del self._framed[: FRAME.size]
                if not self._left:
                    self._left = sys.maxsize  # the end: nothing after it counts
                    break
            piece = self._framed[: self._left]
            del self._framed[: self._left]
            self._unwritten += piece
            self._left = self._left - len(piece) or -1
            if not self._framed:
                break
        self._selector.unregister(self._pipe)
        self._selector.register(self._input, selectors.EVENT_WRITE)

    def _give_input(self) -> None:
        """Write to the task; then close, or read on."""
        try:
            del self._unwritten[: os.write(self._input, self._unwritten)]
        except BlockingIOError:
            return
        except OSError:  # the task does not read: what comes is dropped
            self._unwritten.clear()
        if self._unwritten:
            return
        self._selector.unregister(self._input)
        if self._left == sys.maxsize:
            os.close(self._input)
            os.close(self._pipe)
        else:
            self._selector.register(self._pipe, selectors.EVENT_READ)


def place(rank: int, local_rank: int, world: int, local_world: int) -> dict[str, str]:
    """Variables by which a task finds its place, as ranks do, and as scripts for Slurm do."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(local_world),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NTASKS": str(world),
    }


def leave(status: int) -> NoReturn:
    """End as a task with this wait status ended."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the task has left one
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)
