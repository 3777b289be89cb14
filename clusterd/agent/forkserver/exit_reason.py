"""Why a rank ended: from its wait status, and from what else this host knows."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from pathlib import Path

EXIT_SCRIPT = 92
EXIT_DEVICE_FAULT = 93
EXIT_DATA = 94
EXIT_DEVICE_OOM = 95
EXIT_PLAN = 96
EXIT_NO_TORCH = 97
EXIT_PORT = 98

_ELASTIC_EXITS = {
    EXIT_SCRIPT: "script",
    EXIT_DEVICE_FAULT: "device-fault",
    EXIT_DATA: "data",
    EXIT_DEVICE_OOM: "device-oom",
    EXIT_PLAN: "plan",
    EXIT_NO_TORCH: "no-torch",
    EXIT_PORT: "port",
}

REASONS = (
    "exit", "signal", "oom", "port", "no-torch", "plan", "script", "device-oom", "device-fault", "data", "lost",
    "stopped",
)  # fmt: skip


def reason_of(*, exit_code: int | None, number: int | None, kind: str, stopped: bool, out_of_memory: bool) -> str:
    """One of `REASONS`.

    The codes 92 to 98 mean something only where our own training loop gave them: a command uses them as it likes.
    """
    if stopped:
        return "stopped"
    if number is not None:
        return "oom" if number == signal.SIGKILL and out_of_memory else "signal"
    if kind == "elastic" and exit_code in _ELASTIC_EXITS:
        return _ELASTIC_EXITS[exit_code]
    return "exit"


class OomWatch:
    """Tells whether the kernel killed something of ours for memory lately.

    The counter is read once a second, because it grows when the kernel picks its victim and the victim's end can be
    seconds later, while its memory is taken down. A SIGKILL counts as the kernel's when the counter grew in between.
    """

    WINDOW_S = 20.0

    def __init__(self, counters: tuple[tuple[Path, bytes], ...] | None = None) -> None:
        self._counters = oom_counters() if counters is None else counters
        self._seen: deque[tuple[float, int]] = deque()
        self.look()

    def look(self) -> int:
        """Read the counter, and remember it with its time."""
        now = time.monotonic()
        count = self._count()
        while len(self._seen) > 1 and now - self._seen[1][0] > self.WINDOW_S:
            self._seen.popleft()
        self._seen.append((now, count))
        return count

    def killed_lately(self) -> bool:
        """Whether the counter grew within the window; one kill explains one death."""
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
    """Where this kernel counts its OOM kills, the narrowest first: our own cgroup, then the whole machine."""
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
