"""Ending an attempt so that nothing of it is left: asked, told, killed, and then looked for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Set

from clusterd.agent.host import processes

_TICK_S = 0.02


async def end_ranks(
    leaders: Callable[[], list[tuple[int, int]]],
    sessions: Set[int],
    tag: str,
    grace: Callable[[], float],
    ask: Callable[[], set[int]],
    unheeded: Callable[[int, int, float], None],
) -> list[int]:
    """End these ranks, and everything that carries `tag`; returns the pids that outlived their rank.

    Ranks that can be asked over their control socket have the first half of the grace to finish their step; then, or at
    once, their sessions get SIGTERM; at the end of the grace SIGKILL. Returns only when nothing with the tag is left,
    however long that takes: a process that the kernel cannot end now still holds its device.

    Args:
        leaders: pid and start time of each rank that still runs, each the leader of its session.
        sessions: of all ranks, also of those that have ended.
        grace: seconds from the beginning; asked again and again, for somebody may cut it short.
        ask: sends the control message, and returns the pids of the ranks that got it.
        unheeded: is told of pid and start time of each rank that was asked in vain, and of the seconds that it had.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    asked = ask() if grace() > 0 else set()
    told: set[int] = set()
    late = False
    while left := leaders():
        elapsed, grace_s = loop.time() - begun, grace()
        if elapsed >= grace_s:
            break
        if not late and elapsed >= grace_s / 2:
            late = True
            for pid, start_time in left:
                if pid in asked:
                    unheeded(pid, start_time, elapsed)
            await asyncio.sleep(_TICK_S)  # what they show is shown before they are told to end
        for pid, start_time in left:
            if pid not in told and (pid not in asked or elapsed >= grace_s / 2):
                told.add(pid)
                signal_session(pid, start_time, signal.SIGTERM)
        await asyncio.sleep(_TICK_S)
    while left := leaders():
        for pid, start_time in left:
            signal_session(pid, start_time, signal.SIGKILL)
        await asyncio.sleep(_TICK_S)
    remaining_s = max(0.0, min(1.0, grace() - (loop.time() - begun)))
    return await sweep(tag, remaining_s, sessions)


def signal_session(leader: int, start_time: int, number: int) -> None:
    """Signal a rank and all of its session: its process group, and groups that a shell in it made."""
    if not processes.lives(leader, start_time):
        return
    members = processes.in_session(leader)
    processes.send(leader, start_time, number)  # first: a shell would remark on the end of its child
    for pid in members:
        if pid != leader and (found := processes.stat(pid)) and found.session == leader:
            processes.send(pid, found.start_time, number)


async def sweep(tag: str, grace_s: float, sessions: Set[int] = frozenset()) -> list[int]:
    """End whatever carries `tag`, wherever it was re-parented to; the pids found.

    Looks again until a look finds nothing: what is being killed may fork, and its child be missed by one look. Waits
    for what is on its way out in these sessions: it may still hold a device.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    found: set[int] = set()
    told: set[int] = set()
    pause_s = _TICK_S
    while True:
        left = await loop.run_in_executor(None, lambda: [*processes.tagged(tag), *processes.ending(sessions)])
        if not left:
            return sorted(found)
        found.update(left)
        late = loop.time() - begun >= grace_s
        for pid in left:
            if late:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            elif pid not in told:
                told.add(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGTERM)
        await asyncio.sleep(pause_s)
        if late:
            pause_s = min(pause_s * 1.5, 1.0)


async def clear_session(leader: int, tag: str) -> None:
    """Kill what a rank that is dead has left in its session, and wait until it holds nothing any more.

    Args:
        tag: what the rank's processes carry, for its pid may by now be another's.
    """
    loop = asyncio.get_running_loop()
    while left := await loop.run_in_executor(None, _left_in, leader, tag):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(_TICK_S)


def _left_in(session: int, tag: str) -> list[int]:
    members = set(processes.in_session(session))
    return [pid for pid in processes.tagged(tag) if pid in members] + processes.ending({session})
