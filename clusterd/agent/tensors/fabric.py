"""Slices between hosts: agents fetch ranges of each other's segments over TCP, from memory to memory.

A connection is one fetch. The server (`slice_server`) sends a nonce; the client names a move or a data set, with a MAC
over the nonce under its token, which itself never crosses the network, and its request; the server shows that it knows
the token too, and answers. Bytes of tensors are neither encrypted nor authenticated.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from clusterd import protocol
from clusterd.agent.tensors.segments import Segment
from clusterd.protocol.proof import CHALLENGE_BYTES_MAX, new_nonce, proof, proves

CHUNK_BYTES = 4 << 20
REQUEST_BYTES_MAX = 1 << 20
CONNECT_TIMEOUT_S = 30.0
HANDSHAKE_S = 5.0
"""Time for a peer to prove the token, from its connection on."""
HANDSHAKES = 3
"""Connection attempts of a client: a flooded server may close a connection before its handshake is over."""
IDLE_TIMEOUT_S = 60.0
"""A peer that sends nothing for this long within a transfer is gone."""

Range = tuple[int, int]


class FetchFailed(Exception):
    """A fetch failed; the message names the host and the cause."""


def client_proof(token: str, nonce: str, own_nonce: str, name: str) -> str:
    """MAC by which the fetching side proves its token for `name`."""
    return proof(token, "slice client", nonce, own_nonce, name)


def server_proof(token: str, nonce: str, own_nonce: str, name: str) -> str:
    """MAC by which the serving side proves the token too; nonces in the same order."""
    return proof(token, "slice server", nonce, own_nonce, name)


def data_name(token: str) -> str:
    """Public name of a data set's token, by which a server finds it."""
    return proof(token, "data set")[:32]


def _connect(address: tuple[str, int], token: str, name: str, request: dict[str, Any]) -> socket.socket:
    """Connect, prove the token and send a request.

    Raises:
        OSError, EOFError, ProtocolError: nobody is there, or not somebody with this token.
    """
    for attempt in range(HANDSHAKES):
        connection = socket.create_connection(address, CONNECT_TIMEOUT_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _shake_hands(connection, token, name, request)
            connection.settimeout(IDLE_TIMEOUT_S)
            return connection
        except (EOFError, ConnectionError):
            connection.close()
            if attempt == HANDSHAKES - 1:
                raise
        except BaseException:
            connection.close()
            raise
    raise AssertionError("unreachable")


def _shake_hands(connection: socket.socket, token: str, name: str, request: dict[str, Any]) -> None:
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    try:
        nonce = str(receive_frame(connection, CHALLENGE_BYTES_MAX, time.monotonic() + HANDSHAKE_S).get("nonce"))
    except TimeoutError:
        raise protocol.ProtocolError("it sent no challenge: its agent is of an older version, and busy") from None
    own_nonce = new_nonce()
    shown = {"name": name, "nonce": own_nonce, "proof": client_proof(token, nonce, own_nonce, name)}
    # The request holds no secret, so it is sent with the proof, which saves a round trip.
    connection.sendall(protocol.encode(shown) + protocol.encode(request))
    answer = receive_frame(connection, CHALLENGE_BYTES_MAX, deadline)
    if not proves(token, answer.get("proof"), "slice server", nonce, own_nonce, name):
        raise protocol.ProtocolError("it does not know the token")


def ask(address: tuple[str, int], token: str, request: dict[str, Any]) -> dict[str, Any]:
    """Send one question about a data set to the agent that serves it, and return the answer.

    Raises:
        FetchFailed: nobody answers there, or not to this token.
    """
    where = f"{address[0]}:{address[1]}"
    try:
        with _connect(address, token, data_name(token), request) as connection:
            return receive_frame(connection, protocol.FRAME_BYTES_MAX)
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
        patient: nobody waits for the data: the server yields to ranks on its cores.

    Raises:
        FetchFailed: the other side refused, or broke off, or `stopped` said so.
    """
    where = f"{address[0]}:{address[1]}"
    try:
        request = {"segment": segment, "ranges": [list(r) for r in ranges], "patient": patient}
        with _connect(address, token, move, request) as connection:
            answer = _patient(connection, stopped)
            if "error" in answer:
                raise FetchFailed(f"{where}: {answer['error']}")
            with target.filling() as view:
                _fill(connection, view[offset : offset + int(answer["bytes"])], stopped)
    except (OSError, EOFError, protocol.ProtocolError) as error:
        raise FetchFailed(f"{where} broke off while sending {segment}: {error or type(error).__name__}") from error
    meta: dict[str, Any] = answer["meta"]
    return meta


def _patient(connection: socket.socket, stopped: Callable[[], bool]) -> dict[str, Any]:
    """Receive the first frame, which may take long to come, checking now and then that it is still wanted."""
    connection.settimeout(1.0)
    while True:
        try:
            connection.recv(1, socket.MSG_PEEK)
            break
        except TimeoutError:
            if stopped():
                raise EOFError("the move is over") from None
    connection.settimeout(IDLE_TIMEOUT_S)
    return receive_frame(connection, protocol.FRAME_BYTES_MAX)


def receive_frame(connection: socket.socket, bytes_max: int, deadline: float | None = None) -> dict[str, Any]:
    """Receive the next frame; nothing is stored of a frame longer than `bytes_max`.

    Args:
        deadline: monotonic time by which all of it must have come; None: the socket's own time-out, for each read.
    """
    (length,) = struct.unpack("!I", _receive_exactly(connection, 4, deadline))
    if length > bytes_max:
        raise protocol.ProtocolError(f"a frame of {length} bytes was announced; the longest is {bytes_max}")
    return protocol.decode(_receive_exactly(connection, length, deadline))


def _receive_exactly(connection: socket.socket, count: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < count:
        if deadline is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("it took too long")
            connection.settimeout(left_s)
        # Memory grows with the received bytes, not with the announced length.
        got = connection.recv(min(count - len(data), 1 << 18))
        if not got:
            raise EOFError("it closed the connection")
        data += got
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
