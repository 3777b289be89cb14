"""Jobs that ended long ago: out of the scheduler's state, in a table of the journal, and back when somebody names one.

The state is in memory, in every journal snapshot and in many loops; a year of jobs would slow all of these. Both ways
are events, so that a replay leads to the same state.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import anyio
import anyio.lowlevel

from clusterd.core import events as e
from clusterd.core.lifecycle.job_events import archivable
from clusterd.core.queueing.arrays import find_task
from clusterd.core.state import Job
from clusterd.daemon.journal import job_table
from clusterd.daemon.journal.checksums import Damaged
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.journal.journal import Statement
from clusterd.errors import ClusterError, UsageError
from clusterd.types import JobId

EVERY_S = 60.0

ENDED_MAX = 5000
"""Jobs that are over and stay in the state, however recent they are, but for those of the last `LEAST_S`."""

LEAST_S = 600.0
"""Logs of a job that has just ended are still fetched from its hosts."""

RECALLED_S = 3600.0
"""Time for which a recalled job stays in the state: its files may be on the way to whoever asked for them."""

JOBS_AT_ONCE = 100


class ArchivedJobs:
    """Archives jobs that have been over for `after_s`, and finds archived ones.

    Args:
        hides_names: names are to be hidden from some users, and are kept for it.
    """

    def __init__(self, engine: Engine, after_s: float, hides_names: bool = False) -> None:
        self._engine, self._after_s, self._hides_names = engine, after_s, hides_names
        self._state = engine.state
        self._recalled_s: dict[JobId, float] = {}
        self._counts: Counter[str] = Counter()  # by state, without those on the way
        self._on_the_way: dict[JobId, str] = {}  # being archived or recalled, with their state
        self._moves_one = anyio.Lock()
        self.newest: JobId | None = None
        """The job that was submitted last of those that were archived at the start."""
        self.names: set[tuple[str, str]] = set()
        """User and name of each archived job and array, where names are hidden from some users."""

    @property
    def counts(self) -> Counter[str]:
        """Number of archived jobs by their state: those that the scheduler's state does not have at this instant."""
        return self._counts + Counter(state for job, state in self._on_the_way.items() if job not in self._state.jobs)

    async def load(self) -> None:
        """Read what was archived before the start."""
        found = await self._query("SELECT state, count(*) FROM archived_jobs GROUP BY state")
        self._counts = Counter(dict(found))
        newest = await self._query(f"SELECT job FROM archived_jobs ORDER BY {job_table.NEWEST_FIRST} LIMIT 1")
        self.newest = JobId(newest[0][0]) if newest else None
        if self._hides_names:
            names = "SELECT user, name FROM archived_jobs UNION SELECT user, array_name FROM archived_jobs"
            self.names = {(user, name) for user, name in await self._query(names) if name is not None}

    async def _post(self, event: e.JobsArchived | e.JobRecalled, jobs: Sequence[Job], rows: list[Statement]) -> None:
        """Move jobs into the archive or back, with the statements that do it."""
        self._on_the_way = {job.id: job.state.value for job in jobs}
        try:
            await self._engine.post(event, rows)
        finally:
            self._counts, self._on_the_way = self.counts, {}

    async def run(self) -> None:
        """Archive jobs until cancelled."""
        while True:
            try:
                await self.archive()
            except ClusterError:  # the disk is full, which the engine has logged: they stay in the state
                pass
            await anyio.sleep(min(EVERY_S, self._after_s))

    async def archive(self) -> None:
        """Archive the jobs that ended long enough ago, and the oldest ones beyond `ENDED_MAX`."""
        now_s = time.time()
        self._recalled_s = {job: at_s for job, at_s in self._recalled_s.items() if 0.0 <= now_s - at_s < RECALLED_S}
        over = sorted((job.ended_s or 0.0, job.id) for job in self._state.jobs.values() if job.state.is_final)
        beyond = len(over) - ENDED_MAX
        due = [
            job
            for number, (ended_s, job) in enumerate(over)
            if now_s - ended_s >= (min(LEAST_S, self._after_s) if number < beyond else self._after_s)
        ]
        due = archivable(self._state, [job for job in due if job not in self._recalled_s])
        for at in range(0, len(due), JOBS_AT_ONCE):
            async with self._moves_one:
                jobs = [self._state.jobs[job] for job in due[at : at + JOBS_AT_ONCE] if job in self._state.jobs]
                if self._hides_names:
                    for job in jobs:
                        names = {job.spec.name, *([job.spec.array.name] if job.spec.array is not None else [])}
                        self.names |= {(job.spec.user, name) for name in names}
                event = e.JobsArchived(at_s=now_s, jobs=tuple(job.id for job in jobs))
                await self._post(event, jobs, [job_table.insert(job) for job in jobs])

    # --- finding one --------------------------------------------------------------------------------------------------

    async def recall_named(self, user: str, arguments: dict[str, Any]) -> None:
        """Bring archived jobs that a request names back into the state, so that all verbs find them as ever.

        Raises:
            ClusterError: the journal cannot be written, or the job cannot be read.
            UsageError: the beginning of a name fits several.
        """
        for text in _named(arguments):
            if self.counts or self._on_the_way:
                async with self._moves_one:
                    await self._recall(text, user)

    async def _recall(self, text: str, user: str) -> None:
        state = self._state
        if not text or JobId(text) in state.jobs:
            return
        own = [j.spec.name for j in state.jobs.values() if j.spec.user == user and j.spec.name.startswith(text)]
        if text in own:
            return
        row = await self._row("job = ?", text) or await self._row("name = ? AND user = ?", text, user)
        if row is None and not own and find_task(state, text) is None:
            row = await self._task(text) or await self._by_beginning(text, user)
        if row is not None:
            job = self._decoded(row)
            self._recalled_s[job.id] = time.time()
            self._counts[job.state.value] -= 1
            recalled = e.JobRecalled(at_s=time.time(), job=job.id, record=job)
            await self._post(recalled, [job], [job_table.delete(job.id)])

    async def _row(self, condition: str, *values: object) -> tuple[Any, ...] | None:
        """Row of the newest job that fulfils a condition."""
        newest = f"WHERE {condition} ORDER BY {job_table.NEWEST_FIRST} LIMIT 1"
        found = await self._query(f"SELECT {job_table.COLUMNS} FROM archived_jobs {newest}", *values)
        return found[0] if found else None

    async def _task(self, text: str) -> tuple[Any, ...] | None:
        array, _, index = text.partition("_")
        return await self._row("array_id = ? AND task = ?", array, int(index)) if _is_number(index) else None

    async def _by_beginning(self, text: str, user: str) -> tuple[Any, ...] | None:
        begins = "SELECT DISTINCT name FROM archived_jobs WHERE substr(name, 1, length(?)) = ? AND user = ?"
        names = await self._query(begins, text, text, user)
        if len(names) > 1:
            raise UsageError(f"{text!r} is the beginning of {len(names)} names: write more of the name, or the id")
        return await self._row("name = ? AND user = ?", names[0][0], user) if names else None

    # --- lists --------------------------------------------------------------------------------------------------------

    async def page(self, before: str | None, limit: int) -> list[Job]:
        """The newest archived jobs, newest first; `before`: only those that were submitted before this one."""
        if not self.counts:
            return []
        condition = "(length(job), job) < (length(?), ?)" if before is not None else "TRUE"
        order = f"ORDER BY {job_table.NEWEST_FIRST} LIMIT {limit}"
        values = (before, before) if before is not None else ()
        return [job async for job in self._selected(f"{condition} {order}", *values)]

    async def ended_since(self, since_s: float) -> AsyncIterator[Job]:
        """Archived jobs that ended after a time, oldest first."""
        last: tuple[int, str] = (0, "")
        while self.counts:
            condition = "ended_s >= ? AND (length(job), job) > (?, ?)"
            order = f"ORDER BY {job_table.IN_ORDER} LIMIT {JOBS_AT_ONCE}"
            page = [job async for job in self._selected(f"{condition} {order}", since_s, *last)]
            for job in page:
                yield job
            if len(page) < JOBS_AT_ONCE:
                return
            last = (len(page[-1].id), page[-1].id)

    async def tasks(self, text: str) -> list[Job]:
        """Archived tasks of the arrays of an id or a name."""
        if not self.counts:
            return []
        return [job async for job in self._selected("array_id = ? OR array_name = ?", text, text)]

    async def arrays(self, again: Iterable[tuple[str, int]]) -> list[tuple[Job, int]]:
        """One archived task of each array and each state, with their number; a task counts once, by its newest run.

        Args:
            again: array and index of tasks that are not counted, as a run of them is not archived.
        """
        if not self.counts:
            return []
        newest = (
            "SELECT *, max(CAST(job AS INTEGER)) FROM archived_jobs WHERE array_id IS NOT NULL "
            "AND array_id || '/' || task NOT IN (SELECT value FROM json_each(?)) GROUP BY array_id, task"
        )
        counts = f"SELECT {job_table.COLUMNS}, count(*) FROM ({newest}) GROUP BY array_id, state"
        rows = await self._query(counts, json.dumps([f"{array}/{index}" for array, index in again]))
        return [(self._decoded(row), row[-1]) for row in rows]

    async def _selected(self, condition: str, *values: object) -> AsyncIterator[Job]:
        rows = await self._query(f"SELECT {job_table.COLUMNS} FROM archived_jobs WHERE {condition}", *values)
        for number, row in enumerate(rows):
            if number % JOBS_AT_ONCE == JOBS_AT_ONCE - 1:
                await anyio.lowlevel.checkpoint()  # others are served meanwhile
            if JobId(row[0]) not in self._state.jobs:  # an event that was set aside leaves it in both
                yield self._decoded(row)

    async def _query(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        return await self._engine.journal.query(statement, values)

    def _decoded(self, row: tuple[Any, ...]) -> Job:
        try:
            return job_table.decoded(row)
        except Damaged as error:
            path = self._engine.journal.path
            raise ClusterError(f"{path}: {error}: `clusterd journal check {path}` lists all damages") from None


def _named(arguments: dict[str, Any]) -> Iterable[str]:
    """Jobs that the arguments of a verb name; they are not checked yet."""
    spec, changes = arguments.get("spec"), arguments.get("changes")
    named = [arguments.get("job"), *_list(arguments.get("also"))]
    if isinstance(spec, dict):
        array = spec.get("array")
        named += [spec.get("restore"), array.get("id") if isinstance(array, dict) else None]
    for made in (spec, changes):
        if isinstance(made, dict):
            named += [text.partition(":")[0] for text in _list(made.get("after")) if isinstance(text, str)]
    return [text for text in named if isinstance(text, str) and "/" not in text]


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) < 18
