"""Control groups (version 2) of attempts: made where this user may, with all descendants of a rank inside.

No process leaves its group by a new session, a double fork or another environment. The group of a generation of an
attempt is killed as a whole, and the kernel reports when its last process is gone. It has limits where the memory and
cpu controllers are there.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
import time
from pathlib import Path

PREFIX = "clusterd-"

OWN = f"{PREFIX}agent"
"""Group of the agent and its fork servers: controllers cannot be enabled for groups beside processes."""

UNUSED_S = 3600.0
"""Empty groups older than this are removed when an agent starts: their agent did not come back."""

CONTROLLERS = ("memory", "cpu")

SCOPE_TIMEOUT_S = 5.0

WEIGHT_PER_CORE = 10
"""Of 100 for a group without a weight, as the agent's: it answers while jobs use all cores."""

LINGER = Path("/var/lib/systemd/linger")


def find_base() -> Path | None:
    """The group below which this process may make others; None if there is none.

    As root that is the root of the hierarchy, which does not end with a login session; else the group of this process,
    as in a delegated scope of systemd or in a container. ``CLUSTERD_CGROUPS=0`` in the environment makes it None.
    """
    if os.environ.get("CLUSTERD_CGROUPS") == "0" or (found := _mounted()) is None:
        return None
    return next((group for group in found if _is_writable(group)), None)


def prepare() -> Path | None:
    """Return `find_base` for an agent that starts, in a scope of its own if that helps, with controllers enabled."""
    base = find_base()
    if base is None and lingers() and os.environ.get("CLUSTERD_CGROUPS") != "0":
        _enter_scope()
        base = find_base()
    if base is None:
        return None
    if (base / "cgroup.type").exists():  # all groups but the root of the whole hierarchy, which may contain processes
        with contextlib.suppress(OSError):
            (base / OWN).mkdir(exist_ok=True)
            add(base / OWN, os.getpid())
    for controller in CONTROLLERS:
        with contextlib.suppress(OSError):  # not delegated, or of version 1 on this host
            (base / "cgroup.subtree_control").write_text(f"+{controller}")
    _remove_unused(base)
    return base


def lingers() -> bool:
    """True if this user's service manager outlives logins, as after `loginctl enable-linger`."""
    try:
        return (LINGER / pwd.getpwuid(os.getuid()).pw_name).exists()
    except KeyError:  # a uid without an entry in the user database
        return False


def _enter_scope() -> None:
    """Ask the user's service manager for a delegated scope around this process, as a login session grants none.

    Only where it lingers: else what is in the scope would end with the last login.
    """
    unit = f"{PREFIX}agent-{os.getpid()}.scope"
    service = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
    properties = ("2", "PIDs", "au", "1", str(os.getpid()), "Delegate", "b", "true")
    command = ["busctl", "--user", "call", *service, "StartTransientUnit", "ssa(sv)a(sa(sv))", unit, "fail"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            [*command, *properties, "0"],
            check=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=SCOPE_TIMEOUT_S,
            env={"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}", **os.environ},
        )
        deadline = time.monotonic() + SCOPE_TIMEOUT_S
        while time.monotonic() < deadline and find_base() is None:  # the answer comes before the move
            time.sleep(0.01)


def enforced() -> tuple[str, ...] | None:
    """Controllers that limit the attempts on this host; None if there are no groups for them."""
    base = find_base()
    if base is None:
        return None
    try:
        enabled = (base / "cgroup.subtree_control").read_text().split()
    except OSError:
        return ()
    return tuple(controller for controller in CONTROLLERS if controller in enabled)


def own_groups() -> list[tuple[str, str]]:
    """Controllers and path of each control group of this process; that of version 2 names no controllers."""
    try:
        lines = Path("/proc/self/cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [(controllers, path) for _, controllers, path in (line.split(":", 2) for line in lines)]


def _mounted() -> tuple[Path, Path] | None:
    """Directories of the visible root and of this process' own group, or that above the one made by `prepare`."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    own = next((path for controllers, path in own_groups() if not controllers), None)
    for mount in mounts:
        # man 5 proc: "36 35 98:0 ROOT MOUNTPOINT OPTIONS ... - TYPE SOURCE OPTIONS"
        place, _, kind = mount.partition(" - ")
        if kind.split(" ", 1)[0] != "cgroup2" or own is None:
            continue
        root, directory = place.split(" ")[3:5]
        if root == "/" or own == root or own.startswith(f"{root}/"):
            top = Path(directory)
            group = top / own[len(root) if root != "/" else 0 :].lstrip("/")
            return top, group.parent if group.name == OWN else group
    return None


def _is_writable(group: Path) -> bool:
    return os.access(group, os.W_OK) and os.access(group / "cgroup.procs", os.W_OK)


def _remove_unused(base: Path) -> None:
    for group in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if group.name != OWN and time.time() - group.stat().st_mtime > UNUSED_S and not is_populated(group):
                remove(group)


def group_of(base: Path, agent: str, attempt: str) -> Path:
    """Directory of the group of an attempt's generation; the agent's id separates agents that share a machine."""
    return base / f"{PREFIX}{agent}-{attempt}"


def make(group: Path) -> bool:
    """Make a group; false if the kernel or its owner refuses."""
    try:
        group.mkdir(exist_ok=True)
    except OSError:
        return False
    return True


def limit(group: Path, memory_bytes: int, cores: int) -> None:
    """Limit the memory of a group, and give it a share of busy cores, as far as its controllers are there.

    Args:
        memory_bytes: 0: no limit.
        cores: 0: the share of any other group.
    """
    values = {}
    if memory_bytes:
        # The whole group ends, so that no rank waits for one that is gone.
        values = {"memory.max": memory_bytes, "memory.swap.max": 0, "memory.oom.group": 1}
    if cores:
        values["cpu.weight"] = min(WEIGHT_PER_CORE * cores, 10_000)
    for name, value in values.items():
        with contextlib.suppress(OSError):
            if (group / name).exists():
                (group / name).write_text(str(value))


def out_of_memory_kills(group: Path) -> int | None:
    """Processes of the group that the kernel killed for host memory; None without the memory controller."""
    try:
        lines = (group / "memory.events").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def add(group: Path, pid: int) -> bool:
    """Move a process into a group, with what it forks from now on; false if that is refused."""
    try:
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        return False
    return True


def pids(group: Path) -> set[int]:
    """Processes in a group and in those that a container runtime made below it; zombies are not among them."""
    found: set[int] = set()
    for directory in _with_descendants(group):
        with contextlib.suppress(OSError):
            found.update(map(int, (directory / "cgroup.procs").read_text().split()))
    return found - {0}  # stands for processes of other pid namespaces


def is_populated(group: Path) -> bool:
    """True until the last process in the group has released its files and devices."""
    try:
        return "populated 1" in (group / "cgroup.events").read_text()
    except OSError:
        return False


def kill(group: Path) -> None:
    """Send SIGKILL to every process in the group, also to those that fork meanwhile."""
    try:
        (group / "cgroup.kill").write_text("1")
    except OSError:  # before Linux 5.14: the caller repeats it, and a fork may escape one round but not the next
        for pid in pids(group):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def remove(group: Path) -> None:
    """Remove an empty group and those below it."""
    for directory in reversed(_with_descendants(group)):
        with contextlib.suppress(OSError):
            directory.rmdir()


def _with_descendants(group: Path) -> list[Path]:
    """The group and all groups below it, parents first."""
    return [Path(directory) for directory, _, _ in os.walk(group)]
