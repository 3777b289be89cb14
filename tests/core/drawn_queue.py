"""Drawn clusters whose commands wait, and an oracle of what a reservation may keep idle, by trying all placements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import inf
from statistics import median
from typing import Any, TypeVar

from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.core.reservations import Reservation
from clusterd.core.state import Job
from clusterd.types import AttemptState, DeviceClaim, DeviceId, HostId, JobState
from tests.core.conftest import GIB, Lab, facts

T = TypeVar("T")
Choose = Callable[[Sequence[T]], T]
HOUR = 3600.0
SLACK_S = 3.0
"""Each event takes the clock of the lab a second further."""


@dataclass(frozen=True)
class Where:
    """Resources of a placement."""

    devices: frozenset[DeviceId]
    cores: Mapping[HostId, int]
    memory_bytes: Mapping[HostId, int]

    @staticmethod
    def of(parts: Sequence[Where]) -> Where:
        """All parts together, each on a host of its own."""
        cores = {host: count for part in parts for host, count in part.cores.items()}
        memory_bytes = {host: count for part in parts for host, count in part.memory_bytes.items()}
        return Where(frozenset().union(*(part.devices for part in parts)), cores, memory_bytes)


@dataclass(frozen=True)
class Held:
    """Resources of a job, and how long it holds them from now."""

    where: Where
    until_s: float


class DrawnQueue:
    """Hosts, claims and commands that come and go; the property is checked after each event.

    Attributes:
        promises: starts that were promised so far.
        checks: waiting jobs for which all placements were tried.
    """

    def __init__(self, choose: Choose[Any], lab: Lab | None = None) -> None:
        self.choose = choose
        self.lab = lab or Lab()
        self.promises = 0
        self.checks = 0
        self._before: Reservation | None = None
        self._checked_s = 0.0
        for name in ("a", "b", "c")[: choose([1, 2, 2, 3])]:
            self._add_host(name)

    def _add_host(self, name: str) -> None:
        plain = facts(name, gpus=self.choose([1, 2, 2, 3, 4]), cores=self.choose([4, 8, 8]))
        kind = self.choose(["fast", "slow"])
        found = replace(plain, devices=tuple(replace(device, name=kind) for device in plain.devices))
        self.lab.tell(e.HostAdded(**self.lab.at(), host=HostId(name)))
        self.lab.tell(e.HostConnected(**self.lab.at(), host=HostId(name), facts=found, attempts=()))

    # --- what happens -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Let something happen; nobody waits in vain and every promise stands after it."""
        verbs = [*["submit"] * 8, *["wait"] * 4, "finish", "finish", "claim", "claim", "unclaim", "drain"]
        verb = self.choose(verbs)
        getattr(self, f"_{verb}")()
        self._settle()
        self.check(is_undisturbed=verb in ("submit", "wait", "finish"))

    def _submit(self) -> None:
        devices, nodes = self.choose([*[(1, 1)] * 3, (2, 1), (2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (0, 1), (0, 2)])
        self.lab.submit(
            f"job-{self.lab.jobs}",
            devices=devices,
            nodes=nodes,
            cpus=self.choose([0, 0, 0, 2, 4]),
            memory_bytes=self.choose([0, 0, 100 * GIB]),
            share=self.choose([1, 1, 2]) if devices == 1 else 1,
            hosts=self.choose([(), (), (), (HostId("a"),)]),
            time_limit_s=self.choose([None, 300.0, 1800.0, HOUR, 3 * HOUR, 10 * HOUR]),
            priority=self.choose([0, 0, 0, 0, 1]),
            user=self.choose(["ann", f"user-{self.lab.jobs}"]),
            grace_s=0.0,
        )

    def _wait(self) -> None:
        """Time passes, with all that becomes due; of the rounds in it the last one."""
        until_s = self.lab.now_s + self.choose([60.0, 700.0, HOUR, 3 * HOUR])
        while self.fire_before(until_s):
            pass
        self.lab.now_s = max(self.lab.now_s, until_s)
        self.lab.fire(Timer(TimerKind.ROUND))

    def fire_before(self, until_s: float) -> bool:
        """Fire the next timer that is due by then, but for rounds; False: there is none."""
        timers = self.lab.scheduler.state.timers.items()
        due = [(at_s, str(t), t) for t, at_s in timers if at_s <= until_s and t.kind is not TimerKind.ROUND]
        if due:
            self.lab.fire(min(due)[2])
            self._settle()
        return bool(due)

    def _finish(self) -> None:
        if running := self._running():
            self.lab.finish(self.choose(running).id)

    def _claim(self) -> None:
        devices = [device.id for host in self.lab.scheduler.state.hosts.values() for device in host.devices]
        first = self.choose(range(len(devices)))
        at: dict[str, Any] = self.lab.at()
        from_s = at["at_s"] + self.choose([0.0, 1200.0, 2 * HOUR])
        until_s = self.choose([None, from_s + HOUR, from_s + 10 * HOUR])
        some = tuple(devices[first : first + self.choose([1, 2, 4])])
        number = str(self.lab.scheduler.state.last_device_claim + 1)
        claim = DeviceClaim(id=number, devices=some, from_s=from_s, until_s=until_s, reason="new fan", by="ann")
        self.lab.tell(e.DevicesClaimed(**at, claim=claim))

    def _unclaim(self) -> None:
        if claims := sorted(self.lab.scheduler.state.device_claims):
            self.lab.tell(e.DeviceClaimRemoved(**self.lab.at(), claim=self.choose(claims), by="ann"))

    def _drain(self) -> None:
        host = self.choose(list(self.lab.scheduler.state.hosts.values()))
        if host.drained is None:
            self.lab.tell(e.HostDrained(**self.lab.at(), host=host.id, why="new fan", by="ann"))
        else:
            self.lab.tell(e.HostUndrained(**self.lab.at(), host=host.id, by="ann"))

    def _settle(self) -> None:
        """Agents obey at once."""
        while waits := [job for job in self._active() if job.attempt and job.attempt.state is not AttemptState.RUNNING]:
            for job in waits:
                if job.attempt is not None and job.attempt.state is AttemptState.STOPPING:
                    self.lab.stopped(job.id)
                elif job.attempt is not None:
                    self.lab.run(job.id)

    def _active(self) -> list[Job]:
        state = self.lab.scheduler.state
        return [state.jobs[job] for job in state.active]

    def _running(self) -> list[Job]:
        return [job for job in self._active() if job.state is JobState.RUNNING]

    # --- what must hold -----------------------------------------------------------------------------------------------

    def check(self, is_undisturbed: bool) -> None:
        """Assert that nobody waits in vain, and that a promise is not put off."""
        state, before = self.lab.scheduler.state, self._before
        now, self._before = state.reservation, state.reservation
        if now is not None and now.latest_s is not None:
            self.promises += 1
            assert now.latest_s >= self.lab.now_s - SLACK_S, f"{now} is past at {self.lab.now_s}"
        if before is not None and before.latest_s is not None and is_undisturbed and not self._is_overtaken(before):
            assert now is not None and now.job == before.job, f"{before} is no promise any more"
            assert now.latest_s is not None, f"{before} is no promise any more"
            assert now.latest_s <= before.latest_s + SLACK_S, f"{before} was put off to {now.latest_s}"
        for job in [state.jobs[job] for job in state.queue]:
            self.checks += 1
            assert (found := self._start_of(job)) is None, (
                f"{job.spec} could run on {found} at {self.lab.now_s}; {job.reason}; {state.reservation}"
            )
        self._checked_s = self.lab.now_s

    def _is_overtaken(self, promise: Reservation) -> bool:
        """True where the promised job runs, or another one of higher priority has come since."""
        jobs = self.lab.scheduler.state.jobs
        job = jobs[promise.job]
        return job.state is not JobState.QUEUED or any(
            other.priority > job.priority and other.submitted_s > self._checked_s for other in jobs.values()
        )

    def keeps_its_promise(self) -> bool:
        """Let every running job last to its limit: True where the promised start comes by then, or none was promised.

        Nobody arrives any more.
        """
        promise = self.lab.scheduler.state.reservation
        if promise is None or promise.latest_s is None:
            return True
        while self.fire_before(promise.latest_s + SLACK_S + len(self.lab.scheduler.state.timers)):
            if self.lab.scheduler.state.jobs[promise.job].state is not JobState.QUEUED:
                break
        return self.lab.scheduler.state.jobs[promise.job].state is not JobState.QUEUED

    # --- oracle -------------------------------------------------------------------------------------------------------

    def _start_of(self, job: Job) -> Where | None:
        """Placement on which a queued job could start now without delaying the reserved one; None: there is none."""
        state, now_s = self.lab.scheduler.state, self.lab.now_s
        run_s = job.spec.time_limit_s or inf
        by_limits = [self._held(other, max(self._limit_left_s(other), 1.0)) for other in self._active()]
        running = [replace(x, until_s=inf) for x in by_limits]
        reservation = state.reservation
        placements = self._placements(job, running, 0.0, run_s)
        if reservation is None or reservation.job == job.id:
            return next(placements, None)
        first = state.jobs[reservation.job]
        expected = [self._held(other, self._expected_left_s(other)) for other in self._active()]
        times = sorted({*(x.until_s for x in expected if x.until_s < inf), *self._claim_ends()})
        at_s = next((t for t in times if self._fits(first, expected, t)), None)
        assert at_s is not None, "a start is expected that can never be"
        starts = [(at_s, expected)]
        if reservation.latest_s is not None:
            starts.append((reservation.latest_s - now_s, by_limits))
            if reservation.at_s <= now_s:
                starts = starts[1:]  # what was expected did not come
        for where in placements:
            mine = Held(where, run_s + SLACK_S)  # about the start of the first one either answer is right
            if all(run_s <= t - SLACK_S or self._fits(first, [*others, mine], t) for t, others in starts):
                return where
        return None

    def _claim_ends(self) -> list[float]:
        claims = self.lab.scheduler.state.device_claims.values()
        return [max(c.until_s - self.lab.now_s, 0.0) for c in claims if c.until_s is not None]

    def _held(self, job: Job, until_s: float) -> Held:
        """Resources of a running job."""
        assert job.attempt is not None
        attempt = job.attempt
        booked = attempt.booked
        return Held(Where(frozenset(attempt.devices), booked.cores, booked.memory_bytes), until_s)

    def _limit_left_s(self, job: Job) -> float:
        """Seconds until the time limit of a running job."""
        assert job.attempt is not None
        limit_s = job.spec.time_limit_s
        return inf if limit_s is None else max(limit_s - (self.lab.now_s - job.attempt.started_s), 0.0)

    def _expected_left_s(self, job: Job) -> float:
        """Seconds that a running job is expected to need: by its user's runs, its limit, or as long again."""
        assert job.attempt is not None
        elapsed_s = self.lab.now_s - job.attempt.started_s
        known = self.lab.scheduler.state.run_times.get(job.spec.user)
        total_s = median(known) if known else job.spec.time_limit_s or 600.0
        left_s = total_s - elapsed_s if elapsed_s < total_s else elapsed_s
        return max(min(left_s, self._limit_left_s(job)), 1.0)

    def _fits(self, job: Job, others: Sequence[Held], at_s: float) -> bool:
        return next(self._placements(job, others, at_s, job.spec.time_limit_s or inf), None) is not None

    def _placements(self, job: Job, others: Sequence[Held], at_s: float, run_s: float) -> Iterator[Where]:
        """Every placement of a job that starts in `at_s` seconds, while those of the others that still run go on."""
        running = [x for x in others if x.until_s > at_s + SLACK_S / 2]
        busy = {device for x in running for device in x.where.devices}
        hosts = self.lab.scheduler.state.hosts.values()
        wanted = job.spec.resources
        ways: list[list[Where]] = []
        for host in hosts:
            assert host.facts is not None
            if host.drained is not None or (wanted.hosts and host.id not in wanted.hosts):
                continue
            cores = host.facts.cpu_cores - sum(x.where.cores.get(host.id, 0) for x in running)
            memory_bytes = host.facts.memory_bytes - sum(x.where.memory_bytes.get(host.id, 0) for x in running)
            free = [d.id for d in host.devices if d.id not in busy and self._is_unclaimed(d.id, at_s, run_s)]
            each = wanted.per_node
            parts = each or 1
            needs_cores = parts * max(-(-wanted.cpus // (parts * wanted.nodes)), 1)
            needs_bytes = parts * -(-wanted.memory_bytes // (parts * wanted.nodes))
            if needs_cores <= cores and needs_bytes <= memory_bytes:
                some = combinations(free, each)
                ways.append([Where(frozenset(x), {host.id: needs_cores}, {host.id: needs_bytes}) for x in some])
        for chosen in combinations(ways, wanted.nodes):
            for parts in product(*chosen):
                yield Where.of(parts)

    def _is_unclaimed(self, device: DeviceId, at_s: float, run_s: float) -> bool:
        from_s = self.lab.now_s + at_s
        claims = [c for c in self.lab.scheduler.state.device_claims.values() if device in c.devices]
        return all((c.until_s is not None and c.until_s <= from_s) or c.from_s >= from_s + run_s for c in claims)
