"""Test double of several hosts' agents: the verbs of a migration, with files in place of shared memory."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterd import protocol
from tests.hang import HANG_S

Message = dict[str, Any]


class Network:
    """Published segments of all agents, by name."""

    def __init__(self) -> None:
        self.news = threading.Condition()
        self.published: dict[str, tuple[Path, Message, str]] = {}  # path, meta, host
        self.dropped: set[str] = set()  # moves
        self.sent_bytes = 0  # between hosts

    def wait_for(self, what: Callable[[], bool], deadline_s: float = HANG_S) -> bool:
        with self.news:
            return self.news.wait_for(what, deadline_s)


class HostAgent:
    """Agent of one host."""

    def __init__(self, host: str, directory: Path, network: Network) -> None:
        self.host, self.network = host, network
        self.path = directory / f"{host}.sock"
        self.heard: list[tuple[int, int, Message]] = []  # (generation, rank, message)
        self.refuse: dict[str, Message] = {}  # verb: the error to answer it with
        self._segments = directory / f"{host}.segments"
        self._segments.mkdir()
        self._connections: dict[tuple[int, int], socket.socket] = {}
        self._complete: list[Message] = []
        self._threads: list[threading.Thread] = []
        self._accepted: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._start(self._accept)

    def send(self, generation: int, message: Message) -> None:
        """Send a message to the ranks of a generation on this host."""
        with self.network.news:
            to = [c for (g, _), c in self._connections.items() if g == generation]
        for connection in to:
            try:
                connection.sendall(protocol.encode(message))
            except OSError:
                continue  # that rank has ended

    def said(self, generation: int, what: str, move: str = "") -> dict[int, Message]:
        """Newest report of that kind, by rank."""
        return {
            rank: message["said"]
            for g, rank, message in self.heard
            if g == generation
            and message.get("event") == "said"
            and message["said"]["what"] == what
            and message["said"].get("id", "") in (move, message["said"].get("id"))
            and (not move or message["said"].get("id") == move)
        }

    def ready(self, generation: int) -> int:
        """Number of ranks of a generation that train."""
        return len({rank for g, rank, m in self.heard if g == generation and m.get("event") == "ready"})

    def pid(self, generation: int, rank: int) -> int:
        """Process id of a rank."""
        return next(int(m["pid"]) for g, r, m in self.heard if (g, r) == (generation, rank) and "pid" in m)

    def hang_up(self, generation: int) -> None:
        """Close the connections of a generation, as an agent's death does."""
        with self.network.news:
            lines = [c for (g, _), c in self._connections.items() if g == generation]
        for connection in lines:
            connection.shutdown(socket.SHUT_RDWR)

    def forget(self, move: str) -> None:
        """Remove a migration's segments."""
        with self.network.news:
            self._complete = [s for s in self._complete if s["move"] != move]
        for path in self._segments.glob(f"{move}.*"):
            path.unlink()

    def segments(self) -> list[str]:
        """Names of the existing segments."""
        return sorted(path.name for path in self._segments.iterdir())

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._accepted:
            with contextlib.suppress(OSError):  # a reader in this very process may hold its end forever
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(HANG_S)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        self._threads.append(threading.Thread(target=target, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._accepted.append(connection)
            self._start(self._read, connection)

    def _read(self, connection: socket.socket) -> None:
        decoder, who = protocol.Decoder(), (-1, -1)
        with connection:
            while data := _received(connection):
                for message in decoder.feed(data):
                    if message.get("verb") == "rank_hello":
                        who = (message["generation"], message["rank"])
                    with self.network.news:
                        self._connections[who] = connection
                        self.heard.append((*who, message))
                        self.network.news.notify_all()
                    if "id" in message:
                        self._answer(connection, who, message)
        with self.network.news:
            if self._connections.get(who) is connection:
                del self._connections[who]

    def _answer(self, connection: socket.socket, who: tuple[int, int], message: Message) -> None:
        verb = message["verb"]
        if verb in self.refuse:
            reply: Message = {"error": self.refuse[verb]}
        else:
            answer = self._segments_ if verb == "segments" else getattr(self, f"_{verb}")
            reply = {"ok": answer(who, message)}
        with contextlib.suppress(OSError):  # the rank may have ended meanwhile
            connection.sendall(protocol.encode({"id": message["id"], **reply}))

    def _flush(self, who: tuple[int, int], message: Message) -> Message:
        return {}

    def _segment(self, who: tuple[int, int], message: Message) -> Message:
        path = self._segments / message["name"]
        with path.open("wb") as file:
            file.truncate(message["bytes"])
        self._tell_all({"event": "room", "name": path.name, "path": str(path), "move": path.stem})
        return {"path": str(path), "kind": "file"}

    def _publish(self, who: tuple[int, int], message: Message) -> Message:
        name, path = message["name"], self._segments / message["name"]
        with self.network.news:
            self.network.published[name] = (path, message["meta"], self.host)
            self.network.news.notify_all()
        move, _, suffix = name.rpartition(".")
        for start, where in (("out", "outbox"), ("device", "device")):
            if suffix.startswith(start):
                self._announce(move, name, path, message["meta"], where, int(suffix.removeprefix(start)))
        return {}

    def _device_opened(self, who: tuple[int, int], message: Message) -> Message:
        told = {name: message[name] for name in ("move", "source", "target", "why_not")}
        self._tell_all({"event": "device_opened", **told})
        return {}

    def _fetch(self, who: tuple[int, int], message: Message) -> Message:
        path = self._segments / message["name"]
        with path.open("wb") as file:
            file.truncate(message["bytes"])
        for source in message["sources"]:
            self._start(self._bring, message["move"], path, source)
        return {"path": str(path)}

    def _failed(self, who: tuple[int, int], message: Message) -> Message:
        return {}

    def _segments_(self, who: tuple[int, int], message: Message) -> Message:
        with self.network.news:
            move = message["move"]
            there = [{"name": p.name, "path": str(p), "move": move} for p in self._segments.glob(f"{move}.*")]
            return {"segments": [s for s in self._complete if s["move"] == move], "rooms": there}

    def _bring(self, move: str, path: Path, source: Message) -> None:
        network, name = self.network, source["name"]
        network.wait_for(lambda: name in network.published or move in network.dropped)
        if name not in network.published:
            return
        there, meta, host = network.published[name]
        assert source["address"] == [host, 1]
        try:
            outbox, inbox = there.open("rb"), path.open("r+b")
        except FileNotFoundError:  # the migration was forgotten meanwhile
            return
        with outbox, inbox:
            inbox.seek(source["offset"])
            for offset, length in source["ranges"]:
                outbox.seek(offset)
                inbox.write(outbox.read(length))
                with network.news:
                    network.sent_bytes += length
        self._announce(move, name, path, meta, "inbox", source["source"])

    def _announce(self, move: str, name: str, path: Path, meta: Message, where: str, source: int) -> None:
        news = {"move": move, "name": name, "path": str(path), "meta": meta, "where": where, "source": source}
        with self.network.news:
            self._complete.append(news)
        self._tell_all({"event": "segment", **news})

    def _tell_all(self, message: Message) -> None:
        """Send a message to the ranks of all generations on this host."""
        with self.network.news:
            generations = {g for g, _ in self._connections}
        for generation in generations:
            self.send(generation, message)


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except OSError:
        return b""
