"""Hardware facts of this host, sent to daemons on request and when they change."""

from __future__ import annotations

import asyncio
from pathlib import Path

from clusterd.agent.host import facts
from clusterd.agent.host.gpu import topology
from clusterd.agent.host.gpu.probe import Probe
from clusterd.agent.host.usage import CpuUse, device_uses
from clusterd.agent.ranks import containers
from clusterd.agent.ranks.attempts import Attempts
from clusterd.agent.server import environment_limits
from clusterd.agent.server.connection import Message
from clusterd.agent.server.sessions import Sessions
from clusterd.agent.threads import in_thread
from clusterd.protocol.agent import FactsChanged, Usage
from clusterd.protocol.control import GpuState

PERIOD_S = 10.0


class Hardware:
    """Collects the facts of this host anew at each call.

    Args:
        disk: a path on the file system that jobs write to.
    """

    def __init__(self, attempts: Attempts, disk: Path) -> None:
        self._attempts = attempts
        self._disk = disk
        self._probe = Probe()
        self._runtimes: dict[str, str] = {}

    async def facts(self, *, anew: bool = True) -> Message:
        """Return the protocol's Facts message.

        Args:
            anew: ask the container runtimes, too, which may start a process for each.
        """
        held = {uuid for attempt in self._attempts for uuid in attempt.held}
        loop = asyncio.get_running_loop()
        whole = await loop.run_in_executor(None, facts.gather, self._probe, self._disk, held)
        found = environment_limits.restrict(whole, environment_limits.of_agent())
        if anew:
            self._runtimes = await in_thread(containers.runtimes, "runtimes")
        found["runtimes"] = dict(self._runtimes)
        self._attempts.gpu_cores = topology.cores_by_gpu(found["gpus"], found["cpu_ids"])
        # A GPU that does not answer may be numbered here and not by CUDA, as one with MIG on is.
        is_uncertain = found["gpu_error"] or any("slice" in gpu for gpu in found["gpus"])
        self._attempts.gpu_indices = {} if is_uncertain else {gpu["uuid"]: int(gpu["index"]) for gpu in found["gpus"]}
        return found

    async def inspect_gpu(self, uuid: str) -> GpuState:
        """State of a GPU on which a rank runs: its faults, and the memory that is not clusterd's."""
        found = await self.facts(anew=False)
        gpu = next((gpu for gpu in found["gpus"] if gpu["uuid"] == uuid), None)
        if gpu is None:
            return GpuState(found["gpu_error"] or "its driver does not list it any more")
        foreign = sum(process["memory_bytes"] or 0 for process in gpu["processes"] if not process["ours"])
        return GpuState(gpu.get("fault", ""), foreign + gpu["unlisted_bytes"])

    async def watch(self, sessions: Sessions) -> None:
        """Send samples of use, and facts to daemons whose last ones differ in devices, or in the processes on them."""
        cpu_use = CpuUse(self._attempts.tag)
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(PERIOD_S)
            if not sessions.any_daemon:
                continue
            found = await self.facts(anew=False)
            attempts = await loop.run_in_executor(None, cpu_use.sample, list(self._attempts), found["gpus"])
            used_bytes = found["memory_bytes"] - found["memory_available_bytes"]
            devices = device_uses(found["gpus"])
            sessions.send_to_daemons(Usage(found["cpu_cores"], found["memory_bytes"], used_bytes, devices, attempts))
            sessions.send_facts(FactsChanged(found), reportable(found))


def reportable(found: Message) -> object:
    """Facts whose change is reported: devices and their processes, not the ever-changing memory of our own ranks.

    The pids of those count: the host's other agents take them for foreign, and the daemon tells them by this report.
    """
    devices = [
        (
            gpu["uuid"],
            gpu["unlisted_bytes"] >> 28,
            gpu.get("fault"),
            gpu.get("xids"),
            gpu.get("ecc_corrected"),
            gpu.get("exclusive"),
            sorted((p["pid"], p["ours"], 0 if p["ours"] else (p["memory_bytes"] or 0) >> 28) for p in gpu["processes"]),
        )
        for gpu in found["gpus"]
    ]
    return (found["gpu_error"], devices, found["cpu_ids"])
