"""Server of slices and data sets for other agents: it authenticates first, and bounds the cost of strangers.

Anyone who reaches the port may connect. Until a peer has proved a token it costs one thread, a few kilobytes and five
seconds at most, within limits per address and in total. Threads use blocking sockets, so that the kernel does the work
while the interpreter's lock is free.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from clusterd import protocol
from clusterd.agent.tensors.datasets import Datasets
from clusterd.agent.tensors.fabric import (
    CHUNK_BYTES,
    HANDSHAKE_S,
    IDLE_TIMEOUT_S,
    REQUEST_BYTES_MAX,
    Range,
    receive_frame,
    server_proof,
)
from clusterd.agent.tensors.segments import Segment, Store, set_of
from clusterd.process_attributes import lower_priority
from clusterd.protocol.proof import CHALLENGE_BYTES_MAX, new_nonce, proves

PUBLISH_TIMEOUT_S = 600.0
SENDING_MAX = 64
"""Concurrent transfers; further peers wait, as do those whose segment is not published yet."""
CONNECTIONS_MAX, CONNECTIONS_PER_ADDRESS = 1024, 256
"""Limit of connections of peers that proved a token."""
UNPROVEN_MAX, UNPROVEN_PER_ADDRESS = 128, 32
"""Limit of connections without a proof; beyond it the oldest is closed, so that newer ones have time for theirs."""
ANY_ADDRESS = "0.0.0.0"


class SliceServer:
    """Serves ranges of complete segments, and data sets, to peers that prove their token.

    Args:
        token_of: token of a move or of a set of state snapshots, by name.
        address: of this host, by which its peers know it.
    """

    def __init__(
        self,
        store: Store,
        token_of: Callable[[str], str | None],
        datasets: Datasets | None = None,
        address: str = ANY_ADDRESS,
    ) -> None:
        """Listen on a free port; raises OSError if `address` is not one of this host's."""
        self._store, self._token_of = store, token_of
        self._datasets = datasets or Datasets()
        self._listener = socket.create_server((address, 0), backlog=128)
        self._is_open = True
        self._unproven = _Unproven()
        self._peers: Counter[str] = Counter()  # connections by address
        self._lock = threading.Lock()
        self._sending = threading.BoundedSemaphore(SENDING_MAX)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="fabric", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._is_open = False
        # Closing alone does not wake a thread that is in accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while self._is_open:
            try:
                connection, (address, *_) = self._listener.accept()
            except OSError:
                time.sleep(0.1)  # no descriptor is free now
                continue
            self._unproven.add(connection, address)
            try:
                threading.Thread(target=self._serve, args=(connection, address), name="slice", daemon=True).start()
            except RuntimeError:  # no thread is free now
                self._unproven.discard(connection)
                connection.close()

    def _serve(self, connection: socket.socket, address: str) -> None:
        # The client reports the failure.
        broken = (OSError, EOFError, protocol.ProtocolError, KeyError, TypeError, ValueError)
        with connection, contextlib.suppress(*broken):
            try:
                shown = self._authenticate(connection)
            finally:
                self._unproven.discard(connection)
            if shown is None:
                return  # no reply without a proof
            with self._counted(address) as is_admitted:
                if not is_admitted:
                    return
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(IDLE_TIMEOUT_S)
                name, dataset_token = shown
                if dataset_token:
                    self._answer_data(connection, dataset_token)
                else:
                    self._answer(connection, name, receive_frame(connection, REQUEST_BYTES_MAX))

    def _authenticate(self, connection: socket.socket) -> tuple[str, str] | None:
        """Return the name that the peer proved a token for, and the token if it is of a data set; else None."""
        deadline = time.monotonic() + HANDSHAKE_S
        connection.settimeout(HANDSHAKE_S)
        nonce = new_nonce()
        connection.sendall(protocol.encode({"nonce": nonce}))
        shown = receive_frame(connection, CHALLENGE_BYTES_MAX, deadline)
        name, peer_nonce = str(shown.get("name")), str(shown.get("nonce"))
        dataset_token = self._datasets.token_of(name)
        token = dataset_token or self._token_of(name)
        if token is None or not proves(token, shown.get("proof"), "slice client", nonce, peer_nonce, name):
            return None
        connection.sendall(protocol.encode({"proof": server_proof(token, nonce, peer_nonce, name)}))
        return name, dataset_token or ""

    @contextlib.contextmanager
    def _counted(self, address: str) -> Any:
        """Count a peer's connection; yields False if there are too many."""
        with self._lock:
            most = self._peers.total() >= CONNECTIONS_MAX or self._peers[address] >= CONNECTIONS_PER_ADDRESS
            self._peers[address] += 1
        try:
            yield not most
        finally:
            with self._lock:
                self._peers[address] -= 1
                if not self._peers[address]:
                    del self._peers[address]

    def _answer_data(self, connection: socket.socket, token: str) -> None:
        """Answer a peer's questions one after the other until it closes."""
        while True:
            request = receive_frame(connection, REQUEST_BYTES_MAX)
            with self._sending:
                connection.sendall(protocol.encode(self._datasets.answer(token, request)))

    def _answer(self, connection: socket.socket, move: str, request: dict[str, Any]) -> None:
        name = str(request["segment"])
        # Target ranks may be ready before a source rank has made its segment. A state snapshot is there, or gone.
        is_over = (lambda: True) if set_of(name) else lambda: self._token_of(move) is None
        segment = self._store.awaited(name, is_over, PUBLISH_TIMEOUT_S)
        if segment is None or segment.move != move or not segment.wait(PUBLISH_TIMEOUT_S):
            connection.sendall(protocol.encode({"error": f"segment {name} was dropped, or is not here"}))
            return
        ranges = [(int(offset), int(length)) for offset, length in request["ranges"]]
        if any(offset < 0 or length < 0 or offset + length > segment.size for offset, length in ranges):
            connection.sendall(protocol.encode({"error": f"segment {segment.name} has no such range"}))
            return
        if request.get("patient"):
            lower_priority()
        with self._sending:
            connection.sendall(protocol.encode({"meta": segment.meta, "bytes": sum(n for _, n in ranges)}))
            _send_ranges(connection, segment, ranges)


class _Unproven:
    """Connections of peers that have proved nothing yet, oldest first."""

    def __init__(self) -> None:
        self._address_of: dict[socket.socket, str] = {}
        self._lock = threading.Lock()

    def add(self, connection: socket.socket, address: str) -> None:
        """Add a connection, and close the oldest where there are too many of its address or in total."""
        with self._lock:
            same = [known for known, of in self._address_of.items() if of == address]
            if len(same) >= UNPROVEN_PER_ADDRESS:
                self._close(same[0])
            elif len(self._address_of) >= UNPROVEN_MAX:
                self._close(next(iter(self._address_of)))
            self._address_of[connection] = address

    def discard(self, connection: socket.socket) -> None:
        """Remove a connection that proved a token or closed."""
        with self._lock:
            self._address_of.pop(connection, None)

    def _close(self, connection: socket.socket) -> None:
        del self._address_of[connection]
        with contextlib.suppress(OSError):  # its own thread wakes, and closes it
            connection.shutdown(socket.SHUT_RDWR)


def _send_ranges(connection: socket.socket, segment: Segment, ranges: Sequence[Range]) -> None:
    with memoryview(segment.mapped) as view:
        for offset, length in ranges:
            for start in range(offset, offset + length, CHUNK_BYTES):
                connection.sendall(view[start : min(start + CHUNK_BYTES, offset + length)])
