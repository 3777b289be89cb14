"""Verbs that receive packed working directories, and who may name one in a job.

A digest is no permission: an account names a working directory that it sent itself, or that a job of its own has. What
others have sent before is sent again and stored once, which the sender does not notice.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import anyio

from clusterd.core.state import State
from clusterd.daemon.access import Peer
from clusterd.daemon.journal.journal import Journal
from clusterd.daemon.storage.archive import Archive
from clusterd.errors import TryLater, UsageError
from clusterd.units import duration, size

WAITING_PER_USER = 4
"""Working directories of the largest size that one user may have here without a job that names them."""

KEPT_S = 3600.0
"""A working directory that no job names is removed after this time."""

EVERY_S = 300.0

CHUNK_BYTES = 1 << 20
"""Most by which the last chunk may exceed a limit, before the packed size is known."""


@dataclass(slots=True)
class _Sent:
    """A working directory as one user has sent it."""

    at_s: float
    whole_bytes: int = 0  # 0: not complete yet
    part_bytes: dict[int, int] = field(default_factory=dict)  # by connection that is sending it


class WorkdirVerbs:
    """Receives working directories, within a limit for each user, and removes those that no job names."""

    def __init__(self, archive: Archive, journal: Journal, state: State, bytes_max: int) -> None:
        self._archive, self._journal, self._state, self._bytes_max = archive, journal, state, bytes_max
        self._sent: dict[tuple[str, str], _Sent] = {}  # by user and digest
        self._named: set[tuple[str, str]] = set()  # likewise, by a job of the user

    async def snapshot_has(self, peer: Peer, digest: str) -> dict[str, Any]:
        """Report whether a job of this user may name a working directory without sending it."""
        return {"have": self.may_name(peer, digest)}

    async def snapshot_put(self, peer: Peer, digest: str, offset: int, data: bytes, last: bool) -> None:
        """Store one chunk of a working directory."""
        size_bytes = offset + len(data)
        if size_bytes > self._bytes_max + CHUNK_BYTES:
            raise UsageError(f"the workdir is larger than {self._bytes_max} bytes")
        self._refuse_beyond(peer, digest, size_bytes)
        sent = self._sent.setdefault((peer.user, digest), _Sent(time.time()))
        sent.at_s, sent.part_bytes[peer.connection] = time.time(), size_bytes
        await self._archive.put_workdir(digest, offset, data, last, peer.connection)
        if last:
            sent.whole_bytes = sent.part_bytes.pop(peer.connection)

    def _refuse_beyond(self, peer: Peer, digest: str, size_bytes: int) -> None:
        """Refuse to store more for a user than a few working directories that no job names, parts of any included.

        Args:
            size_bytes: of what this connection sends of the digest.
        Raises:
            TryLater: says when there is room again.
        """
        sent_s, sent_bytes, now_s = [], 0, time.time()
        for (user, other), sent in self._sent.items():
            if user == peer.user:
                sent_bytes += sum(sent.part_bytes.values()) + sent.whole_bytes * (not self._is_named(user, other))
                sent_bytes -= sent.part_bytes.get(peer.connection, 0) * (other == digest)
                sent_s.append(sent.at_s)
        limit = WAITING_PER_USER * self._bytes_max
        if sent_bytes and sent_bytes + size_bytes > limit:
            wait_s = max(min(sent_s) + KEPT_S - now_s, 0.0)
            raise TryLater(
                f"{peer.user} has sent {size(limit)} of working directories that no job names, which is the limit: "
                f"submit their jobs, or try again in {duration(wait_s)}"
            )

    def may_name(self, peer: Peer, digest: str) -> bool:
        """True where the working directory is here, and the user sent it or has a job with it.

        An operator may resume everybody's jobs, and so name their working directories.
        """
        sent = self._sent.get((peer.user, digest))
        is_own = (sent is not None and sent.whole_bytes > 0) or self._is_named(peer.user, digest)
        if not is_own and peer.is_operator:
            is_own = any(job.spec.snapshot == digest for job in self._state.jobs.values())
        return is_own and self._archive.has_workdir(digest)

    def _is_named(self, user: str, digest: str) -> bool:
        jobs = self._state.jobs.values()
        if (user, digest) not in self._named and any(
            job.spec.snapshot == digest and job.spec.user == user for job in jobs
        ):
            self._named.add((user, digest))
        return (user, digest) in self._named

    def gone(self, connection: int) -> None:
        """Drop what a connection that has ended sent in part."""
        for key, sent in list(self._sent.items()):
            sent.part_bytes.pop(connection, None)
            if not sent.part_bytes and not sent.whole_bytes:
                del self._sent[key]
        self._archive.drop_partial(connection)

    def remove(self, digest: str) -> int:
        """Remove a working directory unless a job still needs it or one may be about to; returns the bytes freed."""
        needed = any(job.spec.snapshot == digest and not job.state.is_final for job in self._state.jobs.values())
        is_awaited = any(sent == digest and not self._is_named(user, sent) for user, sent in self._sent)
        return 0 if needed or is_awaited else self._archive.remove_workdir(digest)

    async def run(self) -> None:
        """Remove working directories that no job names, until cancelled."""
        while True:
            await self.remove_unnamed(time.time())
            await anyio.sleep(EVERY_S)

    async def remove_unnamed(self, now_s: float) -> None:
        """Remove the working directories that no job has named for a while after they were sent."""
        self._sent = {k: sent for k, sent in self._sent.items() if sent.part_bytes or now_s - sent.at_s < KEPT_S}
        archived = await self._journal.query("SELECT DISTINCT workdir FROM archived_jobs")
        named = {job.spec.snapshot for job in self._state.jobs.values()} | {digest for (digest,) in archived}
        self._named = {(user, digest) for user, digest in self._named if digest in named}
        for digest, stored_s in self._archive.workdirs():
            if digest not in named and now_s - stored_s >= KEPT_S:
                self.remove(digest)
