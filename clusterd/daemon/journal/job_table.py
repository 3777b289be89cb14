"""Table of archived jobs: jobs that ended long ago, each as it was when it left the scheduler's state."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from clusterd.core.state import Job
from clusterd.daemon.journal import codec
from clusterd.daemon.journal.checksums import Damaged, of_body
from clusterd.types import JobId

SCHEMA = (
    """
    CREATE TABLE IF NOT EXISTS archived_jobs (
        job TEXT PRIMARY KEY, name TEXT NOT NULL, user TEXT NOT NULL, state TEXT NOT NULL, array_id TEXT,
        array_name TEXT, task INTEGER, workdir TEXT, ended_s REAL NOT NULL, body BLOB NOT NULL, checksum BLOB NOT NULL
    )
    """,
    "CREATE INDEX IF NOT EXISTS archived_jobs_in_order ON archived_jobs (length(job), job)",
    "CREATE INDEX IF NOT EXISTS archived_jobs_by_name ON archived_jobs (name, user)",
    "CREATE INDEX IF NOT EXISTS archived_jobs_by_array ON archived_jobs (array_id, task)",
    "CREATE INDEX IF NOT EXISTS archived_jobs_by_end ON archived_jobs (ended_s)",
    "CREATE INDEX IF NOT EXISTS archived_jobs_by_state ON archived_jobs (state)",
)

COLUMNS = "job, body, checksum"
"""Columns that `decoded` takes, first in a row."""

IN_ORDER, NEWEST_FIRST = "length(job), job", "length(job) DESC, job DESC"
"""Order of submission: ids are whole numbers, each given out once."""


def insert(job: Job) -> tuple[str, tuple[Any, ...]]:
    """Statement that stores a job."""
    body, array = zlib.compress(codec.encode(job), 1), job.spec.array  # a third of its bytes
    row = (
        job.id,
        job.spec.name,
        job.spec.user,
        job.state.value,
        array.id if array is not None else None,
        array.name if array is not None else None,
        array.index if array is not None else None,
        job.spec.snapshot,
        job.ended_s or 0.0,
        body,
        of_body(body),
    )
    return f"INSERT OR REPLACE INTO archived_jobs VALUES ({', '.join('?' * len(row))})", row


def delete(job: JobId) -> tuple[str, tuple[Any, ...]]:
    """Statement that removes a job, which goes back to the state."""
    return "DELETE FROM archived_jobs WHERE job = ?", (job,)


def decoded(row: tuple[Any, ...]) -> Job:
    """Job of a row of `COLUMNS`.

    Raises:
        Damaged: the row does not match its checksum, or this version cannot read it.
    """
    job, body, checksum = row[:3]
    try:
        if of_body(body) == checksum:
            return codec.job(zlib.decompress(body))
    except (zlib.error, TypeError, msgspec.ValidationError) as error:
        raise Damaged(f"archived job {job} cannot be read: {error}") from None
    raise Damaged(f"archived job {job} does not match its checksum")
