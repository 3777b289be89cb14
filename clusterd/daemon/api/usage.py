"""Verbs about the use of devices: now, over the last minutes, and a report by user, tenant, model or host."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from clusterd import rows
from clusterd.core.fair_share import Quotas, budgets, month_hours
from clusterd.core.queueing import bookings
from clusterd.core.state import Job, State, Used
from clusterd.core.timers import Timer, TimerKind
from clusterd.daemon.access import Peer
from clusterd.daemon.forecasts.outcomes import OutcomeStore
from clusterd.daemon.storage.archived_jobs import ArchivedJobs
from clusterd.daemon.storage.usage import RETENTION_MINUTES, JobUse, UsageStore
from clusterd.errors import UsageError
from clusterd.protocol.messages import to_map
from clusterd.types import DeviceId, HostId, JobId, JobState

BY = ("user", "tenant", "model", "host", "job")


@dataclass(slots=True)
class _Sums:
    """Sums of one row of the report."""

    jobs: set[str] = field(default_factory=set)
    device_s: float = 0.0
    measured_s: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0
    outside_s: float = 0.0
    days: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, use: JobUse) -> None:
        if not use.job:
            self.idle_s += use.device_s
            return
        if use.job.startswith("@"):
            self.outside_s += use.device_s
            return
        self.jobs.add(use.job)
        self.device_s += use.device_s
        self.days[use.day] += use.device_s
        self.measured_s += use.measured_s
        self.busy_s += use.busy_s


class _Counted:
    """Row of a job for the report, small as there may be years of jobs."""

    __slots__ = ("group", "submitted_s", "waited_s")

    def __init__(self, job: Job, by: str) -> None:
        self.group, self.submitted_s = _group_of(job, by), job.submitted_s
        started_s = job.attempts[0].started_s if job.attempts else job.ended_s or time.time()
        self.waited_s = max(started_s - job.submitted_s, 0.0)


class UsageVerbs:
    """Answers from the store of use and from the state."""

    def __init__(self, store: UsageStore, state: State, archived: ArchivedJobs, outcomes: OutcomeStore) -> None:
        self._store, self._state, self._archived, self._outcomes = store, state, archived, outcomes

    async def usage(self, peer: Peer, minutes: int = 60) -> rows.Usage:
        """Newest sample of each host, and the last minutes of each device.

        Args:
            minutes: how many of them, at most a day's.
        """
        latest = {host: self._store.latest(host) for host in self._state.hosts}
        return rows.Usage(
            hosts={host: to_map(sample) for host, sample in latest.items() if sample is not None},
            devices=await self._store.minutes(min(max(minutes, 0), RETENTION_MINUTES)),
        )

    async def forecasts(self, peer: Peer) -> list[rows.ForecastScore]:
        """Calibration of past forecasts of starts and ends, by kind of job and horizon."""
        return await self._outcomes.scores()

    async def report(self, peer: Peer, since_s: float, by: str = "user") -> list[rows.UsageReport]:
        """Device-hours, utilisation and waiting times since the day of a time, a row for each group.

        Args:
            since_s: seconds since the epoch.
            by: user, tenant, model, host or job.
        """
        if by not in BY:
            raise UsageError(f"report: by is {by!r}; it must be one of {', '.join(BY)}")
        used = await self._store.jobs(since_s)
        jobs: dict[JobId, _Counted] = {}
        if by != "host":
            # Who used a device since then is not over, or ended since then; use is stored by day.
            jobs = {job.id: _Counted(job, by) async for job in self._archived.ended_since(since_s - 86400.0)}
            jobs |= {job.id: _Counted(job, by) for job in self._state.jobs.values()}
        groups: dict[str, _Sums] = defaultdict(_Sums)
        for use in used:
            known = jobs.get(JobId(use.job))  # None: idle devices, or a job that is no longer known
            group = use.host if by == "host" else known.group if known is not None else None
            if by == "user" and use.job.startswith("@"):
                group = use.job[1:] or "(not known)"
            if group is not None:
                groups[group].add(use)
        waits = _waits(jobs.values(), since_s)
        for group in waits:
            groups[group]  # a job that only waited has a row, too
        return [_row(group, groups[group], waits.get(group, [])) for group in sorted(groups)]

    async def fair_share(self, peer: Peer) -> list[rows.FairShare]:
        """Use of each user of each tenant lately, as the newest pass counted it, and the parts due to them."""
        state = self._state
        queued = [state.jobs[job] for job in state.queue]
        now_s = time.time()
        quotas = Quotas(state, map(state.jobs.__getitem__, state.active), now_s)
        tenants, users = quotas.tenant_shares(queued).parts, quotas.user_shares(queued)
        known = {(tenant, user) for tenant, used in state.used.items() for user in used}
        known |= {(job.spec.tenant, job.spec.user) for job in queued}
        found = []
        for tenant, user in sorted(known):
            used = state.used.get(tenant, {}).get(user, Used())
            budget = min(budgets(state, tenant, user, now_s), key=lambda each: each.left_hours, default=None)
            tenant_used, tenant_due = tenants.get(tenant, (None, None))
            user_used, user_due = users[tenant].parts.get(user, (None, None)) if tenant in users else (None, None)
            found.append(
                rows.FairShare(
                    tenant=tenant,
                    user=user,
                    device_hours=used.device_s / 3600,
                    devices=used.devices,
                    month_hours=month_hours([used], now_s),
                    budget_hours=budget.hours if budget is not None else None,
                    budget_left_hours=budget.left_hours if budget is not None else None,
                    tenant_used=tenant_used,
                    tenant_due=tenant_due,
                    user_used=user_used,
                    user_due=user_due,
                )
            )
        return found


def _waits(jobs: Iterable[_Counted], since_s: float) -> dict[str, list[float]]:
    """Seconds from submission to start, or to now, of the jobs submitted since then, by group."""
    waits: dict[str, list[float]] = defaultdict(list)
    for job in jobs:
        if job.submitted_s >= since_s:
            waits[job.group].append(job.waited_s)
    return waits


def _group_of(job: Job, by: str) -> str:
    if by == "model":
        return job.inspection.model[:12] or job.spec.name
    if by == "job":
        return f"{job.spec.name} ({job.id})"
    return job.spec.user if by == "user" else job.spec.tenant or "(none)"


def _row(group: str, sums: _Sums, waits: list[float]) -> rows.UsageReport:
    waits = sorted(waits)
    return rows.UsageReport(
        group=group, jobs=len(sums.jobs), device_hours=sums.device_s / 3600,
        utilisation=sums.busy_s / sums.measured_s if sums.measured_s else None,
        idle_device_hours=sums.idle_s / 3600, outside_device_hours=sums.outside_s / 3600, submitted=len(waits),
        waited_s_median=waits[len(waits) // 2] if waits else None, waited_s_longest=waits[-1] if waits else None,
        device_hours_by_day={day: seconds / 3600 for day, seconds in sorted(sums.days.items())},
    )  # fmt: skip


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
