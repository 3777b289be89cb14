"""Sources of data-set bytes: a folder of this host, the host's cache, or another host through the agent.

A source answers two read-only queries: the entry at a path, and a range of a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from clusterd import protocol
from clusterd.datasets import FREE_SHARE, UNREACHABLE, DataUnavailable, DataUnreachable, File, Folder, Found, Source
from clusterd.protocol import calls
from clusterd.protocol.control import DataHello, LookUpData, ReadData
from clusterd.protocol.messages import Request, from_map, to_map

R = TypeVar("R")

BLOCK_BYTES = 1 << 20
"""Unit of fetching and caching."""
LOOKUP_TTL_S = 10.0
"""Validity of a lookup: scripts open a file per sample."""
ANSWER_S = 300.0
"""Longer than the agent's own timeout: its error names the cause."""


class CachedSource:
    """Caches another source in blocks on this host's disk, shared by all ranks of the host and their workers.

    A block file appears complete; two readers that miss it at once both fetch it. On an almost full disk blocks are not
    cached, and training goes on.
    """

    def __init__(self, source: Source, directory: Path) -> None:
        self._source, self._directory = source, directory
        self._lookups: dict[tuple[str, str], tuple[float, File | Folder]] = {}

    def look(self, dataset: str, path: str) -> Found:
        """Entry at a path, at most `LOOKUP_TTL_S` old."""
        found = self._recent(dataset, path)
        if found is None and path:
            folder, _, name = path.rpartition("/")
            around = self._recent(dataset, folder)
            found = around.get(name) if isinstance(around, Mapping) else None
        if found is None:
            found = self._source.look(dataset, path)
            if found is not None:
                self._lookups[dataset, path] = time.monotonic(), found
        return found

    def _recent(self, dataset: str, path: str) -> Found:
        at_s, found = self._lookups.get((dataset, path), (0.0, None))
        return found if time.monotonic() - at_s < LOOKUP_TTL_S else None

    def read(self, dataset: str, path: str, file: File, offset: int, length: int) -> bytes:
        """Read a range from the blocks that cover it."""
        if offset + length > file.size:
            raise DataUnavailable(f"{path} of data set {dataset!r} ends before byte {offset + length}")
        first, last = offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES
        blocks = b"".join(self._block(dataset, path, file, number) for number in range(first, last + 1))
        start = offset - first * BLOCK_BYTES
        return blocks[start : start + length]

    def _block(self, dataset: str, path: str, file: File, number: int) -> bytes:
        start = number * BLOCK_BYTES
        length = min(BLOCK_BYTES, file.size - start)
        key = hashlib.sha256(f"{dataset}\0{path}\0{file.version}\0{file.size}".encode()).hexdigest()[:32]
        place = self._directory / key[:2] / key / f"{number:x}"
        try:
            data = place.read_bytes()
        except OSError:
            data = b""
        if len(data) == length:
            return data
        try:
            data = self._source.read(dataset, path, file, start, length)
        except DataUnavailable:
            self._lookups.clear()  # the file may have changed; the next open must look again
            raise
        part = place.with_name(f"{place.name}.{os.getpid()}.{threading.get_ident()}.part")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            disk = shutil.disk_usage(place.parent)
            if disk.free - length < FREE_SHARE * disk.total:
                return data
            part.write_bytes(data)
            part.replace(place)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
        return data


class AgentSource:
    """Data sets of other hosts, through the agent of this one.

    Each process has a connection of its own to the agent, so that data-loader workers need not share the rank's.
    """

    def __init__(self, control_socket: str, hello: DataHello) -> None:
        self._path, self._hello = control_socket, hello
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._process = 0
        self._calls = calls.Calls()
        self._decoder = protocol.Decoder()

    def look(self, dataset: str, path: str) -> Found:
        """Entry at a path, from the agent."""
        found = self._ask(LookUpData(dataset, path))
        if found.file is not None:
            return File(*found.file)
        if found.folder is not None:
            return {name: File(*file) if file else None for name, file in found.folder.items()}
        return None

    def read(self, dataset: str, path: str, file: File, offset: int, length: int) -> bytes:
        """Read a range from any host that has the file."""
        data = self._ask(ReadData(dataset, path, (file.size, file.version), offset, length)).data or b""
        if len(data) != length:
            raise DataUnavailable(f"{path} of data set {dataset!r}: got {len(data)} bytes of {length}")
        return data

    def _ask(self, request: Request[R]) -> R:
        with self._lock:
            for again in (True, False):
                try:
                    outcome = self._exchange(request)
                    if isinstance(outcome, calls.Ok):
                        reply: R = from_map(request.reply, outcome.value, request.verb)
                        return reply
                    break
                except (OSError, protocol.ProtocolError) as error:
                    self._disconnect()  # a restarted agent answers the second time
                    if not again:
                        raise DataUnreachable(f"the agent did not answer {request.verb!r}: {error}") from error
        assert isinstance(outcome, calls.Failure)
        raise (DataUnreachable if outcome.kind == UNREACHABLE else DataUnavailable)(outcome.message)

    def _exchange(self, request: Request[Any]) -> calls.Reply:
        if self._connection is None or self._process != os.getpid():  # after a fork the connection is the parent's
            self._connect()
        assert self._connection is not None
        replies: list[calls.Reply] = []
        number = self._calls.open(replies.append)
        try:
            self._connection.sendall(protocol.encode(calls.request(number, request.verb, to_map(request))))
            while data := self._connection.recv(1 << 20):
                for message in self._decoder.feed(data):
                    self._calls.take(message)
                if replies:
                    return replies[0]
        finally:
            self._calls.close(number)
        raise ConnectionError("the agent closed the connection")

    def __del__(self) -> None:
        self._disconnect()

    def _connect(self) -> None:
        self._disconnect()
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(ANSWER_S)
        self._connection.connect(self._path)
        self._connection.sendall(protocol.encode(self._hello.to_message()))
        self._process, self._decoder = os.getpid(), protocol.Decoder()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
