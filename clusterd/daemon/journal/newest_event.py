"""Id and checksum of the newest event in a file beside the journal, by which an older copy of the journal shows."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from clusterd.daemon.journal.journal import Journal
from clusterd.errors import ClusterError

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
