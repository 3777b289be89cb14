"""Notifications about jobs and hosts, for a command of the operator's, and for services such as mail and chats."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import IO, Any

import anyio
import anyio.to_thread
import msgspec

from clusterd.config import Notify
from clusterd.core import story
from clusterd.core.decisions import Decision, EndJob, ReleaseBooked, RequeueJob
from clusterd.core.events import CheckpointFailed, CheckpointTaken, DeviceMemoryObserved, Event, IdlenessObserved
from clusterd.core.fair_share import budgets
from clusterd.core.state import Job, Outcome, State
from clusterd.process_attributes import inherited_umask
from clusterd.projection import newest_checkpoint
from clusterd.types import HostId, HostState, JobId
from clusterd.units import counted

log = logging.getLogger(__name__)

BUDGET_PARTS = (1.0, 0.8)
"""Parts of a month's device-hours at which people are told, the largest first."""

PATIENCE_S = 60.0
"""Time limit of the command, and of the services together."""
WAITING_MAX = 1000
"""Notifications that may wait; with a slow command the oldest are dropped."""

_BY_CHOICE = (Outcome.PREEMPTED, Outcome.REFUSED)
"""Outcomes of attempts that users need not hear about."""

Notification = dict[str, Any]


class Notifier:
    """Passes notifications on, one after the other."""

    def __init__(self, notify: Notify, state: State) -> None:
        self._notify, self._state = notify, state
        self._lost: set[HostId] = set()
        self._not_saved: set[JobId] = set()
        self._budgets: dict[str, float] = {}  # the part that was told of, by whose it is
        self._waiting: deque[Notification] = deque()
        self._wake = anyio.Event()

    def handled(self, events: Iterable[Event], decisions: Iterable[Decision]) -> None:
        """Queue the notifications of a handled batch."""
        for event in events:
            if isinstance(event, IdlenessObserved) and event.since_s is not None:
                line = story.of_event(event, self._state)
                self.tell(_of_job(self._state.jobs[event.job], "idle", f" is idle: {line.text}"))
            if isinstance(event, DeviceMemoryObserved) and event.used_bytes > event.part_bytes:
                line = story.of_event(event, self._state)
                self.tell(_of_job(self._state.jobs[event.job], "over its share", f": {line.text}"))
            if isinstance(event, CheckpointTaken):
                self._not_saved.discard(event.job)
            elif isinstance(event, CheckpointFailed) and event.job not in self._not_saved:
                self._not_saved.add(event.job)
                job, line = self._state.jobs[event.job], story.of_event(event, self._state)
                self.tell(_of_job(job, "not saved", f": {line.text} ({newest_checkpoint(job)})"))
        for decision in decisions:
            if isinstance(decision, EndJob):
                self._not_saved.discard(decision.job)
                self.tell(
                    _of_job(self._state.jobs[decision.job], decision.state, f" {decision.state}: {decision.reason}")
                )
            elif isinstance(decision, RequeueJob):
                job = self._state.jobs[decision.job]
                *before, last = (attempt.stop.outcome for attempt in job.attempts[: decision.attempt])
                if last not in _BY_CHOICE and not (last is Outcome.HOST_FULL and before[-1:] == [last]):
                    # The reason ends with where it goes on.
                    self.tell(_of_job(job, "queued again", f": {decision.reason}"))
            elif isinstance(decision, ReleaseBooked):
                self.tell({"kind": "booking released", "text": decision.reason, "user": decision.user})
        self._watch_budgets()
        for host in self._state.hosts.values():
            if host.state is HostState.LOST and host.id not in self._lost:
                self._lost.add(host.id)
                self.tell(_of_host("host lost", host.id, f"{host.id} is lost: {host.why}"))
            elif host.state is HostState.UP and host.id in self._lost:
                self._lost.remove(host.id)
                self.tell(_of_host("host back", host.id, f"{host.id} is back"))

    def _watch_budgets(self) -> None:
        """Queue a notification once much of a month's device-hours is used, and once all of them are."""
        for tenant, users in self._state.used.items():
            for user in users:
                for budget in budgets(self._state, tenant, user, time.time()):
                    part = next((part for part in BUDGET_PARTS if budget.used_hours >= part * budget.hours), 0.0)
                    if part > self._budgets.get(budget.who, 0.0):
                        text = f"{budget.who} has used {part:.0%} of the month's {budget.hours:g} device-hours"
                        self.tell({"kind": "budget", "text": text, "user": budget.user, "tenant": tenant, "hosts": []})
                    self._budgets[budget.who] = part

    async def run(self) -> None:
        """Send notifications until cancelled."""
        while True:
            await self.deliver()
            self._wake = anyio.Event()
            await self._wake.wait()

    async def deliver(self) -> None:
        """Pass on each waiting notification."""
        while self._waiting:
            notification = self._waiting.popleft()
            if self._notify.command:
                await self._run_command(notification)
            if urls := (*self._notify.urls, *self._notify.users.get(notification.get("user", ""), ())):
                await _send(urls, notification)

    def tell(self, notification: Notification) -> None:
        """Queue a notification, if its kind is to be told of."""
        if notification["kind"] not in self._notify.on:
            return
        if len(self._waiting) >= WAITING_MAX:
            dropped = self._waiting.popleft()
            log.warning("notify: too many wait; nobody is told that %s", dropped["text"])
        self._waiting.append({**notification, "at_s": time.time()})
        self._wake.set()

    async def _run_command(self, notification: Notification) -> None:
        command = self._notify.command
        # Files, not pipes: what the command leaves in the background may hold these for ever.
        with _file("news") as text, _file("said") as errors:
            text.write(msgspec.json.encode(notification) + b"\n")
            text.seek(0)
            try:
                code = await _run(command, text, errors)
            except (OSError, ValueError, TimeoutError) as error:
                log.error("notify: %s; it was to tell that %s", error, notification["text"])
                return
            if code:
                errors.seek(0)
                output = errors.read().decode(errors="replace").strip().splitlines()
                log.error("notify: %s ended with %d: %s", command[0], code, output[-1] if output else "it said nothing")


