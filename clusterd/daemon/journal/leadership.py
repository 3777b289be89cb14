"""Leadership of one daemon over the agents of its cluster: identity, epoch and key, and the newest event it handled."""

from __future__ import annotations

import logging
import os
import secrets
import time
import uuid
from pathlib import Path

from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.journal.journal import Journal
from clusterd.errors import ClusterError, HostError
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
    journal, last_epoch = engine.journal, engine.state.epoch
    cluster = journal.fact("cluster", uuid.uuid4().hex[:12])
    # Clusters of earlier versions have jobs under agents that were made for all clusters of a user.
    agents_of = journal.fact("agents_of", "" if last_epoch else cluster)
    epoch = max(last_epoch + 1, int(time.time()) if is_restored else 0)
    agent_key = journal.fact("agent_key", secrets.token_hex(32))
    if is_restored:
        await journal.keep_fact("restored", str(epoch))
    history = JournalHistory(engine, epoch, restored=int(journal.fact("restored", "0")))
    return Leader(cluster, epoch, agent_key, agents_of, history)


log = logging.getLogger(__name__)

NEWEST_EVENT = "newest_event"
"""Name of the file in a state directory; a directory without one was never led from."""

BACKUP_OF = "backup_of"
"""Fact in the journal of a backup: the state directory that it is of."""


class NewestEvent:
    """The file, which a running daemon overwrites in place: its content is at most a batch behind the journal."""

    def __init__(self, directory: Path) -> None:
        try:
            self._file = os.open(directory / NEWEST_EVENT, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ClusterError(f"{error.filename}: {error.strerror}: make it a writable file, or remove it") from None

    async def check(self, journal: Journal) -> None:
        """Check that the journal goes on from where the last daemon in this directory was.

        Raises:
            ClusterError: it is a backup, or an older copy.
        """
        if origin := journal.fact(BACKUP_OF, ""):
            raise ClusterError(
                f"{journal.path.parent} is a backup of {origin}: clusterd start --restored leads the hosts from it, "
                "and ends the lead of the daemon that it was taken from"
            )
        event, _, checksum = os.pread(self._file, 200, 0).decode(errors="replace").strip().partition(" ")
        if event.isdigit() and int(event) and not await journal.has(int(event), checksum):
            raise ClusterError(
                f"{journal.path} is an older copy: a daemon here came to event {event}, and it ends at event "
                f"{journal.last_event_id()}; if it was restored from a backup on purpose: clusterd start --restored"
            )

    def write(self, event: int, checksum: str) -> None:
        """Store the newest event; the width is fixed, so that a later one covers an earlier one."""
        try:
            os.pwrite(self._file, f"{event:>20} {checksum:<64}\n".encode(), 0)
        except OSError as error:  # the agents know the newest event, too
            log.debug("the newest event could not be written: %s", error)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
