"""Leadership of one daemon over the agents of its cluster: identity, epoch and key, from the journal."""

from __future__ import annotations

import secrets
import time
import uuid

from clusterd.daemon.journal.engine import Engine
from clusterd.errors import HostError
from clusterd.ssh.host import Leader


class JournalHistory:
    """History of this daemon's events; an agent that has seen others refuses to be led by it.

    Args:
        epoch: of this daemon.
        restored: epoch of the last start with ``--restored``; 0: there was none.
    """

    def __init__(self, engine: Engine, epoch: int, restored: int) -> None:
        self._engine = engine
        self._epoch = epoch
        self._restored = restored

    def newest(self) -> tuple[int, str]:
        """Id and checksum of the newest event that was handled."""
        return self._engine.newest()

    async def check(self, epoch: int, event: int, checksum: str) -> None:
        """Check what an agent has seen: the epoch of its last daemon, and the newest event that this daemon named.

        Raises:
            HostError: a newer daemon leads, or the journal does not hold that event and was not restored on purpose.
        """
        if epoch > self._epoch:
            raise HostError(
                f"a newer daemon (epoch {epoch}) leads this host, and epoch {self._epoch} is over: clusterd stop; or, "
                "to take the hosts back from it: clusterd start --restored"
            )
        if self._restored > epoch or event == 0 or await self._engine.journal.has(event, checksum):
            return
        raise HostError(
            f"its agent knows event {event} of this cluster, which this daemon's journal does not hold (it ends at "
            f"event {self.newest()[0]}): the journal is an older copy; if it was restored from a backup on purpose: "
            "clusterd stop; clusterd start --restored"
        )


async def take_the_lead(engine: Engine, is_restored: bool) -> Leader:
    """Read the cluster's identity from the journal, or make it, and open the next epoch.

    Args:
        is_restored: hosts may have been led by daemons that are newer than the state.
    """
    journal, last_epoch = engine.journal, engine.scheduler.state.epoch
    cluster = journal.fact("cluster", uuid.uuid4().hex[:12])
    # Clusters of earlier versions have jobs under agents that were made for all clusters of a user.
    agents_of = journal.fact("agents_of", "" if last_epoch else cluster)
    epoch = max(last_epoch + 1, int(time.time()) if is_restored else 0)
    agent_key = journal.fact("agent_key", secrets.token_hex(32))
    if is_restored:
        await journal.keep_fact("restored", str(epoch))
    history = JournalHistory(engine, epoch, restored=int(journal.fact("restored", "0")))
    return Leader(cluster, epoch, agent_key, agents_of, history)