async def _send(urls: Sequence[str], notification: Notification) -> None:
    """Send to services, each in a thread of apprise's; failures are logged without the URLs, which hold passwords."""
    import apprise

    failed = 0
    with anyio.move_on_after(PATIENCE_S) as limit:
        for url in urls:
            service = apprise.Apprise(url)
            send = partial(service.notify, body=notification["text"], title="clusterd")
            failed += not await anyio.to_thread.run_sync(send, abandon_on_cancel=True)
    if failed or limit.cancelled_caught:
        why = "services are too slow" if limit.cancelled_caught else f"{counted(failed, 'service')} refused"
        log.error("notify: %s; it was to tell that %s", why, notification["text"])


def _file(name: str) -> IO[bytes]:
    """Anonymous file in memory: a full disk must not stop notifications about it."""
    return os.fdopen(os.memfd_create(name), "w+b")


async def _run(command: Sequence[str], text: IO[bytes], errors: IO[bytes]) -> int:
    """Run the command and return its exit code; its process group ends with its time limit, or with the daemon.

    Raises:
        TimeoutError: it took too long.
    """
    process = await anyio.open_process(
        command, stdin=text, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True, umask=inherited_umask()
    )
    try:
        with anyio.move_on_after(PATIENCE_S):
            return await process.wait()
        raise TimeoutError(f"{command[0]} was not done after {PATIENCE_S:.0f} s")
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself, and nobody heard of it yet
                os.killpg(process.pid, signal.SIGKILL)
            with anyio.CancelScope(shield=True):
                await process.wait()


def _of_job(job: Job, what: str, text: str) -> Notification:
    return {
        "kind": f"job {what}",
        "text": f"{job.spec.name} ({job.id}){text}",
        "job": job.id,
        "name": job.spec.name,
        "user": job.spec.user,
        "tenant": job.spec.tenant,
        "hosts": list(job.attempts[-1].hosts) if job.attempts else [],
        "exit_code": job.exit_code,
    }


def _of_host(kind: str, host: HostId, text: str) -> Notification:
    return {"kind": kind, "text": text, "hosts": [host]}
