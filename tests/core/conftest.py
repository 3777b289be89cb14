"""A small cluster without machines: events in, decisions out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core import story
from clusterd.core.invariants import violations
from clusterd.core.scheduler import Scheduler
from clusterd.types import (
    Device,
    DeviceId,
    HostFacts,
    HostId,
    JobId,
    JobKind,
    JobSpec,
    RankEnd,
    RankReport,
    Reason,
    Resources,
)

OK = RankEnd(reason=Reason.EXIT, exit_code=0)
CRASH = RankEnd(reason=Reason.EXIT, exit_code=3)
GIB = 1 << 30


def facts(
    host: str,
    gpus: int = 0,
    cpus: int = 0,
    cores: int = 32,
    gpu_bytes: int = 80 * GIB,
    capability: str = "",
    labels: tuple[str, ...] = (),
) -> HostFacts:
    """A machine with GPUs, or with CPU devices of one core."""
    kinds = [("cuda", f"gpu{i}", gpu_bytes) for i in range(gpus)] + [("cpu", f"cpu{i}", 8 * GIB) for i in range(cpus)]
    return HostFacts(
        boot_id="boot",
        cpu_cores=cores,
        memory_bytes=256 * GIB,
        address="127.0.0.1",
        devices=tuple(
            Device(
                id=DeviceId(f"{host}:{name}"),
                host=HostId(host),
                kind=kind,
                uuid=name,
                name=kind,
                memory_bytes=memory,
                compute_capability=capability if kind == "cuda" else "",
            )
            for kind, name, memory in kinds
        ),
        labels=labels,
    )


class Lab:
    """A scheduler, a clock that only moves when told, and shorthand for what agents would say."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.now_s = 1000.0
        self.log: list[e.Event] = []
        self.decisions: list[d.Decision] = []
        self.jobs = 0

    def tell(self, *events: e.Event) -> list[d.Decision]:
        """Handle events; invariants hold after every one."""
        decided = self.scheduler.handle(*events)
        self.log += events
        self.decisions += decided
        assert violations(self.scheduler.state) == []
        lines = [story.of_event(event, self.scheduler.state) for event in events]
        assert all(line.text for line in [*lines, *map(story.of_decision, decided)])
        return decided

    def fire(self, timer: e.Timer) -> list[d.Decision]:
        """Fire the timer if it was set."""
        self.now_s = max(self.now_s, self.scheduler.state.timers.get(timer, self.now_s))
        return self.tell(e.TimerFired(**self.at(), timer=timer))

    def at(self) -> dict[str, Any]:
        self.now_s += 1.0
        return {"at_s": self.now_s, "id": e.EventId(len(self.log) + 1)}

    def host(self, name: str, **what: Any) -> list[d.Decision]:
        """Add a host and let its agent answer."""
        self.tell(e.HostAdded(**self.at(), host=HostId(name)))
        return self.connect(name, **what)

    def connect(self, name: str, *reports: Any, **what: Any) -> list[d.Decision]:
        known = self.scheduler.state.hosts[HostId(name)].facts
        now = facts(name, **what) if what or known is None else known
        return self.tell(e.HostConnected(**self.at(), host=HostId(name), facts=now, attempts=tuple(reports)))

    def submit(self, name: str = "job", **what: Any) -> tuple[JobId, list[d.Decision]]:
        """Submit a command job with this many devices, and more fields of JobSpec."""
        self.jobs += 1
        job = JobId(str(self.jobs))
        wanted = {
            name: what.pop(name)
            for name in (
                "hosts",
                "exclude",
                "nodes",
                "tasks",
                "cpus",
                "memory_bytes",
                "plans",
                "constraint",
                "compute_capability",
                "share",
                "device_memory_bytes",
            )
            if name in what
        }
        resources = Resources(devices=what.pop("devices", 1), kind=what.pop("device_kind", None), **wanted)
        spec = JobSpec(
            name=name,
            command=what.pop("command", ("true",)),
            resources=resources,
            kind=what.pop("kind", JobKind.COMMAND),
            **what,
        )
        return job, self.tell(e.JobSubmitted(**self.at(), job=job, spec=spec))

    def run(self, job: JobId) -> list[d.Decision]:
        """The agent says that every rank was started."""
        attempt = self.attempt(job)
        return self.tell(e.AttemptLaunched(**self.at(), job=job, attempt=attempt.number, generation=attempt.generation))

    def attempt(self, job: JobId) -> Any:
        attempt = self.scheduler.state.jobs[job].attempt
        assert attempt is not None
        return attempt

    def exit(self, job: JobId, rank: int = 0, end: RankEnd = OK) -> list[d.Decision]:
        attempt = self.attempt(job)
        host = attempt.ranks[rank].place.host
        return self.tell(
            e.RankExited(
                **self.at(),
                job=job,
                attempt=attempt.number,
                generation=attempt.generation,
                host=host,
                rank=rank,
                end=end,
            )
        )

    def stopped(self, job: JobId, *ends: RankReport) -> list[d.Decision]:
        """Every host says that nothing is left of the attempt."""
        attempt = self.attempt(job)
        decided: list[d.Decision] = []
        for host in sorted(attempt.stop.pending):
            decided += self.tell(
                e.AttemptStopped(
                    **self.at(), job=job, attempt=attempt.number, generation=attempt.generation, host=host, ranks=ends
                )
            )
        return decided

    def finish(self, job: JobId) -> list[d.Decision]:
        """All ranks exit with 0 and the host is clean."""
        decided: list[d.Decision] = []
        for rank in list(self.attempt(job).ranks):
            decided += self.exit(job, rank)
        return decided + self.stopped(job)

    def state(self, job: JobId) -> str:
        return self.scheduler.state.jobs[job].state.value

    def why(self, job: JobId) -> str:
        return self.scheduler.state.jobs[job].reason


@pytest.fixture
def lab() -> Lab:
    """No hosts yet."""
    return Lab()


@pytest.fixture
def lab_with_two_hosts(lab: Lab) -> Lab:
    """a and b, four GPUs each."""
    lab.host("a", gpus=4)
    lab.host("b", gpus=4)
    return lab


@pytest.fixture
def replayed() -> Iterator[Callable[[Lab], Scheduler]]:
    """A second scheduler that was told the same."""

    def replay(lab: Lab) -> Scheduler:
        other = Scheduler()
        for event in lab.log:
            other.handle(event)
        return other

    return replay
