"""Strangers may connect to the slice port; no migration suffers from them."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from clusterd import protocol
from clusterd.agent.tensors.datasets import Datasets
from clusterd.agent.tensors.fabric import FetchFailed, ask, fetch
from clusterd.agent.tensors.segments import Store
from clusterd.agent.tensors.slice_server import SliceServer
from tests.agent.client import AgentClient

TOKEN = "5ec2e7" * 5
SIZE = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "shm", tmp_path / "files")
    source = made.make("m.out0", SIZE, "m")
    source.path.write_bytes(b"\x07" * SIZE)
    made.publish("m.out0", {"step": 1})
    yield made
    made.close()


@pytest.fixture
def server(store: Store) -> Iterator[SliceServer]:
    made = SliceServer(store, {"m": TOKEN}.get, address="127.0.0.1")
    yield made
    made.close()


def connected(server: SliceServer) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), 30)
    connection.settimeout(30)
    return connection


def bring(store: Store, port: int, name: str = "in", token: str = TOKEN) -> bytes:
    inbox = store.make(name, SIZE, "m")
    fetch(("127.0.0.1", port), token, "m", "m.out0", [(0, SIZE)], inbox, 0, lambda: False)
    return bytes(inbox.mapped)


def test_a_move_goes_through_among_a_hundred_strangers(store: Store, server: SliceServer) -> None:
    """64 connections that said nothing held all places, and the move waited for them."""
    with ExitStack() as strangers:
        for number in range(100):
            stranger = strangers.enter_context(connected(server))
            if number % 2:  # half a frame
                stranger.sendall(struct.pack("!I", 4000) + b"half")
        assert bring(store, server.port) == b"\x07" * SIZE


def test_a_flood_of_strangers_does_not_keep_a_move_out(store: Store, server: SliceServer) -> None:
    over = threading.Event()

    def flood() -> None:
        while not over.is_set():
            with ExitStack() as strangers:
                for _ in range(200):
                    strangers.enter_context(connected(server))

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        for number in range(5):
            assert bring(store, server.port, f"in{number}") == b"\x07" * SIZE
    finally:
        over.set()
        flooding.join()


def test_a_stranger_that_announces_much_is_closed_at_once(server: SliceServer) -> None:
    """4 MB were allocated on its word."""
    with connected(server) as stranger:
        stranger.sendall(struct.pack("!I", 4097))
        while data := stranger.recv(4096):
            assert b"nonce" in data


def test_a_stranger_that_dribbles_is_closed(server: SliceServer) -> None:
    """Each byte bought it another minute."""
    with connected(server) as stranger:
        stranger.sendall(struct.pack("!I", 100))
        stranger.settimeout(0.5)
        closed = False
        for _ in range(60):
            try:
                stranger.sendall(b"x")
                data = stranger.recv(4096)
            except TimeoutError:
                continue
            except ConnectionError:
                data = b""
            if not data:
                closed = True
                break
        assert closed


def test_a_token_never_crosses_the_network(store: Store, server: SliceServer) -> None:
    """Whoever listened had it, and everything that it opens; and what was overheard opens nothing a second time."""
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def relay() -> None:
            client, _ = listener.accept()
            with client, connected(server) as upstream:
                back = threading.Thread(target=copy, args=(upstream, client, bytearray()))
                back.start()
                copy(client, upstream, heard)
                back.join()

        relaying = threading.Thread(target=relay)
        relaying.start()
        assert bring(store, listener.getsockname()[1]) == b"\x07" * SIZE
        relaying.join()
    assert heard and TOKEN.encode() not in heard
    with connected(server) as again:
        again.sendall(heard)
        (length,) = struct.unpack("!I", again.recv(4))
        assert "nonce" in protocol.decode(again.recv(length))
        try:
            assert again.recv(4096) == b""
        except ConnectionError:
            pass  # closed before everything was read


def copy(source: socket.socket, sink: socket.socket, heard: bytearray) -> None:
    try:
        while data := source.recv(1 << 16):
            heard += data
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def test_a_server_that_does_not_know_the_token_is_not_believed(store: Store) -> None:
    """A foreign server may have taken the port of an agent that died."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            client, _ = listener.accept()
            with client, contextlib.suppress(ConnectionError):
                client.sendall(protocol.encode({"nonce": "n"}) + protocol.encode({"proof": "p"}))
                client.sendall(protocol.encode({"meta": {}, "bytes": SIZE}) + bytes(SIZE))
                while client.recv(4096):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(FetchFailed, match="does not know the token"):
            bring(store, listener.getsockname()[1])
        thread.join()


def test_data_sets_are_read_with_their_token_only(store: Store, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_bytes(b"a")
    datasets = Datasets()
    datasets.serve(TOKEN, "corpus", str(tmp_path / "data"))
    server = SliceServer(store, {"m": "of the move"}.get, datasets, "127.0.0.1")
    try:
        at = ("127.0.0.1", server.port)
        assert "file" in ask(at, TOKEN, {"data": "look", "path": "a"})
        with pytest.raises(FetchFailed):
            ask(at, "of the move", {"data": "look", "path": "a"})
    finally:
        server.close()


def test_the_port_is_bound_to_the_address_that_others_use(agent: AgentClient) -> None:
    """Regression: the port was open on every interface of the host."""
    port = agent.ok("fabric", address="127.0.0.1")["port"]
    socket.create_connection(("127.0.0.1", port), 10).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 10)
    # The address of a router in front of the host is none of its own.
    port = agent.ok("fabric", address="192.0.2.1")["port"]
    socket.create_connection(("127.0.0.2", port), 10).close()
