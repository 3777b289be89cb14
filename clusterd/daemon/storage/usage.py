"""Use of devices over time, from the samples of agents, and what follows: idle jobs, shared memory, outsiders.

The use is kept in a database beside the journal: it may be lost without losing a job. Its size is bounded: minutes by
the number of devices, days by jobs that ran on them and by `RETENTION_DAYS`. Nothing is decided here: the core learns
since when a job is idle, or holds too much memory, and an operator's command is told of processes outside the queue.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from clusterd.core import events as e
from clusterd.core.state import Attempt, State
from clusterd.daemon.hosts.facts import OutsideProcess
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.notifications import Notification
from clusterd.protocol.agent import AttemptUse, Usage
from clusterd.rows import Minute
from clusterd.types import Device, DeviceId, HostId, HostState, JobId, Reclaim
from clusterd.units import duration, size

log = logging.getLogger(__name__)

EVERY_S = 10.0
"""Agents sample as often."""

MINUTE_S = 60.0
RETENTION_MINUTES = 24 * 60
RETENTION_DAYS = 400
STALE_S = 60.0
"""A sample older than this says nothing about now."""

_SCHEMA = """
    CREATE TABLE IF NOT EXISTS minutes (
        minute INTEGER NOT NULL, device TEXT NOT NULL, job TEXT, busy REAL, memory_bytes INTEGER, power_w REAL,
        temperature_c REAL, PRIMARY KEY (minute, device)
    ) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS days (
        day TEXT NOT NULL, host TEXT NOT NULL, job TEXT NOT NULL, device_s REAL NOT NULL, measured_s REAL NOT NULL,
        busy_s REAL NOT NULL, PRIMARY KEY (day, host, job)
    ) WITHOUT ROWID;
