"""The agent's directory on a host, and atomic writes of its records."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterd.durable_files import write_durably
from clusterd.trusted_paths import private_directory

SOCKET_PATH_BYTES_MAX = 100
"""Longest path used for a Unix socket (Linux allows 108 bytes); sockets with a longer path are made below /tmp."""

NO_SPACE_BYTES = 1 << 16
"""A disk with less is full."""

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class Home:
    """Directory of one agent's persistent files."""

    root: Path

    @property
    def lock(self) -> Path:
        """Lock file that the running agent holds with flock."""
        return self.root / "agent.lock"

    @property
    def record(self) -> Path:
        """Record of the running agent: pid, start time, boot id, version, socket."""
        return self.root / "agent.json"

    @property
    def log(self) -> Path:
        """Log file of the agent."""
        return self.root / "agent.log"

    @property
    def attempts(self) -> Path:
        """Directory with one directory per attempt."""
        return self.root / "attempts"

    @property
    def workdirs(self) -> Path:
        """Directory of the unpacked workdirs, each in a directory named by its digest."""
        return self.root / "snapshots"

    @property
    def sockets(self) -> Path:
        """Directory of the sockets of the agent and its fork servers; below /tmp if this path is too long."""
        longest = os.fsencode(self.root / "sockets" / ("0" * 16 + ".sock"))
        if len(longest) <= SOCKET_PATH_BYTES_MAX:
            return self.root / "sockets"
        digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:16]
        return Path(f"/tmp/clusterd-{os.getuid()}-{digest}")

    @property
    def socket(self) -> Path:
        """Socket on which the agent serves daemons."""
        return self._socket("daemon.sock")

    @property
    def rank_socket(self) -> Path:
        """Socket on which the agent serves ranks."""
        # Named as by the version that had one socket for all: ranks that it started reconnect to its successor here.
        return self._socket("agent.sock")

    def _socket(self, name: str) -> Path:
        beside = self.root / name
        return beside if len(os.fsencode(beside)) <= SOCKET_PATH_BYTES_MAX else self.sockets / name

    def attempt(self, job: str, attempt: int, generation: int = 1) -> Path:
        """Directory of one generation of an attempt; during a migration two generations may run on one host.

        Raises:
            ValueError: the job id is not a plain name.
        """
        if not _NAME.fullmatch(job):
            raise ValueError(f"{job!r} is no job id: letters, digits, '.', '_' and '-' only")
        return self.attempts / attempt_name(job, attempt, generation)

    def identity(self) -> str:
        """Id of this home's agent, created at the first call and the same after restarts."""
        path = self.root / "identity.json"
        known = read_json(path)
        if known is None:
            known = {"agent": uuid.uuid4().hex}
            write_json(path, known)
        return str(known["agent"])

    def make(self) -> None:
        """Create the missing directories with access for this user alone.

        Raises:
            UnsafePath: another account could change what is in one of them.
        """
        for directory in (self.root, self.attempts, self.workdirs, self.sockets):
            private_directory(str(directory))

    def check(self) -> None:
        """Check the directories in which the agent's record and sockets are.

        Raises:
            UnsafePath: as `make`; FileNotFoundError: no agent has lived here.
        """
        for directory in (self.root, self.sockets):
            private_directory(str(directory), make=False)


def listen(path: Path) -> socket.socket:
    """Open a socket of the agent, with access for this user alone. The caller holds the home's lock."""
    path.unlink(missing_ok=True)  # left by an agent that was killed: the lock proves that none runs
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.fspath(path))
    path.chmod(0o600)
    return listener


def attempt_name(job: str, attempt: int, generation: int) -> str:
    """``<job>.<attempt>`` for the first generation, ``<job>.<attempt>.<generation>`` for later ones."""
    return f"{job}.{attempt:d}" if generation <= 1 else f"{job}.{attempt:d}.{generation:d}"


def forget_directory(sockets: Path) -> None:
    """Remove an empty directory of sockets below /tmp."""
    if sockets.parent == Path("/tmp"):
        with contextlib.suppress(OSError):  # not empty
            sockets.rmdir()


def default_home() -> Home:
    """`$CLUSTERD_AGENT_HOME`, or a directory per host name and cluster in the user's state directory.

    The host name is part of the path because hosts may share a home over NFS, while sockets, locks and process ids
    belong to one machine. The cluster is part of it because each cluster numbers its jobs from 1 and ends attempts it
    does not know.
    """
    given = os.environ.get("CLUSTERD_AGENT_HOME")
    if given:
        return Home(Path(given).expanduser().absolute())
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()) or "host"
    return Home(
        Path(state).expanduser().absolute() / "clusterd" / "agent" / host / os.environ.get("CLUSTERD_AGENT_OF", "")
    )


def write_json(path: Path, value: Any) -> None:
    """Write a JSON value with `write_durably`."""
    write_durably(path, json.dumps(value, separators=(",", ":")).encode())


def no_space(directory: Path) -> str:
    """Message if the disk of a directory has no room; empty: it has some, or the directory is gone."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return ""
    return f"no space left on the disk of {directory}" if found.f_bavail * found.f_frsize < NO_SPACE_BYTES else ""


def is_disk_full(error: OSError) -> bool:
    """True where a disk, or a quota on it, has no room; `shutil.copytree` says so in its text alone."""
    numbers = (errno.ENOSPC, errno.EDQUOT)
    return error.errno in numbers or any(f"[Errno {number}]" in str(error) for number in numbers)


def read_json(path: Path) -> dict[str, Any] | None:
    """JSON object in `path`; None if there is no such file or it has other content."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) else None
