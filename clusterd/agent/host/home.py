"""The agent's directory on a host, and how records get there: whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOCKET_PATH_BYTES_MAX = 100
"""A Unix socket's path has 108 bytes on Linux; a longer one is moved below /tmp."""

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


class UnsafeDirectory(Exception):
    """A directory for sockets exists, but others could put their own there."""


@dataclass(frozen=True, slots=True)
class Home:
    """Directory of one agent's persistent files."""

    root: Path

    @property
    def lock(self) -> Path:
        """Held by flock for as long as an agent lives here."""
        return self.root / "agent.lock"

    @property
    def record(self) -> Path:
        """Record of the running agent: pid, start time, boot id, version, socket."""
        return self.root / "agent.json"

    @property
    def log(self) -> Path:
        """Log of the agent."""
        return self.root / "agent.log"

    @property
    def attempts(self) -> Path:
        """One directory per attempt."""
        return self.root / "attempts"

    @property
    def snapshots(self) -> Path:
        """One directory per snapshot, named by its digest."""
        return self.root / "snapshots"

    @property
    def sockets(self) -> Path:
        """Of the agent and its fork servers; a short path below /tmp where this one is too long for a socket."""
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
        """The directory of one generation of an attempt; during a move two of them run here side by side.

        Raises:
            ValueError: a job id that is no plain name.
        """
        if not _NAME.fullmatch(job):
            raise ValueError(f"{job!r} is no job id: letters, digits, '.', '_' and '-' only")
        return self.attempts / attempt_name(job, attempt, generation)

    def identity(self) -> str:
        """Of the agent of this home, made once and kept."""
        path = self.root / "identity.json"
        known = read_json(path)
        if known is None:
            known = {"agent": uuid.uuid4().hex}
            write_json(path, known)
        return str(known["agent"])

    def make(self) -> None:
        """Create what is missing, for this user alone.

        Raises:
            UnsafeDirectory: the directory for sockets is someone else's, or open to others.
        """
        for directory in (self.root, self.attempts, self.snapshots, self.sockets):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for directory in (self.root, self.sockets):
            status = directory.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                raise UnsafeDirectory(f"{directory} is not a directory of this user's; remove it")
            if status.st_mode & 0o077:
                directory.chmod(0o700)


def listen(path: Path) -> socket.socket:
    """Bind a socket of the agent, for this user alone."""
    path.unlink(missing_ok=True)  # of an agent that was killed: the lock says that none lives
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.fspath(path))
    path.chmod(0o600)
    return listener


def attempt_name(job: str, attempt: int, generation: int) -> str:
    """``<job>.<attempt>``, and of later generations ``<job>.<attempt>.<generation>``."""
    return f"{job}.{attempt:d}" if generation <= 1 else f"{job}.{attempt:d}.{generation:d}"


def inode(path: Path) -> int | None:
    """Inode number of the file at `path`; None if there is none."""
    try:
        return path.stat().st_ino
    except OSError:
        return None


def is_still(path: Path, made: int | None) -> bool:
    """True if the file at `path` still has the inode `made`; false if it was removed or replaced."""
    return made is not None and inode(path) == made


def forget_directory(sockets: Path) -> None:
    """Removes the directory of sockets after the last of them, where it was made below /tmp for its short path."""
    if sockets.parent == Path("/tmp"):
        with contextlib.suppress(OSError):  # others are there still
            sockets.rmdir()


def default_home() -> Home:
    """`$CLUSTERD_AGENT_HOME`, or a directory per host name and cluster in the user's state directory.

    The host name is part of it because homes are shared between hosts over NFS, while an agent's sockets, locks and
    process ids are one machine's; the cluster, because each numbers its jobs from 1, and ends what it does not know.
    """
    given = os.environ.get("CLUSTERD_AGENT_HOME")
    if given:
        return Home(Path(given).expanduser().absolute())
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()) or "host"
    return Home(
        Path(state).expanduser().absolute() / "clusterd" / "agent" / host / os.environ.get("CLUSTERD_AGENT_OF", "")
    )


def write_durably(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace `path` so that after a crash it holds either the old bytes or all of the new ones."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames and creations in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any, mode: int = 0o600) -> None:
    """`write_durably` of a JSON value."""
    write_durably(path, json.dumps(value, separators=(",", ":")).encode(), mode)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None where there is no such file, or none of ours."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) else None
