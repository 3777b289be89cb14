"""Ids of jobs, each given out once: by a daemon, too, whose state is older than what files and hosts remember."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from clusterd.types import JobId

log = logging.getLogger(__name__)


class JobNumbers:
    """Whole numbers from 1 on; what a job is called in logs, on hosts, and in checkpoints."""

    def __init__(self, known: Iterable[str]) -> None:
        self._last = max((int(job) for job in known if job.isdecimal()), default=0)

    def next(self) -> JobId:
        """One that nobody has had."""
        self._last += 1
        return JobId(str(self._last))

    def seen(self, job: str, where: str) -> None:
        """Somebody remembers this job; a state that does not was restored from a backup."""
        if job.isdecimal() and int(job) > self._last:
            log.warning("%s remembers job %s, and this state is older: new jobs get higher numbers", where, job)
            self._last = int(job)
