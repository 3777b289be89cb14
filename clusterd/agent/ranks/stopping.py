"""Stop an attempt completely: stop message, SIGTERM, SIGKILL, then a sweep for what it left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Set
from pathlib import Path

from clusterd.agent.host import cgroups, processes

_TICK_S = 0.02


async def end_ranks(
    leaders: Callable[[], list[tuple[int, int]]],
    sessions: Set[int],
    tag: str,
    groups: Set[Path],
    grace: Callable[[], float],
    ask: Callable[[], set[int]],
    on_timeout: Callable[[int, int, float], None],
) -> list[int]:
    """Stop these ranks and every other process of their attempt; return the pids that outlived their rank.

    Ranks connected over their control socket have the first half of the grace to finish their step. Then (others at
    once) their sessions get SIGTERM, and SIGKILL at the end of the grace. Returns only when no process of the
    attempt is left, however long that takes: a process that the kernel cannot end yet still holds its device.

    Args:
        leaders: pid and start time of each running rank, the leader of its session.
        sessions: session ids of all ranks, including exited ones.
        tag: of the attempt's processes.
        groups: control groups of all ranks.
        grace: seconds since the call; evaluated repeatedly, because it may be shortened.
        ask: sends the stop message; returns the pids of the ranks that got it.
        on_timeout: called with pid, start time and elapsed seconds of each rank that did not obey the stop message.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    for pid, start_time in leaders():  # a rank that somebody suspended could neither hear nor save
        signal_session(pid, start_time, signal.SIGCONT)
    asked = ask() if grace() > 0 else set()
    terminated: set[int] = set()
    half_elapsed = False
    while left := leaders():
        elapsed, grace_s = loop.time() - begun, grace()
        if elapsed >= grace_s:
            break
        if not half_elapsed and elapsed >= grace_s / 2:
            half_elapsed = True
            for pid, start_time in left:
                if pid in asked:
                    on_timeout(pid, start_time, elapsed)
            await asyncio.sleep(_TICK_S)  # lets them dump their threads before SIGTERM
        for pid, start_time in left:
            if pid not in terminated and (pid not in asked or elapsed >= grace_s / 2):
                terminated.add(pid)
                signal_session(pid, start_time, signal.SIGTERM)
        await asyncio.sleep(_TICK_S)
    while left := leaders():
        for pid, start_time in left:
            signal_session(pid, start_time, signal.SIGKILL)
        await asyncio.sleep(_TICK_S)
    remaining_s = max(0.0, min(1.0, grace() - (loop.time() - begun)))
    return await sweep(tag, remaining_s, sessions, groups)


def signal_session(leader: int, start_time: int, number: int, first_only: bool = False) -> None:
    """Signal a rank and its whole session, including process groups that a shell in it made.

    Args:
        first_only: not the session's other processes.
    """
    if not processes.lives(leader, start_time):
        return
    members = processes.in_session(leader) if not first_only else []
    processes.send(leader, start_time, number)  # first: a shell would log the death of its child
    for pid in members:
        if pid != leader and (found := processes.stat(pid)) and found.session == leader:
            processes.send(pid, found.start_time, number)


async def sweep(
    tag: str, grace_s: float, sessions: Set[int] = frozenset(), groups: Set[Path] = frozenset()
) -> list[int]:
    """Kill every process of an attempt, wherever it was re-parented to; return the pids found.

    The members of its control groups, where it has some, and the processes with its tag or mark. Scans until one scan
    finds nothing: a process may fork while it is being killed, and one scan may miss the child. Also waits for exiting
    processes of `sessions` and `groups`, which may still hold a device.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    found: set[int] = set()
    terminated: set[int] = set()
    pause_s = _TICK_S
    while True:
        left = await loop.run_in_executor(None, _left_behind, tag, sessions, groups)
        if not left and not any(map(cgroups.is_populated, groups)):
            for group in groups:
                cgroups.remove(group)
            return sorted(found)
        found.update(left)
        expired = loop.time() - begun >= grace_s
        for group in groups if expired else ():
            cgroups.kill(group)
        for pid in left:
            if expired:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            elif pid not in terminated:
                terminated.add(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGTERM)
        await asyncio.sleep(pause_s)
        if expired:
            pause_s = min(pause_s * 1.5, 1.0)


def _left_behind(tag: str, sessions: Set[int], groups: Set[Path]) -> set[int]:
    members = {pid for group in groups for pid in cgroups.pids(group)}
    return {*processes.of_attempt(tag), *processes.ending(sessions), *members}


async def clear_session(leader: int, tag: str) -> None:
    """Kill the processes that a dead rank left in its session, and wait until they release their resources.

    Args:
        tag: tag of the rank's processes, because its pid may have been reused.
    """
    loop = asyncio.get_running_loop()
    while left := await loop.run_in_executor(None, _left_in, leader, tag):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(_TICK_S)


def _left_in(session: int, tag: str) -> list[int]:
    members = set(processes.in_session(session))
    return [pid for pid in processes.of_attempt(tag) if pid in members] + processes.ending({session})
