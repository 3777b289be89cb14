"""What a host is and has, for the daemons that ask, and told to them when it changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from clusterd.agent.host import facts
from clusterd.agent.host.nvml import Probe
from clusterd.agent.ranks.attempts import Attempts
from clusterd.agent.server.connection import Message
from clusterd.agent.server.sessions import Callers

PERIOD_S = 10.0


class Hardware:
    """What this host is and has, asked for each time.

    Args:
        disk: a path on the file system that jobs write to.
    """

    def __init__(self, attempts: Attempts, disk: Path) -> None:
        self._attempts = attempts
        self._disk = disk
        self._probe = Probe()

    async def facts(self) -> Message:
        """The Facts of the protocol."""
        held = {uuid for attempt in self._attempts for uuid in attempt.held}
        found = await asyncio.get_running_loop().run_in_executor(None, facts.gather, self._probe, self._disk, held)
        # One that does not answer may be counted here and not by CUDA.
        self._attempts.gpu_indices = (
            {} if found["gpu_error"] else {gpu["uuid"]: int(gpu["index"]) for gpu in found["gpus"]}
        )
        return found

    async def watch(self, callers: Callers) -> None:
        """Tell daemons when devices, or foreign use of them, changed."""
        told: object = None
        while True:
            await asyncio.sleep(PERIOD_S)
            if not callers.any_daemon:
                continue
            found = await self.facts()
            seen = _worth_telling(found)
            if told is not None and seen != told:
                callers.tell_daemons({"event": "facts", "facts": found})
            told = seen


def _worth_telling(found: Message) -> object:
    """Devices, and what others hold of them; our own ranks' memory changes all the time and is no news."""
    devices = [
        (
            gpu["uuid"],
            gpu["unlisted_bytes"] >> 28,
            sorted((p["pid"], (p["memory_bytes"] or 0) >> 28) for p in gpu["processes"] if not p["ours"]),
        )
        for gpu in found["gpus"]
    ]
    return (found["gpu_error"], devices, found["cpu_ids"])
