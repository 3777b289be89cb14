"""A terminal for the interface: a pseudo-terminal of a given size, and the bytes sent to it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Sequence

from tests.hang import HANG_S


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, argv: Sequence[str], columns: int, rows: int, environment: dict[str, str] | None = None) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._master, slave = pty.openpty()
        self.before = termios.tcgetattr(slave)
        self.resize(columns, rows)
        looks = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "C.UTF-8"}
        plain = {**os.environ, **(environment or {}), **looks}
        for name in ("NO_COLOR", "PYTHONDONTWRITEBYTECODE"):  # an installed program is compiled once, too
            plain.pop(name, None)
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            argv, stdin=slave, stdout=slave, stderr=slave, env=plain, start_new_session=True, close_fds=True
        )
        self._slave = slave
        self.output = b""
        self.whole = b""

    def resize(self, columns: int, rows: int) -> None:
        """Another size, as when a window is dragged."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGWINCH)

    def read(self, seconds: float) -> bytes:
        """Output that arrives within this time; returns at the first of it; empty if none comes."""
        if not select.select([self._master], [], [], max(seconds, 0.0))[0]:
            return b""
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # the other side is closed
            return b""
        self.output += data
        self.whole += data
        return data

    def expect(self, wanted: bytes, timeout_s: float = HANG_S, forget: bool = True) -> float:
        """Wait for these bytes; seconds since the start. `forget`: what came before is not looked at again."""
        deadline_s = time.monotonic() + timeout_s
        while wanted not in self.output:
            assert time.monotonic() < deadline_s, f"{wanted!r} was not drawn; the last was {self.output[-2000:]!r}"
            self.read(deadline_s - time.monotonic())
        if forget:
            self.output = self.output.partition(wanted)[2]
        return time.monotonic() - self.started_s

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._master, keys.encode())

    def wait(self, timeout_s: float = HANG_S) -> int:
        """Until the program ends; its exit code."""
        deadline_s = time.monotonic() + timeout_s
        assert self.process is not None
        while self.process.poll() is None:
            assert time.monotonic() < deadline_s, "the program did not end"
            self.read(0.05)
        while self.read(0.05):
            pass
        return self.process.returncode

    @property
    def is_restored(self) -> bool:
        """The line discipline is as it was, and the alternate screen and the mouse are switched off last."""
        same = termios.tcgetattr(self._slave)[:4] == self.before[:4]
        pairs = ((b"\x1b[?1049h", b"\x1b[?1049l"), (b"\x1b[?1000h", b"\x1b[?1000l"), (b"\x1b[?25l", b"\x1b[?25h"))
        return same and all(self.whole.rfind(off) > self.whole.rfind(on) for on, off in pairs)

    def hang_up(self) -> None:
        """Close the terminal's side, as when an SSH connection drops."""
        os.close(self._slave)
        os.close(self._master)
        self._slave = self._master = -1

    def close(self) -> None:
        """End the program if it has not ended."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for descriptor in {self._master, self._slave} - {-1}:
            os.close(descriptor)
