"""Hardware facts and use of this host, sent to daemons on request and when they change."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from clusterd.agent.background_tasks import in_thread
from clusterd.agent.host import facts, processes
from clusterd.agent.host.attempt_records import Attempt
from clusterd.agent.host.gpu_probe import Probe
from clusterd.agent.ranks import containers
from clusterd.agent.ranks.attempts import Attempts
from clusterd.agent.server import environment_limits
from clusterd.agent.server.connection import Message, Sessions
from clusterd.protocol.agent import AttemptUse, DeviceUse, FactsChanged, Usage
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
        self._attempts.gpu_cores = facts.cores_by_gpu(found["gpus"], found["cpu_ids"])
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
            gpu.get("notes"),
            sorted((p["pid"], p["ours"], 0 if p["ours"] else (p["memory_bytes"] or 0) >> 28) for p in gpu["processes"]),
        )
        for gpu in found["gpus"]
    ]
    return (found["gpu_error"], devices, found["cpu_ids"])


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class CpuUse:
    """Measures processor time since the previous sample.

    Processor time of a process that ended between two samples is not counted.

    Args:
        tag: returns the tag that processes of an attempt carry, by its name.
    """

    def __init__(self, tag: Callable[[str], str]) -> None:
        self._tag = tag
        self._sessions: dict[int, str | None] = {}  # tag of each session at the previous sample; None: it had none
        self._at_s = time.monotonic()
        self._ticks: dict[int, int] | None = None  # by process, at the previous sample; None: there was none

    def sample(self, attempts: Iterable[Attempt], gpus: Iterable[Mapping[str, Any]] = ()) -> tuple[AttemptUse, ...]:
        """Use by each running attempt, of all processes in the sessions of its ranks and of shells beside them.

        Args:
            gpus: with the processes that hold memory of each, as their driver lists them.
        """
        running = [attempt for attempt in attempts if attempt.running]
        of_ranks = {session: attempt for attempt in running for session in attempt.sessions}
        tagged = {self._tag(attempt.name): attempt for attempt in running}
        tags: dict[int, str | None] = {}
        now_s = time.monotonic()
        elapsed_s, self._at_s = max(now_s - self._at_s, 1e-3), now_s
        before = self._ticks
        ticks: dict[int, int] = {}
        cores: dict[str, float] = {}
        memory: dict[str, int] = {}
        known: dict[str, Attempt] = {}
        on_gpu: dict[str, dict[str, int]] = {}
        held_by: dict[int, list[tuple[str, int]]] = {}
        for gpu in gpus:
            for process in gpu["processes"]:
                if process["memory_bytes"] is not None:
                    held_by.setdefault(process["pid"], []).append((str(gpu["uuid"]), process["memory_bytes"]))
        for pid in processes.everyone():
            found = processes.stat(pid)
            if found is None:
                continue
            attempt = of_ranks.get(found.session)
            if attempt is None and tagged:
                if found.session not in tags:  # one that had none may have been looked at before it ran its program
                    tags[found.session] = self._sessions.get(found.session) or processes.tag_of(pid)
                attempt = tagged.get(tags[found.session] or "")
            if attempt is None:
                continue
            ticks[pid] = found.cpu_ticks
            name = attempt.name
            known[name] = attempt
            # One that was not there at the previous sample has used all of its time since.
            delta = max(found.cpu_ticks - before.get(pid, 0), 0) if before is not None else 0
            cores[name] = cores.get(name, 0.0) + delta / _TICKS_PER_S / elapsed_s
            memory[name] = memory.get(name, 0) + found.resident_pages * _PAGE_BYTES
            for uuid, held in held_by.get(pid, ()):
                mine = on_gpu.setdefault(name, {})
                mine[uuid] = mine.get(uuid, 0) + held
        self._ticks, self._sessions = ticks, tags
        return tuple(
            AttemptUse(each.job, each.attempt, round(cores[name], 3), memory[name], on_gpu.get(name, {}))
            for name, each in known.items()
        )


def device_uses(gpus: Iterable[Mapping[str, object]]) -> tuple[DeviceUse, ...]:
    """Use of the GPUs as their driver reported it with the facts."""
    return tuple(
        DeviceUse(
            str(gpu["uuid"]),
            busy=_number(gpu.get("utilisation")),
            memory_used_bytes=_whole(gpu.get("memory_used_bytes")),
            power_w=_number(gpu.get("power_w")),
            temperature_c=_number(gpu.get("temperature_c")),
        )
        for gpu in gpus
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None
