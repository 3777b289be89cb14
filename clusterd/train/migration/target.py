"""Target side of a migration: build the rank while the source ranks train, then load the state they publish.

A standby rank has no values of its own. It builds the model without them, rendezvous with the other target ranks,
rehearses one step so that the first real one finds everything warm, and then overwrites parameters, optimizer state,
buffers and counters. Until it gets the resume message it may be killed at any moment without loss.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from clusterd.plans.memory import OVERHEAD, estimate
from clusterd.plans.packing import Read
from clusterd.plans.plan import Plan
from clusterd.protocol import control as events
from clusterd.protocol.launch import PROOF
from clusterd.protocol.messages import Event
from clusterd.protocol.rank import Failed, Loaded, Prepared
from clusterd.train.migration import device_memory
from clusterd.train.migration.spec import MigrationSpec, sums_from_bytes
from clusterd.train.parallel.mesh import same_on_all_ranks
from clusterd.train.process import accelerator, device_faults, exits
from clusterd.train.process.context import Context
from clusterd.train.process.control import Control
from clusterd.train.process.exits import PlanRefused
from clusterd.train.process.script_variables import differences, script_variables
from clusterd.train.state import scalars
from clusterd.train.state.attributes import SAMPLER
from clusterd.train.state.copy_plan import LocalShards, copy_threads, segment_part
from clusterd.train.state.copying import CopyBatch, copies_from_device, copies_from_segment
from clusterd.train.state.local_shards import check_shards
from clusterd.train.state.next_steps import NOISE_TIMES, STEPS, Difference, NextSteps, difference
from clusterd.train.state.segments import Segment, memory_headroom_bytes, trim_heap
from clusterd.train.state.training import Training

POLL_S = 0.1

MAPPED_AHEAD_BYTES = 256 << 20
"""Segment bytes that a CPU rank maps before they are filled, or more, up to a share of a step's memory.

The rest is mapped source by source, and counts as this process's memory while it is read."""
PEAK_SHARE = 1.25


class CarryFailed(exits.TrainError):
    """The state of the source ranks does not go on here as it does there."""


class MigrationFailed(exits.TrainError):
    """This rank cannot take over; the source ranks go on."""


Target = TypeVar("Target", bound=Training)


