"""Reports of ranks to the daemon: training progress, and exits once leftover processes are gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from clusterd.agent.background_tasks import Background
from clusterd.agent.host import processes
from clusterd.agent.host.attempt_records import Attempt, Rank, steps_after
from clusterd.agent.host.home import no_space
from clusterd.agent.ranks import containers, stopping
from clusterd.exit_reasons import Reason
from clusterd.protocol import agent
from clusterd.protocol.agent import RankExited
from clusterd.protocol.forkserver import RankRecord
from clusterd.protocol.messages import Event

STRAGGLER_GRACE_S = 1.0
"""Processes that outlive the last rank of an attempt get SIGTERM, and SIGKILL after this long."""

CLEAR_S = 10.0
"""The exit of one of several ranks is reported after this long at the latest: its peers wait for the report."""

Emit = Callable[[Event], object]


class ExitReports:
    """Exit reports of the ranks of all attempts.

    Args:
        emit: sends an event to the daemon, if one is connected.
        before_end: called before an exit report is sent, to send the rank's last progress first.
        tag: returns the tag of an attempt's processes, by attempt name.
    """

    def __init__(
        self, emit: Emit, before_end: Callable[[Attempt], None], tag: Callable[[str], str], background: Background
    ) -> None:
        self._emit = emit
        self._before_end = before_end
        self._tag = tag
        self._background = background

    def poll(self, attempt: Attempt) -> None:
        """Detect ranks that exited without a report."""
        for rank in attempt.ranks.values():
            if rank.state == "running" and rank.end is None and (record := _exit_record(attempt, rank)):
                self.add(attempt, rank, record)

    def add(self, attempt: Attempt, rank: Rank, record: RankRecord) -> None:
        """Take the exit record of a rank."""
        if rank.end is None and rank.state != "exited":
            rank.end = record
            if not attempt.lock.locked():
                self.flush(attempt)

    def flush(self, attempt: Attempt) -> None:
        """Send the collected exits; the last one after the sweep of the attempt, because it frees the devices."""
        if any(rank.state == "running" and rank.end is None for rank in attempt.ranks.values()):
            for rank in attempt.ranks.values():
                if rank.end is not None:
                    self._background.start(self._clear_and_report(attempt, rank))
        elif any(rank.end for rank in attempt.ranks.values()):
            self._background.start(self._sweep_and_report(attempt))

    def report_all(self, attempt: Attempt) -> None:
        """Send all collected exits now."""
        for rank in attempt.ranks.values():
            self._report(attempt, rank)

    async def wait_for(self, attempt: Attempt, rank: Rank) -> RankRecord:
        """Wait for the exit record from the fork server: on disk, or as an event if the disk is full."""
        while (record := rank.end or _exit_record(attempt, rank)) is None:  # noqa: ASYNC110  # it waits for a file
            await asyncio.sleep(0.01)
        return record

    async def _clear_and_report(self, attempt: Attempt, rank: Rank) -> None:
        """Report one of several ranks; if it failed, kill its leftovers first: a replacement may start at once."""
        died = rank.end is not None and rank.end.exit_code != 0 and attempt.launch.kind == "elastic"
        if died and rank.pid in attempt.sessions:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):  # two distinct classes in Python 3.10
                await asyncio.wait_for(stopping.clear_session(rank.pid, self._tag(attempt.name)), CLEAR_S)
        self._report(attempt, rank)

    async def _sweep_and_report(self, attempt: Attempt) -> None:
        async with attempt.lock:
            await stopping.sweep(self._tag(attempt.name), STRAGGLER_GRACE_S, attempt.sessions, attempt.cgroups)
            await containers.remove(self._tag(attempt.name), containers.runtime_of(attempt.launch.container))
            self.report_all(attempt)

    def _report(self, attempt: Attempt, rank: Rank) -> None:
        if rank.end is None:
            return
        self._before_end(attempt)
        rank.take(attempt.judged(rank.end))
        if attempt.launch.container and not rank.message:
            rank.message = containers.start_failure(
                attempt.launch.container, rank.exit_code, _last_lines(attempt, rank)
            )
        if rank.exit_code != 0 and rank.reason in (Reason.EXIT, Reason.SIGNAL) and not rank.message:
            rank.message = no_space(attempt.directory)  # for which its log had no room either
        rank.end = None
        self._send(attempt, rank)

    def repeat(self, attempt: Attempt) -> None:
        """Send the exits of ranks that ended before their launch was asked for again, as after a broken connection.

        The daemon waits for that launch alone: it would take these ranks for running, and hold their devices for ever.
        """
        for rank in attempt.ranks.values():
            if rank.state != "running" and rank.pid:  # without a pid it was never started
                self._send(attempt, rank)

    def _send(self, attempt: Attempt, rank: Rank) -> None:
        named = (attempt.job, attempt.attempt, attempt.generation, rank.rank)
        reason, message = rank.reason or Reason.LOST, rank.message or ""
        self._emit(RankExited(*named, reason, rank.exit_code, rank.signal, rank.at_s, message))


def _last_lines(attempt: Attempt, rank: Rank) -> list[str]:
    try:
        with open(attempt.log(rank.rank), "rb") as log:
            log.seek(max(log.seek(0, 2) - 4096, 0))
            return log.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _exit_record(attempt: Attempt, rank: Rank) -> RankRecord | None:
    """Exit record of a rank; None while it runs or its fork server has yet to write the record."""
    if processes.lives(rank.pid, rank.start_time, rank.boot_id):
        return None
    server_lives = processes.lives(
        rank.spawner.pid, rank.spawner.start_time, rank.boot_id
    )  # checked before the file: the server writes before it exits
    record = attempt.read_rank(rank.rank)
    if record is not None and record.state == "exited":
        return record
    return None if server_lives else rank.lost(time.time())


PROGRESS_PERIOD_S = 0.5
_DETAILS = ("phases", "device_bytes", "host_bytes", "overhead_bytes")


class Progress:
    """Follows the step files by polling, because inotify misses changes on network file systems.

    Args:
        emit: sends an event to the daemon; false: none took it, and its step counts as not sent.
    """

    def __init__(self, emit: Callable[[Event], bool]) -> None:
        self._emit = emit
        self._sizes: dict[str, int] = {}

    async def follow(self, attempts: Iterable[Attempt]) -> None:
        """Poll running attempts until cancelled."""
        while True:
            for attempt in attempts:
                if attempt.running:
                    self.poll(attempt)
            await asyncio.sleep(PROGRESS_PERIOD_S)

    def poll(self, attempt: Attempt) -> None:
        """Send the newest step if it was not sent before."""
        try:
            size = os.stat(attempt.steps).st_size
        except OSError:
            return
        if size == self._sizes.get(attempt.name):
            return
        steps, end = steps_after(attempt.steps, self._sizes.get(attempt.name, 0))
        if not steps:
            self._sizes[attempt.name] = end
            return
        step = steps[-1]
        details: dict[str, Any] = next((s for s in reversed(steps) if "phases" in s), {})
        report = agent.Progress(
            attempt.job,
            attempt.attempt,
            attempt.generation,
            step=step["step"],
            loss=step.get("loss"),
            is_nan="loss" in step and step["loss"] is None,
            step_time_s=step["time_s"],
            steps=tuple((s["step"], s["time_s"]) for s in steps if s.get("plan") == step.get("plan")),
            plan=step.get("plan") or "",
            samples=step.get("samples"),
            at_s=step.get("at_s"),
            **{k: details[k] for k in _DETAILS if k in details},
        )
        if self._emit(report):
            self._sizes[attempt.name] = end

    def forget(self, name: str) -> None:
        """Drop the read position of an attempt that was removed."""
        self._sizes.pop(name, None)
