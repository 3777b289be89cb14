"""Verbs about running jobs: migrations, pins and checkpoints on a user's request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from weakref import WeakValueDictionary

import anyio
from msgspec.structs import replace as replace_fields

from clusterd import projection, rows
from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.allocation.request_grant import objection_to_size
from clusterd.core.allocation.requested_migration import requested as requested_migration
from clusterd.core.estimates.first_fit import memory_conflict
from clusterd.core.lifecycle import migrations
from clusterd.core.queueing import admission
from clusterd.core.state import Attempt, Job
from clusterd.core.view import Move, Refusal, View
from clusterd.daemon.access import Peer
from clusterd.daemon.api.watch import Feed
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.journal.engine import Engine
from clusterd.errors import ClusterError, TryLater, UsageError
from clusterd.plans.layout import layout
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan, PlanError
from clusterd.plans.reshard import plan_transfers
from clusterd.protocol.control import TakeCheckpoint
from clusterd.protocol.rank import CheckpointFailed
from clusterd.protocol.requests import SendToRanks
from clusterd.types import AttemptState, DeviceId, JobId, JobKind, RankPlace

CHECKPOINT_S = 900.0

LAST_MOVE_S = 60.0
"""A migration waits this long for the clean-up of the one before, then it is refused."""

COPY_BYTES_PER_S = 2e9
"""Copy rate of one rank, where no migration of this job was measured yet."""

NETWORK_BYTES_PER_S = 1e9
"""Network rate of one host, likewise."""

FIXED_S = 0.1
"""Fixed part of the downtime: agreement on the last step, messages, and the commit of the switch."""

RESTART_S = 10.0
"""Downtime through host memory, where it was not measured yet: ranks exit, new ones start and build the model."""


class MigrationVerbs:
    """Requests migrations from the scheduler and checkpoints from ranks."""

    def __init__(self, engine: Engine, hosts: HostRegistry, feed: Feed) -> None:
        self._engine, self._hosts, self._feed = engine, hosts, feed
        self._state = engine.state
        self._locks: WeakValueDictionary[JobId, anyio.Lock] = WeakValueDictionary()

    async def migrate(
        self,
        peer: Peer,
        job: str,
        plan: str | None = None,
        devices: list[str] | None = None,
        pin: bool = False,
        dry_run: bool = False,
    ) -> rows.MigrationPreview:
        """Migrate a running job; replies with the predicted cost, `wait` and `watch` report the outcome."""
        known = admission.find_own_job(self._state, job, peer.user, peer.is_operator)
        try:
            requested = Plan.parse(plan) if plan else None
        except PlanError as error:
            raise UsageError(f"--plan: {error}") from None
        chosen = tuple(device for text in devices or () for device in admission.find_devices(self._state, text))
        if known.spec.kind is JobKind.CHECKPOINTABLE:
            if chosen:
                raise UsageError(
                    f"{known.spec.name} is a checkpointable job: it starts where there is room, not on --devices"
                )
            return await self._restart(peer, known, requested, dry_run)
        lock = self._locks.setdefault(known.id, anyio.Lock())
        async with lock:  # of two at once the second finds the job being moved
            return await self._request(peer, known, requested, chosen, pin, dry_run)

    async def _request(
        self, peer: Peer, known: Job, requested: Plan | None, chosen: tuple[DeviceId, ...], pin: bool, dry_run: bool
    ) -> rows.MigrationPreview:
        with anyio.move_on_after(LAST_MOVE_S):
            await self._settled(known)
        answer = requested_migration(known, View(self._state, time.time()), requested, chosen, peer.user)
        if isinstance(answer, Refusal):
            raise ClusterError(answer.reason)
        stays = pin and migrations.is_there(known, answer)
        objection = self._mixed_devices(answer) or migrations.objection(self._state, known, answer, time.time())
        if objection and not stays:
            raise ClusterError(objection)
        preview = await self._preview(known, answer)
        if not dry_run:
            event = e.MigrationRequested(
                at_s=time.time(), job=known.id, plan=requested, devices=chosen, pin=pin, by=peer.user
            )
            await self._engine.post(event)
        return replace_fields(preview, migrations=len(known.plan_changes), stays=stays)

    def _mixed_devices(self, move: Move) -> str | None:
        """Reason against tensor parallelism over mixed GPU types: their random numbers differ; None: there is none."""
        names = {d.id: d.name for host in self._state.hosts.values() for d in host.devices if d.kind == "cuda"}
        places = sorted(move.ranks, key=lambda place: place.rank)
        for first in range(0, len(places), move.plan.tp):
            group = [place.device for place in places[first : first + move.plan.tp]]
            types = sorted({names[device] for device in group if device in names})
            if len(types) > 1:
                return f"{move.plan} cuts tensors across {' and '.join(types)}, whose dropout differs: use one type"
        return None

    async def _restart(self, peer: Peer, job: Job, requested: Plan | None, dry_run: bool) -> rows.MigrationPreview:
        """Restart a checkpointable job at another size: it saves, stops and starts again."""
        if requested is None:
            raise UsageError(f"{job.spec.name} is a checkpointable job: say what to start it as, with --plan")
        if job.attempt is None or job.attempt.state is not AttemptState.RUNNING:
            raise ClusterError(f"{job.spec.name} is {job.state.value}: only a running job can be given another size")
        if job.attempt.plan == requested:
            raise ClusterError(f"{job.spec.name} runs under {requested} already")
        objection = objection_to_size(job, View(self._state, time.time()), requested)
        if objection:
            raise ClusterError(f"{job.spec.name} cannot be started as {requested}: {objection}")
        old = str(job.attempt.plan)
        if not dry_run:
            event = e.MigrationRequested(at_s=time.time(), job=job.id, plan=requested, by=peer.user)
            await self._engine.post(event)
        return rows.MigrationPreview(
            job=job.id, name=job.spec.name, old=old, plan=str(requested), restarts=True, attempt=job.attempts[-1].number
        )

    async def _settled(self, job: Job) -> None:
        """Wait until the ranks of the job's last migration are gone: two requests in a row mean one after the other."""
        while job.attempt is not None and (job.attempt.retired or job.resuming is not None):
            await self._feed.wait(self._feed.number)

    async def _preview(self, job: Job, move: Move) -> rows.MigrationPreview:
        """Predicted bytes and downtime of a migration."""
        attempt = job.attempt
        assert attempt is not None
        devices = {place.device for place in move.ranks}
        crowded = memory_conflict(self._state.hosts, job, attempt, move.plan, devices)
        restart_s = self._state.restart_costs_s.get(job.inspection.model)
        return await anyio.to_thread.run_sync(predict_cost, job, move, crowded, restart_s)

    async def checkpoint(self, peer: Peer, job: str, path: str | None = None) -> rows.CheckpointWritten:
        """Write a checkpoint of a running job to a directory that its hosts share, while it trains on.

        Without `path` it goes below the job's own directory.
        """
        known = admission.find_own_job(self._state, job, peer.user, peer.is_operator)
        attempt = known.attempt
        if known.spec.kind is JobKind.COMMAND or attempt is None or attempt.state is not AttemptState.RUNNING:
            raise ClusterError(
                f"{known.spec.name} is of kind {known.spec.kind.value} and {known.state.value}: only elastic and "
                "checkpointable jobs that run can be checkpointed"
            )
        if path is None and known.spec.checkpoint_directory is None:
            raise UsageError(f"{known.spec.name} has no [checkpoints] directory: give the one to write to")
        path = path if path is not None else known.spec.checkpoint_path(known.id, "asked")
        if not path.startswith("/"):
            raise UsageError(f"{path!r} is no absolute path: name a directory as the job's hosts see it")
        if (known.id, path) in self._hosts.checkpoints:
            raise TryLater(f"{known.spec.name} is writing a checkpoint to {path}: wait for it, or name another place")
        with self._hosts.checkpoints.expect((known.id, path)) as waiting:
            asked = d.TakeCheckpoint(
                cause=e.EventId(0),  # no event: nothing is decided, the word is only passed on
                reason=f"asked by {peer.user}",
                job=known.id,
                attempt=attempt.number,
                generation=attempt.generation,
                hosts=attempt.hosts,
                path=path,
            )
            answers, errors = await self._hosts.everywhere(
                asked, SendToRanks, message=TakeCheckpoint(path).to_message()
            )
            if not answers:  # one is enough: ranks of an elastic job pass it on
                raise errors[0]
            if not any(answer.ranks for answer in answers):
                own = ", or its script does not use clusterd.train.checkpointable"
                raise TryLater(
                    f"nobody of {known.spec.name} listens: it is still at its start"
                    f"{own if known.spec.kind is JobKind.CHECKPOINTABLE else ''}"
                )
            with anyio.move_on_after(CHECKPOINT_S) as patience:
                async with anyio.create_task_group() as watching:
                    watching.start_soon(self._resolve_at_end, known, attempt, path)
                    outcome = await waiting
                    watching.cancel_scope.cancel()
            if patience.cancelled_caught:
                raise ClusterError(f"{known.spec.name} did not write its checkpoint within {CHECKPOINT_S:.0f} s")
            if outcome is None and known.attempt is attempt:
                raise TryLater(f"{known.spec.name} was moved before it had written its checkpoint: ask again")
            if outcome is None:
                raise ClusterError(f"{known.spec.name} is {known.state.value}, and had not written its checkpoint")
        if isinstance(outcome, CheckpointFailed):
            raise ClusterError(f"{known.spec.name} could not write its checkpoint: {outcome.why}")
        return rows.row_of(rows.CheckpointWritten, outcome, name=known.spec.name)

    async def _resolve_at_end(self, job: Job, attempt: Attempt, path: str) -> None:
        """Give up waiting once the ranks that were asked are gone: the attempt ended, or migrated."""
        generation = attempt.generation
        while job.attempt is attempt and attempt.generation == generation:
            await self._feed.wait(self._feed.number)
        self._hosts.checkpoints.resolve((job.id, path), None)

    async def unpin(self, peer: Peer, job: str) -> rows.Job:
        """Let the scheduler choose again."""
        known = admission.find_own_job(self._state, job, peer.user, peer.is_operator)
        admission.refuse_if_over(known)
        await self._engine.post(e.JobUnpinned(at_s=time.time(), job=known.id, by=peer.user))
        return projection.job_row(known, self._state)


