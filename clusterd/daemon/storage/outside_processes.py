"""Notifications to people whose processes hold a GPU outside the queue.

Nothing is done to the processes: the operator's own command, which reads each notification, may.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable

import anyio

from clusterd.daemon.hosts.facts import OutsideProcess
from clusterd.daemon.notifications import Notification
from clusterd.units import duration, size

EVERY_S = 10.0
"""Agents report as often."""


class OutsideProcesses:
    """Tells once of each process that has held a GPU for so long.

    Args:
        found: processes of now.
        tell: queues a notification.
        exempt: users who are not told.
    """

    def __init__(
        self,
        found: Callable[[], Iterable[OutsideProcess]],
        tell: Callable[[Notification], None],
        after_s: float,
        exempt: Container[str],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._found, self._tell, self._after_s, self._exempt = found, tell, after_s, exempt
        self._monotonic = monotonic
        self._since_s: dict[tuple[str, int, str], float] = {}  # by host, process and device; infinite: told of

    async def run(self) -> None:
        """Observe until cancelled."""
        while True:
            await anyio.sleep(EVERY_S)
            self.observe()

    def observe(self) -> None:
        """Tell of the processes that have been there for long enough."""
        now_s, seen = self._monotonic(), dict[tuple[str, int, str], float]()
        for process in self._found():
            key = (process.host, process.pid, process.device)
            seen[key] = since_s = self._since_s.get(key, now_s)
            if now_s - since_s >= self._after_s and process.user not in self._exempt:
                seen[key] = float("inf")
                self._tell(_notification(process, now_s - since_s))
        self._since_s = seen


def _notification(process: OutsideProcess, for_s: float) -> Notification:
    text = (
        f"{process.user or 'somebody'} holds {size(process.memory_bytes)} of {process.device} outside the queue "
        f"for {duration(for_s)} (pid {process.pid}): clusterd run --gpus 1 -- COMMAND would find it a GPU of its own"
    )
    about = {"user": process.user, "pid": process.pid, "device": process.device, "hosts": [process.host]}
    return {"kind": "outside the queue", "text": text, **about}
