"""Verbs about the files that jobs wrote into their working directories, on whichever host they lie."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from clusterd.core.queueing import admission
from clusterd.core.state import Job
from clusterd.daemon.access import Peer
from clusterd.daemon.api.retention import hosts_of
from clusterd.daemon.api.server import Streaming, Verb
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.journal.engine import Engine
from clusterd.errors import AgentLost, ClusterError, TryLater, without_host
from clusterd.protocol.codec import to_map
from clusterd.protocol.requests import ListFiles, ReadFile
from clusterd.ssh.host import AgentRefused
from clusterd.types import HostId, JobKind

CHUNK_BYTES = 1 << 20


class FileVerbs:
    """Lists and reads files of one job, its newest attempt first."""

    def __init__(self, engine: Engine, hosts: HostRegistry) -> None:
        self._engine, self._hosts = engine, hosts

    @property
    def verbs(self) -> dict[str, Verb]:
        """Methods by verb."""
        return {"files": self.files}

    @property
    def streams(self) -> dict[str, Streaming]:
        """Streaming methods by verb."""
        return {"file": self.file}

    async def files(self, peer: Peer, job: str, after: str = "") -> dict[str, Any]:
        """Newest file of each path over all attempts, and the hosts that could not be asked, with the reason.

        What several hosts of a command wrote under one path are several files. `more` are left out: they follow
        `after` the last path, but for those whose names are no text.
        """
        known = self._own(peer, job)
        state = self._engine.scheduler.state
        newest: dict[str, list[dict[str, Any]]] = {}
        left: dict[str, str] = {}
        more, ends = 0, []
        for attempt in known.attempts:
            for host in hosts_of(known, attempt):
                here = state.hosts.get(host)
                if here is None or not here.reaches(attempt.account):
                    left[host] = here.why_away(attempt.account) if here is not None else "it was removed"
                    continue
                try:
                    answer = await self._hosts.request(host, ListFiles(known.id, attempt.number, after), timeout_s=None)
                except ClusterError as error:
                    if not (isinstance(error, AgentRefused) and error.kind == "unknown"):  # it was never launched there
                        left[host] = without_host(host, error)
                    continue
                more += answer.more
                ends += [answer.files[-1].path] if answer.more and answer.files else []
                for file in answer.files:
                    row = {**to_map(file), "host": host, "attempt": attempt.number}
                    before = newest.setdefault(file.path, [row])
                    if known.spec.kind is JobKind.COMMAND and before[0]["attempt"] == attempt.number:
                        if row["at_s"] not in [other["at_s"] for other in before]:  # else they share the directory
                            before.append(row)
                    elif before[-1]["at_s"] <= file.at_s:
                        newest[file.path] = [row]
        rows = [row for path in sorted(newest) for row in newest[path] if path > after]
        end = min(ends, default="")  # behind it the list of that host has gaps
        files = [row for row in rows if not end or row["path"] <= end]
        return {
            "job": known.id,
            "name": known.spec.name,
            "files": files,
            "more": more + len(rows) - len(files),
            "left": left,
        }

    async def file(
        self, peer: Peer, job: str, path: str, host: str, attempt: int, written: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        """Stream one file in chunks: ``{data, size}``; `written`: only one that is not as it was submitted."""
        known = self._own(peer, job)
        if not any(attempt == one.number and host in hosts_of(known, one) for one in known.attempts):
            raise ClusterError(f"attempt {attempt} of job {known.id} ({known.spec.name}) was never on {host}")
        offset = 0
        while True:
            try:
                wanted = ReadFile(known.id, attempt, path, offset, CHUNK_BYTES, written)
                piece = await self._hosts.request(HostId(host), wanted)
            except AgentLost as lost:
                raise TryLater(f"{path} is not copied, {host} went away in the middle of it: {lost}") from None
            yield {"data": piece.data, "size": piece.size}
            offset += len(piece.data)
            if not piece.data or offset >= piece.size:
                return

    def _own(self, peer: Peer, job: str) -> Job:
        return admission.find_own_job(self._engine.scheduler.state, job, peer.user, peer.is_operator)
