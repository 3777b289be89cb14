"""Verbs about hosts: membership, host keys, drain and undrain, hosts that dial in, claims on devices and bookings."""

from __future__ import annotations

import math
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import anyio

from clusterd import projection, rows
from clusterd.config import Config, host_options
from clusterd.core import events as e
from clusterd.core.queueing import admission, bookings
from clusterd.daemon.access import Peer
from clusterd.daemon.forecasts.forecaster import Forecaster
from clusterd.daemon.hosts.host_key_enrolment import HostKeyEnrolment
from clusterd.daemon.hosts.joined import JoinedHosts
from clusterd.daemon.hosts.registry import JOINED, LOCAL, HostRegistry
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.rights import Rights
from clusterd.errors import ClusterError, UsageError, first_of
from clusterd.forecasting import Change
from clusterd.keys import checked_name
from clusterd.trusted_paths import account_name
from clusterd.types import DeviceClaim, Resources
from clusterd.units import counted


class HostVerbs:
    """Answers questions about hosts and turns requests into events."""

    def __init__(
        self, engine: Engine, hosts: HostRegistry, enrolment: HostKeyEnrolment, forecaster: Forecaster
    ) -> None:
        self._engine, self._hosts, self._enrolment, self._forecaster = engine, hosts, enrolment, forecaster
        self._state = engine.state

    async def hosts(self, peer: Peer) -> list[rows.Host]:
        """Rows of hosts."""
        return [projection.host_row(self._state, h, self._hosts.link_row(h.id)) for h in self._state.hosts.values()]

    async def host(self, peer: Peer, host: str) -> rows.Host:
        """Everything about one host."""
        known = admission.find_host(self._state, host)
        return projection.host_row(self._state, known, self._hosts.link_row(known.id))

    async def host_inspect(self, peer: Peer, address: str, accept: list[str], new: bool = False) -> dict[str, Any]:
        """Find the first unknown key on the route to a host; keys in `accept` are stored on the way.

        Raises:
            ClusterError: the host is to be `new`, and is in the cluster already.
        """
        if new:
            self._enrolment.name(address, self._state)
        elif address.startswith((LOCAL, JOINED)):
            return {"unknown": [], "changed": []}  # a server of our own, whose key is made at each start, or none
        return await self._enrolment.inspect(address, accept)

    async def host_add(
        self, peer: Peer, address: str, accept: list[str], options: dict[str, Any] | None = None
    ) -> dict[str, str]:
        """Add a host to the cluster; `accept`: fingerprints that its user saw and accepted."""
        known = host_options(options or {}, "the host's options")
        name = await self._enrolment.admit(address, accept, self._state)
        await self._hosts.add(name, address, known)
        return {"name": name}

    async def host_trust(self, peer: Peer, host: str, accept: list[str]) -> dict[str, Any]:
        """Accept a host's changed key."""
        known = admission.find_host(self._state, host)
        address = str(self._hosts.link_row(known.id)["address"])
        if address.startswith(JOINED):
            raise UsageError(f"{known.id} dials in itself: it has no host key")
        answer = await self._enrolment.trust(address, accept)
        self._hosts.retry_now(known.id)
        return answer

    async def host_drain(
        self, peer: Peer, host: str, why: str = "", also: list[str] | None = None, jobs_stay: bool = False
    ) -> rows.Host:
        """Drain a host, and those in `also` at the same moment, so that no job moves from one to the next.

        Args:
            jobs_stay: jobs that are there run to their end.
        """
        known = [admission.find_host(self._state, name) for name in (host, *(also or ()))]
        now_s = time.time()
        try:
            async with anyio.create_task_group() as group:
                for each in known:
                    event = e.HostDrained(at_s=now_s, host=each.id, by=peer.user, why=why, jobs_stay=bool(jobs_stay))
                    group.start_soon(self._engine.post, event)
        except ExceptionGroup as errors:
            raise first_of(errors) from None
        return projection.host_row(self._state, admission.find_host(self._state, host))

    async def drain_preview(self, peer: Peer, hosts: list[str], jobs_stay: bool = False) -> rows.Effect:
        """Effect of draining hosts now: the time from which they are free, and whom that would delay."""
        known = tuple(admission.find_host(self._state, name).id for name in hosts)
        return await self._forecaster.effect(Change(drained=known, jobs_stay=bool(jobs_stay)))

    async def host_undrain(self, peer: Peer, host: str) -> rows.Host:
        """Return the host to service."""
        known = admission.find_host(self._state, host)
        await self._engine.post(e.HostUndrained(at_s=time.time(), host=known.id, by=peer.user))
        return projection.host_row(self._state, admission.find_host(self._state, host))

    async def host_remove(self, peer: Peer, host: str) -> dict[str, Any]:
        """Remove the host from the cluster."""
        known = admission.find_host(self._state, host)
        left, agents = projection.may_still_run(self._state, known), dict[str, str]()
        while self._state.hosts.get(known.id) is known:  # still there: it was given work while we asked
            admission.may_remove(self._state, known)
            agents = await self._hosts.remove(known.id)
        own = agents.pop("", None)
        return {"name": known.id, "left": left, "agent_left": bool(known.agent and own), "agents_left": agents}


