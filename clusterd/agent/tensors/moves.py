"""The agent's part in migrations: segments, fetches from other hosts, and messages between ranks and daemon.

The agent knows no tensors. It makes segments, announces published ones, fetches ranges from other hosts, and forwards
messages between the daemon and the source and target ranks of a migration. State snapshots are segments, too: a rank
publishes one every few steps, the daemon names the host that stores a replica, so that a host's death loses few steps,
and the rank gets its reply once the replica is complete, so that it does not overwrite a segment that is being read.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterd.agent.background_tasks import in_thread
from clusterd.agent.host.attempt_records import Attempt, Refused
from clusterd.agent.log import log_line
from clusterd.agent.tensors import fabric
from clusterd.agent.tensors.datasets import Datasets
from clusterd.agent.tensors.fabric import FetchFailed, fetch
from clusterd.agent.tensors.segments import SNAPSHOT_NAME, Segment, Store, set_of
from clusterd.agent.tensors.slice_server import ANY_ADDRESS, SliceServer
from clusterd.process_attributes import lower_priority
from clusterd.protocol import control
from clusterd.protocol.agent import StateSnapshotRow, StateSnapshotTaken
from clusterd.protocol.launch import PROOF, MigrationRequest
from clusterd.protocol.messages import Done, Event
from clusterd.protocol.requests import KeepReplica, Port, Receivers, Step

Message = dict[str, Any]

REPLICA_TIMEOUT_S = 60.0


class SnapshotReplicas:
    """Snapshots that this host's ranks publish, and replicas that it stores for other hosts."""

    def __init__(self, store: Store, tokens: dict[str, str], send_to_daemon: Callable[[Event], bool]) -> None:
        """`send_to_daemon` sends an event to the daemon; false: none is connected."""
        self._store = store
        self._tokens = tokens
        self._send_to_daemon = send_to_daemon
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def published(self, attempt: Attempt, segment: Segment, wait: bool) -> None:
        """Handle a complete snapshot of a rank: returns when a second host has a replica, or will not get one.

        Args:
            wait: wait for the replica; False for a rank that will not write again.
        """
        found = SNAPSHOT_NAME.fullmatch(segment.name)
        assert found is not None
        answer = self._waiting[segment.name] = asyncio.get_running_loop().create_future()
        named = (attempt.job, attempt.attempt, attempt.generation, int(found[2]), segment.name)
        delivered = self._send_to_daemon(
            StateSnapshotTaken(*named, step=int(segment.meta.get("step", -1)), bytes=segment.size)
        )
        try:
            if delivered and wait:
                await asyncio.wait_for(answer, REPLICA_TIMEOUT_S)
        except asyncio.TimeoutError:
            pass
        finally:
            self._waiting.pop(segment.name, None)

    def confirm(self, name: str) -> None:
        """Release the waiting rank: the daemon reports that the replica is complete or given up."""
        answer = self._waiting.get(name)
        if answer is not None and not answer.done():
            answer.set_result(None)

    async def keep(self, wanted: KeepReplica) -> Step:
        """Fetch a replica from the host of its rank.

        Raises:
            Refused: no room, or it could not be fetched.
        """
        name, group = wanted.name, wanted.set
        self._tokens[group] = wanted.token
        loop = asyncio.get_running_loop()
        segment = await loop.run_in_executor(None, self._store.make, name, wanted.bytes, group)
        segment.complete = False
        request = (wanted.address, wanted.token, group, name, [(0, segment.size)], segment, 0)

        def bring() -> Message:
            lower_priority()
            return fetch(*request, lambda: segment.dropped, patient=True)

        try:
            result = await in_thread(bring, "snapshot")
        except FetchFailed as failed:
            raise Refused("snapshot", str(failed)) from failed
        self._store.publish(name, result)
        return Step(int(result.get("step", -1)))

    def rows(self) -> tuple[StateSnapshotRow, ...]:
        """Complete state snapshots on this host, for a newly connected daemon."""
        return tuple(
            StateSnapshotRow(s.name, int(s.meta.get("step", -1)), s.size)
            for s in self._store.all()
            if s.complete and SNAPSHOT_NAME.fullmatch(s.name)
        )


SendToRanks = Callable[[Attempt, Event], int]
SendToAttempt = Callable[[str, int, Event], None]

_OF_SOURCE = re.compile(r"\.(out|device)(\d+)$")
"""Suffix of segments that a source rank fills with its state, or with the places of it on a device; with the rank."""

