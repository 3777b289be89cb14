"""Records of launches that agents keep for a daemon whose journal is older: the job as of that launch, and its secrets.

They are encrypted with the key of the state directory: hosts cannot read them, nor make a job up.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from clusterd.core.lifecycle.reconcile import is_adoptable
from clusterd.core.state import Job
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.journal.journal import Journal, Statement
from clusterd.daemon.journal.secrets_key import SecretsKey
from clusterd.errors import AgentLost, ClusterError
from clusterd.protocol.requests import ReadRecord, Record
from clusterd.types import AttemptReport, HostId, JobId

log = logging.getLogger(__name__)


class LaunchRecord(msgspec.Struct, frozen=True):
    """A job at one of its launches, and its secrets as the journal has them."""

    job: Job
    secrets: dict[str, str] = {}


class LaunchRecords:
    """Makes the records that go with launches, and reads those of jobs that this state does not know."""

    def __init__(self, engine: Engine, journal: Journal, key: SecretsKey) -> None:
        self._engine, self._journal, self._key = engine, journal, key

    async def make(self, job: JobId) -> bytes:
        """Record of a job as it is now."""
        rows = await self._journal.query("SELECT name, value FROM secrets WHERE job = ?", (job,))
        record = LaunchRecord(self._engine.state.jobs[job], dict(rows))
        return self._key.seal(zlib.compress(msgspec.msgpack.encode(record)))

    async def adoptable(
        self,
        host: HostId,
        account: str,
        reports: Iterable[AttemptReport],
        read: Callable[[ReadRecord], Awaitable[Record]],
    ) -> list[LaunchRecord]:
        """Records of jobs that an agent runs and that are newer than this state, each as of its newest launch.

        Args:
            account: of the agent; records of another account's jobs are refused.
            read: asks the agent.
        Raises:
            AgentLost: the link broke.
        """
        newest: dict[JobId, AttemptReport] = {}
        for report in sorted(reports, key=lambda report: (report.attempt, report.generation)):
            if is_adoptable(self._engine.state, report):
                newest[report.job] = report
        found = []
        for job, report in newest.items():
            try:
                answer = await read(ReadRecord(job, report.attempt, report.generation))
                record = self._opened(answer.data)
                if (record.job.id, record.job.spec.account) != (job, account):
                    raise ClusterError("it is of another job or account")
                found.append(record)
            except AgentLost:
                raise
            except ClusterError as error:
                log.warning("job %s on %s is newer than this state and cannot be adopted: %s", job, host, error)
        return found

    def _opened(self, data: bytes) -> LaunchRecord:
        if not data:
            raise ClusterError("its agent has no record of the launch")
        try:
            return msgspec.msgpack.decode(zlib.decompress(self._key.open(data)), type=LaunchRecord)
        except (zlib.error, msgspec.DecodeError) as error:
            raise ClusterError(f"the record of its launch is of another version of clusterd: {error}") from None


def secret_rows(records: Iterable[LaunchRecord]) -> list[Statement]:
    """Statements that put the secrets of adopted jobs into the journal."""
    statement = "INSERT OR REPLACE INTO secrets VALUES (?, ?, ?)"
    return [(statement, (record.job.id, name, value)) for record in records for name, value in record.secrets.items()]
