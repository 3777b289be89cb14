"""One simulation: a daemon, its hosts, users and faults, all from one seed, on one thread, in virtual time."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterd.core.events import Event
from clusterd.core.state import State
from clusterd.daemon.journal import codec
from clusterd.daemon.journal.engine import Engine
from clusterd.errors import ClusterError
from clusterd.types import JobId, JobKind
from tests.soak import checks
from tests.soak.clock import Clock, Stuck, virtual_time
from tests.soak.daemon import Disk, Killed, Life, simulated_surroundings
from tests.soak.faults import Faults
from tests.soak.host import Machine
from tests.soak.network import Network
from tests.soak.training import Trainings
from tests.soak.users import Users

FAULTS_S = 600.0
"""Virtual time with users and faults."""

END_WITHIN_S = 2 * 3600.0
"""Virtual time after the last fault within which every job must be over."""

START_WITHIN_S = 600.0
LOOK_S = 5.0
RESTART_S = 3.0
MEMORY = Path("/dev/shm")


@dataclass
class Outcome:
    """Result of one simulation."""

    seed: int
    wrong: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    jobs: int = 0
    moves: int = 0
    events: int = 0
    checks: int = 0
    lives: int = 0
    requests: int = 0
    virtual_s: float = 0.0
    trace: str = ""
    """Hash of all events with their times: the same for the same seed."""


class _Bugs(logging.Handler):
    """Collects what the daemon logs as its own bugs."""

    def __init__(self, wrong: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._wrong = wrong

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or "a bug" in record.getMessage():
            self._wrong.append(f"logged: {self.format(record)}")


class Simulation:
    """Everything of one seed."""

    def __init__(self, seed: int, directory: Path, clock: Clock, faults_s: float) -> None:
        self.outcome = Outcome(seed)
        self.clock = clock
        self.disk = Disk()
        self._faults_s = faults_s
        draw = random.Random(seed)
        self.network = Network(random.Random(draw.random()))
        self._faults = Faults(self, random.Random(draw.random()))
        self.users = Users(self, random.Random(draw.random()))
        self.trainings = Trainings(self.wrong, self._faults.chance)
        for number in range(draw.randint(2, 4)):
            name = f"host{number}"
            self.network.machines[name] = Machine(
                name,
                draw.choice((1, 2, 4)) if number else 4,
                random.Random(draw.random()),
                self.wrong,
                self._faults.chance,
                self.trainings,
            )
        self.life = self._new_life(directory / "1")
        self._is_concluded = False
        self._daemons_task: asyncio.Task[None] | None = None
        self._trace = hashlib.sha256()

    def wrong(self, what: str) -> None:
        """Record a broken promise."""
        if len(self.outcome.wrong) < 20:
            self.outcome.wrong.append(f"at {self.clock.monotonic_s - 1000:.3f} s: {what}")

    @property
    def state(self) -> State:
        """State of the current daemon."""
        assert self.life.engine is not None
        return self.life.engine.scheduler.state

    def is_training(self, job: str) -> bool:
        """True for an elastic job that runs."""
        known = self.state.jobs.get(JobId(job)) if self.life.engine is not None else None
        return known is not None and known.spec.kind is JobKind.ELASTIC and known.attempt is not None

    async def call(self, verb: str, **arguments: Any) -> Any:
        """Request of a client."""
        return await self.life.call(verb, **arguments)

    def kill_daemon(self) -> None:
        """Kill the daemon, if it runs."""
        if self.life.verbs is not None:
            self.life.kill()

    def _new_life(self, directory: Path) -> Life:
        directory.mkdir(exist_ok=True)
        return Life(directory, self.network, self.disk, self._on_batch)

    def _on_batch(self, engine: Engine, events: Sequence[Event]) -> None:
        for event in events:
            self._trace.update(codec.encode(event))
        self.outcome.events += len(events)
        self.outcome.checks += 1
        for what in checks.after_batch(engine.scheduler.state, self.network.machines.values()):
            self.wrong(what)

    async def _daemons(self) -> None:
        """Start the daemon, again after each kill."""
        while not self._is_concluded:
            self.outcome.lives += 1
            why = await self.life.run()
            if why and not (self.disk.is_full or "disk I/O error" in why or "is full" in why):
                self.wrong(f"the daemon ended by itself: {why}")
            await asyncio.sleep(RESTART_S)
            self.life = self._new_life(self.life.image or self.life.directory)

    async def serving(self) -> None:
        """Wait until a daemon serves, but not for ever."""
        for _ in range(int(START_WITHIN_S)):
            if self.life.verbs is not None:
                return
            await asyncio.sleep(1.0)
        raise Stuck(f"no daemon served for {START_WITHIN_S:.0f} s")

    async def begin(self) -> None:
        """Start the daemon, and add the hosts."""
        self._daemons_task = asyncio.create_task(self._daemons())
        await self.serving()
        for name in self.network.machines:
            await self.call("host_add", address=name, accept=[])

    async def end(self) -> None:
        """End the daemon."""
        self._is_concluded = True
        if self._daemons_task is not None:
            self.life.kill()
            await self._daemons_task

    async def run(self) -> None:
        """Run with faults, then without until every job is over, and check what has come of it."""
        await self.begin()
        busy = [asyncio.create_task(work) for work in (self.users.run(), self._faults.run())]
        await asyncio.sleep(self._faults_s)
        for task in busy:
            if task.done() and (error := task.exception()) is not None:
                raise error  # without users and faults every promise is kept
            task.cancel()
        self._faults.end()
        await self._set_right()
        waited_s = 0.0
        while not self._is_over() and waited_s < END_WITHIN_S:
            await asyncio.sleep(LOOK_S)
            waited_s += LOOK_S
        await asyncio.sleep(60.0)
        await self.serving()
        self._conclude()

    async def _set_right(self) -> None:
        while True:
            await self.serving()
            try:
                return await self.users.set_right()
            except (ClusterError, Killed):
                await asyncio.sleep(1.0)

    def _is_over(self) -> bool:
        if self.life.verbs is None:
            return False
        return all(job.state.is_final for job in self.state.jobs.values()) and all(
            host.unusable is None for host in self.state.hosts.values()
        )

    def _conclude(self) -> None:
        state, machines = self.state, self.network.machines.values()
        jobs = checks.all_jobs(state, self.life.directory)
        for what in (
            *checks.after_batch(state, machines),
            *checks.accepted_jobs(jobs, self.users.accepted),
            *checks.at_end(state, jobs, machines, self.users.cancelled),
            *checks.trained_to_the_end(jobs, self.trainings.finished),
            *checks.replay_equals(state, self.life.directory),
        ):
            self.wrong(what)
        assert self.life.engine is not None
        if self.life.engine.set_aside:
            self.wrong(f"{self.life.engine.set_aside} events were set aside")
        self.outcome.jobs = len(jobs)
        self.outcome.moves = self.trainings.moves
        self.outcome.requests = self.users.requests
        self.outcome.faults = self._faults.counts
        self.outcome.virtual_s = self.clock.monotonic_s - 1000.0
        self.outcome.trace = self._trace.hexdigest()[:16]


def simulate(seed: int, faults_s: float = FAULTS_S) -> Outcome:
    """Run the simulation of one seed."""
    return in_simulation(seed, Simulation.run, faults_s)


def in_simulation(seed: int, work: Callable[[Simulation], Awaitable[None]], faults_s: float = FAULTS_S) -> Outcome:
    """Run `work` in a simulation of its own."""
    place = tempfile.mkdtemp(prefix="clusterd-soak-", dir=MEMORY if MEMORY.is_dir() else None)
    logger = logging.getLogger("clusterd")

    async def whole(simulation: Simulation) -> None:
        try:
            await work(simulation)
        except Stuck as stuck:
            simulation.wrong(str(stuck))
        finally:
            await simulation.end()

    try:
        with virtual_time() as (loop, clock):
            simulation = Simulation(seed, Path(place), clock, faults_s)
            bugs = _Bugs(simulation.outcome.wrong)
            logger.addHandler(bugs)
            try:
                with simulated_surroundings(lambda: simulation.life, simulation.network, seed):
                    loop.run_until_complete(whole(simulation))
                    left = asyncio.all_tasks(loop)
                    for task in left:
                        task.cancel()
                    loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            except Stuck as stuck:
                simulation.wrong(str(stuck))
            finally:
                logger.removeHandler(bugs)
            return simulation.outcome
    finally:
        shutil.rmtree(place, ignore_errors=True)
