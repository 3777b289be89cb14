"""Verbs about jobs, one method each; dry runs are the scheduler's own pass over a copy of its state."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from heapq import nlargest
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
from msgspec.structs import asdict
from msgspec.structs import replace as replace_fields

from clusterd import projection, rows
from clusterd.config import Config
from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.allocation.requirements import misfit
from clusterd.core.events import JobSubmitted
from clusterd.core.queueing import admission
from clusterd.core.scheduler import Scheduler
from clusterd.core.state import Job, State
from clusterd.core.timers import Timer, TimerKind
from clusterd.core.view import Policy
from clusterd.daemon.access import Peer
from clusterd.daemon.api.daemon import Accounts
from clusterd.daemon.api.validation import refuse_booking, refuse_malformed, refuse_secrets, refuse_unsatisfiable
from clusterd.daemon.api.watch import Baselines, Change, Feed, SharedRow
from clusterd.daemon.api.workdirs import WorkdirVerbs
from clusterd.daemon.forecasts.forecaster import Forecaster, what_if
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.hosts.reports import HostUp
from clusterd.daemon.journal import codec
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.rights import Rights
from clusterd.daemon.storage.archive import Archive
from clusterd.daemon.storage.archived_jobs import ArchivedJobs
from clusterd.errors import ClusterError, UsageError, first_of
from clusterd.forecasting import WhatIf
from clusterd.submission.batch_script import command_line
from clusterd.types import HostId, JobId, JobSpec, JobState

log = logging.getLogger(__name__)

ALIVE_EVERY_S = 5.0
"""Longest silence towards a watcher, so that it notices a dead daemon."""

HISTORY_MAX = 5000
"""Most events, and most decisions, that `history` returns."""


class JobVerbs:
    """Answers clients from the state and turns their requests into events."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        hosts: HostRegistry,
        archive: Archive,
        workdirs: WorkdirVerbs,
        archived: ArchivedJobs,
        feed: Feed,
        accounts: Accounts,
        rights: Rights,
        forecaster: Forecaster,
        status: Callable[[], rows.Status],
    ) -> None:
        """`status`: of the daemon, for watchers."""
        self._forecaster = forecaster
        self._datasets, self._rights, self._status = config.datasets, rights, status
        self._engine, self._hosts, self._feed = engine, hosts, feed
        self._state = engine.state
        self._archive, self._workdirs, self._archived = archive, workdirs, archived
        self._accounts = accounts
        self._baselines = Baselines(feed, lambda: self._listed(all=True), self._baseline_item)
        self._ids = JobIds({*engine.state.jobs, *archive.jobs(), archived.newest or ""})
        hosts.reports.subscribe(HostUp, self._on_host_up)

    def _on_host_up(self, host: HostId, report: HostUp) -> None:
        for row in report.hello.attempts:
            self._ids.seen(row.job, host)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    async def submit(
        self, peer: Peer, spec: dict[str, Any], secrets: dict[str, str] | None = None
    ) -> rows.SubmittedJob:
        """Accept a job: once this is answered, the job is not lost."""
        known = self.admit(peer, spec)
        refuse_secrets(secrets or {})
        refuse_unsatisfiable(known, self._state, "--wait-for-hosts queues it all the same")
        if known.account:
            await self._hosts.log_in(known.account)
        job = self._ids.next()
        known = _in_array(known, job)
        sealed = [
            ("INSERT INTO secrets VALUES (?, ?, ?)", (job, name, self._archive.sealed(value)))
            for name, value in (secrets or {}).items()
        ]
        await self._engine.post(e.JobSubmitted(at_s=time.time(), job=job, spec=known), sealed)
        return rows.SubmittedJob(id=job, name=known.name, reason=self._state.jobs[job].reason)

    async def dry_run(
        self, peer: Peer, spec: dict[str, Any], also: list[dict[str, Any]] | None = None, only_check: bool = False
    ) -> rows.DryRun | list[rows.DryRun]:
        """Report what would happen now to a job, or with `also` to several, without submitting them.

        Args:
            only_check: only refuse what a submit refuses, which costs no scheduling pass.
        """
        known = [self.admit(peer, each, need_workdir=False) for each in (spec, *(also or ()))]
        for each in known:
            refuse_unsatisfiable(each, self._state, "--wait-for-hosts queues it all the same")
        if only_check:
            return []
        now_s, ids = time.time(), self._ids.coming(len(known))
        events = [
            e.JobSubmitted(at_s=now_s, job=job, spec=_in_array(each, ids[0]))
            for job, each in zip(ids, known, strict=True)
        ]
        answers = await rehearse(self._engine.scheduler, events)
        return answers if also is not None else answers[0]

    async def when(
        self, peer: Peer, spec: dict[str, Any], also: list[dict[str, Any]] | None = None
    ) -> list[rows.Expectation]:
        """Forecast start and end of a job, and of others in its place, each as if it alone were submitted now."""
        known = [self.admit(peer, each, need_workdir=False) for each in (spec, *(also or ()))][:WHAT_IFS_MAX]
        asked: list[WhatIf | str] = []
        for each in known:
            try:
                refuse_unsatisfiable(each, self._state, "nothing would start it")
                asked.append(what_if(each, self._state.jobs.values()))
            except UsageError as error:
                if len(known) == 1:
                    raise
                asked.append(str(error))  # of the others it can be told
        answers = iter(await self._forecaster.what_if([one for one in asked if not isinstance(one, str)]))
        found = []
        for each, one in zip(known, asked, strict=True):
            wanted: dict[str, Any] = {
                "name": each.name,
                "devices": each.resources.devices,
                "guaranteed": each.guaranteed,
            }
            if isinstance(one, str):
                found.append(rows.Expectation(**wanted, why=one))
                continue
            answer = next(answers)
            why = "" if answer.forecast is not None else "most roll-outs never start or end it"
            found.append(rows.Expectation(**wanted, forecast=answer.forecast, plan=answer.plan, why=why))
        return found

    def admit(self, peer: Peer, spec: dict[str, Any], need_workdir: bool = True) -> JobSpec:
        """Check a submitted job and make it its user's.

        Raises:
            UsageError: what is wrong with it.
        """
        try:
            known = msgspec.convert(spec, JobSpec)
        except msgspec.ValidationError as error:
            raise UsageError(f"the job is not well-formed: {error}") from None
        known = replace(
            known, user=peer.user, account=self._accounts.of(peer), datasets={**self._datasets, **known.datasets}
        )
        known = admission.find_checkpoint(self._state, known, peer.user, peer.is_operator)
        refuse_malformed(known)
        refuse_booking(known, self._state)
        self._rights.refuse_job(peer, known)
        if need_workdir and known.snapshot is not None and not self._workdirs.may_name(peer, known.snapshot):
            raise UsageError(
                "the job's workdir was not sent by you, or was removed by clusterd forget: submit its job file"
            )
        if known.array is not None and known.array.id:
            admission.refuse_other_array(self._state, known.array, peer.user)
        return replace(known, after=admission.find_awaited(self._state, known, peer.user))

    async def jobs(self, peer: Peer, all: bool = False, before: str | None = None) -> list[rows.Job]:
        """Rows of the jobs that are not over; with `all`, of the newest that are over, too, oldest first.

        Args:
            before: the next page: only jobs that are over and were submitted before this one.
        """
        found = []
        listed = await self._listed(all, before)
        places = projection.places(self._state)
        for number, job in enumerate(listed):
            if number % ROWS_AT_ONCE == ROWS_AT_ONCE - 1:
                await anyio.lowlevel.checkpoint()  # others are served meanwhile: there may be many thousands
            place = places.get(job.id) if job.state is JobState.QUEUED else None
            found.append(projection.job_row(job, self._state, self._forecaster.of(job), place=place))
        return found

    async def _listed(self, all: bool, before: str | None = None) -> list[Job]:
        """Jobs of `jobs`."""
        archived = await self._archived.page(before, JOBS_PER_PAGE) if all else []
        state = self._state
        active = [] if before is not None else [state.jobs[job] for job in {**state.queue, **state.active}]
        over = (job for job in state.jobs.values() if job.state.is_final) if all else ()
        over = (job for job in over if before is None or _in_order(job.id) < _in_order(before))
        newest = nlargest(JOBS_PER_PAGE, {job.id: job for job in (*archived, *over)}.values(), key=_of_job)
        return sorted([*active, *newest], key=_of_job)

    async def job(self, peer: Peer, job: str) -> rows.JobDetail:
        """Everything about one job."""
        known = admission.find_job(self._state, job, peer.user)
        return rows.JobDetail(
            **self._placed(known), spec=projection.spec_row(known.spec), command=command_line(known.spec.command),
            shape=known.inspection.shape, attempts=tuple(projection.attempt_row(a) for a in known.attempts),
            decisions=await self._decisions(known.id),
        )  # fmt: skip

    async def why(self, peer: Peer, job: str) -> rows.Explanation:
        """Explain a job's state: its reason, the jobs before it, and earlier decisions."""
        known = admission.find_job(self._state, job, peer.user)
        active = [self._state.jobs[job] for job in self._state.active]
        alike = Counter(job.spec.name for job in active)
        holders = {j.spec.name if alike[j.spec.name] == 1 else f"{j.spec.name} ({j.id})": j for j in active}
        held = Counter(job for device in self._state.holders for job in self._state.jobs_on(device))
        left_s = {name: projection.left_s(holder) for name, holder in holders.items() if holder.id in held}
        ends_s = {name: self._state.timers.get(Timer(TimerKind.LIMIT, j.id)) for name, j in holders.items()}
        misfits = (misfit(known, host) for host in self._state.hosts.values())
        return rows.Explanation(
            **self._placed(known),
            holders={name: held[j.id] for name, j in holders.items() if j.id in held},
            holders_left_s={name: left for name, left in left_s.items() if left is not None},
            core_holders={n: sum(j.attempt.booked.cores.values()) for n, j in holders.items() if j.attempt is not None},
            holders_most_s={n: max(end - time.time(), 0.0) for n, end in ends_s.items() if end is not None},
            misfits=tuple(text for text in misfits if text is not None),
            unusable=tuple(projection.unusable(known, self._state, time.time())),
            decisions=await self._decisions(known.id),
        )  # fmt: skip

    def _placed(self, job: Job) -> dict[str, Any]:
        """Fields of a job and of its place."""
        place = projection.place_row(job.id, self._state)
        return {**asdict(projection.job_row(job, self._state, self._forecaster.of(job))), **asdict(place)}

    async def _decisions(self, job: str) -> tuple[rows.Decision, ...]:
        found = await self._engine.journal.query(
            "SELECT at_s, kind, body FROM decisions WHERE job = ? ORDER BY id DESC LIMIT 50", (job,)
        )
        return _decided(found)

    async def history(self, peer: Peer, limit: int = 500) -> dict[str, Any]:
        """Newest events and decisions, oldest first, for a watcher that has just connected."""
        limit = min(max(int(limit), 0), HISTORY_MAX)
        events = await self._engine.journal.query("SELECT kind, body FROM events ORDER BY id DESC LIMIT ?", (limit,))
        decisions = await self._engine.journal.query(
            "SELECT at_s, kind, body FROM decisions ORDER BY id DESC LIMIT ?", (limit,)
        )
        happened = tuple(projection.event_row(codec.event(kind, body), self._state) for kind, body in reversed(events))
        return {"events": happened, "decisions": _decided(decisions)}

    async def cancel(
        self, peer: Peer, job: str, also: list[str] | None = None, now: bool = False, why: str = ""
    ) -> rows.Job | rows.Cancelled:
        """Cancel a job; replies at once, `wait` reports when its devices are free.

        Args:
            also: others at the same moment, so that none of them starts where another one ends. Each that cannot be
                cancelled is told of beside those that are.
            now: without the time that they have to save what they did, also where that has begun.
            why: reason, which its owner and others see.
        """
        of = {"by": peer.user, "now": now, "why": " ".join(why.split())[:WHY_MAX]}
        if also is None:
            return await _cancel_one(self._engine, peer, job, of)
        return await _cancel_several(self._engine, peer, [job, *also], of)

    async def wait(self, peer: Peer, job: str) -> AsyncIterator[rows.Job]:
        """Stream the job's row whenever it changes, until it is over."""
        known = admission.find_job(self._state, job, peer.user)
        last = None
        while True:
            number = self._feed.number
            row, is_over = projection.job_row(known, self._state), known.state.is_final
            if row != last:
                yield row  # it may be over before this has been taken
                last = row
            if is_over:
                return
            await self._feed.wait(number)

    # --- watching -----------------------------------------------------------------------------------------------------

    async def watch(self, peer: Peer, after: int | None = None) -> AsyncIterator[SharedRow | dict[str, float | None]]:
        """Stream a baseline, then every change by number; `after` resumes without a baseline where possible."""
        number = after
        while True:
            changes = self._feed.after(number) if number is not None else None
            if changes is None:
                async for item in self._baselines.items():
                    yield item
                    number = item.number
                continue
            for change in changes:
                yield self._change(change)
                number = change.number
            with anyio.move_on_after(ALIVE_EVERY_S) as quiet:
                await self._feed.wait(number or 0)
            if quiet.cancelled_caught:
                yield {"alive_s": time.time(), "number": number}

    def _baseline_item(self, jobs: list[Job], number: int, is_first: bool) -> Any:
        """The state with the first jobs of a baseline, or further jobs as a change without events."""
        state = self._state
        found = tuple(projection.job_row(job, state, self._forecaster.of(job)) for job in jobs)
        if not is_first:
            return replace_fields(projection.change_row(state, number, (), ()), jobs=found)
        hosts = tuple(projection.host_row(state, host, self._hosts.link_row(host.id)) for host in state.hosts.values())
        order = projection.order_row(state.order)
        return {
            "snapshot": rows.Baseline(status=self._status(), jobs=found, hosts=hosts, order=order),
            "number": number,
        }

    def _change(self, change: Change) -> SharedRow:
        if change.row is None:
            row = projection.change_row(
                self._state, change.number, change.events, change.decisions, self._hosts.link_row,
                change.side_effects, self._forecaster.of,
            )  # fmt: skip
            change.row = SharedRow(row, change.number)
        return change.row


