"""Faults of one simulation, drawn from its seed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.soak.simulation import Simulation

MEAN_PAUSE_S = 25.0
CLOCK_STEPS_S = (-3600.0, -30.0, 30.0, 7200.0)


class Faults:
    """Injects faults until it is stopped, and then mends what lasts."""

    def __init__(self, simulation: Simulation, randomness: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self.are_on = True
        self._simulation, self._random = simulation, randomness
        self._lasting: dict[asyncio.Task[None], None] = {}

    def chance(self, name: str, probability: float) -> bool:
        """True with this probability while faults are injected; counts it."""
        if not self.are_on or self._random.random() >= probability:
            return False
        self.counts[name] += 1
        return True

    async def run(self) -> None:
        """Inject one fault after the other until cancelled."""
        kinds = (
            self._kill, self._kill, self._kill_at_write, self._kill_at_write, self._fill_disk, self._fail_disk,
            self._cut, self._cut, self._reset, self._reset, self._restart_agent, self._reboot, self._slow, self._clock,
        )  # fmt: skip
        while True:
            await asyncio.sleep(self._random.expovariate(1.0 / MEAN_PAUSE_S))
            self._random.choice(kinds)()

    def end(self) -> None:
        """No more faults: everything works again."""
        self.are_on = False
        for task in self._lasting:
            task.cancel()
        disk, network = self._simulation.disk, self._simulation.network
        disk.is_full, disk.fails, disk.kill_at = False, 0, None
        for machine in network.machines.values():
            machine.slowness = 1.0
            if not machine.is_on:
                machine.switch_on()
            network.heal(machine)

    def _count(self, name: str) -> None:
        self.counts[name] += 1

    def _machine(self) -> object:
        return self._random.choice(list(self._simulation.network.machines.values()))

    def _later(self, after_s: float, mend: object) -> None:
        async def wait() -> None:
            await asyncio.sleep(after_s)
            mend()  # type: ignore[operator]

        task = asyncio.create_task(wait())
        self._lasting[task] = None
        task.add_done_callback(lambda done: self._lasting.pop(done, None))

    # --- the head node --------------------------------------------------------------------------------------------

    def _kill(self) -> None:
        self._count("daemon killed")
        self._simulation.kill_daemon()

    def _kill_at_write(self) -> None:
        at = self._random.choice(("before", "after"))
        self._count(f"daemon killed {at} a commit")
        self._simulation.disk.kill_at = at

    def _fill_disk(self) -> None:
        self._count("journal's disk full")
        disk = self._simulation.disk
        disk.is_full = True
        self._later(self._random.uniform(1.0, 60.0), lambda: setattr(disk, "is_full", False))

    def _fail_disk(self) -> None:
        self._count("journal's disk failing")
        self._simulation.disk.fails += self._random.randint(1, 5)

    def _clock(self) -> None:
        self._count("wall clock set")
        self._simulation.clock.set_wall(self._random.choice(CLOCK_STEPS_S))

    # --- hosts and links ------------------------------------------------------------------------------------------

    def _cut(self) -> None:
        self._count("partition")
        machine, network = self._machine(), self._simulation.network
        network.cut(machine)  # type: ignore[arg-type]
        self._later(self._random.choice((5.0, 40.0, 270.0, 400.0)), lambda: network.heal(machine))  # type: ignore[arg-type]

    def _reset(self) -> None:
        self._count("connection reset")
        self._simulation.network.reset(self._machine())  # type: ignore[arg-type]

    def _restart_agent(self) -> None:
        machine = self._machine()
        if machine.is_on:  # type: ignore[attr-defined]
            self._count("agent restarted")
            machine.restart_agent()  # type: ignore[attr-defined]

    def _reboot(self) -> None:
        machine = self._machine()
        if machine.is_on:  # type: ignore[attr-defined]
            self._count("host rebooted")
            machine.switch_off()  # type: ignore[attr-defined]
            self._later(self._random.uniform(20.0, 300.0), lambda: machine.is_on or machine.switch_on())  # type: ignore[attr-defined]

    def _slow(self) -> None:
        self._count("slow host")
        machine = self._machine()
        machine.slowness = self._random.choice((10.0, 100.0))  # type: ignore[attr-defined]
        self._later(self._random.uniform(5.0, 60.0), lambda: setattr(machine, "slowness", 1.0))
