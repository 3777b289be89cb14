"""Moves through this host: what ranks that leave and ranks that come need of the agent between them.

The agent knows nothing of tensors. It makes segments, says who published which, fetches ranges from other hosts, and
passes on what the daemon and the ranks say to each other.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterd.agent.host.attempt_records import Attempt, Refused
from clusterd.agent.log import say
from clusterd.agent.tensors.datasets import Datasets
from clusterd.agent.tensors.fabric import FetchFailed, SliceServer, fetch
from clusterd.agent.tensors.segments import Segment, Store
from clusterd.agent.tensors.snapshot_replicas import Copies, set_of
from clusterd.agent.threads import in_thread

Message = dict[str, Any]
Tell = Callable[[Attempt, Message], int]
TellAll = Callable[[str, int, Message], None]

_OUTBOX = re.compile(r"\.out(\d+)$")
"""Names of segments that an old rank fills: the move, and the rank."""

_REMEMBERED = ("move", "quiesce", "abort", "resume")
"""What a rank that was not connected at that moment is told when it is."""


class Moves:
    """The store, the way in and out of it, and words between ranks.

    Args:
        tell: sends a message to the connected ranks of one generation; returns to how many.
        tell_all: sends a message to all connected ranks of an attempt (job, number).
    """

    def __init__(
        self,
        home: Path,
        agent_id: str,
        tell: Tell,
        tell_all: TellAll,
        tell_daemon: Callable[[Message], bool],
        datasets: Datasets,
    ) -> None:
        shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else home
        self._store = Store(shared / f"clusterd-{os.getuid()}-{agent_id[:8]}", home / "segments", home / "store.json")
        self._server: SliceServer | None = None
        self._datasets = datasets
        self._tokens: dict[str, str] = {}
        self.copies = Copies(self._store, self._tokens, tell_daemon)
        self._last: dict[str, Message] = {}
        self._over: set[str] = set()
        self._tell = tell
        self._tell_all = tell_all
        self._fetching: set[asyncio.Task[None]] = set()
        self._arrived: dict[str, list[Message]] = {}

    # ---- the daemon's verbs --------------------------------------------------------------------------------------

    def fabric(self) -> Message:
        """Where other agents fetch from; listens from the first call on."""
        if self._server is None:
            self._server = SliceServer(self._store, self._tokens.get, self._datasets.answer)
        return {"port": self._server.port}

    def admit(self, move: Message) -> None:
        """Whoever shows this move's token may fetch its segments, and the snapshots that it goes on from."""
        for group, token in (move.get("sets") or {}).items():
            self._tokens[str(group)] = str(token)
        self._tokens[str(move["id"])] = str(move["token"])
        self._over.discard(str(move["id"]))

    def forward(self, attempt: Attempt, message: Message) -> Message:
        """Pass a word of the daemon's on to the ranks of one generation; those that connect later get it then."""
        kind = str(message.get("event"))
        if kind in _REMEMBERED:
            self._last[attempt.name] = message
        if kind == "move":
            self.admit(message["move"])
        if kind == "abort":
            self.drop(str(message["move"]))
        return {"ranks": self._tell(attempt, message)}

    def drop(self, move: str) -> Message:
        """The move is over, one way or the other."""
        self._over.add(move)
        self._tokens.pop(move, None)
        self._arrived.pop(move, None)
        self._store.drop(move)
        return {}

    def end(self, job: str, attempt: int) -> None:
        """Nothing of the attempt runs here: what its moves hold is dropped, whoever was to say so; snapshots stay."""
        mine = re.compile(rf"{re.escape(job)}\.{attempt}\.\d+")
        for move in {*self._tokens, *(segment.move for segment in self._store.all())}:
            if mine.fullmatch(move):
                self.drop(move)

    # ---- ranks' requests -----------------------------------------------------------------------------------------

    def missed(self, attempt: Attempt) -> Message | None:
        """What a rank that has just connected should have been told."""
        return self._last.get(attempt.name)

    async def segment(self, attempt: Attempt, message: Message) -> Message:
        """Make a segment for a rank to fill."""
        name = str(message["name"])
        move = set_of(name) or name.rpartition(".")[0]
        made = await self._make(name, int(message["bytes"]), move, rank_writes=True)
        self._tell_room(attempt, made)
        return {"path": str(made.path), "kind": "shm" if made.path.is_relative_to("/dev/shm") else "file"}

    async def _make(self, name: str, size: int, move: str, *, rank_writes: bool = False) -> Segment:
        def make() -> Segment:
            return self._store.make(name, size, move, rank_writes=rank_writes)

        if move in self._over:
            raise Refused("over", f"move {move} is over")
        made = await asyncio.get_running_loop().run_in_executor(None, make)
        if move in self._over:  # meanwhile
            self._store.drop(move)
            raise Refused("over", f"move {move} is over")
        return made

    async def publish(self, attempt: Attempt, message: Message) -> Message:
        """A rank filled its segment: all ranks of the attempt hear of it, and agents that wait for it are served."""
        name, wait = str(message["name"]), bool(message.get("wait", True))
        snapshot = set_of(name) is not None
        # The two segments of a rank's snapshots take turns, until the one that nobody waits for.
        made = self._store.publish(name, dict(message.get("meta") or {}), last=not (snapshot and wait))
        if snapshot:
            await self.copies.published(attempt, made, wait=wait)
            return {}
        source = _OUTBOX.search(made.name)
        if source is not None:
            self._announce(attempt, made.move, made.name, made.path, made.meta, "outbox", int(source[1]))
        return {}

    async def fetch(self, attempt: Attempt, message: Message) -> Message:
        """Make this host's inbox of a move and begin to fill it; each source is announced when it is there."""
        move = str(message["move"])
        inbox = await self._make(str(message["name"]), int(message["bytes"]), move)
        self._tell_room(attempt, inbox)
        for source in message["sources"]:
            task = asyncio.create_task(self._bring(attempt, move, inbox, source))
            self._fetching.add(task)
            task.add_done_callback(self._fetching.discard)
        return {"path": str(inbox.path)}

    def segments(self, message: Message) -> Message:
        """What was announced of a move so far, for a rank that came late."""
        move = str(message["move"])
        rooms = [{"name": s.name, "path": str(s.path)} for s in self._store.of(move)]
        return {"segments": list(self._arrived.get(move, ())), "rooms": rooms}

    def _tell_room(self, attempt: Attempt, made: Segment) -> None:
        """Ranks that will read a segment can map it before there is anything in it."""
        if set_of(made.name) is None:
            said = {"event": "room", "move": made.move, "name": made.name, "path": str(made.path)}
            self._tell_all(attempt.job, attempt.attempt, said)

    async def _bring(self, attempt: Attempt, move: str, inbox: Segment, source: Message) -> None:
        host, port = source["address"]
        # What an old rank left as a snapshot is admitted under the name of its set, not of the move that reads it.
        group = set_of(str(source["name"])) or move
        token = self._tokens.get(group, "")
        ranges = [(int(offset), int(length)) for offset, length in source["ranges"]]
        work = (
            (str(host), int(port)), token, group, str(source["name"]), ranges, inbox, int(source["offset"]),
            lambda: move in self._over,
        )  # fmt: skip
        try:
            meta = await in_thread(lambda: fetch(*work), "fetch")
        except FetchFailed as failed:
            if move not in self._over:
                say(f"agent: {attempt.name}: {failed}")
                said = {"event": "fetch_failed", "move": move, "name": source["name"], "why": str(failed)}
                self._tell_all(attempt.job, attempt.attempt, said)
            return
        self._announce(attempt, move, str(source["name"]), inbox.path, meta, "inbox", source.get("source"))

    def _announce(
        self, attempt: Attempt, move: str, name: str, path: Path, meta: Message, where: str, source: Any
    ) -> None:
        said = {
            "event": "segment", "move": move, "name": name, "path": str(path), "meta": meta, "where": where,
            "source": source,
        }  # fmt: skip
        self._arrived.setdefault(move, []).append(said)
        self._tell_all(attempt.job, attempt.attempt, said)

    def forget(self, attempt: Attempt) -> None:
        """Nothing of this generation will ask again."""
        self._last.pop(attempt.name, None)

    def close(self) -> None:
        """The agent ends; segments are of no use to the next, which knows no move."""
        if self._server is not None:
            self._server.close()
        self._store.close()
