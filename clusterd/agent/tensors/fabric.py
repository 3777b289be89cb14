"""Slices between hosts: agents fetch ranges of each other's segments over TCP, from memory to memory.

A connection is one fetch: a frame that names it and shows the move's token, a frame back once the segment is complete,
then the bytes. Threads with blocking sockets: the kernel does the work, and the interpreter's lock is free meanwhile.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from clusterd import protocol
from clusterd.agent.tensors.segments import Segment, Store
from clusterd.niceness import lower_priority

CHUNK_BYTES = 4 << 20
PUBLISH_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 30.0
IDLE_TIMEOUT_S = 60.0
"""A peer that sends nothing for so long in the middle of its bytes is gone."""

CONNECTIONS_MAX = 64

Range = tuple[int, int]


class FetchFailed(Exception):
    """The bytes did not come; says from where and why."""


class SliceServer:
    """Serves ranges of complete segments to whoever shows the token of their move."""

    def __init__(
        self,
        store: Store,
        token_of: Callable[[str], str | None],
        data: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda request: None,
    ) -> None:
        """Listens at once, on all addresses and a free port.

        Args:
            data: answers questions about data sets; None where the token is a stranger's.
        """
        self._store = store
        self._data = data
        self._token_of = token_of
        self._listener = socket.create_server(("0.0.0.0", 0), backlog=128)
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="fabric", daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        # Closing alone does not wake a thread that is in accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._slots.acquire()
            threading.Thread(target=self._serve, args=(connection,), name="slice", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(IDLE_TIMEOUT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                request = _receive_frame(connection)
                if "data" in request:
                    self._answer_data(connection, request)
                    return
                known = self._token_of(str(request.get("move")))
                if known is None or not hmac.compare_digest(known, str(request.get("token"))):
                    return  # no word to strangers
                self._answer(connection, request)
        except (OSError, EOFError, protocol.ProtocolError, KeyError, TypeError, ValueError):
            return  # the other side says what it missed; there is nobody here to tell
        finally:
            self._slots.release()

    def _answer_data(self, connection: socket.socket, request: dict[str, Any]) -> None:
        """One question after the other, for as long as the caller has some."""
        while (answer := self._data(request)) is not None:
            connection.sendall(protocol.encode(answer))
            request = _receive_frame(connection)

    def _answer(self, connection: socket.socket, request: dict[str, Any]) -> None:
        segment = self._store.find(str(request["segment"]))
        if segment is None or segment.move != request["move"] or not segment.wait(PUBLISH_TIMEOUT_S):
            connection.sendall(protocol.encode({"error": f"segment {request['segment']} was dropped, or is not here"}))
            return
        ranges = [(int(offset), int(length)) for offset, length in request["ranges"]]
        if any(offset < 0 or length < 0 or offset + length > segment.size for offset, length in ranges):
            connection.sendall(protocol.encode({"error": f"segment {segment.name} has no such range"}))
            return
        if request.get("patient"):
            lower_priority()
        connection.sendall(protocol.encode({"meta": segment.meta, "bytes": sum(n for _, n in ranges)}))
        _send_ranges(connection, segment, ranges)


def _send_ranges(connection: socket.socket, segment: Segment, ranges: Sequence[Range]) -> None:
    with memoryview(segment.mapped) as view:
        for offset, length in ranges:
            for start in range(offset, offset + length, CHUNK_BYTES):
                connection.sendall(view[start : min(start + CHUNK_BYTES, offset + length)])


def ask(address: tuple[str, int], request: dict[str, Any]) -> dict[str, Any]:
    """One question about a data set to the agent that has it, and its answer.

    Raises:
        FetchFailed: nobody answers there, or not to this token.
    """
    where = f"{address[0]}:{address[1]}"
    try:
        with socket.create_connection(address, CONNECT_TIMEOUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(IDLE_TIMEOUT_S)
            connection.sendall(protocol.encode(request))
            (length,) = struct.unpack("!I", _receive_exactly(connection, 4))
            if length > protocol.FRAME_BYTES_MAX:
                raise protocol.ProtocolError(f"a frame of {length} bytes was announced")
            return protocol.decode(_receive_exactly(connection, length))
    except (OSError, EOFError, protocol.ProtocolError) as error:
        raise FetchFailed(f"{where}: {error or type(error).__name__}") from error


def fetch(
    address: tuple[str, int],
    token: str,
    move: str,
    segment: str,
    ranges: Sequence[Range],
    target: Segment,
    offset: int,
    stopped: Callable[[], bool],
    patient: bool = False,
) -> dict[str, Any]:
    """Bring ranges of a remote segment into `target` at `offset`; returns the remote segment's meta.

    Blocks until the segment is published there.

    Args:
        patient: nobody waits for it: the other side gives way to ranks on its cores.

    Raises:
        FetchFailed: the other side refused, or broke off, or `stopped` said so.
    """
    where = f"{address[0]}:{address[1]}"
    try:
        with socket.create_connection(address, CONNECT_TIMEOUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request: dict[str, Any] = {"token": token, "move": move, "segment": segment}
            request |= {"ranges": [list(r) for r in ranges], "patient": patient}
            connection.sendall(protocol.encode(request))
            answer = _patient(connection, stopped)
            if "error" in answer:
                raise FetchFailed(f"{where}: {answer['error']}")
            connection.settimeout(IDLE_TIMEOUT_S)
            with target.filling() as view:
                _fill(connection, view[offset : offset + int(answer["bytes"])], stopped)
    except (OSError, EOFError, protocol.ProtocolError) as error:
        raise FetchFailed(f"{where} broke off while sending {segment}: {error or type(error).__name__}") from error
    meta: dict[str, Any] = answer["meta"]
    return meta


def _patient(connection: socket.socket, stopped: Callable[[], bool]) -> dict[str, Any]:
    """The first frame, which may be long in coming; looks up now and then whether it is still wanted."""
    connection.settimeout(1.0)
    head = b""
    while len(head) < 4:
        try:
            data = connection.recv(4 - len(head))
        except TimeoutError:
            if stopped():
                raise EOFError("the move is over") from None
            continue
        if not data:
            raise EOFError("it closed the connection")
        head += data
    connection.settimeout(IDLE_TIMEOUT_S)
    (length,) = struct.unpack("!I", head)
    if length > protocol.FRAME_BYTES_MAX:
        raise protocol.ProtocolError(f"a frame of {length} bytes was announced")
    return protocol.decode(_receive_exactly(connection, length))


def _receive_frame(connection: socket.socket) -> dict[str, Any]:
    (length,) = struct.unpack("!I", _receive_exactly(connection, 4))
    if length > CHUNK_BYTES:
        raise protocol.ProtocolError(f"a request of {length} bytes was announced")
    return protocol.decode(_receive_exactly(connection, length))


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    with memoryview(data) as view:
        _fill(connection, view)
    return bytes(data)


def _fill(connection: socket.socket, view: memoryview, stopped: Callable[[], bool] = lambda: False) -> None:
    done = 0
    while done < len(view):
        if stopped():
            raise EOFError("the move is over")
        got = connection.recv_into(view[done : done + CHUNK_BYTES])
        if not got:
            raise EOFError("it closed the connection")
        done += got
