"""Verbs about claims on devices: devices that operators keep from the scheduler for some time."""

from __future__ import annotations

import math
import re
import time
from typing import Any

import anyio

from clusterd import projection
from clusterd.core import events as e
from clusterd.core.queueing import admission
from clusterd.core.state import Host, State
from clusterd.daemon.api.hosts import need_operator
from clusterd.daemon.api.server import Peer, Verb
from clusterd.daemon.journal.engine import Engine
from clusterd.errors import UsageError
from clusterd.types import DeviceClaim, DeviceId


class ClaimVerbs:
    """Answers requests about claims and turns them into events."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbering = anyio.Lock()

    @property
    def verbs(self) -> dict[str, Verb]:
        """Methods by verb."""
        return {"claims": self.claims, "claim_add": self.claim_add, "claim_remove": self.claim_remove}

    @property
    def _state(self) -> State:
        return self._engine.scheduler.state

    async def claims(self, peer: Peer) -> list[dict[str, Any]]:
        """Rows of claims that are not over."""
        return [projection.claim_row(claim) for claim in self._state.device_claims.values()]

    async def claim_add(
        self,
        peer: Peer,
        devices: list[str],
        reason: str,
        from_s: float | None = None,
        for_s: float | None = None,
        drain: bool = False,
    ) -> dict[str, Any]:
        """Claim devices.

        Args:
            devices: ``gpu01:3``, ``gpu01:gpu3``, or ``gpu01`` for all of its devices.
            from_s: start; None: now.
            for_s: seconds until the end; None: until it is removed.
            drain: stop jobs that cannot move, and queue them again.
        """
        need_operator(peer, "claim devices")
        if not isinstance(reason, str) or not reason.strip() or not reason.isprintable():
            raise UsageError("a claim needs a reason in one line, which users see")
        now_s = time.time()
        begins_s = now_s if from_s is None else float(from_s)
        ends_s = None if for_s is None else begins_s + float(for_s)
        if not math.isfinite(begins_s) or (ends_s is not None and not (math.isfinite(ends_s) and ends_s > now_s)):
            raise UsageError("the claim would be over already: give a later --from, or a longer --for")
        found = tuple(dict.fromkeys(device for text in devices for device in self._devices(text)))
        if not found:
            raise UsageError("no device is named: write gpu01:3, or gpu01 for all of its devices")
        async with self._numbering:
            claim = DeviceClaim(
                id=str(self._state.last_device_claim + 1),
                devices=found,
                from_s=max(begins_s, now_s),
                until_s=ends_s,
                reason=reason.strip(),
                by=peer.user,
                drain=bool(drain),
            )
            await self._engine.post(e.DevicesClaimed(at_s=now_s, claim=claim))
        holders = {str(lease.job) for device in found if (lease := self._state.leases.get(device)) is not None}
        names = sorted(self._state.jobs[job].spec.name for job in self._state.active if job in holders)
        return {**projection.claim_row(claim), "held_by": names}

    async def claim_remove(self, peer: Peer, claim: str) -> dict[str, Any]:
        """Remove a claim before its end."""
        need_operator(peer, "remove claims")
        known = self._state.device_claims.get(claim)
        if known is None:
            raise UsageError(f"there is no claim {claim!r}: clusterd claim ls shows them")
        await self._engine.post(e.DeviceClaimRemoved(at_s=time.time(), claim=claim, by=peer.user))
        return projection.claim_row(known)

    def _devices(self, text: str) -> list[DeviceId]:
        """Devices that one word means.

        Raises:
            UsageError: the host or the device does not exist.
        """
        name, _, which = text.partition(":")
        host = admission.find_host(self._state, name)
        if not which:
            return [device.id for device in host.devices]
        return [_device(host, part) for part in which.split(",")]


def _device(host: Host, part: str) -> DeviceId:
    known = {device.id for device in host.devices}
    kinds = ("gpu", "cpu") if re.fullmatch(r"\d+", part, re.ASCII) else ("",)
    for kind in kinds:
        if (device := DeviceId(f"{host.id}:{kind}{part}")) in known:
            return device
    there = ", ".join(sorted(known)) or "none"
    raise UsageError(f"{host.id} has no device {part!r}: there are {there}")
