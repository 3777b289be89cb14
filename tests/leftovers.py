"""Processes, shared memory, directories and ports that a test session left behind."""

from __future__ import annotations

import gc
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MARK = "CLUSTERD_TEST_SESSION"
"""Variable by which processes of this session, and theirs, are known; several sessions may run side by side."""

LISTENS = "0A"
_END_WITH_US = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver", b"multiprocessing.spawn")


class Session:
    """One test session; with pytest-xdist, that of one worker."""

    def __init__(self) -> None:
        self._directories: list[Path] = []
        self._make: Callable[..., str] = tempfile.mkdtemp
        self._listen: Callable[..., None] = socket.socket.listen
        self._listeners: dict[int, str] = {}
        self._ports = set(_own_ports())
        os.environ[MARK] = str(os.getpid())

    def begin(self) -> None:
        """Remember the temporary directories that are made from now on, and in which test a port is opened."""

        def made(*args: Any, **options: Any) -> str:
            directory = self._make(*args, **options)
            self._directories.append(Path(directory))
            return directory

        def listen(listener: socket.socket, *args: Any) -> None:
            self._listen(listener, *args)
            if listener.family in {socket.AF_INET, socket.AF_INET6}:
                self._listeners[listener.getsockname()[1]] = os.environ.get("PYTEST_CURRENT_TEST", "no test")

        tempfile.mkdtemp = made
        socket.socket.listen = listen  # type: ignore[method-assign,assignment]

    def end(self) -> None:
        """Remember no more."""
        tempfile.mkdtemp = self._make  # type: ignore[assignment]
        socket.socket.listen = self._listen  # type: ignore[method-assign,assignment]

    def left(self, directory: Path) -> list[str]:
        """Describe what is left.

        Args:
            directory: pytest's own of this session; its content may stay, and nothing else that belongs to it.
        """
        gc.collect()  # listeners of event loops that are over, and of failed tests
        ours = [os.fsencode(place) for place in (*self._directories, directory)]
        return [
            *(f"process {pid}: {command}" for pid, command in _processes(ours)),
            *(f"shared memory {place}" for place in shared_memory(ours)),
            *(f"directory {place}" for place in self._directories if place.exists()),
            *(f"port {port}, open {self._since(port)}" for port in sorted(set(_own_ports()) - self._ports)),
        ]

    def _since(self, port: int) -> str:
        return f"since {self._listeners[port]}" if port in self._listeners else "by code that is not Python"


def _processes(ours: list[bytes]) -> Iterator[tuple[int, str]]:
    """Processes with our mark, or with one of our directories, in their environment."""
    marks = [f"{MARK}={os.getpid()}\0".encode(), *(place + b"/" for place in ours)]
    for place in Path("/proc").iterdir():
        if not place.name.isdigit() or int(place.name) == os.getpid():
            continue
        try:
            environment = (place / "environ").read_bytes()
            command = (place / "cmdline").read_bytes()
        except OSError:  # of somebody else, or gone
            continue
        if command and any(mark in environment for mark in marks) and not any(w in command for w in _END_WITH_US):
            yield int(place.name), command.replace(b"\0", b" ").decode(errors="replace")[:200]


def shared_memory(ours: list[bytes]) -> Iterator[Path]:
    """Directories of agents in shared memory, each with the name of its agent's home."""
    for owner in Path("/dev/shm").glob("clusterd-*/owner"):
        try:
            home = owner.read_bytes()
        except OSError:  # removed meanwhile
            continue
        if home.startswith(tuple(ours)):
            yield owner.parent


def _own_ports() -> Iterator[int]:
    """TCP ports on which this process listens."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor))
        except OSError:
            continue
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
        except OSError:  # no such family here
            continue
        for fields in map(str.split, lines):
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in inodes:
                yield int(fields[1].rpartition(":")[2], 16)
