"""What an agent does unasked: looks for ranks that ended, shortens logs, gives back ports, ends when not needed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from clusterd.agent.host import growing_files
from clusterd.agent.host.ports import UNUSED_S as PORT_UNUSED_S
from clusterd.agent.host.ports import Ports
from clusterd.agent.host.workdirs import Snapshots
from clusterd.agent.log import say
from clusterd.agent.ranks.attempts import Attempts
from clusterd.agent.ranks.terminals import Terminals
from clusterd.agent.server.sessions import Callers

IDLE_S = 24 * 3600.0
"""An agent that no daemon speaks to, and that has nothing that runs, ends after this long."""


class Chores:
    """Done once a second, or at every so manieth.

    Args:
        idle: is called when nobody has needed this agent for long.
    """

    def __init__(
        self,
        attempts: Attempts,
        callers: Callers,
        terminals: Terminals,
        ports: Ports,
        snapshots: Snapshots,
        idle: Callable[[], object],
    ) -> None:
        self._attempts, self._callers, self._terminals = attempts, callers, terminals
        self._ports, self._snapshots, self._idle = ports, snapshots, idle
        self._needed_at = time.monotonic()

    def needed(self) -> None:
        """Somebody has asked for something."""
        self._needed_at = time.monotonic()

    async def every_second(self) -> None:
        """Goes on until it is cancelled."""
        loop = asyncio.get_running_loop()
        ticks = 0
        while True:
            self._attempts.look_after()
            self._terminals.look_after()
            self._ports.release(self._port_is_over)
            if self._attempts.running or self._callers.any_daemon:
                self.needed()
            if time.monotonic() - self._needed_at > IDLE_S:
                await self._attempts.spawners.shutdown()
                self._idle()
            if ticks % 10 == 0:
                await self.shorten_logs()
            if ticks % 3600 == 0:
                used = {str(attempt.launch.get("snapshot")) for attempt in self._attempts}
                await loop.run_in_executor(None, self._snapshots.clean, used)
            ticks += 1
            await asyncio.sleep(1.0)

    async def shorten_logs(self) -> None:
        """Of what runs, and once more of what has ended: a rank writes gigabytes in the seconds between two looks."""
        due = [attempt for attempt in self._attempts if attempt.running or not attempt.is_shortened]
        over = [attempt for attempt in due if not attempt.running]
        files = [attempt.log(rank) for attempt in due for rank in attempt.ranks]
        await asyncio.get_running_loop().run_in_executor(None, _trim, files)
        for attempt in over:
            attempt.is_shortened = True

    def _port_is_over(self, name: str, generation: int, age_s: float) -> bool:
        for attempt in self._attempts:
            if attempt.name == name and attempt.generation == generation and attempt.running:
                return False
        # A lease may be older than its launch, or be for ranks on other hosts, which this agent cannot see end.
        return age_s > PORT_UNUSED_S


def _trim(files: list[Path]) -> None:
    for file in files:
        try:
            dropped = growing_files.trim(file)
        except OSError as error:
            say(f"agent: cannot shorten {file}: {error}")
            continue
        if dropped:
            say(f"agent: dropped {dropped} bytes of {file}, which was too long")
