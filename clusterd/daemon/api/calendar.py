"""Verb of the calendar: who is expected where, from running jobs, forecasts, bookings, claims and ends of hosts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from clusterd import rows
from clusterd.core.queueing import bookings
from clusterd.core.state import Job, State
from clusterd.core.timers import Timer, TimerKind
from clusterd.daemon.access import Peer
from clusterd.daemon.api.server import Verb
from clusterd.errors import UsageError
from clusterd.types import DeviceId, HostId, JobState

DAYS_MAX = 366

Forecast = Callable[[Job], rows.Forecast | None]


class CalendarVerbs:
    """Answers requests for the calendar.

    Args:
        forecast: returns the newest forecast of a job.
        ends: wall clock of the ends of hosts' allocations, as far as they are known.
    """

    def __init__(self, state: Callable[[], State], forecast: Forecast, ends: Mapping[HostId, float]) -> None:
        self._state, self._forecast, self._ends = state, forecast, ends

    @property
    def verbs(self) -> dict[str, Verb]:
        """Methods by verb."""
        return {"calendar": self.calendar}

    async def calendar(self, peer: Peer, days: int = 1) -> list[rows.CalendarEntry]:
        """Entries of each host for so many days from now, by host and start."""
        if not isinstance(days, int) or not 1 <= days <= DAYS_MAX:
            raise UsageError(f"days is {days!r}; it must be a number of days from 1 to {DAYS_MAX}")
        now_s = time.time()
        return entries(self._state(), self._forecast, self._ends, now_s, now_s + days * 86400.0)


def entries(
    state: State, forecast: Forecast, ends: Mapping[HostId, float], now_s: float, until_s: float
) -> list[rows.CalendarEntry]:
    """Entries that are not over, and that begin before `until_s`; a job on several hosts has one for each."""
    found = [*_of_jobs(state, forecast, now_s), *_of_claims(state)]
    found += (
        rows.CalendarEntry(what="leaves", host=host, from_s=at_s, text="its allocation ends")
        for host, at_s in ends.items()
        if host in state.hosts
    )
    shown = [each for each in found if each.from_s < until_s and (each.until_s is None or each.until_s > now_s)]
    return sorted(shown, key=lambda each: (each.host == "", each.host, each.from_s, each.devices))


def _of_jobs(state: State, forecast: Forecast, now_s: float) -> Iterator[rows.CalendarEntry]:
    for job in [state.jobs[each] for each in (*state.active, *state.queue)]:
        known, attempt = forecast(job), job.attempt
        end = known.end if known is not None else None
        ends_s = end.p50_s if end is not None else state.timers.get(Timer(TimerKind.LIMIT, job.id))
        text = f"{job.spec.name} ({job.id})"
        if attempt is not None:
            # One that runs beyond its expected end is there all the same.
            until_s = ends_s if ends_s is not None and ends_s > now_s else None
            for host in attempt.hosts:
                yield rows.CalendarEntry(
                    what="running", host=host, devices=_on(host, attempt.devices), from_s=attempt.started_s,
                    until_s=until_s,
                    user=job.spec.user, job=job.id, text=text,
                )  # fmt: skip
        elif job.state is JobState.QUEUED and (starts_s := _start_s(state, job, known, now_s)) is not None:
            booking = state.device_claims.get(job.spec.booking)
            hosts = _hosts(booking.devices if booking is not None else ()) or job.spec.resources.hosts[:1] or ("",)
            latest_s = bookings.ends_s(state.device_claims, job) if booking is not None else None
            yield rows.CalendarEntry(
                what="expected", host=hosts[0], from_s=starts_s, until_s=ends_s if ends_s is not None else latest_s,
                user=job.spec.user, job=job.id, text=f"{text}, expected",
            )  # fmt: skip


def _start_s(state: State, job: Job, forecast: rows.Forecast | None, now_s: float) -> float | None:
    """Expected start of a job that waits; None: not known."""
    if job.held_by is not None:
        return None
    booking = state.device_claims.get(job.spec.booking)
    if booking is not None and not booking.is_active(now_s):
        return booking.from_s
    if forecast is not None and forecast.start is not None:
        return forecast.start.p50_s
    promise = state.reservation
    return promise.at_s if promise is not None and promise.job == job.id and promise.is_foreseen else None


def _of_claims(state: State) -> Iterator[rows.CalendarEntry]:
    for claim in state.device_claims.values():
        what = "booking" if claim.owner else "claim"
        for host in _hosts(claim.devices):
            yield rows.CalendarEntry(
                what=what, host=host, devices=_on(host, claim.devices), from_s=claim.from_s, until_s=claim.until_s,
                user=claim.owner or claim.by, claim=claim.id,
                text=f"{what} {claim.id}{f': {claim.reason}' if claim.reason else ''}",
            )  # fmt: skip


def _on(host: str, devices: Iterable[DeviceId]) -> tuple[str, ...]:
    return tuple(device for device in devices if device.startswith(f"{host}:"))


def _hosts(devices: Iterable[DeviceId]) -> tuple[str, ...]:
    """Hosts of devices, in their order."""
    return tuple(dict.fromkeys(device.partition(":")[0] for device in devices))