_REMEMBERED = (control.BeginMigration, control.Quiesce, control.Abort, control.Resume)
"""Events that a rank gets on connecting if it missed them."""


ENDED_MAX = 1000
"""Migrations that are over and whose late requests are recognised."""


class Moves:
    """Tensor store, slice server and message forwarding of this host's migrations.

    Args:
        send_to_ranks: sends an event to the connected ranks of one generation; returns to how many.
        send_to_attempt: sends an event to all connected ranks of an attempt (job, number).
    """

    def __init__(
        self,
        home: Path,
        send_to_ranks: SendToRanks,
        send_to_attempt: SendToAttempt,
        send_to_daemon: Callable[[Event], bool],
        datasets: Datasets,
    ) -> None:
        shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else home
        # A name that nobody can foresee and take.
        place = shared / f"clusterd-{os.getuid()}-{secrets.token_hex(8)}"
        self._store = Store(place, home / "segments", home / "store.json")
        self._servers: dict[str, SliceServer] = {}  # by address
        self._datasets = datasets
        self._tokens: dict[str, str] = {}
        self.replicas = SnapshotReplicas(self._store, self._tokens, send_to_daemon)
        self._last: dict[str, Event] = {}
        self._ended: dict[str, None] = {}  # the newest last
        self._send_to_ranks = send_to_ranks
        self._send_to_attempt = send_to_attempt
        self._fetching: set[asyncio.Task[None]] = set()
        self._arrived: dict[str, dict[str, control.SegmentPublished]] = {}  # by migration, by segment

    # ---- the daemon's verbs --------------------------------------------------------------------------------------

    def serve(self, address: str) -> Port:
        """Return the port that other agents fetch from; listen from the first call on.

        Args:
            address: of this host, by which others know it; "": a daemon of an earlier version did not say.
        """
        address = address or ANY_ADDRESS
        if address not in self._servers:
            self._servers[address] = self._listen(address)
        return Port(self._servers[address].port)

    def _listen(self, address: str) -> SliceServer:
        try:
            return SliceServer(self._store, self._tokens.get, self._datasets, address)
        except OSError as error:  # the address is a router's
            log_line(f"agent: serving slices on all interfaces, not on {address} alone: {error}")
            return SliceServer(self._store, self._tokens.get, self._datasets)

    def admit(self, move: MigrationRequest) -> None:
        """Accept this migration's token for its segments, and the tokens of the state snapshots it restores from."""
        self._tokens.update(move.sets)
        for name in (move.id, move.id + PROOF):
            self.admit_reader(name, move.token)

    def admit_reader(self, move: str, token: str) -> None:
        """Accept a token for the segments of a migration, or of a set of state snapshots."""
        self._tokens[move] = token
        self._ended.pop(move, None)

    def forward(self, attempt: Attempt, event: Event) -> Receivers:
        """Forward a daemon's event to the ranks of one generation, also to those that connect later."""
        if isinstance(event, _REMEMBERED):
            self._last[attempt.name] = event
        if isinstance(event, control.BeginMigration):
            self.admit(event.move)
        if isinstance(event, control.Abort):
            self.drop(event.move)
        return Receivers(self._send_to_ranks(attempt, event))

    def drop(self, move: str) -> None:
        """End a migration, completed or aborted, and drop its segments."""
        for name in (move, move + PROOF):
            self._ended[name] = None
            if len(self._ended) > ENDED_MAX:
                del self._ended[next(iter(self._ended))]
            self._tokens.pop(name, None)
            self._arrived.pop(name, None)
            self._store.drop(name)

    def end(self, job: str, attempt: int) -> None:
        """Drop all migrations of an attempt that has ended here; its state snapshots stay."""
        mine = re.compile(rf"{re.escape(job)}\.{attempt}\.\d+")
        for move in {*self._tokens, *(segment.move for segment in self._store.all())}:
            if mine.fullmatch(move):
                self.drop(move)

    # ---- ranks' requests -----------------------------------------------------------------------------------------

    def missed(self, attempt: Attempt) -> Event | None:
        """Return the last event that a newly connected rank missed."""
        return self._last.get(attempt.name)

    async def segment(self, attempt: Attempt, request: control.MakeSegment) -> control.SegmentReply:
        """Make a segment for a rank to fill."""
        move = set_of(request.name) or request.name.rpartition(".")[0]
        made = await self._make(request.name, request.bytes, move, rank_writes=True)
        self._announce_segment(attempt, made)
        return control.SegmentReply(str(made.path), "shm" if made.path.is_relative_to("/dev/shm") else "file")

    async def _make(self, name: str, size: int, move: str, *, rank_writes: bool = False) -> Segment:
        def make() -> Segment:
            return self._store.make(name, size, move, rank_writes=rank_writes)

        if move in self._ended:
            raise Refused("over", f"move {move} is over")
        made = await asyncio.get_running_loop().run_in_executor(None, make)
        if move in self._ended:  # meanwhile
            self._store.drop(move)
            raise Refused("over", f"move {move} is over")
        return made

    async def publish(self, attempt: Attempt, request: control.PublishSegment) -> Done:
        """Mark a rank's segment as complete: announce it to the attempt's ranks and serve waiting agents."""
        snapshot = set_of(request.name) is not None
        # A rank's state snapshots alternate between two segments; the last one is published without waiting.
        made = self._store.publish(request.name, request.meta, last=not (snapshot and request.wait))
        if snapshot:
            await self.replicas.published(attempt, made, wait=request.wait)
            return Done()
        source = _OF_SOURCE.search(made.name)
        if source is not None:
            path, where = str(made.path), "outbox" if source[1] == "out" else "device"
            self._announce(
                attempt, control.SegmentPublished(made.move, made.name, path, made.meta, where, int(source[2]))
            )
        return Done()

    def device_opened(self, attempt: Attempt, request: control.ReportDeviceOpened) -> Done:
        """Tell a source rank whether a target rank has opened its device memory."""
        opened = control.DeviceOpened(request.move, request.source, request.target, request.why_not)
        self._send_to_attempt(attempt.job, attempt.attempt, opened)
        return Done()

    async def fetch(self, attempt: Attempt, request: control.FetchSegments) -> control.SegmentReply:
        """Make this host's inbox of a migration and start to fill it; announce each source when it is complete."""
        inbox = await self._make(request.name, request.bytes, request.move)
        self._announce_segment(attempt, inbox)
        for source in request.sources:
            task = asyncio.create_task(self._bring(attempt, request.move, inbox, source))
            self._fetching.add(task)
            task.add_done_callback(self._fetching.discard)
        return control.SegmentReply(str(inbox.path))

    def segments(self, move: str) -> control.SegmentsReply:
        """Segments of a migration announced so far, for a rank that connected later."""
        made = tuple(control.SegmentMade(s.name, str(s.path), move) for s in self._store.of(move))
        return control.SegmentsReply(tuple(self._arrived.get(move, {}).values()), made)

    def _announce_segment(self, attempt: Attempt, made: Segment) -> None:
        """Announce a new segment, so that ranks can map it before it is filled."""
        if set_of(made.name) is None:
            made_event = control.SegmentMade(made.name, str(made.path), made.move)
            self._send_to_attempt(attempt.job, attempt.attempt, made_event)

    async def _bring(self, attempt: Attempt, move: str, inbox: Segment, source: control.FetchSource) -> None:
        # A state snapshot is admitted under the name of its set, not of the migration that reads it.
        group = set_of(source.name) or move
        token = self._tokens.get(group, "")
        work = (
            source.address, token, group, source.name, source.ranges, inbox, source.offset,
            lambda: move in self._ended,
        )  # fmt: skip
        try:
            meta = await in_thread(lambda: fabric.fetch(*work), "fetch")
        except fabric.FetchFailed as failed:
            if move not in self._ended:
                log_line(f"agent: {attempt.name}: {failed}")
                self._send_to_attempt(attempt.job, attempt.attempt, control.FetchFailed(move, source.name, str(failed)))
            return
        path = str(inbox.path)
        self._announce(attempt, control.SegmentPublished(move, source.name, path, meta, "inbox", source.source))

    def _announce(self, attempt: Attempt, published: control.SegmentPublished) -> None:
        self._arrived.setdefault(published.move, {})[published.name] = published
        self._send_to_attempt(attempt.job, attempt.attempt, published)

    def forget(self, attempt: Attempt) -> None:
        """Drop the stored event of a removed generation."""
        self._last.pop(attempt.name, None)

    def close(self) -> None:
        """Close the server and the store when the agent exits."""
        for server in self._servers.values():
            server.close()
        self._store.close()
