"""Exit reasons of ranks, from the wait status, stop markers and the kernel's OOM counters."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from pathlib import Path

from clusterd.exit_reasons import EXIT_CODES, Reason


def reason_of(*, exit_code: int | None, number: int | None, kind: str, stopped: bool, out_of_memory: bool) -> Reason:
    """Reason of a rank's exit.

    The codes of `EXIT_CODES` count only for elastic jobs, whose training loop sets them: a command may use any code.
    """
    if stopped:
        return Reason.STOPPED
    if number is not None:
        return Reason.OOM if number == signal.SIGKILL and out_of_memory else Reason.SIGNAL
    if kind == "elastic" and exit_code in EXIT_CODES:
        return EXIT_CODES[exit_code]
    return Reason.EXIT


class OomWatch:
    """Detects recent OOM kills by the kernel.

    The counter is read once a second: it grows when the kernel picks its victim, which may exit seconds later, once its
    memory is released. A SIGKILL is attributed to the kernel if the counter grew within `WINDOW_S` before it.
    """

    WINDOW_S = 20.0

    def __init__(self, counters: tuple[tuple[Path, bytes], ...] | None = None) -> None:
        self._counters = oom_counters() if counters is None else counters
        self._seen: deque[tuple[float, int]] = deque()
        self.look()

    def look(self) -> int:
        """Read the counter and store it with its time."""
        now = time.monotonic()
        count = self._count()
        while len(self._seen) > 1 and now - self._seen[1][0] > self.WINDOW_S:
            self._seen.popleft()
        self._seen.append((now, count))
        return count

    def killed_lately(self) -> bool:
        """True if the counter grew within the window; each kill accounts for one exit."""
        count = self.look()
        if count <= self._seen[0][1]:
            return False
        self._seen = deque((at, seen + 1) for at, seen in self._seen)
        self._seen[-1] = (self._seen[-1][0], count)
        return True

    def _count(self) -> int:
        for path, field in self._counters:
            try:
                for line in path.read_bytes().splitlines():
                    name, _, value = line.partition(b" ")
                    if name == field:
                        return int(value)
            except (OSError, ValueError):
                continue
        return 0


def oom_counters() -> tuple[tuple[Path, bytes], ...]:
    """Readable OOM-kill counters (file, field), the narrowest first: our own cgroup, then the whole machine."""
    found: list[tuple[Path, bytes]] = []
    for line in _own_cgroups():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found.append((Path("/sys/fs/cgroup" + path) / "memory.events", b"oom_kill"))
        elif "memory" in controllers.split(","):
            found.append((Path("/sys/fs/cgroup/memory" + path) / "memory.oom_control", b"oom_kill"))
    found.append((Path("/proc/vmstat"), b"oom_kill"))
    return tuple((path, field) for path, field in found if os.access(path, os.R_OK))


def _own_cgroups() -> list[str]:
    try:
        return Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
