"""Ranks of simulated elastic jobs: they train together, and hand their state over in migrations.

The ranks of a generation find each other without the daemon, as over the network between hosts, which a partition of
the daemon does not cut. What they did is the truth that promises about steps are checked against.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clusterd.exit_reasons import Reason
from clusterd.protocol import requests as r
from clusterd.protocol.agent import Progress, RankReport
from clusterd.protocol.rank import Failed, Loaded, Orphaned, Prepared, Quiesced, RankMessage, Resumed, Trains
from tests.plans.test_reshard import gpt

if TYPE_CHECKING:
    from tests.soak.host import Machine, Process, Record

STEPS = 80
STEP_S = 0.5
PROGRESS_STEPS = 4
MODEL: dict[str, Any] = json.loads(json.dumps({**gpt().to_dict(), "steps": STEPS}))
DIGEST = "of the copy plan"

Key = tuple[str, int, int]
"""Job, attempt, generation."""


@dataclass
class Rank:
    """One rank with its place."""

    machine: Machine
    process: Process
    is_asked: bool = False  # to quiesce, of a source rank; to resume, of a target rank


@dataclass(eq=False)
class Generation:
    """Ranks of one generation: ``starts -> trains -> quiesced -> trains``, or ``standby -> loaded -> trains``."""

    key: Key
    size: int
    move: str = ""  # of which its ranks are the target
    state: str = "starts"
    step: int = 0
    source_of: str = ""
    ranks: dict[int, Rank] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None

    @property
    def is_whole(self) -> bool:
        """True while every rank is there."""
        return len(self.ranks) == self.size and all(rank.process.is_alive for rank in self.ranks.values())

    @property
    def is_over(self) -> bool:
        """True once a rank ended."""
        return any(not rank.process.is_alive for rank in self.ranks.values())

    def on(self, machine: Machine) -> list[tuple[int, Rank]]:
        """Live ranks on a machine."""
        return [(n, k) for n, k in self.ranks.items() if k.machine is machine and k.process.is_alive]

    def send(self, message: RankMessage, ranks: list[tuple[int, Rank]] | None = None) -> None:
        """Report to the daemon, from each of these ranks; None: from all."""
        for number, rank in list(self.ranks.items()) if ranks is None else ranks:
            if rank.process.is_alive:
                report = RankReport(*self.key, number, message.to_message(), time.time())
                rank.machine.emit(report)


class Trainings:
    """All generations of elastic jobs, on all machines.

    Attributes:
        finished: jobs of which some generation made the last step.
        moves: migrations whose target ranks trained.
    """

    def __init__(self, wrong: Callable[[str], None], chance: Callable[[str, float], bool]) -> None:
        self.finished: set[str] = set()
        self.moves = 0
        self._wrong, self._chance = wrong, chance
        self._generations: dict[Key, Generation] = {}

    def join(self, machine: Machine, record: Record, process: Process) -> None:
        """A rank's process has started."""
        launch = record.launch
        key = (launch.job, launch.attempt, launch.generation)
        known = self._generations.get(key)
        if known is None or known.is_over:  # over: the id was given out again
            known = Generation(key, process.spec.world_size, launch.move.id if launch.move else "")
            self._generations[key] = known
            known.task = asyncio.ensure_future(self._live(known))
        known.ranks[process.spec.rank] = Rank(machine, process)

    async def _live(self, ranks: Generation) -> None:
        while not ranks.is_whole:
            if ranks.is_over:
                self._orphan(ranks)
                return
            await asyncio.sleep(STEP_S)
        if ranks.move:
            await self._stand_by(ranks)
        else:
            ranks.state = "trains"
        await self._train(ranks)

    async def _stand_by(self, ranks: Generation) -> None:
        """Load the state of the source once it has quiesced, and wait for the switch."""
        ranks.state = "standby"
        await asyncio.sleep(STEP_S)
        ranks.send(Prepared(ranks.move, DIGEST))
        source = await self._quiesced_source(ranks)
        if source is None:
            return
        await asyncio.sleep(STEP_S)
        if self._chance("transfer failed", 0.1):
            ranks.send(Failed(ranks.move, "a segment could not be fetched"))
            return
        ranks.step, ranks.state = source.step, "loaded"
        ranks.send(Loaded(ranks.move, ranks.step, verified=True))
        while not all(rank.is_asked for rank in ranks.ranks.values()):
            if ranks.is_over:
                return
            await asyncio.sleep(STEP_S / 10)
        if source.state == "trains":
            self._wrong(f"{ranks.key} is to train, and so does {source.key}: the state is on both sides")
        if source.step != ranks.step:
            self._wrong(f"{ranks.key} has step {ranks.step}, and {source.key} has made step {source.step}")
        source.state, ranks.state = "released", "trains"
        self.moves += 1
        ranks.send(Trains(ranks.move, ranks.step, time.time()))

    async def _quiesced_source(self, ranks: Generation) -> Generation | None:
        """The source once all its ranks have quiesced; None: the target is over before."""
        while not ranks.is_over:
            for other in self._generations.values():
                if other.key[:2] == ranks.key[:2] and other.source_of == ranks.move and other.state == "quiesced":
                    return other
            await asyncio.sleep(STEP_S / 10)
        return None

    async def _train(self, ranks: Generation) -> None:
        while ranks.step < STEPS:
            await asyncio.sleep(STEP_S)
            if ranks.is_over:
                self._orphan(ranks)
                return
            if ranks.state == "released":
                return
            if ranks.state != "trains":
                continue
            if ranks.source_of and all(rank.is_asked for rank in ranks.ranks.values()):
                ranks.state = "quiesced"
                ranks.send(Quiesced(ranks.source_of, ranks.step, time.time()))
                continue
            self._check_alone(ranks)
            ranks.step += 1
            if ranks.step % PROGRESS_STEPS == 0 or ranks.step == STEPS:
                progress = Progress(*ranks.key, ranks.step, 1.0, STEP_S, last=ranks.step == STEPS)
                ranks.ranks[0].machine.emit(progress)
        ranks.state = "finished"
        self.finished.add(ranks.key[0])
        for rank in ranks.ranks.values():
            rank.process.end(Reason.EXIT, exit_code=0)

    def _check_alone(self, ranks: Generation) -> None:
        for other in self._generations.values():
            if other is not ranks and other.key[:2] == ranks.key[:2] and other.state == "trains" and other.is_whole:
                self._wrong(f"{ranks.key} and {other.key} train at once")

    def _orphan(self, ranks: Generation) -> None:
        """Ranks that lost a peer hold their state until they are stopped."""
        if ranks.state not in ("released", "finished"):
            ranks.state = "orphaned"
            ranks.send(Orphaned(ranks.step))

    # --- requests of the daemon ---------------------------------------------------------------------------------------

    async def move(self, machine: Machine, request: r.MoveRanks) -> r.Receivers:
        """Source ranks prepare."""
        ranks = self._generations.get((request.job, request.attempt, request.generation))
        here = ranks.on(machine) if ranks is not None else []
        if ranks is not None and here:
            if ranks.source_of != request.move.id:
                ranks.source_of = request.move.id
                for rank in ranks.ranks.values():
                    rank.is_asked = False
            if self._chance("source rank refuses to move", 0.03):
                ranks.send(Failed(request.move.id, "it does not know its model any more"), here)
            else:
                ranks.send(Prepared(request.move.id, DIGEST), here)
        return r.Receivers(len(here))

    async def quiesce(self, machine: Machine, request: r.QuiesceRanks) -> r.Receivers:
        """Source ranks end the same step, once all are asked."""
        return self._ask(machine, request, lambda ranks: ranks.source_of == request.move)

    async def resume(self, machine: Machine, request: r.ResumeRanks) -> r.Receivers:
        """Target ranks train, once all are asked; asked again, they say again that they do."""
        ranks = self._generations.get((request.job, request.attempt, request.generation))
        if ranks is not None and ranks.state == "trains" and ranks.move == request.move:
            ranks.send(Trains(ranks.move, ranks.step, time.time()), ranks.on(machine))
        return self._ask(machine, request, lambda ranks: ranks.move == request.move)

    def _ask(
        self, machine: Machine, request: r.QuiesceRanks | r.ResumeRanks, concerns: Callable[[Generation], bool]
    ) -> r.Receivers:
        ranks = self._generations.get((request.job, request.attempt, request.generation))
        here = ranks.on(machine) if ranks is not None and concerns(ranks) else []
        for _, rank in here:
            rank.is_asked = True
        return r.Receivers(len(here))

    async def abort(self, machine: Machine, request: r.AbortRanks) -> r.Receivers:
        """Source ranks train on."""
        ranks = self._generations.get((request.job, request.attempt, request.generation))
        if ranks is None or ranks.source_of != request.move:
            return r.Receivers(0)
        if ranks.state == "released":
            self._wrong(f"{ranks.key} is to train on after its target ranks trained")
        if ranks.state == "quiesced" and ranks.is_whole:
            ranks.state = "trains"
        ranks.source_of = ""
        here = ranks.on(machine)
        ranks.send(Resumed(request.move, ranks.step), here)
        return r.Receivers(len(here))
