"""Verbs that change how a submitted job is queued and what it asks for."""

from __future__ import annotations

import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import anyio
import msgspec

from clusterd import projection, rows
from clusterd.core import events as e
from clusterd.core.queueing import admission
from clusterd.core.queueing.arrays import tasks_of
from clusterd.core.queueing.dependencies import awaits
from clusterd.core.queueing.edits import EDITABLE, described, refused_now
from clusterd.core.state import Job
from clusterd.daemon.access import Peer
from clusterd.daemon.api.validation import refuse_booking, refuse_malformed, refuse_unsatisfiable
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.rights import Rights
from clusterd.daemon.storage.archived_jobs import ArchivedJobs
from clusterd.errors import ClusterError, UsageError
from clusterd.job_signals import SIGNALS
from clusterd.protocol.requests import SignalRanks
from clusterd.ssh.host import AgentRefused
from clusterd.submission.job_file import with_changes
from clusterd.types import JobKind, JobSpec, JobState
from clusterd.units import duration

Submit = Callable[[Peer, dict[str, Any], dict[str, str]], Awaitable[rows.SubmittedJob]]


class QueueVerbs:
    """Answers requests about one submitted job, each with one event."""

    def __init__(
        self, engine: Engine, hosts: HostRegistry, archived: ArchivedJobs, submit: Submit, rights: Rights
    ) -> None:
        self._engine, self._hosts, self._archived, self._submit, self._rights = engine, hosts, archived, submit, rights
        self._state = engine.state
        # An edit is computed from the specification of the moment: another one must not come between it and its event.
        self._editing = anyio.Lock()

    async def priority(self, peer: Peer, job: str, priority: int) -> rows.Job:
        """Change a job's priority."""
        known = admission.find_own_job(self._state, job, peer.user, peer.is_operator)
        if not isinstance(priority, int):
            raise UsageError(f"priority is {priority!r}; it must be a whole number")
        self._rights.refuse_change(peer, replace(known.spec, priority=priority), known)
        async with self._editing:
            admission.refuse_if_over(known)
            await self._engine.post(e.JobReprioritised(at_s=time.time(), job=known.id, priority=priority, by=peer.user))
        return projection.job_row(known, self._state)

    async def hold(self, peer: Peer, job: str) -> rows.Job:
        """Keep a queued job from starting until it is released."""
        known = admission.find_own_job(self._state, job, peer.user, peer.is_operator)
        if known.state is not JobState.QUEUED:
            again = f": clusterd requeue --hold {known.id} stops it" if known.attempt is not None else ""
            raise ClusterError(f"job {known.id} ({known.spec.name}) is {known.state.value}, not queued{again}")
        await self._engine.post(e.JobHeld(at_s=time.time(), job=known.id, by=peer.user))
        return projection.job_row(known, self._state)

    async def release(self, peer: Peer, job: str) -> rows.Job:
        """Let a held job start; what an operator holds an operator releases."""
        known = admission.find_own_job(self._state, job, peer.user, peer.is_operator)
        if known.held_by is None:
            raise ClusterError(f"job {known.id} ({known.spec.name}) is not held")
        if known.held_by not in ("", peer.user) and not peer.is_operator:
            raise ClusterError(f"job {known.id} ({known.spec.name}) is held by {known.held_by}: ask them")
        await self._engine.post(e.JobReleased(at_s=time.time(), job=known.id, by=peer.user))
        return projection.job_row(known, self._state)

    async def requeue(self, peer: Peer, job: str, hold: bool = False) -> rows.Job:
        """Stop a running job and queue it again; `hold`: it stays queued until it is released."""
        known = admission.find_own_job(self._state, job, peer.user, peer.is_operator, ends=True)
        if known.attempt is None:
            raise ClusterError(f"job {known.id} ({known.spec.name}) is {known.state.value}: it does not run")
        await self._engine.post(e.JobRequeued(at_s=time.time(), job=known.id, by=peer.user, hold=bool(hold)))
        return projection.job_row(known, self._state)

    async def pause(self, peer: Peer, job: str) -> rows.Job:
        """Stop a job until `unpause`: one that can save leaves its devices, a command keeps them, in mid-step."""
        known = admission.find_own_job(self._state, job, peer.user, peer.is_operator, ends=True)
        if known.state is JobState.QUEUED:
            return await self.hold(peer, job)
        if known.spec.kind is not JobKind.COMMAND:
            return await self.requeue(peer, job, hold=True)
        admission.running_attempt(known, "only what runs is paused")
        # Recorded first: stopped processes of a job that counts as running could not be let go on.
        await self._engine.post(e.JobPaused(at_s=time.time(), job=known.id, by=peer.user))
        try:
            await self._send(known, signal.SIGSTOP, "only what runs is paused")
        except AgentRefused:  # as one of an older version: it stopped nothing, and hosts before it go on
            with suppress(ClusterError):
                await self._send(known, signal.SIGCONT, "it is not paused")
            await self._engine.post(e.JobUnpaused(at_s=time.time(), job=known.id, by=peer.user))
            raise
        except ClusterError as error:
            again = f"clusterd unpause {known.id} lets it go on, clusterd pause {known.id} tries again"
            raise ClusterError(f"job {known.id} ({known.spec.name}) may run on some hosts: {error}: {again}") from None
        return projection.job_row(known, self._state)

    async def unpause(self, peer: Peer, job: str) -> rows.Job:
        """Let a paused job go on: where it was, or from the queue."""
        known = admission.find_own_job(self._state, job, peer.user, peer.is_operator)
        if known.attempt is None or known.held_by is not None:
            return await self.release(peer, job)
        if known.attempt.paused_by is None:
            raise ClusterError(f"job {known.id} ({known.spec.name}) is not paused")
        await self._send(known, signal.SIGCONT, "it is not paused")
        await self._engine.post(e.JobUnpaused(at_s=time.time(), job=known.id, by=peer.user))
        return projection.job_row(known, self._state)

    async def signal(self, peer: Peer, job: str, number: int) -> None:
        """Send a signal to the processes of a running job, on all of its hosts."""
        known = admission.find_own_job(self._state, job, peer.user, peer.is_operator, ends=True)
        if number not in SIGNALS.values():
            raise UsageError(f"signal {number} is not sent to jobs, but {', '.join(SIGNALS)}; clusterd cancel ends one")
        await self._send(known, number, "signals are for running jobs")

    async def _send(self, job: Job, number: int, otherwise: str) -> None:
        """Send a signal to the processes of a job on each of its hosts.

        Raises:
            ClusterError: it does not run, with `otherwise`; a host does not answer.
        """
        attempt = admission.running_attempt(job, otherwise)
        for host in attempt.hosts:
            await self._hosts.request(host, SignalRanks(job.id, attempt.number, attempt.generation, int(number)))

    async def edit(self, peer: Peer, job: str, changes: dict[str, Any]) -> rows.Job:
        """Change what a job asks for.

        Args:
            changes: new values by field of the specification; `resources` names only the fields that change.
        """
        known = admission.find_own_job(self._state, job, peer.user, peer.is_operator)
        async with self._editing:
            admission.refuse_if_over(known)
            spec = self._edited(peer, known, changes)
            what = described(replace(known.spec, priority=known.priority), spec)
            if not what:
                return projection.job_row(known, self._state, edited="")
            await self._engine.post(e.JobEdited(at_s=time.time(), job=known.id, spec=spec, what=what, by=peer.user))
            if known.spec != spec:
                raise ClusterError(
                    f"job {known.id} ({known.spec.name}) is {known.state.value} by now: look, and try again"
                )
        return projection.job_row(known, self._state, edited=what)

    async def resume(
        self,
        peer: Peer,
        job: str,
        changes: dict[str, Any] | None = None,
        steps: int | None = None,
        env: dict[str, str] | None = None,
        secrets: dict[str, str] | None = None,
    ) -> rows.SubmittedJob:
        """Submit a job that goes on from the newest checkpoint of one that is over.

        Args:
            changes: as of `edit`.
            steps: number of steps in all, instead of that in the script.
            env: further variables.
            secrets: values, which are forgotten when a job ends.
        """
        known = admission.find_own_job(self._state, job, peer.user, peer.is_operator)
        more = {
            "restore": known.id,
            "restore_step": 0,
            "array": None,
            **({"steps": steps} if steps is not None else {}),
        }
        return await self._submit_again(peer, known, more, changes, env, secrets)

    async def rerun(
        self,
        peer: Peer,
        job: str,
        changes: dict[str, Any] | None = None,
        snapshot: str | None = None,
        commit: str = "",
        env: dict[str, str] | None = None,
        secrets: dict[str, str] | None = None,
    ) -> rows.SubmittedJob:
        """Submit a job that is over again, as it was; a task takes its own place in its array.

        Args:
            changes, env, secrets: as of `resume`.
            snapshot: working directory in the place of the one that was sent; `commit`: of that.
        """
        known = admission.find_own_job(self._state, job, peer.user, peer.is_operator)
        if not known.state.is_final:
            begun = known.attempt is not None
            again = f"clusterd requeue {known.id} stops it and begins it again" if begun else "it has yet to run"
            raise ClusterError(f"job {known.id} ({known.spec.name}) is {known.state.value}: {again}")
        more = {} if snapshot is None else {"snapshot": snapshot, "commit": commit}
        return await self._submit_again(peer, known, more, changes, env, secrets)

    async def _submit_again(
        self,
        peer: Peer,
        known: Job,
        more: dict[str, Any],
        changes: dict[str, Any] | None,
        env: dict[str, str] | None,
        secrets: dict[str, str] | None,
    ) -> rows.SubmittedJob:
        if missing := sorted({*known.spec.secrets} - {*(secrets or {})}):
            raise UsageError(f"job {known.id} ({known.spec.name}) needs the secret {missing[0]}: set that variable")
        # A booking is of a time that may be over: it is named again.
        alone = replace(known.spec, after=(), booking="", begin_s=None, hold=False)
        alone = replace(alone, interactive=False, is_attached=False, reads_input=False)
        before = replace(alone, env={**known.spec.env, **(env or {})}, **more)
        spec = _with_changes(before, changes or {})
        return await self._submit(peer, msgspec.to_builtins(spec), secrets or {})

    async def arrays(self, peer: Peer, all: bool = False) -> list[rows.Array]:
        """Arrays with a task that is not over, or all: id, name, limit, and the number of tasks in each state."""
        state = self._state
        current = {a.id for job in (*state.queue, *state.active) if (a := state.jobs[job].spec.array) is not None}
        if not (current or all):
            return []
        found: dict[str, rows.Array] = {}
        here = {(a.id, a.index): (job, 1) for job in state.jobs.values() if (a := job.spec.array) is not None}
        for job, count in [*await self._archived.arrays(here), *here.values()]:  # of a task that ran again, the newest
            array = job.spec.array
            if array is None or not (all or array.id in current):
                continue
            new = rows.Array(id=array.id, name=array.name, user=job.spec.user, most=array.most)
            row = found.setdefault(array.id, new)
            row.tasks += count
            row.states[job.state.value] = row.states.get(job.state.value, 0) + count
        return list(found.values())

    async def tasks(self, peer: Peer, array: str) -> list[rows.Job]:
        """Rows of all tasks of an array or a sweep, by index."""
        archived = await self._archived.tasks(array.removesuffix("_*"))
        found = tasks_of([*archived, *self._state.jobs.values()], array, peer.user)
        if not found:
            raise UsageError(f"there is no array or sweep {array!r} of yours: clusterd ls --all shows the jobs")
        return [projection.job_row(job, self._state) for job in found]

    def _edited(self, peer: Peer, job: Job, changes: dict[str, Any]) -> JobSpec:
        """Specification of the job after the changes.

        Raises:
            UsageError: what is wrong with them.
            ClusterError: what cannot change now.
        """
        spec = _with_changes(replace(job.spec, priority=job.priority), changes)
        if fixed := refused_now(job, spec):
            again = f"clusterd requeue --hold {job.id} stops and queues it"
            raise ClusterError(
                f"job {job.id} ({job.spec.name}) is {job.state.value}: {' and '.join(fixed)} cannot change now: {again}"
            )
        if "after" in changes:
            spec = replace(spec, after=admission.find_awaited(self._state, spec, peer.user))
            if (cycle := awaits(spec, job.id, self._state.jobs)) is not None:
                raise UsageError(f"after: {cycle} waits for job {job.id} itself: they would wait for ever")
        refuse_malformed(spec)
        if "booking" in changes:
            refuse_booking(spec, self._state)
        self._rights.refuse_change(peer, spec, job)
        attempt = job.attempt
        if attempt is None:
            if spec.resources != job.spec.resources:
                refuse_unsatisfiable(spec, self._state, "the job stays as it was")
        elif spec.time_limit_s is not None and spec.time_limit_s != job.spec.time_limit_s:
            ran_s = time.time() - attempt.started_s
            if ran_s >= spec.time_limit_s:
                raise UsageError(f"it has run for {duration(ran_s)} already: clusterd cancel {job.id} ends it")
        return spec


def _with_changes(spec: JobSpec, changes: dict[str, Any]) -> JobSpec:
    """Apply changes that may come after the submission.

    Raises:
        UsageError: what is wrong with them.
    """
    if unknown := sorted({*changes} - EDITABLE):
        raise UsageError(f"{unknown[0]} of a job cannot be changed")
    return with_changes(spec, changes)
