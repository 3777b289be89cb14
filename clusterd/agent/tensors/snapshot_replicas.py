"""Replicas of state snapshots in memory on a second host, so that a host's death loses few steps.

A rank publishes a segment every few steps; the daemon names the host that stores a replica. The rank gets its reply
once the replica is complete, so that it does not overwrite a segment that is still being read.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from clusterd.agent.host.attempt_records import Attempt, Refused
from clusterd.agent.tensors.fabric import FetchFailed, fetch
from clusterd.agent.tensors.segments import Segment, Store
from clusterd.agent.threads import in_thread
from clusterd.process_attributes import lower_priority
from clusterd.protocol.agent import StateSnapshotRow, StateSnapshotTaken
from clusterd.protocol.messages import Event
from clusterd.protocol.requests import KeepReplica, Step

Message = dict[str, Any]

NAME = re.compile(r"(.+\.g\d+)\.snap(\d+)\.\d$")
"""Job, attempt and generation; the rank; the segment of two that take turns."""

REPLICA_TIMEOUT_S = 60.0


def set_of(name: str) -> str | None:
    """Name under which all snapshots of one generation are admitted and dropped; None if it is no snapshot."""
    found = NAME.fullmatch(name)
    return f"{found[1]}.snaps" if found else None


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
        found = NAME.fullmatch(segment.name)
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
            if s.complete and NAME.fullmatch(s.name)
        )
