"""Links to agents, as the registry and the accounts both use them: kept running, counted, shut down."""

from __future__ import annotations

import logging
from collections import Counter

import anyio

from clusterd.errors import ClusterError
from clusterd.ssh.host import HostLink

log = logging.getLogger(__name__)

LINK_FAILED_PAUSE_S = 5.0
SHUTDOWN_S = 5.0


async def keep_running(link: HostLink) -> None:
    """Run a link until cancelled.

    One agent's message must not end the daemon: after an unexpected error the link starts over, and the agent reports
    again.
    """
    while True:
        try:
            await link.run()
        except Exception:
            log.exception("the link to %s failed", link.name)
            await anyio.sleep(LINK_FAILED_PAUSE_S)


async def shut_down(link: HostLink) -> bool:
    """Shut down an agent; False while it cannot be reached."""
    with anyio.move_on_after(SHUTDOWN_S):
        try:
            await link.request("shutdown", timeout_s=SHUTDOWN_S, force=False)
            return True
        except ClusterError as error:
            log.info("an agent of %s was not shut down: %s", link.name, error)
    return False


class DroppedMessages:
    """Log of messages that were not handled, by sender."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()

    def add(self, sender: str, why: object) -> None:
        """Log a dropped message: the 1st, 2nd, 4th, ... of a sender, as a job must not fill the log either."""
        self._count[sender] += 1
        if self._count[sender].bit_count() == 1:
            log.warning("%s: dropped a malformed message (%d so far): %s", sender, self._count[sender], why)