def predict_cost(
    job: Job, move: Move, crowded: str | None = None, restart_s: float | None = None
) -> rows.MigrationPreview:
    """Predict the bytes within and between hosts, and the downtime.

    Args:
        crowded: why the job has to stop for it and start again; None: it need not.
        restart_s: what that took before.
    """
    attempt = job.attempt
    assert attempt is not None and attempt.plan is not None and job.inspection.shape is not None
    shape = ModelShape.from_dict(job.inspection.shape)
    if crowded is not None:
        local, network, seconds = shape.state_bytes, 0, restart_s or RESTART_S
    else:
        local, network = _bytes(shape, attempt, move)
        seconds = _downtime_s(job, local, network, move.ranks)
    return rows.MigrationPreview(
        job=job.id,
        name=job.spec.name,
        plan=str(move.plan),
        old=str(attempt.plan),
        devices=tuple(place.device for place in move.ranks),
        reason=move.reason,
        local_bytes=local,
        network_bytes=network,
        crowded=crowded,
        predicted_downtime_s=seconds,
    )


def _bytes(shape: ModelShape, attempt: Attempt, move: Move) -> tuple[int, int]:
    """Bytes within hosts, and between them."""
    assert attempt.plan is not None, "only what runs under a plan is moved"
    old = [rank.place for _, rank in sorted(attempt.ranks.items())]
    moves = plan_transfers(
        layout(shape, attempt.plan),
        layout(shape, move.plan),
        [place.host for place in old],
        [place.host for place in move.ranks],
        [str(place.device) for place in old],
        [str(place.device) for place in move.ranks],
    )
    return moves.local_bytes, moves.network_bytes


def _downtime_s(job: Job, local: int, network: int, places: Sequence[RankPlace]) -> float:
    """Downtime scaled from the job's own migrations where there are any."""
    seconds = _expected_s(local, network, places)
    done = [m for m in job.migrations if m.downtime_s is not None and m.local_bytes + m.network_bytes]
    if not done:
        return seconds
    last = done[-1]
    expected = _expected_s(last.local_bytes, last.network_bytes, last.places)
    return seconds * (last.downtime_s or expected) / expected


def _expected_s(local: int, network: int, places: Sequence[RankPlace]) -> float:
    """Downtime by assumed rates: ranks copy in parallel, twice each byte; hosts fetch in parallel."""
    copied = 2.0 * (local + network) / len(places)
    return FIXED_S + copied / COPY_BYTES_PER_S + network / len({place.host for place in places}) / NETWORK_BYTES_PER_S