WHAT_IFS_MAX = 16
"""Jobs that one question compares."""

WHY_MAX = 500
"""Characters of a reason that a user gives."""

ROWS_AT_ONCE = 100
"""Rows between two turns of the event loop."""

JOBS_PER_PAGE = 1000
"""Jobs that are over in one answer; a year of them would not fit into a frame."""


def _in_order(job: str) -> tuple[int, str]:
    """Key of the order of submission."""
    return len(job), job


def _of_job(job: Job) -> tuple[int, str]:
    return _in_order(job.id)


def _in_array(spec: JobSpec, first: JobId) -> JobSpec:
    """The specification; a task of an array without an id gets that of the array's first job."""
    array = spec.array
    return replace(spec, array=replace(array, id=first)) if array is not None and not array.id else spec


class JobIds:
    """Ids of jobs: whole numbers from 1 on, each given out once, also by a daemon with a restored, older state."""

    def __init__(self, known: Iterable[str]) -> None:
        self._last = max((int(job) for job in known if job.isdecimal()), default=0)

    def next(self) -> JobId:
        """A new id."""
        self._last += 1
        return JobId(str(self._last))

    def coming(self, count: int) -> list[JobId]:
        """The ids that `next` is going to give out."""
        return [JobId(str(self._last + number)) for number in range(1, count + 1)]

    def seen(self, job: str, where: str) -> None:
        """Skip an id that a host remembers: a state that does not know it was restored from a backup."""
        if job.isdecimal() and int(job) > self._last:
            log.warning("%s remembers job %s, and this state is older: new jobs get higher numbers", where, job)
            self._last = int(job)