"""


@dataclass(slots=True)
class _Minute:
    """Sums over one minute of one device."""

    job: str | None = None
    seconds: float = 0.0
    busy_s: float = 0.0
    measured_s: float = 0.0
    memory_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None

    @property
    def busy(self) -> float | None:
        """Share of the time in which the device worked; None: not known."""
        return self.busy_s / self.measured_s if self.measured_s else None


@dataclass(frozen=True, slots=True)
class JobUse:
    """Device-seconds of a job, of idle devices (""), or of a user outside the queue ("@ann"), on a host and day."""

    host: str
    job: str
    device_s: float
    measured_s: float  # of these, with a known utilisation
    busy_s: float
    day: str = ""


@dataclass(slots=True)
class _Pending:
    minutes: dict[DeviceId, _Minute] = field(default_factory=lambda: defaultdict(_Minute))
    days: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0, 0.0]))


class UsageStore:
    """Accounts for every device each `EVERY_S` seconds, by the holders in the state and the samples of agents."""

    def __init__(
        self,
        file: Path,
        state: State,
        clock: Callable[[], float] = time.time,
        outside: Callable[[], Iterable[OutsideProcess]] = tuple,
    ) -> None:
        """Open, or create, the database.

        Args:
            outside: processes of now that hold devices and belong to no job.
        Raises:
            sqlite3.DatabaseError: it is damaged.
        """
        self._state, self._clock, self._outside = state, clock, outside
        self._database = sqlite3.connect(file, check_same_thread=False)
        self._database.executescript(_SCHEMA)
        self._latest: dict[HostId, tuple[float, Usage]] = {}
        self._of_attempts: defaultdict[HostId, list[tuple[float, AttemptUse]]] = defaultdict(list)
        self._pending = _Pending()
        self._counted_at_s: float | None = None
        self._minute = 0
        self._writing = anyio.Lock()

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def on_usage(self, host: HostId, report: Usage) -> None:
        """Store an agent's newest sample: of the host and its own attempts; that of a person's agent tells of these."""
        now_s, mine = self._clock(), {(use.job, use.attempt) for use in report.attempts}
        others = (each for each in self._of_attempts[host] if (each[1].job, each[1].attempt) not in mine)
        kept = [(at_s, use) for at_s, use in others if now_s - at_s <= STALE_S]
        self._of_attempts[host] = [*kept, *((now_s, use) for use in report.attempts)]
        if report.cpu_cores:
            self._latest[host] = (now_s, report)

    def latest(self, host: HostId) -> Usage | None:
        """The newest samples of all agents of a host; None: its own sent none lately."""
        now_s, (at_s, usage) = self._clock(), self._latest.get(host, (0.0, None))
        if usage is None or now_s - at_s > STALE_S:
            return None
        return replace(usage, attempts=tuple(use for at_s, use in self._of_attempts[host] if now_s - at_s <= STALE_S))

    def busy(self, device: Device, job: str) -> float | None:
        """Share of the time in which a device of a job works now; None: not known.

        Of a GPU that no driver measures, its job's use of cores counts.
        """
        usage = self.latest(device.host)
        found = self._busy(device, job, usage)
        if found is not None or usage is None:
            return found
        used = [use.cores for use in usage.attempts if use.job == job]
        return min(sum(used), 1.0) if used else None

    async def run(self) -> None:
        """Account until cancelled."""
        while True:
            await anyio.sleep(EVERY_S)
            self.count()
            if int(self._clock() // MINUTE_S) != self._minute:
                await self.flush()

    def count(self) -> None:
        """Add the time since the last call to every device of hosts that are up."""
        now_s = self._clock()
        since_s, self._counted_at_s = self._counted_at_s, now_s
        elapsed_s = 0.0 if since_s is None else min(max(now_s - since_s, 0.0), 3 * EVERY_S)
        others: dict[str, list[str]] = defaultdict(list)
        for process in self._outside():
            if (name := f"@{process.user}") not in others[process.device]:
                others[process.device].append(name)
        for host in self._state.hosts.values():
            if host.state is not HostState.UP:
                continue
            usage = self.latest(host.id)
            for device in host.devices:
                jobs: list[str] = [*self._state.jobs_on(device.id)] or others.get(device.id) or [""]
                for job in jobs:  # those that share it have equal parts
                    self._add(host.id, device, job, elapsed_s / len(jobs), usage)

    def _add(self, host: HostId, device: Device, job: str, elapsed_s: float, usage: Usage | None) -> None:
        busy = self._busy(device, job, usage)
        gpu = next((use for use in usage.devices if use.uuid == device.uuid), None) if usage is not None else None
        minute = self._pending.minutes[device.id]
        minute.job = minute.job if job.startswith("@") else job or minute.job
        minute.seconds += elapsed_s
        day = self._pending.days[host, job]
        day[0] += elapsed_s
        if busy is not None:
            minute.busy_s += busy * elapsed_s
            minute.measured_s += elapsed_s
            day[1] += elapsed_s
            day[2] += busy * elapsed_s
        if gpu is not None:
            minute.memory_bytes, minute.power_w = gpu.memory_used_bytes, gpu.power_w
            minute.temperature_c = gpu.temperature_c

    def _busy(self, device: Device, job: str, usage: Usage | None) -> float | None:
        """Share of the time in which a device works: a GPU's by its driver, that of CPU cores by their job's use."""
        if usage is None:
            return None
        if device.kind == "cuda":
            return next((use.busy for use in usage.devices if use.uuid == device.uuid), None)
        if not job:
            return 0.0
        used = [use.cores for use in usage.attempts if use.job == job]  # one for each generation
        attempt = self._state.jobs[job].attempt if job in self._state.jobs else None  # type: ignore[index]
        cores = attempt.booked.cores.get(device.host, 0) if attempt is not None else 0
        return min(sum(used) / cores, 1.0) if used and cores else None

    async def flush(self) -> None:
        """Write what was counted, and remove what is too old."""
        pending, self._pending = self._pending, _Pending()
        now_s = self._clock()
        minute, self._minute = self._minute or int(now_s // MINUTE_S), int(now_s // MINUTE_S)
        async with self._writing:
            try:
                await anyio.to_thread.run_sync(self._write, pending, minute, now_s)
            except sqlite3.Error as error:  # as on a full disk: jobs go on, and so does the next minute
                log.warning("the use of devices is not recorded: %s", error)

    def _write(self, pending: _Pending, minute: int, now_s: float) -> None:
        day = time.strftime("%Y-%m-%d", time.localtime(now_s))
        oldest = time.strftime("%Y-%m-%d", time.localtime(now_s - RETENTION_DAYS * 86400))
        with self._database as database:
            database.executemany(
                "INSERT OR REPLACE INTO minutes VALUES (?, ?, ?, ?, ?, ?, ?)",
                [
                    (minute, device, m.job, m.busy, m.memory_bytes, m.power_w, m.temperature_c)
                    for device, m in pending.minutes.items()
                ],
            )
            database.executemany(
                "INSERT INTO days VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET device_s = device_s + "
                "excluded.device_s, measured_s = measured_s + excluded.measured_s, busy_s = busy_s + excluded.busy_s",
                [(day, host, job, *sums) for (host, job), sums in pending.days.items()],
            )
            database.execute("DELETE FROM minutes WHERE minute < ?", (int(now_s // MINUTE_S) - RETENTION_MINUTES,))
            database.execute("DELETE FROM days WHERE day < ?", (oldest,))

    async def minutes(self, count: int) -> dict[str, tuple[Minute, ...]]:
        """The last minutes of each device, oldest first: minute, job, busy, memory, power, temperature."""
        first = int(self._clock() // MINUTE_S) - count
        rows = await self._query("SELECT * FROM minutes WHERE minute >= ? ORDER BY minute", (first,))
        found: dict[str, list[Minute]] = defaultdict(list)
        for minute, device, *rest in rows:
            fields = zip(Minute.__struct_fields__, (minute, *rest), strict=True)
            found[device].append(Minute(**dict(fields)))
        return {device: tuple(minutes) for device, minutes in found.items()}

    async def jobs(self, since_s: float) -> list[JobUse]:
        """Device-seconds by day, host and job since the day of this time."""
        day = time.strftime("%Y-%m-%d", time.localtime(since_s))
        await self.flush()
        statement = "SELECT host, job, sum(device_s), sum(measured_s), sum(busy_s), day FROM days WHERE day >= ?"
        return [JobUse(*row) for row in await self._query(f"{statement} GROUP BY day, host, job", (day,))]

    async def _query(self, statement: str, arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        async with self._writing:
            return await anyio.to_thread.run_sync(lambda: self._database.execute(statement, arguments).fetchall())


async def post_observed(engine: Engine, observe: Callable[[], Iterable[e.Event]]) -> None:
    """Observe each `EVERY_S` seconds until cancelled, and post what was."""
    while True:
        await anyio.sleep(EVERY_S)
        for event in observe():
            await engine.post(event)


WORKS = 0.02
"""Least share of the time in which a device works that counts as use: drivers and idle notebooks take a little."""


class IdleJobs:
    """Observes when devices of a running job have done nothing for `idle_after_s`, and when they work again.

    Args:
        busy: share of the time in which a device of a job works; None: not known, which is no proof of either.
        reclaim_idle_s: devices that are idle for so long are reclaimed; None: they are not.
        reclaim: from whom, and how.
    """

    def __init__(
        self,
        engine: Engine,
        busy: Callable[[Device, str], float | None],
        idle_after_s: float,
        reclaim_idle_s: float | None,
        reclaim: Reclaim,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._busy = engine, busy
        self._clock, self._monotonic = clock, monotonic
        self._idle_after_s, self._reclaim_idle_s, self._reclaim = idle_after_s, reclaim_idle_s, reclaim
        # Newest time at which an attempt was not known to be idle, by the clock that is never set.
        self._worked_s: dict[tuple[JobId, int], float] = {}

    def observe(self) -> list[e.IdlenessObserved]:
        """Events about jobs that became idle, or work again, since the last call."""
        attempts = [each for each in self._engine.state.running_attempts() if each.devices]
        known = {(attempt.job, attempt.number) for attempt in attempts}
        self._worked_s = {key: at_s for key, at_s in self._worked_s.items() if key in known}
        return [event for attempt in attempts if (event := self._of_attempt(attempt)) is not None]

    def _of_attempt(self, attempt: Attempt) -> e.IdlenessObserved | None:
        works, now_s = self._is_working(attempt), self._monotonic()
        worked_s = self._worked_s.setdefault((attempt.job, attempt.number), now_s)
        is_idle = attempt.idle_since_s is not None
        if works is not False or is_idle:
            self._worked_s[attempt.job, attempt.number] = now_s
        if works and is_idle:
            return e.IdlenessObserved(at_s=self._clock(), job=attempt.job, attempt=attempt.number, since_s=None)
        if is_idle or works is not False or now_s - worked_s < self._idle_after_s:
            return None
        at_s = self._clock()
        since_s = at_s - (now_s - worked_s)
        reclaim_at_s = since_s + self._reclaim_idle_s if self._reclaim_idle_s is not None else None
        found = e.IdlenessObserved(at_s=at_s, job=attempt.job, attempt=attempt.number, since_s=since_s)
        return replace(found, reclaim_at_s=reclaim_at_s, reclaim=self._reclaim)

    def _is_working(self, attempt: Attempt) -> bool | None:
        """True if one of its devices works, False if all are known to do nothing."""
        hosts = self._engine.state.hosts
        devices = [d for host in attempt.hosts for d in hosts[host].devices if d.id in set(attempt.devices)]
        shares = [self._busy(device, attempt.job) for device in devices]
        if any(share is not None and share >= WORKS for share in shares):
            return True
        return None if None in shares or not shares else False


class SharedDeviceMemory:
    """Observes when a job holds more of a device's memory than its part, and when it does no more.

    Args:
        latest: newest sample of a host; None: there is none.
    """

    def __init__(
        self, engine: Engine, latest: Callable[[HostId], Usage | None], clock: Callable[[], float] = time.time
    ) -> None:
        self._engine, self._latest, self._clock = engine, latest, clock

    def observe(self) -> list[e.DeviceMemoryObserved]:
        """Events about jobs that began to hold too much, or hold it no more."""
        running = self._engine.state.running_attempts()
        return [event for attempt in running for event in self._of_attempt(attempt)]

    def _of_attempt(self, attempt: Attempt) -> Iterator[e.DeviceMemoryObserved]:
        state = self._engine.state
        share = state.jobs[attempt.job].spec.resources.share
        if share < 2:
            return
        for host in attempt.hosts:
            if (usage := self._latest(host)) is None:
                continue
            for device in state.hosts[host].devices:
                if device.id not in attempt.devices or device.kind != "cuda":
                    continue
                used = [use.device_memory.get(device.uuid, 0) for use in usage.attempts if use.job == attempt.job]
                part = device.memory_bytes // share
                if used and (sum(used) > part) != bool(attempt.over_share):
                    yield e.DeviceMemoryObserved(
                        at_s=self._clock(), job=attempt.job, attempt=attempt.number, device=device.id,
                        used_bytes=sum(used), part_bytes=part,
                    )  # fmt: skip


class OutsideProcesses:
    """Tells once of each process that has held a GPU for so long.

    Args:
        found: processes of now.
        tell: queues a notification.
        after_s: by host, "": by default; None: as by default, 0 or no default: never.
        exempt: users who are not told.
    """

    def __init__(
        self,
        found: Callable[[], Iterable[OutsideProcess]],
        tell: Callable[[Notification], None],
        after_s: Mapping[str, float | None],
        exempt: Container[str],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._found, self._tell, self._after_s, self._exempt = found, tell, after_s, exempt
        self._monotonic = monotonic
        self._since_s: dict[tuple[str, int, str], float] = {}  # by host, process and device; infinite: told of

    async def run(self) -> None:
        """Observe until cancelled."""
        while True:
            await anyio.sleep(EVERY_S)
            self.observe()

    def observe(self) -> None:
        """Tell of the processes that have been there for long enough."""
        now_s, seen = self._monotonic(), dict[tuple[str, int, str], float]()
        for process in self._found():
            key = (process.host, process.pid, process.device)
            seen[key] = since_s = self._since_s.get(key, now_s)
            own_s = self._after_s.get(process.host)
            after_s = self._after_s[""] if own_s is None else own_s
            if after_s and now_s - since_s >= after_s and process.user not in self._exempt:
                seen[key] = float("inf")
                self._tell(_notification(process, now_s - since_s))
        self._since_s = seen


def _notification(process: OutsideProcess, for_s: float) -> Notification:
    text = (
        f"{process.user or 'somebody'} holds {size(process.memory_bytes)} of {process.device} outside the queue "
        f"for {duration(for_s)} (pid {process.pid}): clusterd run --gpus 1 -- COMMAND would find it a GPU of its own"
    )
    about = {"user": process.user, "pid": process.pid, "device": process.device, "hosts": [process.host]}
    return {"kind": "outside the queue", "text": text, **about}
