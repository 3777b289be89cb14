"""Source side of a migration: prepare beside training, publish the state, wait for the outcome.

For the proof that the state is carried, a state is copied beside a step, and published with the steps that follow it.

Preparation runs in a thread beside the training loop. Publishing runs in the loop's own thread, between two steps that
all ranks agreed on. Until the target ranks train, an abort lets this rank go on with the next step as if nothing had
happened.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection
from typing import Any

from clusterd.protocol.control import Abort, BeginMigration, DeviceOpened, MakeSegment, PublishSegment, Quiesce
from clusterd.protocol.rank import Failed, Prepared, Quiesced, Resumed
from clusterd.train.migration import device_memory
from clusterd.train.migration.carry_proof import CarryProof
from clusterd.train.migration.spec import MigrationSpec, sums_to_bytes
from clusterd.train.process import accelerator
from clusterd.train.process.control import Control
from clusterd.train.state import scalars
from clusterd.train.state.copy_plan import (
    LocalShards,
    MemoryAddresses,
    PreparedCopy,
    copy_threads,
    memory_addresses,
    segment_part,
)
from clusterd.train.state.copying import CopyBatch, SegmentPart, copies_to_segment, sums_on_device
from clusterd.train.state.local_shards import check_shards, local_shards
from clusterd.train.state.segments import Segment, trim_heap
from clusterd.train.state.training import Training

POLL_S = 0.1
POPULATED_AHEAD_BYTES = 256 << 20
"""Bytes of a CPU rank's segment that are populated while it trains; more would add to a step's peak memory."""
POLITE_SWITCH_S = 0.0005
"""Longest time for which the preparing thread may keep the interpreter from the training loop."""


class MigrationSource:
    """Source side of the migrations of one running rank, one at a time."""

    def __init__(self, training: Training, control: Control) -> None:
        self._training, self._control = training, control
        self._changed = threading.Condition()
        self._migration: MigrationSpec | None = None
        self._quiesce: str = ""  # id of the migration that requested it
        self._aborted: set[str] = set()
        self._ready = False  # the preparing thread has ended, with or without success
        self._failed = ""
        self._begun = False
        self._segment: Segment | None = None
        self._opened: dict[int, str] = {}  # by target rank: why it could not open this rank's device memory, or ""
        self._shares = False  # they all could, and read from there what need not go through host memory
        self._ended = False
        self._addresses: tuple[MemoryAddresses, int] = {}, 0  # at preparation, and the last step done then
        self._prepared: PreparedCopy | None = None
        self._proof = CarryProof(training, control)
        control.on(BeginMigration, self._on_move)
        control.on(Quiesce, self._on_quiesce)
        control.on(Abort, self._on_abort)
        control.on(DeviceOpened, self._on_device_opened)

    def hand_over(self, at_s: float) -> str:
        """Publish the state between two steps, on every rank, and wait for the outcome.

        Args:
            at_s: wall time of the end of the last step.
        Returns:
            "abort": go on with the next step; "stop": end.
        """
        with self._changed:
            migration = self._migration
            # All ranks agreed, but this one may have received the abort already.
            while migration is not None and not (self._quiesce == migration.id and self._ready):
                self._changed.wait(POLL_S)
                migration = self._migration
                if self._control.requested("stop"):
                    return "stop"
        if migration is None:
            return "abort"
        if not self._failed:
            try:
                self._publish(migration, at_s)
            except Exception as error:  # the daemon decides about the migration; this rank is unchanged
                self._fail(migration, "quiesce", error)
        return self._wait(migration)

    def end(self) -> None:
        """End what waits beside training: no step follows."""
        self._proof.end()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def before_step(self) -> None:
        """Have the next step measure what a proof compares."""
        self._proof.before_step()

    def begin_proof(self, why_not: str = "") -> None:
        """Begin to copy the state between two steps, on every rank; `copied` waits for the copy.

        Args:
            why_not: the steps that follow cannot be repeated.
        """
        self._proof.begin(why_not)

    def copied(self) -> None:
        """Wait until no copy reads the state any more; call before the state changes."""
        self._proof.copied()

    def record(self, step: int, loss: float) -> None:
        """Record a finished step, for the proof."""
        self._proof.record(step, loss)

    def has_begun(self) -> bool:
        """True once after a migration began: between two steps, the loop then frees what the target ranks may need."""
        begun, self._begun = self._begun, False
        return begun

    def wait_for_migration(self, timeout_s: float) -> MigrationSpec | None:
        """Wait for a migration to hand over to; None if none came in time, or the rank must stop."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._migration is None and not self._control.requested("stop") and time.monotonic() < deadline:
                self._changed.wait(POLL_S)
            return self._migration

    def _publish(self, migration: MigrationSpec, at_s: float) -> None:
        with self._changed:
            if self._migration is not migration:
                return
            # Owned by this thread while it copies: an abort must not unmap or unpin the memory.
            segment, self._segment = self._segment, None
        try:
            self._fill_and_publish(migration, segment, at_s)
        finally:
            with self._changed:
                if self._migration is migration:
                    self._segment = segment
                elif segment is not None:
                    segment.close()

    def _fill_and_publish(self, migration: MigrationSpec, segment: Segment | None, at_s: float) -> None:
        training = self._training
        with self._changed:
            prepared, self._prepared = self._prepared, None
        live = local_shards(training, migration.shape)
        if prepared is None or prepared.memory_addresses != memory_addresses(live):
            live = check_shards(training, migration.shape, migration.old_layout, training.context.rank)
            prepared = None
        outbox = migration.packing.outbox(training.context.rank)
        began_s = time.time()
        sums: list[int] = []
        meta: dict[str, Any] = {}
        if segment is not None:
            if outbox.size_bytes > POPULATED_AHEAD_BYTES and accelerator.of(training.device) is None:
                # The next step begins without gradients anyway; the segment needs their memory now.
                training.optimizer.zero_grad()
                trim_heap()
                segment.populate_for_writing()
            copies = prepared.copies if prepared is not None else self._copies(migration, segment, live)
            if self._shares and prepared is None and memory_addresses(live) != self._addresses[0]:
                meta["device"] = self._describe(migration, live)
            threads = copy_threads(migration.old.hosts, training.context.rank)
            sums = [value for batch in copies for value in batch.run(threads)]
        copied = (began_s, time.time()) if sums else ()
        if segment is not None:
            meta |= {
                "step": training.step,
                "sums": sums_to_bytes(sums),
                "scalars": scalars.collect(training, migration.shape),
            }
            self._control.ask(PublishSegment(migration.outbox_name(training.context.rank), meta))
        if migration.frees_source_memory:
            free_state(training, live)
        self._control.report(Quiesced(migration.id, training.step, at_s, copied))

    def _copies(self, migration: MigrationSpec, segment: Segment, live: LocalShards) -> tuple[CopyBatch, ...]:
        """Copies into the segment, and sums of what target ranks copy from this rank's device memory."""
        through_host, on_device = self._parts(migration, live)
        if not self._shares:
            return (copies_to_segment(segment, through_host + on_device),)
        return copies_to_segment(segment, through_host), sums_on_device(on_device)

    def _describe(self, migration: MigrationSpec, live: LocalShards) -> bytes:
        _, on_device = self._parts(migration, live)
        return device_memory.describe(accelerator.of(self._training.device), on_device)

    def _parts(self, migration: MigrationSpec, live: LocalShards) -> tuple[list[SegmentPart], list[SegmentPart]]:
        """Live tensors of what goes through host memory, and of what ranks on this device alone read."""
        tensors, outbox = migration.transfers.old.tensors, migration.packing.outbox(self._training.context.rank)
        parts = [segment_part(part, tensors[part.tensor], live, part.offset) for part in outbox.parts]
        return parts[: outbox.host_parts], parts[outbox.host_parts :]

    def _wait(self, migration: MigrationSpec) -> str:
        """Wait for the abort of `migration`, or for a stop."""
        while True:
            with self._changed:
                if self._migration is not migration:
                    break
                # Python's signal handlers cannot notify a condition; they raise the flag that is checked here.
                self._changed.wait(POLL_S)
            if self._control.requested("stop"):
                return "stop"
        self._control.report(Resumed(migration.id, self._training.step))
        return "abort"

    # --- messages of the agent, on the control thread -----------------------------------------------------------------

    def _on_move(self, event: BeginMigration) -> None:
        migration_id = event.move.id
        with self._changed:
            if migration_id in self._aborted or (self._migration is not None and self._migration.id == migration_id):
                return  # repeated by an agent that reconnected
        try:
            migration = MigrationSpec.of(event.move)
        except (KeyError, TypeError, ValueError) as error:
            self._control.report(Failed(migration_id, f"cannot parse the migration: {error}", phase="prepare"))
            return
        if self._training.context.rank in migration.lost:
            return  # this rank's state is older than that of the others
        with self._changed:
            self._reset()
            self._migration, self._begun = migration, True
            self._changed.notify_all()
        # Not a daemon thread, as it may be inside torch: see `snapshots`.
        threading.Thread(target=self._prepare, args=[migration], name="clusterd-prepare").start()

    def _on_quiesce(self, event: Quiesce) -> None:
        with self._changed:
            if event.move in self._aborted:
                return
            self._quiesce = event.move
            self._prepare_copy()
            self._changed.notify_all()
        self._control.request("quiesce", f"migration {event.move}")

    def _on_device_opened(self, event: DeviceOpened) -> None:
        with self._changed:
            own = self._migration is not None and event.move == self._migration.id
            if own and event.source == self._training.context.rank:
                self._opened[event.target] = event.why_not
                self._changed.notify_all()

    def _on_abort(self, event: Abort) -> None:
        self._control.withdraw("quiesce")
        with self._changed:
            self._aborted.add(event.move)
            if self._migration is not None and self._migration.id == event.move:
                self._reset()
            self._changed.notify_all()

    def _prepare_copy(self) -> None:
        """Prepare the copies during the last step, outside of the downtime.

        Only if an update has left the state at its addresses. Otherwise the prepared copies would keep a second copy of
        the state alive, in a step that may have no memory for it.
        """
        before, step = self._addresses
        if self._migration is None or self._segment is None or self._training.step <= step:
            return
        try:
            live = local_shards(self._training, self._migration.shape)
            if memory_addresses(live) == before:
                self._prepared = PreparedCopy(self._copies(self._migration, self._segment, live), before)
        except Exception as error:  # the error recurs and is reported between two steps
            print(f"clusterd: migration {self._migration.id}: copies not prepared: {error}", flush=True)

    # --- beside the training loop -------------------------------------------------------------------------------------

    def _prepare(self, migration: MigrationSpec) -> None:
        rank = self._training.context.rank
        before = sys.getswitchinterval()
        sys.setswitchinterval(POLITE_SWITCH_S)
        try:
            digest = migration.transfers.digest
            outbox = migration.packing.outbox(rank)
            if migration.proof_s:
                self._proof.run(migration, lambda: self._migration is not migration)
            live = check_shards(self._training, migration.shape, migration.old_layout, rank)
            addresses = memory_addresses(live), self._training.step
            segment = None
            readers = outbox.device_readers if accelerator.of(self._training.device) is not None else ()
            not_shared = self._share(migration, live, readers) if readers else ""
            shares = bool(readers) and not not_shared
            if size_bytes := outbox.size_bytes:
                if shares:
                    size_bytes = max(outbox.host_bytes, 1)
                made = self._control.ask(MakeSegment(migration.outbox_name(rank), size_bytes))
                segment = Segment(made.path, size_bytes=size_bytes)
                if (gpu := accelerator.of(self._training.device)) is not None:
                    segment.populate_for_writing()
                    segment.pin(gpu)
                else:
                    segment.populate_for_writing(POPULATED_AHEAD_BYTES)
        except Exception as error:  # any failure ends the migration, never the training
            self._fail(migration, "prepare", error)
            return
        finally:
            sys.setswitchinterval(before)
        with self._changed:
            if self._migration is not migration:
                if segment is not None:
                    segment.close()
                return
            self._segment, self._shares, self._addresses, self._ready = segment, shares, addresses, True
            self._changed.notify_all()
        self._control.report(Prepared(migration.id, digest, outbox.size_bytes, not_shared))

    def _share(self, migration: MigrationSpec, live: LocalShards, readers: Collection[int]) -> str:
        """Describe the device memory of this rank to target ranks on its device, and wait until they have opened it.

        Returns:
            Why they cannot read it; empty if all can.
        """
        rank = self._training.context.rank
        name, description, not_shared = migration.description_name(rank), b"", ""
        try:
            description = self._describe(migration, live)
        except device_memory.NotShared as error:
            not_shared = str(error)
        path = self._control.ask(MakeSegment(name, max(len(description), 1))).path
        with open(path, "r+b") as file:
            file.write(description)
        self._control.ask(PublishSegment(name, {"bytes": len(description), "not_shared": not_shared}))
        with self._changed:
            while not self._opened.keys() >= set(readers):
                if self._migration is not migration or self._ended or self._control.requested("stop"):
                    return "the migration is over"
                self._changed.wait(POLL_S)
            not_shared = next(filter(None, self._opened.values()), "")
        if not not_shared:
            _, on_device = self._parts(migration, live)
            sums_on_device(on_device).run()  # the first kernels of a kind take long
        return not_shared

    def _fail(self, migration: MigrationSpec, phase: str, error: Exception) -> None:
        with self._changed:
            if self._migration is not migration:
                return
            self._ready, self._failed = True, str(error)
            self._changed.notify_all()
        self._control.report(Failed(migration.id, f"{type(error).__name__}: {error}", phase))

    def _reset(self) -> None:
        self._prepared = None
        if self._segment is not None:
            self._segment.close()
        self._migration, self._segment, self._ready, self._failed = None, None, False, ""
        self._addresses, self._opened, self._shares = ({}, 0), {}, False


def free_state(training: Training, live: LocalShards) -> None:
    """Free the published state and gradients: this rank only waits for the target ranks to take over."""
    training.optimizer.zero_grad()
    training.parallel.drop_buckets()
    for shard in live.values():
        for tensor in shard.tensors:
            if tensor is not None and tensor.untyped_storage().resizable():
                tensor.untyped_storage().resize_(0)
    if (gpu := accelerator.of(training.device)) is not None:
        gpu.empty_cache()
    else:
        trim_heap()