class MigrationTarget:
    """Target side of the migration that a standby rank was started for.

    Attributes:
        migration_id: id of that migration.
    """

    def __init__(self, context: Context, control: Control) -> None:
        assert context.migration is not None
        self._context, self._control = context, control
        self._phase = "prepare"
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.migration_id = context.migration.id
        self._mapped: dict[str, Segment] = {}  # by path
        self._copies: dict[tuple[str, int], CopyBatch] = {}  # out of mapped segments, by path and source
        self._map_budget_bytes = MAPPED_AHEAD_BYTES
        self._memory: device_memory.OpenedMemory | None = None
        self._device_copies: dict[int, CopyBatch] = {}  # by source whose device memory is open
        self._device = torch.device("cpu")
        self._gpu: Any = None
        for kind in (events.SegmentPublished, events.SegmentMade, events.FetchFailed, events.Resume, events.Connected):
            control.on(kind, self._events.put)
        control.on(events.Stop, self._exit_unneeded)

    def take_over(self, make: Callable[[], Target], device: torch.device) -> Target:
        """Make the rank's training and return it once it may run the next step.

        Raises:
            MigrationFailed: after reporting the failure to the daemon.
            SystemExit: code 0 after SIGTERM: this rank is not needed.
        """
        try:
            training = self._prepare_and_load(make, device)
        except Exception as error:
            known = exits.classify_error(error, where="")
            known = device_faults.judge(error, known, self._context, self._control)
            own = isinstance(known, (exits.PlanRefused, CarryFailed))
            why = str(known) if own else f"{type(error).__name__}: {error}"
            full = isinstance(known, exits.DeviceOutOfMemory)
            refused = str(known) if isinstance(known, exits.PlanRefused) else ""
            self._control.report(Failed(self.migration_id, why, self._phase, full, refused))
            raise MigrationFailed(f"migration {self.migration_id} failed in phase {self._phase}: {why}") from error
        self._control.on(events.Stop, lambda _: None)  # from now on the loop handles stops, between two steps
        # A daemon that repeats the resume message missed the report that this rank trains.
        self._control.on(events.Resume, lambda _: self._control.resend_report())
        return training

    def _prepare_and_load(self, make: Callable[[], Target], device: torch.device) -> Target:
        assert self._context.migration is not None
        migration = MigrationSpec.of(self._context.migration)
        rank = self._context.rank
        self.leave_memory_to_source(device)
        training = make()
        self._device = device
        training.rehearse()
        if self._gpu is not None:
            self._gpu.empty_cache()  # the source ranks train beside this one
        trim_heap()
        self._map_budget_bytes = (
            sys.maxsize if self._gpu is not None else max(MAPPED_AHEAD_BYTES, memory_headroom_bytes(PEAK_SHARE))
        )
        live = check_shards(training, migration.shape, migration.new_layout, rank)
        reads = migration.packing.reads(rank)
        if migration.proof_s:
            self._prove(migration, training, reads)
            live = check_shards(training, migration.shape, migration.new_layout, rank)  # steps may replace buffers
        self._fetch(migration)
        self._open_device_memory(migration, live, reads)
        for segment in self._control.ask(events.ListSegments(migration.id)).rooms:
            self._map(migration, live, reads, segment)
        self._control.report(Prepared(migration.id, migration.transfers.digest))
        self._phase = "transfer"
        metas, copied = self._load(migration, live, reads, copy_threads(migration.new.hosts, rank))
        self._phase = "verify"
        steps = {int(meta["step"]) for meta in metas}
        if len(steps) != 1:
            raise ValueError(f"the source ranks ended different steps: {sorted(steps)}")
        training.step = steps.pop()
        scalars.restore(training, migration.shape, [meta["scalars"] for meta in metas])
        if training.stream is not None:
            training.read_ahead()  # fails where the stream does not go on as for the source ranks
        host = migration.new.hosts[rank]
        self._control.report(
            Loaded(
                migration.id,
                training.step,
                verified=True,
                bytes_local=sum(read.bytes for read in reads if read.local),
                bytes_network=sum(fetch.bytes for fetch in migration.packing.fetches(host)),
                bytes_device=sum(read.bytes for read in reads if self._is_on_device(migration, read)),
                copied=copied,
            )
        )
        if self._gpu is None:
            self._unmap()
        training.read_ahead()
        self._phase = "resume"
        while not isinstance(self._next(), events.Resume):
            pass
        if self._gpu is not None:
            self._gpu.limit_memory(None)
            # Unpinning takes the driver long: beside the first steps, not within the downtime.
            threading.Thread(target=self._release, name="clusterd-unpin").start()
        return training

    def _prove(self, migration: MigrationSpec, training: Training, reads: list[Read]) -> None:
        """Make the steps after a state of the source ranks, and compare them with theirs, while they train.

        Leaves a state that the loading replaces.

        Raises:
            CarryFailed: they differ.
            PlanRefused: they differ, and the source ranks do without some technique of this plan.
        """
        proof, rank = migration.of_proof, self._context.rank

        def load() -> list[dict[str, Any]]:
            live = check_shards(training, migration.shape, migration.new_layout, rank)
            deadline = time.monotonic() + migration.proof_s
            found, _ = self._load(proof, live, reads, copy_threads(migration.new.hosts, rank), deadline)
            self._unmap()
            return found

        why_not = "a stream is read once" if training.stream is not None else ""
        metas: list[dict[str, Any]] = []
        self._fetch(proof)
        try:
            metas = load()
            why_not = why_not or next((meta["skipped"] for meta in metas if "skipped" in meta), "")
        except TimeoutError:
            why_not = "the source ranks sent no state in time"
        if not same_on_all_ranks(bool(why_not), self._device) or why_not:
            print(
                f"clusterd: it was not tried whether the state is carried: {why_not or 'on another rank'}", flush=True
            )
            return
        job, old, new = training.job, migration.old.plan, migration.new.plan
        there = NextSteps.of_all([meta["next"] for meta in metas])
        autocast = there.autocast
        if job.own_loop:
            there = NextSteps(there.losses[:1], there.norms)  # the script may change something before the second
        if _parts(old) != _parts(new) and (training.normalises_parts or job.sees_batch == "replica"):
            there = NextSteps(rates=there.rates)  # the other numbers depend on the plan, as the log says

        def made(seed: int) -> NextSteps:
            training.step = int(metas[0]["step"])
            scalars.restore(training, migration.shape, [meta["scalars"] for meta in metas])
            return training.try_steps(STEPS, seed, autocast=autocast)

        def off(one: NextSteps, other: NextSteps) -> Difference:
            return self._worst(difference(one, other, training.rounds_as))

        variables = script_variables()
        here = made(job.seed)
        found = off(there, here)
        if found.excess > 1 and found.random:
            load()
            if off(here, made(job.seed)).excess <= 1:  # else it is what was not restored here either
                noise = []
                for seed in range(job.seed + 1, job.seed + 4):
                    load()
                    noise.append(off(here, made(seed)).excess)
                if found.excess <= NOISE_TIMES * max(noise):
                    found = Difference()
        training.optimizer.make_state()
        training.parallel.refresh_replication()
        if found.excess <= 1:
            return
        step = int(metas[0]["step"])
        text = f"the state of step {step} does not go on under {new} as under {old}: {found}"
        if unlike := differences([meta.get("variables", {}) for meta in metas], variables):
            text = f"{text}. Variables of the script that differ: {unlike}"
        what_to_do = "Keep what goes on in attributes or buffers of modules, or register it: the rest is not moved"
        if of_sampler := [name for name in training.attributes.of_loop if name.startswith(SAMPLER)]:
            what_to_do = (
                f"The order of an epoch follows from {min(of_sampler)} at its beginning, and the script's loop changes "
                "that within it: change it after the last step of an epoch only"
            )
        text = f"{text}. {what_to_do}"
        raise (CarryFailed if new.techniques <= old.techniques else PlanRefused)(text)

    def _worst(self, own: Difference) -> Difference:
        """The largest difference that any rank has found."""
        if not dist.is_initialized():
            return own
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        worst: Difference = max(every, key=lambda each: each.excess)
        return worst

    def leave_memory_to_source(self, device: torch.device) -> None:
        """Leave a source rank on the same GPU its memory until the resume: this rank can fail harmlessly."""
        self._gpu = accelerator.of(device)
        assert self._context.migration is not None
        migration = MigrationSpec.of(self._context.migration)
        shared = migration.new.devices[self._context.rank] in migration.old.devices
        if self._gpu is None or not shared or migration.snapshot is not None or migration.frees_source_memory:
            return
        _, total_bytes = self._gpu.memory_bytes()
        source_bytes = estimate(migration.old.plan, migration.shape, kind="cuda").device_bytes
        left_bytes = total_bytes - source_bytes - OVERHEAD.of(migration.new.plan)
        if left_bytes > 0:  # else the estimate is of no use
            self._gpu.limit_memory(left_bytes)

    def _fetch(self, migration: MigrationSpec) -> None:
        """Have the agent fetch the boxes that this host lacks; the lowest rank of the host asks."""
        rank = self._context.rank
        host = migration.new.hosts[rank]
        fetches = migration.packing.fetches(host)
        if not fetches or migration.new.hosts.index(host) != rank:
            return
        sources = tuple(
            events.FetchSource(
                migration.outbox_name(fetch.source),
                migration.fabric[fetch.source_host],
                tuple(fetch.ranges),
                fetch.offset,
                fetch.source,
            )
            for fetch in fetches
        )
        size_bytes = migration.packing.inbox_bytes(host)
        self._control.ask(events.FetchSegments(migration.id, migration.inbox_name, size_bytes, sources))

    def _load(
        self,
        migration: MigrationSpec,
        live: LocalShards,
        reads: list[Read],
        threads: int,
        deadline: float = float("inf"),
    ) -> tuple[list[dict[str, Any]], tuple[float, float]]:
        """Read every source as it arrives; return the metadata by source, and start and end times.

        Raises:
            TimeoutError: they did not arrive by the deadline.
        """
        pending: dict[int, list[Read]] = {}
        for read in reads:
            pending.setdefault(read.source, []).append(read)
        if not pending:
            raise ValueError(
                f"rank {self._context.rank} of {migration.new.plan} has nothing to read: it would hold no state"
            )
        metas: dict[int, dict[str, Any]] = {}
        began_s = 0.0
        self._request_published(migration)
        while pending:
            event = self._next(deadline)
            if isinstance(event, events.Connected):
                self._request_published(migration)
            if isinstance(event, events.SegmentMade) and event.move == migration.id:
                self._map(migration, live, reads, event)
            if not isinstance(event, events.SegmentPublished) or event.move != migration.id or event.source is None:
                continue
            own_reads = pending.get(event.source, [])
            if not own_reads or event.where != ("outbox" if own_reads[0].local else "inbox"):
                continue
            began_s = began_s or time.time()
            if "sums" in event.meta:
                self._read_source(migration, live, own_reads, event, event.source, threads)
            metas[event.source] = event.meta
            del pending[event.source]
        for shard in live.values():
            if shard.mirror is not None and (local := shard.tensors[0]) is not None:
                shard.mirror.copy_(local)
        return [metas[source] for source in sorted(metas)], (began_s, time.time())

    def _map(self, migration: MigrationSpec, live: LocalShards, reads: list[Read], made: events.SegmentMade) -> None:
        """Map a segment that this rank will read, and prepare the copies from it, before the downtime.

        Maps only this rank's own pages.
        """
        name, path = os.path.basename(made.path), made.path
        local = {migration.outbox_name(read.source) for read in reads if read.local}
        if path in self._mapped or not (name == migration.inbox_name or name in local):
            return
        own_reads = [
            r
            for r in reads
            if (migration.outbox_name(r.source) == name if r.local else name == migration.inbox_name)
            and not self._is_on_device(migration, r)
        ]
        size_bytes = sum(read.bytes for read in own_reads)
        if not own_reads or size_bytes > self._map_budget_bytes:
            return
        try:
            segment = Segment(path)
        except FileNotFoundError:
            return  # dropped meanwhile; the reason arrives as a message
        segment.populate_for_reading((read.offset, read.bytes) for read in own_reads)
        if self._gpu is not None:
            segment.pin(
                self._gpu, min(read.offset for read in own_reads), max(read.offset + read.bytes for read in own_reads)
            )
        self._mapped[path] = segment
        self._map_budget_bytes -= size_bytes
        for source in {read.source for read in own_reads}:
            self._copies[path, source] = _copies(migration, live, segment, [r for r in own_reads if r.source == source])

    def _open_device_memory(self, migration: MigrationSpec, live: LocalShards, reads: list[Read]) -> None:
        """Open the memory of source ranks on this device, tell them, and wait for the segments of the rest.

        Copies once, while they train: the first kernels of a kind take long. The state that this makes is replaced.
        """
        pending: dict[int, list[Read]] = {}
        for read in reads:
            if self._gpu is not None and migration.packing.on_device(read):
                pending.setdefault(read.source, []).append(read)
        outboxes = {migration.outbox_name(source) for source in pending}
        if pending:
            self._memory = device_memory.OpenedMemory(self._gpu)
            self._request_published(migration)
        while pending:
            event = self._next()
            if isinstance(event, events.Connected):
                self._request_published(migration)
            if not isinstance(event, events.SegmentPublished) or (event.move, event.where) != (migration.id, "device"):
                continue
            if event.source not in pending:
                continue
            source, own_reads, why_not = event.source, pending.pop(event.source), event.meta["not_shared"]
            if not why_not:
                with open(event.path, "rb") as file:
                    description = file.read(event.meta["bytes"])
                try:
                    copies = self._copies_from_device(migration, live, own_reads, description)
                    copies.run()
                    self._device_copies[source] = copies
                except device_memory.NotShared as error:
                    why_not = str(error)
            self._control.ask(events.ReportDeviceOpened(migration.id, source, self._context.rank, why_not))
        while not outboxes <= {made.name for made in self._control.ask(events.ListSegments(migration.id)).rooms}:
            self._next()

    def _copies_from_device(
        self, migration: MigrationSpec, live: LocalShards, reads: list[Read], description: bytes
    ) -> CopyBatch:
        """Copies of these reads, all of one source.

        Raises:
            NotShared: the memory cannot be opened, or a tensor of this rank is not on the device.
        """
        assert self._memory is not None
        tensors = migration.transfers.new.tensors
        outbox = migration.packing.outbox(reads[0].source)
        place = {(p.tensor, p.low, p.high): i for i, p in enumerate(outbox.parts[outbox.host_parts :])}
        described = self._memory.tensors(description)
        parts = [segment_part(read, tensors[read.tensor], live, read.offset) for read in reads]
        if any(t is None or accelerator.of(t.device) is not self._gpu for part in parts for t in part.tensors):
            raise device_memory.NotShared("some of the state is not on the device")
        return copies_from_device(parts, [described[place[read.tensor, read.low, read.high]] for read in reads])

    def _is_on_device(self, migration: MigrationSpec, read: Read) -> bool:
        """True for a read from opened device memory; a proof reads a state that was copied to host memory."""
        opened = migration.id == self.migration_id and read.source in self._device_copies
        return opened and migration.packing.on_device(read)

    def _release(self) -> None:
        """Unmap and close what was read from, while this rank trains."""
        self._unmap()
        self._device_copies.clear()
        if self._memory is not None:
            self._memory.close()

    def _unmap(self) -> None:
        self._copies.clear()
        for segment in self._mapped.values():
            segment.close()
        self._mapped.clear()

    def _read_source(
        self,
        migration: MigrationSpec,
        live: LocalShards,
        reads: list[Read],
        published: events.SegmentPublished,
        source: int,
        threads: int,
    ) -> None:
        """Read the parts of one source.

        Raises:
            ValueError: a checksum differs from that of the source rank.
        """
        tensors = migration.transfers.new.tensors
        path = published.path
        on_device: list[Read] = []
        through_host: list[Read] = []
        for read in reads:
            (on_device if self._is_on_device(migration, read) else through_host).append(read)
        sums: list[int] = []
        if on_device:
            copies = self._device_copies[source]
            if "device" in published.meta:  # tensors of the source rank have moved since it described them
                copies = self._copies_from_device(migration, live, on_device, published.meta["device"])
            sums = copies.run()
        if through_host:
            segment = self._mapped.get(path)
            if segment is not None and segment.is_at(path):
                sums += self._copies[path, source].run(threads)
            else:
                segment = Segment(path)
                segment.populate_for_reading((read.offset, read.bytes) for read in through_host)
                sums += _copies(migration, live, segment, through_host).run(threads)
                segment.close()
        sent = sums_from_bytes(published.meta["sums"])
        place = {(p.tensor, p.low, p.high): i for i, p in enumerate(migration.packing.outbox(source).parts)}
        for read, found in zip(on_device + through_host, sums, strict=True):
            low, high = read.within or (read.low, read.high)
            if sent[place[read.tensor, low, high]] != found:
                name = tensors[read.tensor].name
                raise ValueError(
                    f"{name} {list(read.low)}:{list(read.high)} from rank {source} has a different checksum here"
                )

    def _request_published(self, migration: MigrationSpec) -> None:
        """Ask for the segments that were published before this rank listened."""
        for segment in self._control.ask(events.ListSegments(migration.id)).segments:
            self._events.put(segment)

    def _next(self, deadline: float = float("inf")) -> Event:
        while True:
            if time.monotonic() > deadline:
                raise TimeoutError
            if self._control.requested("stop"):
                if self._owns_state():
                    return events.Resume(self.migration_id)
                raise SystemExit(0)
            try:
                event = self._events.get(timeout=POLL_S)
            except queue.Empty:
                continue
            break
        if isinstance(event, events.FetchFailed) and event.move.removesuffix(PROOF) == self.migration_id:
            raise ConnectionError(f"{event.name}: {event.why}")
        return event

    def _owns_state(self) -> bool:
        """True once a stop asks for the state: the migration has switched, whether or not the resume has arrived."""
        return any(self._control.requested(flag) for flag in ("keep", "done", "save"))

    def _exit_unneeded(self, stop: events.Stop) -> None:
        if self._owns_state():
            return  # the loop handles it
        # The main thread may wait in a collective for ranks that are gone; there is no state to save.
        print(f"clusterd: not needed: {stop.reason}", flush=True)
        sys.stderr.flush()
        os._exit(0)


def _parts(plan: Plan) -> int:
    """Number of parts into which a plan cuts the batch."""
    return plan.dp * plan.accumulation


def _copies(migration: MigrationSpec, live: LocalShards, segment: Segment, reads: list[Read]) -> CopyBatch:
    tensors = migration.transfers.new.tensors
    return copies_from_segment(segment, [segment_part(read, tensors[read.tensor], live, read.offset) for read in reads])
