"""Processes as /proc shows them: who lives, since when, and under which tag; and the memory that they share.

A pid alone names nobody: pids are reused. A process is known by pid, start time and boot id together.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Container, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

TAG = "CLUSTERD_TAG"
"""Environment variable that marks every process of an attempt: ``<agent>/<job>.<attempt>``."""


class Stat(NamedTuple):
    """Fields of /proc/PID/stat that are used here."""

    state: str  # "Z" and "X" are dead
    parent: int
    group: int
    session: int
    start_time: int  # clock ticks since boot
    memory_bytes: int  # of addresses; none left: it is on its way out


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Changes with every boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def machine() -> str:
    """This boot of this machine, or of this container: those of one kernel share its boot id."""
    return f"{boot_id()}/{os.stat('/proc/self/ns/pid').st_ino}"


def machine_memory_bytes() -> tuple[int, int]:
    """Total and available memory of the whole machine, whatever a cgroup leaves of it."""
    with open("/proc/meminfo", encoding="ascii") as file:
        values = {name: int(rest.split()[0]) << 10 for name, rest in (line.split(":", 1) for line in file)}
    return values["MemTotal"], values["MemAvailable"]


def stat(pid: int) -> Stat | None:
    """None where no such process is."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command's name stands in parentheses and may hold spaces and parentheses itself.
    fields = text[text.rindex(b")") + 2 :].split()
    return Stat(fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]), int(fields[20]))


def lives(pid: int, start_time: int, boot: str | None = None) -> bool:
    """True if exactly this process still runs; a zombie does not."""
    if boot is not None and boot != boot_id():
        return False
    found = stat(pid)
    return found is not None and found.start_time == start_time and found.state not in "ZX"


def everyone() -> Iterator[int]:
    """Pids of all processes."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def environment(pid: int) -> bytes:
    """The environment `pid` was started with; empty where it is gone, a zombie, or another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def tagged(tag: str) -> list[int]:
    """Pids whose environment carries `tag`, wherever they were re-parented to; never the caller's own."""
    wanted = f"{TAG}={tag}".encode()
    own = os.getpid()
    found = []
    for pid in everyone():
        text = environment(pid) if pid != own else b""
        if wanted in text and wanted in text.split(b"\0"):
            found.append(pid)
    return found


def ending(sessions: Container[int]) -> list[int]:
    """Pids in these sessions that have given back their memory, but not yet what else they hold.

    The kernel takes a process' memory first, and with it its environment, by which `tagged` knows it; then closes its
    files, the devices among them, which for a GPU with a full memory takes seconds. A process whose first thread has
    ended shows as a zombie while others run on.
    """
    found = []
    for pid in everyone():
        seen = stat(pid)
        if not seen or seen.session not in sessions or seen.memory_bytes:
            continue
        if seen.state not in "ZX" or _threads(pid) > 1:
            found.append(pid)
    return found


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def tags(prefix: str) -> set[str]:
    """Tags that begin with `prefix` and that some living process carries; one look at all of them."""
    begin = f"{TAG}={prefix}".encode()
    own = os.getpid()
    entries = (entry for pid in everyone() if pid != own for entry in environment(pid).split(b"\0"))
    return {entry.partition(b"=")[2].decode(errors="replace") for entry in entries if entry.startswith(begin)}


def in_session(session: int) -> list[int]:
    """Pids of the session that `session` leads, leader included."""
    return [pid for pid in everyone() if (found := stat(pid)) and found.session == session and found.state not in "ZX"]


def send(pid: int, start_time: int, number: int) -> bool:
    """Signal exactly this process; False where it is gone.

    The pidfd is opened first and the start time compared after: between the two the pid cannot change hands. Kernels
    before 5.3 have none; there it can, within microseconds.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (OSError, AttributeError):
        handle = -1
    try:
        if not lives(pid, start_time):
            return False
        if handle >= 0:
            signal.pidfd_send_signal(handle, number)
        else:
            os.kill(pid, number)
    except ProcessLookupError:
        return False
    finally:
        if handle >= 0:
            os.close(handle)
    return True


def claim_environment(name: str, value: str) -> bool:
    """Write `value` over the placeholder that this process was started with under `name`.

    A process forked without exec keeps showing its parent's first environment in /proc/PID/environ, whatever
    `os.environ` says. The parent is therefore started with a placeholder of spaces under `name`, and the child writes
    over its own copy of that memory. Returns False where there is no placeholder, or the value is longer.
    """
    try:
        # man 5 proc_pid_stat: fields 50 and 51 are env_start and env_end; the state, after the name, is field 3.
        text = Path("/proc/self/stat").read_bytes()
        fields = text[text.rindex(b")") + 2 :].split()
        start, end = int(fields[47]), int(fields[48])
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            block = b"\0" + (memory.read(end - start) or b"")
            key = f"\0{name}=".encode()
            begin = block.index(key) + len(key)
            capacity = block.index(b"\0", begin) - begin
            written = value.encode()
            if len(written) > capacity:
                return False
            memory.seek(start + begin - 1)
            # Zero bytes after the value: readers split at zeros and see empty entries, which carry nothing.
            memory.write(written.ljust(capacity, b"\0"))
    except (OSError, ValueError):
        return False  # a kernel that hides its addresses, or was started without a placeholder
    return True


PLACEHOLDER = " " * 160
"""Room for a tag in the environment of a process that forks ranks."""
