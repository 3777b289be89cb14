"""Bookings: devices that a user reserved ahead, for a time; each is a claim that admits the jobs of its owner.

With a device goes its part of the cores and memory of its host: a half of them with two of four devices.

A job of a booking starts on what it requests of the booking's devices, stays there, and ends with the booking at the
latest. Nobody moves it, nor does it use devices or hosts outside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

from clusterd.core.estimates.expected_time import ends_of_request
from clusterd.core.host import Host
from clusterd.core.state import Attempt, Job, State
from clusterd.types import Device, DeviceClaim, DeviceId, HostId, HostState, JobSpec, Resources

UNUSED_S = 900.0
"""A booked device that no job of the booking has used for so long, though it could, is released."""

WEEK_S = 7 * 86400.0
"""The quota counts bookings that begin within so long of each other."""

Claims = Mapping[str, DeviceClaim]
"""Claims and bookings that are not over, by id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Devices that somebody wants to book."""

    resources: Resources  # number, kind and name of the devices
    only: frozenset[DeviceId]  # those that are meant; empty: any
    from_s: float
    until_s: float

    @property
    def device_s(self) -> float:
        """Device-seconds."""
        return self.resources.devices * (self.until_s - self.from_s)


def claim_against(claims: Claims, spec: JobSpec, host: Host, device: DeviceId) -> str:
    """Claim that keeps a device from a job now; empty: there is none. A job of a booking has that one's devices."""
    claimed = host.claimed.get(device, "")
    if not spec.booking:
        return claimed
    own = claims.get(spec.booking)
    if own is not None and claimed == str(own):
        return ""
    return claimed or f"not a device of booking {spec.booking}"


def waits_for(spec: JobSpec, claims: Claims, now_s: float) -> str | None:
    """Reason why the booking of a job keeps it from starting; None: it has begun."""
    booking = claims.get(spec.booking)
    if booking is None or booking.owner != spec.user:
        return f"its booking {spec.booking} is over or released: clusterd edit JOB booking=none lets it start without"
    return None if booking.is_active(now_s) else f"waits for its booking {booking.id}, which has not begun"


def misfit(spec: JobSpec, claims: Claims) -> str:
    """Reason why a job cannot be one of the booking that it names; empty: it can, or names none."""
    if not spec.booking:
        return ""
    booking = claims.get(spec.booking)
    if booking is None or booking.owner != spec.user:
        return f"there is no booking {spec.booking!r} of {spec.user}: clusterd book ls shows them"
    if spec.resources.devices > len(booking.devices):
        return f"booking {booking.id} has {len(booking.devices)} devices, the job requests {spec.resources.devices}"
    return ""


def used_s(state: State, user: str, from_s: float) -> float:
    """Most device-seconds of a user's bookings that begin in any seven days, of which `from_s` is part."""
    booked = [*state.booked_s.get(user, ())]
    booked += ((c.from_s, duration_s(c) * len(c.devices)) for c in state.device_claims.values() if c.owner == user)
    starts = [start_s for start_s, _ in booked if from_s - WEEK_S < start_s <= from_s]
    weeks = [[s for start_s, s in booked if first_s <= start_s < first_s + WEEK_S] for first_s in [from_s, *starts]]
    return max(sum(week, 0.0) for week in weeks)


def duration_s(booking: DeviceClaim) -> float:
    """Seconds from its start to its end."""
    return (booking.until_s if booking.until_s is not None else inf) - booking.from_s


def choose(state: State, wanted: Wanted, now_s: float) -> tuple[tuple[DeviceId, ...], list[DeviceClaim]]:
    """Devices to book: on the fewest hosts, and of these on devices that are expected to be free first.

    Returns:
        The devices, fewer than wanted where there are not enough; and the claims on further ones that would do.
    """
    free: dict[HostId, list[tuple[float, bool, DeviceId]]] = {}
    in_the_way: dict[str, DeviceClaim] = {}
    for host, device in candidates(state, wanted):
        claims = [c for c in state.device_claims.values() if device.id in c.devices and _overlaps(c, wanted)]
        in_the_way |= {claim.id: claim for claim in claims}
        if not claims:
            free_s = _free_s(state, device.id, now_s)  # which is a guess: of equals, one that is free now
            free.setdefault(host.id, []).append((max(free_s, wanted.from_s), free_s > now_s, device.id))
    chosen: list[DeviceId] = []
    while free and len(chosen) < wanted.resources.devices:
        left = wanted.resources.devices - len(chosen)
        some = {host: sorted(devices)[:left] for host, devices in free.items()}
        # The most of what is missing; of equals, the one that is free first; of these, the one that leaves least over.
        best = min(some, key=lambda host: (-len(some[host]), some[host][-1][:2], len(free[host]), host))
        chosen += [device for *_, device in some[best]]
        del free[best]
    return tuple(chosen), list(in_the_way.values())


def candidates(state: State, wanted: Wanted) -> Iterator[tuple[Host, Device]]:
    """Devices in service that would do, claimed ones too."""
    for host in state.hosts.values():
        if host.state is HostState.LOST or host.drained is not None:
            continue
        for device in host.devices:
            is_others = device.excluded or host.is_faulty(device.id) or device.id in host.reported_faults
            is_others = is_others or bool(device.foreign and device.id not in host.claimed)
            of = wanted.resources
            is_meant = not wanted.only or device.id in wanted.only
            if is_meant and not is_others and of.admits(device.kind, device.name, device.memory_bytes, ""):
                yield host, device


def _overlaps(claim: DeviceClaim, wanted: Wanted) -> bool:
    return claim.from_s < wanted.until_s and (claim.until_s is None or wanted.from_s < claim.until_s)


def _free_s(state: State, device: DeviceId, now_s: float) -> float:
    """Time at which the jobs on a device are expected to have ended; a guess where nothing is known of them."""
    jobs = (state.jobs[job] for job in state.jobs_on(device))
    return now_s + max((ends_of_request(job, state.run_times, now_s).expected_s for job in jobs), default=0.0)


def ends_s(claims: Claims, job: Job) -> float:
    """Time at which a job's booking ends; infinite: it has none."""
    booking = claims.get(job.spec.booking)
    return inf if booking is None or booking.until_s is None else booking.until_s


def note_used(state: State, job: Job, attempt: Attempt) -> None:
    """Record that a job of a booking has begun: its devices, of a job without any those of its hosts, are in use."""
    if (booking := state.device_claims.get(job.spec.booking)) is not None:
        used = {*attempt.devices}
        used |= {device.id for host in (() if used else attempt.hosts) for device in state.hosts[host].devices}
        unused = {device: since_s for device, since_s in booking.unused.items() if device not in used}
        state.device_claims[booking.id] = replace(booking, unused=unused)


def note_over(state: State, booking: DeviceClaim, devices: int, now_s: float) -> None:
    """Record the device-seconds of a booking that is over, or of devices that it releases; one to come had none."""
    known = state.booked_s.setdefault(booking.owner, [])
    if now_s > booking.from_s:
        held_s = min(now_s - booking.from_s, duration_s(booking))
        known.append((booking.from_s, devices * held_s))
    known[:] = [each for each in known if each[0] > now_s - WEEK_S]
    if not known:
        del state.booked_s[booking.owner]
