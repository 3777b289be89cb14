"""Use of this host: processor time and memory of the host and of each attempt, between two samples."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from clusterd.agent.host import processes
from clusterd.agent.host.attempt_records import Attempt
from clusterd.protocol.agent import AttemptUse, DeviceUse

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
