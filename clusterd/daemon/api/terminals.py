"""Terminals inside running jobs, and connections to ports of their hosts; the daemon relays input and output."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import anyio

from clusterd.core import events as e
from clusterd.core.lifecycle.attempts import TIMED_OUT
from clusterd.core.queueing import admission
from clusterd.core.state import Attempt, Job, Outcome
from clusterd.daemon.access import Peer
from clusterd.daemon.api.watch import Feed
from clusterd.daemon.execution.launching import job_variables
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.storage.archive import Archive
from clusterd.errors import AgentLost, ClusterError, UsageError
from clusterd.protocol import requests
from clusterd.ssh.host import AgentRefused
from clusterd.types import AttemptState, HostId, JobState

CLOSE_S = 5.0
HELD_EVERY_S = 30.0
"""Interval of keep-alives to agents: a user who does not read for a while is not gone."""
STARTING_S = 0.5
"""Interval in which a container that is being started is looked for."""
TYPING_S = 24 * 3600.0
"""Time for a command to read its input."""


@dataclass(frozen=True, slots=True)
class _Open:
    uid: int
    host: HostId
    name: str  # on that host
    account: str  # whose agent runs it


class Terminals:
    """A verb that streams a command's output, and one that takes its input, by the terminal's number."""

    def __init__(self, engine: Engine, hosts: HostRegistry, archive: Archive, feed: Feed) -> None:
        self._engine, self._hosts, self._archive, self._feed = engine, hosts, archive, feed
        self._state = engine.state
        self._open: dict[int, _Open] = {}
        self._count = 0

    async def run(self) -> None:
        """Send keep-alives for open terminals until cancelled."""
        while True:
            await anyio.sleep(HELD_EVERY_S)
            for found in list(self._open.values()):
                with contextlib.suppress(ClusterError):  # whoever reads from it is told
                    await self._hosts.request(found.host, requests.HoldTerminal(found.name), account=found.account)

    async def shell(
        self,
        peer: Peer,
        job: str,
        argv: list[str] | None = None,
        rank: int = 0,
        screen: requests.Screen | None = None,
        holds: bool = False,
    ) -> AsyncIterator[dict[str, Any]]:
        """Run `argv`, or a shell, beside a rank: ``{terminal, host, device}``, then ``{data}``, then ``{exit_code}``.

        Where the attempt is ended and the command with it, the last has the reason beside it, as ``why``; the code of a
        time limit is 124, as it is the job's.

        Args:
            screen: of the person's terminal; None: pipes.
            holds: the job is only there for this shell: waited for, with ``{waits}``, over with it, and cancelled when
                its person goes.
        """
        known = admission.find_own_job(self._state, job, peer.user, peer.is_operator)
        lost = is_over = False
        number = 0
        try:
            if holds:
                async for reason in self._until_it_runs(known):
                    yield {"waits": reason}
            secrets, variables, waits = await self._archive.secrets(known.id), job_variables(known.spec), ""
            while True:
                attempt = _running(known, rank, known.reason if holds else "only inside a running job")
                place = attempt.ranks[rank].place
                named = (known.id, attempt.number, attempt.generation, rank)
                wanted = requests.OpenTerminal(*named, tuple(argv or ()), secrets, screen, variables)
                try:
                    answer = await self._hosts.request(place.host, wanted)
                    break
                except AgentRefused as refused:
                    if refused.kind != "starting":
                        raise
                    if str(refused) != waits:
                        yield {"waits": str(refused)}
                    waits = str(refused)
                    await anyio.sleep(STARTING_S)
            number = self._register(_Open(peer.uid, place.host, answer.terminal, known.spec.account))
            yield {"terminal": number, "host": place.host, "device": place.device}
            reads = requests.ReadTerminal(answer.terminal)
            while True:
                piece = await self._hosts.request(place.host, reads, account=known.spec.account)
                if piece.data:
                    yield {"data": piece.data}
                if is_over := piece.exit_code is not None:
                    yield _ended(attempt, piece.exit_code)
                    return
        except AgentLost:
            lost = True  # nobody gave the devices back
            raise
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_S):
                await self._close(number)
                if holds and not lost:
                    await self._cancel(known, peer, is_over)

    async def forward(self, peer: Peer, job: str, port: int, rank: int = 0) -> AsyncIterator[dict[str, Any]]:
        """Connect to a port of the host of a rank: ``{terminal, host}``, then ``{data}``, then ``{end}``.

        `shell_input` takes the other direction. The stream ends when both directions did.
        """
        known = admission.find_own_job(self._state, job, peer.user, peer.is_operator)
        attempt = _running(known, rank, "only to a running job")
        if not 0 < port < 65536:
            raise UsageError(f"{port} is no port; a port is a number from 1 to 65535")
        host, account = attempt.ranks[rank].place.host, known.spec.account
        number = 0
        try:
            wanted = requests.OpenPort(known.id, attempt.number, attempt.generation, rank, port)
            name = (await self._hosts.request(host, wanted)).terminal
            number = self._register(_Open(peer.uid, host, name, account))
            yield {"terminal": number, "host": host}
            while True:
                piece = await self._hosts.request(host, requests.ReadTerminal(name), account=account)
                if piece.data:
                    yield {"data": piece.data}
                if piece.end:
                    yield {"end": True}
                if piece.exit_code:
                    raise ClusterError(f"the connection to port {port} of {host} broke")
                if piece.exit_code is not None:
                    return
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_S):
                await self._close(number)

    def _register(self, opened: _Open) -> int:
        self._count += 1
        self._open[self._count] = opened
        return self._count

    async def _until_it_runs(self, job: Job) -> AsyncIterator[str]:
        """Stream the job's reason whenever it changes, until it runs or is over."""
        reason = ""
        while not job.state.is_final and (job.attempt is None or job.attempt.state is not AttemptState.RUNNING):
            number = self._feed.number
            if job.state is JobState.QUEUED and job.reason and job.reason != reason:
                reason = job.reason
                yield reason
            await self._feed.wait(number)

    async def shell_input(
        self,
        peer: Peer,
        terminal: int,
        data: bytes = b"",
        screen: requests.Screen | None = None,
        end: bool = False,
        abort: bool = False,
    ) -> None:
        """Pass input on; `screen`: new size of the window; `end`: end of piped input; `abort`: hang up."""
        found = self._open.get(terminal)
        if found is None or found.uid != peer.uid:
            raise ClusterError(f"there is no terminal {terminal} of yours")
        if abort:
            await self._close(terminal)
            return
        wanted = requests.WriteTerminal(found.name, data, screen, end)
        await self._hosts.request(found.host, wanted, TYPING_S, account=found.account)

    async def job_input(self, peer: Peer, job: str, data: bytes = b"", offset: int = 0, end: bool = False) -> None:
        """Pass input on to a command, once it runs and when it has read most of what came before.

        Args:
            offset: of `data` in all input; what came before it must have been passed on.
            end: nothing comes after it.
        """
        known = admission.find_own_job(self._state, job, peer.user, peer.is_operator)
        while True:
            async for _ in self._until_it_runs(known):
                pass
            number, attempt = self._feed.number, _running(known, 0, known.reason)
            wanted = requests.WriteInput(known.id, attempt.number, attempt.generation, data, offset, end)
            try:
                await self._hosts.request(attempt.ranks[0].place.host, wanted, TYPING_S)
                return
            except AgentLost:  # once it is back it tells what it has taken by `offset`
                await self._feed.wait(number)

    async def _close(self, number: int) -> None:
        found = self._open.pop(number, None)
        if found is None:
            return
        try:
            await self._hosts.request(found.host, requests.CloseTerminal(found.name), account=found.account)
        except ClusterError:
            return  # the agent hangs up by itself on whoever is silent

    async def _cancel(self, job: Job, peer: Peer, is_over: bool) -> None:
        ends = job.attempt is not None and job.attempt.stop.outcome in (Outcome.CANCELLED, Outcome.TIME_LIMIT)
        if not job.state.is_final and not ends:
            why = f"its shell {'ended' if is_over else 'is gone'}"
            gone = e.JobCancelled(at_s=time.time(), job=job.id, by=peer.user, why=why, is_over=is_over)
            await self._engine.post(gone)


def _running(job: Job, rank: int, where: str) -> Attempt:
    """Attempt of a job in which a rank runs.

    Raises:
        ClusterError: none runs; `where` says what it is needed for. UsageError: it has no such rank.
    """
    attempt = admission.running_attempt(job, where)
    if rank not in attempt.ranks:
        raise UsageError(f"job {job.id} ({job.spec.name}) has no rank {rank}: 0 to {max(attempt.ranks)}")
    return attempt


def _ended(attempt: Attempt, exit_code: int) -> dict[str, Any]:
    if attempt.state is AttemptState.RUNNING:
        return {"exit_code": exit_code}
    timed_out = attempt.stop.outcome is Outcome.TIME_LIMIT
    return {"exit_code": TIMED_OUT if timed_out else exit_code, "why": attempt.stop.why}