def _decided(stored: Sequence[tuple[float, str, bytes]]) -> tuple[rows.Decision, ...]:
    """Rows of decisions of the journal, which are given newest first."""
    return tuple(projection.decision_summary(codec.decision(kind, body), at_s) for at_s, kind, body in reversed(stored))


async def _cancel_one(engine: Engine, peer: Peer, job: str, of: dict[str, Any]) -> rows.Job:
    """Cancel a job and return its row; `now`: without a grace period.

    Raises:
        ClusterError: it is over, or not the peer's.
    """
    known = _cancellable(engine, peer, job)
    await engine.post(e.JobCancelled(at_s=time.time(), job=known.id, **of))
    return projection.job_row(known, engine.state)


async def _cancel_several(engine: Engine, peer: Peer, jobs: list[str], of: dict[str, Any]) -> rows.Cancelled:
    """Cancel several jobs; returns the rows of those cancelled and the errors of the others."""
    found: dict[JobId, Job] = {}
    refused = []
    for text in jobs:
        try:
            known = _cancellable(engine, peer, text)
            found[known.id] = known
        except ClusterError as error:
            refused.append(rows.Refusal(job=text, message=str(error), exit_code=error.exit_code))
    now_s = time.time()
    try:
        async with anyio.create_task_group() as group:
            # Queued jobs first: where there are several batches, the first must not free devices for jobs of the next.
            for known in sorted(found.values(), key=lambda job: job.state is not JobState.QUEUED):
                group.start_soon(engine.post, e.JobCancelled(at_s=now_s, job=known.id, **of))
    except ExceptionGroup as errors:
        raise first_of(errors) from None
    cancelled = tuple(projection.job_row(known, engine.state) for known in found.values())
    return rows.Cancelled(jobs=cancelled, refused=tuple(refused))


