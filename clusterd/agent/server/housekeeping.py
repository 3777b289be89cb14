"""Periodic work of the agent: detect exited ranks, trim logs, remove what is unused, exit when idle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from clusterd.agent.host import append_only_files
from clusterd.agent.host.ports import UNUSED_S as PORT_UNUSED_S
from clusterd.agent.host.ports import Ports
from clusterd.agent.host.workdirs import Workdirs
from clusterd.agent.log import log_line
from clusterd.agent.ranks.attempts import Attempts
from clusterd.agent.ranks.environments import Environments
from clusterd.agent.ranks.terminals import Terminals
from clusterd.agent.server.sessions import Sessions

IDLE_S = 24 * 3600.0
"""An agent without a connected daemon and without running attempts exits after this long."""


class Housekeeping:
    """Runs every second; some of the work only every Nth tick.

    Args:
        idle: called once the agent was idle for `IDLE_S`.
    """

    def __init__(
        self,
        attempts: Attempts,
        sessions: Sessions,
        terminals: Terminals,
        ports: Ports,
        workdirs: Workdirs,
        environments: Environments,
        idle: Callable[[], object],
    ) -> None:
        self._attempts, self._sessions, self._terminals = attempts, sessions, terminals
        self._ports, self._workdirs, self._environments, self._idle = ports, workdirs, environments, idle
        self._needed_at = time.monotonic()

    def mark_needed(self) -> None:
        """Restart the idle timer, as after a request."""
        self._needed_at = time.monotonic()

    async def every_second(self) -> None:
        """Run until cancelled."""
        loop = asyncio.get_running_loop()
        ticks = 0
        while True:
            self._attempts.poll()
            self._terminals.poll()
            self._ports.release(self._port_is_unused)
            if self._attempts.running or self._sessions.any_daemon:
                self.mark_needed()
            if time.monotonic() - self._needed_at > IDLE_S:
                await self._attempts.fork_servers.shutdown()
                self._idle()
            if ticks % 10 == 0:
                await self.shorten_logs()
            if ticks % 3600 == 0:
                used = {attempt.launch.snapshot or "" for attempt in self._attempts}
                await loop.run_in_executor(None, self._workdirs.clean, used)
                pythons = [Path(a.launch.python) for a in self._attempts if a.running and a.launch.python]
                await loop.run_in_executor(None, self._environments.clean, pythons)
            ticks += 1
            await asyncio.sleep(1.0)

    async def shorten_logs(self) -> None:
        """Trim logs of running attempts, and once more after they end: a rank writes gigabytes within seconds."""
        due = [attempt for attempt in self._attempts if attempt.running or not attempt.is_shortened]
        ended = [attempt for attempt in due if not attempt.running]
        files = [attempt.log(rank) for attempt in due for rank in attempt.ranks]
        await asyncio.get_running_loop().run_in_executor(None, _trim, files)
        for attempt in ended:
            attempt.is_shortened = True

    def _port_is_unused(self, name: str, generation: int, age_s: float) -> bool:
        for attempt in self._attempts:
            if attempt.name == name and attempt.generation == generation and attempt.running:
                return False
        # A lease may precede its launch, or serve ranks on other hosts, whose exit this agent cannot observe.
        return age_s > PORT_UNUSED_S


def _trim(files: list[Path]) -> None:
    for file in files:
        try:
            dropped = append_only_files.trim(file)
        except OSError as error:
            log_line(f"agent: cannot shorten {file}: {error}")
            continue
        if dropped:
            log_line(f"agent: dropped {dropped} bytes of {file}, which was too long")