class JoinVerbs:
    """A stream by which a host dials in, and verbs of the same connection: output of its processes, and its leave."""

    def __init__(self, config: Config, joined: JoinedHosts, cluster: str) -> None:
        self._config, self._joined, self._cluster = config, joined, cluster

    async def join(
        self,
        peer: Peer,
        identity: str,
        name: str,
        exact: bool = False,
        options: dict[str, Any] | None = None,
        until_s: float | None = None,
    ) -> AsyncIterator[dict[str, Any]]:
        """Make the caller's machine a host: its ``{name, cluster}``, then commands for processes that it starts.

        Args:
            identity: of the host, the same when it dials in again.
            exact: refuse the name if another host has it, instead of adding a number.
            until_s: wall clock of the end of the host's allocation, for the calendar.
        Raises:
            ClusterError: the host would run jobs of others under the caller's account.
        """
        if peer.uid not in (0, os.getuid()) and self._config.accounts != "shared":
            account = account_name(os.getuid())
            raise ClusterError(
                f"a host of user {peer.user} would run the jobs of {account}: join it as {account}; "
                'operators may with accounts = "shared"'
            )
        known = host_options(options or {}, "the host's options")
        host = await self._joined.admit(identity, name, exact, known)
        connection = self._joined.connect(host, peer.connection, until_s)
        yield {"name": host, "cluster": self._cluster}
        async for command in connection.commands():
            yield command

    async def join_output(
        self, peer: Peer, process: int, data: bytes = b"", error: bool = False, exit_code: int | None = None
    ) -> None:
        """Take output of a process of the caller's host, or its exit code; answers when more may come."""
        _, connection = self._joined.of_peer(peer.connection)
        await connection.receive(process, data, error, exit_code)

    async def leave(self, peer: Peer) -> dict[str, str]:
        """Take the caller's host out of the cluster; its jobs are stopped and queued again first."""
        host, _ = self._joined.of_peer(peer.connection)
        await self._joined.leave(host, peer.user)
        return {"name": host}