def _cancellable(engine: Engine, peer: Peer, job: str) -> Job:
    known = admission.find_own_job(engine.state, job, peer.user, peer.is_operator, ends=True)
    admission.refuse_if_over(known)
    return known


async def rehearse(scheduler: Scheduler, events: Sequence[JobSubmitted]) -> list[rows.DryRun]:
    """Outcome for each of these jobs if they were submitted now; nothing is kept or carried out."""
    state, policy = codec.encode(scheduler.state), deepcopy(scheduler.policy)
    return await anyio.to_thread.run_sync(outcomes, state, policy, events)


def outcomes(state: bytes, policy: Policy, events: Sequence[JobSubmitted]) -> list[rows.DryRun]:
    """Outcome for each job; changes `policy`."""
    copy = Scheduler(policy)
    copy.state = codec.state(state)
    copy.state.passed_s = None  # a submit may have to wait for its pass: this is that pass
    decisions = copy.handle(*events)
    changes = _changes(copy.state, decisions, {event.job for event in events})
    return [_outcome(copy.state, event.job, decisions, changes) for event in events]


def _outcome(
    state: State, job: JobId, decisions: Sequence[d.Decision], changes: dict[str, tuple[rows.SubmittedJob, ...]]
) -> rows.DryRun:
    """State of a submitted job after the pass: where it starts, or its place in the queue and what it waits for."""
    known, start = state.jobs[job], d.LaunchAttempt.match(decisions, job=job)
    place = projection.place_row(job, state)
    return rows.DryRun(
        starts=start is not None, state=known.state.value, reason=start.reason if start is not None else known.reason,
        ranks=codec.plain(start.ranks) if start is not None else (), promise=projection.promise_row(job, state),
        place=place.place, ahead=len(place.ahead), after=place.after, **changes,
    )  # fmt: skip


def _changes(
    state: State, decisions: Sequence[d.Decision], submitted: set[JobId]
) -> dict[str, tuple[rows.SubmittedJob, ...]]:
    """Running jobs that the pass stops, and those that it migrates, live or through host memory."""
    changes: dict[str, dict[JobId, rows.SubmittedJob]] = {"stops": {}, "migrates": {}}
    for decision in decisions:
        if isinstance(decision, d.StopAttempt | d.StartMigration) and decision.job not in submitted:
            job = state.jobs[decision.job]
            stops = isinstance(decision, d.StopAttempt) and (job.attempt is None or not job.attempt.pending_restart)
            row = rows.SubmittedJob(id=job.id, name=job.spec.name, reason=decision.reason)
            changes["stops" if stops else "migrates"].setdefault(job.id, row)
    return {kind: tuple(affected.values()) for kind, affected in changes.items()}
