"""Processes in /proc: liveness, start time, session, tag and mark; and the memory of the machine.

Pids are reused, so a process is identified by pid, start time and boot id together.
"""

from __future__ import annotations

import hashlib
import os
import resource
import signal
from collections.abc import Container, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

TAG = "CLUSTERD_TAG"
"""Environment variable that every process of an attempt has: ``<agent>/<job>.<attempt>``."""

_RLIMIT_LOCKS = 10
"""A resource limit that Linux inherits and shows, but has not enforced since version 2.4."""


class Stat(NamedTuple):
    """The fields of /proc/PID/stat that clusterd uses."""

    state: str  # "Z" and "X" are dead
    parent: int
    group: int
    session: int
    start_time: int  # clock ticks since boot
    memory_bytes: int  # size of the address space; 0 while the process is exiting
    cpu_ticks: int  # processor time since its start, in clock ticks
    resident_pages: int


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Id of the current boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def machine() -> str:
    """Id of this boot and pid namespace: containers on one kernel share the boot id."""
    return f"{boot_id()}/{os.stat('/proc/self/ns/pid').st_ino}"


def machine_memory_bytes() -> tuple[int, int]:
    """Total and available memory of the whole machine, without cgroup limits."""
    with open("/proc/meminfo", encoding="ascii") as file:
        values = {name: int(rest.split()[0]) << 10 for name, rest in (line.split(":", 1) for line in file)}
    return values["MemTotal"], values["MemAvailable"]


def stat(pid: int) -> Stat | None:
    """Read /proc/PID/stat; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command's name is in parentheses and may contain spaces and parentheses itself.
    fields = text[text.rindex(b")") + 2 :].split()
    parent, group, session = map(int, fields[1:4])
    user, system = map(int, fields[11:13])
    start_time, memory_bytes, resident_pages = map(int, fields[19:22])
    return Stat(fields[0].decode(), parent, group, session, start_time, memory_bytes, user + system, resident_pages)


def lives(pid: int, start_time: int, boot: str | None = None) -> bool:
    """True if this very process still runs; false for a zombie."""
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
    """Initial environment of `pid`; empty if the process is gone, a zombie, or another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def set_mark(tag: str) -> bool:
    """Mark this process, and all that it starts from now on, as of the attempt with `tag`; false if that is refused.

    The mark is a resource limit without effect. A new session, a double fork or another environment does not remove
    it; only a program that sets this very limit does. It is refused where an administrator, or an enclosing attempt,
    has set a lower one.
    """
    value = mark_of(tag)
    try:
        resource.setrlimit(_RLIMIT_LOCKS, (value, value))
    except (OSError, ValueError):
        return False
    return True


def mark_of(tag: str) -> int:
    """The mark of the processes of an attempt, by its tag."""
    return int.from_bytes(hashlib.sha256(tag.encode()).digest()[:8], "big") >> 2 | 1 << 62


def mark(pid: int) -> int | None:
    """The mark of a process; None if it has none or is gone."""
    try:
        lines = Path(f"/proc/{pid}/limits").read_bytes().splitlines()
    except OSError:
        return None
    hard = next((line.split()[4] for line in lines if line.startswith(b"Max file locks")), b"")
    return int(hard) if hard.isdigit() else None


def marks() -> set[int]:
    """Marks of all processes."""
    return {found for pid in everyone() if (found := mark(pid)) is not None and not _is_over(pid)}


def of_attempt(tag: str) -> list[int]:
    """Pids of the processes that carry `tag` or its mark, whoever their parent is now; never the caller's own.

    Processes that this user may not signal, such as those of a set-uid program, are not among them.
    """
    wanted, wanted_mark = f"{TAG}={tag}".encode(), mark_of(tag)
    own = os.getpid()
    found = []
    for pid in everyone():
        if pid == own:
            continue
        text = environment(pid)
        has_tag = wanted in text and wanted in text.split(b"\0")
        if has_tag or (mark(pid) == wanted_mark and not _is_over(pid) and _may_signal(pid)):
            found.append(pid)
    return found


def tag_of(pid: int) -> str | None:
    """Tag that a process carries in its environment; None: it has none, or this user may not read it."""
    prefix = f"{TAG}=".encode()
    found = next((entry for entry in environment(pid).split(b"\0") if entry.startswith(prefix)), None)
    return os.fsdecode(found[len(prefix) :]) if found is not None else None


def _is_over(pid: int) -> bool:
    """True for a process that is gone, or a zombie. One whose main thread has ended appears as a zombie before."""
    found = stat(pid)
    return found is None or (found.state in "ZX" and _threads(pid) <= 1)


def _may_signal(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def ending(sessions: Container[int]) -> list[int]:
    """Pids in these sessions that have released their memory, but still hold files and devices.

    On exit the kernel first frees a process' memory, with the environment by which a scan finds it, and then closes
    its files. Closing a GPU whose memory is full takes seconds. A process whose main thread has ended appears as a
    zombie while its other threads run.
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
    """Tags of running processes that begin with `prefix`, from one scan of /proc."""
    begin = f"{TAG}={prefix}".encode()
    own = os.getpid()
    entries = (entry for pid in everyone() if pid != own for entry in environment(pid).split(b"\0"))
    return {entry.partition(b"=")[2].decode(errors="replace") for entry in entries if entry.startswith(begin)}


def in_session(session: int) -> list[int]:
    """Pids of the session that `session` leads, leader included."""
    return [pid for pid in everyone() if (found := stat(pid)) and found.session == session and found.state not in "ZX"]


def send(pid: int, start_time: int, number: int) -> bool:
    """Signal this very process; false if it is gone.

    The start time is checked after the pidfd is opened, so the signal cannot reach a process that reuses the pid.
    Kernels before 5.3 have no pidfds; there a window of microseconds remains.
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
    """Write `value` over the placeholder that this process inherited in its environment under `name`.

    /proc/PID/environ of a process forked without exec shows the environment its parent was started with, regardless of
    `os.environ`. The parent is therefore started with a placeholder of spaces under `name`, and the child overwrites
    its own copy of that memory. Returns false if there is no placeholder or the value is longer than it.
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
            # Zero bytes after the value: readers split at zeros and ignore empty entries.
            memory.write(written.ljust(capacity, b"\0"))
    except (OSError, ValueError):
        return False  # the kernel hides the addresses, or the process was started without a placeholder
    return True


PLACEHOLDER = " " * 160
"""Placeholder for a tag in the environment of a process that forks ranks."""