class ClaimVerbs:
    """Answers requests about claims and bookings, and turns them into events."""

    def __init__(self, engine: Engine, rights: Rights, forecaster: Forecaster) -> None:
        self._engine, self._rights, self._forecaster = engine, rights, forecaster
        self._state = engine.state
        self._numbering = anyio.Lock()

    async def claims(self, peer: Peer) -> list[rows.Claim]:
        """Rows of claims and bookings that are not over."""
        return [projection.claim_row(claim) for claim in self._state.device_claims.values()]

    async def claim_add(
        self,
        peer: Peer,
        devices: list[str],
        reason: str,
        from_s: float | None = None,
        for_s: float | None = None,
        drain: bool = False,
        dry_run: bool = False,
    ) -> rows.Claim | rows.Effect:
        """Claim devices.

        Args:
            devices: ``gpu01:3``, ``gpu01:gpu3``, or ``gpu01`` for all of its devices.
            from_s: start; None: now.
            for_s: seconds until the end; None: until it is removed.
            drain: stop jobs that cannot move, and queue them again.
            dry_run: tell only when the devices would be free, and whom that would delay.
        """
        if not isinstance(reason, str) or not reason.strip() or not reason.isprintable():
            raise UsageError("a claim needs a reason in one line, which users see")
        now_s = time.time()
        begins_s, ends_s = _window("claim", from_s, for_s, now_s)
        found = tuple(dict.fromkeys(device for text in devices for device in admission.find_devices(self._state, text)))
        if not found:
            raise UsageError("no device is named: write gpu01:3, or gpu01 for all of its devices")
        claim = DeviceClaim(
            id=self._next_id(), devices=found, from_s=begins_s, until_s=ends_s, reason=reason.strip(), by=peer.user,
            drain=bool(drain),
        )  # fmt: skip
        if dry_run:
            return await self._forecaster.effect(Change(claim=claim))
        async with self._numbering:
            claim = replace(claim, id=self._next_id())
            await self._engine.post(e.DevicesClaimed(at_s=now_s, claim=claim))
        return self._with_holders(claim)

    def _next_id(self) -> str:
        return str(self._state.last_device_claim + 1)

    def _with_holders(self, claim: DeviceClaim) -> rows.Claim:
        """Row of a new claim, with the jobs that are on its devices."""
        holders = {job for device in claim.devices for job in self._state.jobs_on(device)}
        names = sorted(self._state.jobs[job].spec.name for job in self._state.active if job in holders)
        return projection.claim_row(claim, held_by=tuple(names))

    async def booking_add(
        self,
        peer: Peer,
        devices: int,
        for_s: float,
        from_s: float | None = None,
        kind: str | None = None,
        device_name: str = "",
        on: list[str] | None = None,
        name: str = "",
        user: str = "",
    ) -> rows.Claim:
        """Book devices for jobs of the caller, or of `user`.

        Args:
            for_s: seconds until the end.
            from_s: start; None: now.
            kind, device_name: as of a job's resources.
            on: hosts and devices that are meant, as of `claim_add`; empty: any.
            user: for whom an operator books, beyond that user's quota; empty: the caller.
        """
        owner = self._rights.owner_of_booking(peer, user)
        if not isinstance(devices, int) or devices < 1:
            raise UsageError(f"{devices} devices cannot be booked: give 1 or more, as in --gpus 4")
        if kind not in (None, "cuda", "cpu"):
            raise UsageError(f"kind is {kind!r}; it must be cuda or cpu, or left out for any")
        try:
            name = checked_name(name) if name else ""
        except ValueError as error:
            raise UsageError(f"the booking: {error}") from None
        now_s = time.time()
        begins_s, ends_s = _window("booking", from_s, for_s, now_s)
        assert ends_s is not None, "a booking has an end"
        only = frozenset(device for text in on or () for device in admission.find_devices(self._state, text))
        resources = Resources(devices=devices, kind=kind, device_name=device_name)
        wanted = bookings.Wanted(resources=resources, only=only, from_s=begins_s, until_s=ends_s)
        async with self._numbering:
            self._rights.refuse_booking(peer, wanted)
            found, in_the_way = bookings.choose(self._state, wanted, now_s)
            if len(found) < devices:
                noun = counted(devices, {"cuda": "GPU", "cpu": "CPU device"}.get(kind or "", "device"))
                of_type = f" of type {device_name}" if device_name else ""
                others = "".join(f"; {projection.claimed_until(claim, now_s)}" for claim in in_the_way)
                there = sum(1 for _ in bookings.candidates(self._state, wanted))
                has = f"; in service there are {there}" if there < devices else ""
                raise ClusterError(f"{len(found)} of {noun}{of_type} can be booked for all of that time{has}{others}")
            claim = DeviceClaim(
                id=self._next_id(), devices=found, from_s=begins_s, until_s=ends_s,
                reason=name, by=peer.user, owner=owner,
            )  # fmt: skip
            await self._engine.post(e.DevicesClaimed(at_s=now_s, claim=claim))
        return self._with_holders(claim)

    async def booking_cancel(self, peer: Peer, booking: str) -> rows.Claim:
        """Cancel a booking of the caller's, operators any; its jobs end."""
        known = self._state.device_claims.get(booking)
        if known is None or not known.owner:
            raise UsageError(f"there is no booking {booking!r}: clusterd book ls shows them")
        if known.owner != peer.user and not peer.is_operator:
            raise ClusterError(f"booking {booking} is {known.owner}'s: ask them, or an operator")
        await self._engine.post(e.DeviceClaimRemoved(at_s=time.time(), claim=booking, by=peer.user))
        return projection.claim_row(known)

    async def claim_remove(self, peer: Peer, claim: str) -> rows.Claim:
        """Remove a claim before its end."""
        known = self._state.device_claims.get(claim)
        if known is None:
            raise UsageError(f"there is no claim {claim!r}: clusterd claim ls shows them")
        await self._engine.post(e.DeviceClaimRemoved(at_s=time.time(), claim=claim, by=peer.user))
        return projection.claim_row(known)


def _window(noun: str, from_s: float | None, for_s: float | None, now_s: float) -> tuple[float, float | None]:
    """Start and end of a claim or a booking.

    Raises:
        UsageError: it would be over already.
    """
    begins_s = now_s if from_s is None else float(from_s)
    ends_s = None if for_s is None else begins_s + float(for_s)
    if not math.isfinite(begins_s) or (ends_s is not None and not (math.isfinite(ends_s) and ends_s > now_s)):
        raise UsageError(f"the {noun} would be over already: give a later --from, or a longer --for")
    return max(begins_s, now_s), ends_s
