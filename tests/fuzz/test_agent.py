"""Frames of strangers at the sockets of a real agent, and at its port for slices: it answers, or cuts them off."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterd import protocol
from clusterd.agent.host.home import Home
from clusterd.agent.tensors.segments import Store
from clusterd.agent.tensors.slice_server import SliceServer
from clusterd.protocol import control
from clusterd.protocol.messages import Request
from clusterd.protocol.requests import REQUESTS
from tests.agent.client import AgentClient
from tests.agent.conftest import agent, connect
from tests.fuzz import examples, one_of
from tests.hang import HANG_S

__all__ = ["agent", "connect"]

FIELDS = one_of(
    "job attempt generation rank offset limit data digest token name segment ranges proof nonce path move argv"
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
RANK_VERBS = [
    kind.verb
    for kind in vars(control).values()
    if isinstance(kind, type) and issubclass(kind, Request) and kind is not Request
]
HARMLESS = sorted(REQUESTS.keys() - {"shutdown", "launch"})  # a launch of odd arguments runs them


def frame(message: Any) -> bytes:
    """A frame, also of what is no map."""
    body = protocol.pack(message)
    return struct.pack("!I", len(body)) + body


def messages(verbs: list[str]) -> st.SearchStrategy[bytes]:
    """Frames of requests and events with odd fields."""
    requests = st.builds(
        lambda verb, number, more: frame({**more, "verb": verb, "id": number}),
        st.sampled_from(verbs) | st.text(max_size=4),
        st.integers(0, 9),
        st.dictionaries(FIELDS, VALUES, max_size=4),
    )
    events = st.dictionaries(FIELDS | st.just("event"), VALUES, max_size=3).map(frame)
    return requests | events | VALUES.map(frame)


STREAMS = st.lists(messages([*HARMLESS, *RANK_VERBS, "challenge", "hello"]) | st.binary(max_size=30), max_size=5).map(
    b"".join
)


def send(connection: socket.socket, data: bytes) -> None:
    """Send everything, read until the other side closes, and do not mind being cut off."""
    connection.settimeout(HANG_S)
    try:
        with connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
    except OSError as error:
        if error.errno not in (errno.ENOTCONN, errno.EPIPE, errno.ECONNRESET):
            raise


def test_strangers_at_the_sockets_of_an_agent(agent: AgentClient) -> None:
    home = Home(agent.root)
    agent.launch(["sleep", "1000"])

    @examples(60)
    @given(data=STREAMS, of_ranks=st.booleans())
    def try_it(data: bytes, of_ranks: bool) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(home.rank_socket if of_ranks else home.socket))
        send(connection, data)

    try_it()
    assert agent.hello()["attempts"][0]["ranks"][0]["state"] == "running"
    assert "Traceback" not in home.log.read_text()


def test_odd_requests_of_a_daemon(agent: AgentClient) -> None:
    @examples(80)
    @given(verb=st.sampled_from(HARMLESS), arguments=st.dictionaries(FIELDS, VALUES, max_size=5))
    def try_it(verb: str, arguments: dict[str, Any]) -> None:
        if verb not in ("terminal_read", "terminal_hold"):  # wait for a terminal
            assert {"ok", "error"} & agent.request(verb, **arguments).keys()

    try_it()
    assert agent.hello()["attempts"] == []
    assert "Traceback" not in Home(agent.root).log.read_text()


@pytest.fixture
def slices(tmp_path: Path) -> Iterator[SliceServer]:
    store = Store(tmp_path / "shm", tmp_path / "files")
    server = SliceServer(store, {"m": "secret"}.get, address="127.0.0.1")
    yield server
    server.close()
    store.close()


def test_strangers_at_the_port_for_slices(slices: SliceServer) -> None:
    @examples(60)
    @given(data=STREAMS)
    def try_it(data: bytes) -> None:
        send(socket.create_connection(("127.0.0.1", slices.port)), data)

    try_it()
    with socket.create_connection(("127.0.0.1", slices.port), HANG_S) as connection:
        assert b"nonce" in connection.recv(100)
