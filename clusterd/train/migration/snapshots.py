"""State snapshots: every few steps a copy of this rank's share of the state, in shared memory of the agent.

The copy runs beside the next step's forward and backward pass, and completes before a parameter changes. Two segments
alternate, so that one is complete at any moment. Buffers, and parameters that a forward pass writes into, are cloned
before that pass begins.

A rank that is stopped so that its job can go on elsewhere leaves one more state snapshot, of its last step.
"""

from __future__ import annotations

import threading
import time
from functools import cached_property
from typing import Any, TypeVar

from clusterd.plans.layout import Layout, layout
from clusterd.plans.packing import Outbox
from clusterd.plans.snapshots import state_snapshot_outbox
from clusterd.process_attributes import lower_priority
from clusterd.protocol.control import MakeSegment, PublishSegment
from clusterd.protocol.messages import Request
from clusterd.train.migration.spec import sums_to_bytes
from clusterd.train.process import accelerator
from clusterd.train.process.control import AgentAbsent, AgentRefused, Control
from clusterd.train.process.plain_data import NotSerializable
from clusterd.train.state import scalars
from clusterd.train.state.copy_plan import segment_part
from clusterd.train.state.copying import SegmentPart, copies_to_segment
from clusterd.train.state.local_shards import check_shards, clone_changing
from clusterd.train.state.segments import Segment
from clusterd.train.state.training import Training

R = TypeVar("R")


class StateSnapshots:
    """State snapshots of one running rank.

    Args:
        every: steps between two state snapshots; 0: none.
    """

    def __init__(self, training: Training, control: Control, every: int) -> None:
        self._training, self._control, self._every = training, control, every
        self._segments: list[Segment] = []
        self._newest = 1  # index of the segment that was published last
        self._step = -1  # of that segment
        self._copied = threading.Event()
        self._copied.set()
        self._thread: threading.Thread | None = None
        if every > 0 and training.context.control_socket:
            # The layout is computed here, between steps, and not on the thread.
            arguments = [self._outbox.size_bytes, 2]
            # Not a daemon thread: a process that exits while a thread is inside torch is aborted by C++ (SIGABRT).
            self._thread = threading.Thread(target=self._allocate_segments, args=arguments, name="clusterd-snapshots")
            self._thread.start()

    def begin(self) -> None:
        """Start a state snapshot after a step, if one is due, a segment is free and the last one is done."""
        training = self._training
        if not self._every or training.step % self._every or training.step >= training.job.steps:
            return
        if len(self._segments) < 2 or self._is_busy():
            return
        slot = 1 - self._newest
        try:
            parts, meta = self._state()
        except NotSerializable as error:
            print(f"clusterd: no state snapshots: {error}", flush=True)
            self._every = 0
            return
        self._copied.clear()
        done = None  # the copy need not wait for the next step, queued after this event
        if (gpu := accelerator.of(training.device)) is not None:
            done = gpu.record_event()

        def take() -> None:
            try:
                lower_priority()
                meta["sums"] = sums_to_bytes(copies_to_segment(self._segments[slot], parts).run(after=done))
            finally:
                self._copied.set()
            if self._ask_agent(PublishSegment(self._name(slot), meta)) is not None:
                self._newest, self._step = slot, meta["step"]

        self._thread = threading.Thread(target=take, name="clusterd-snapshot")
        self._thread.start()

    def copied(self) -> None:
        """Wait until no copy reads the state any more; call before the state changes."""
        self._copied.wait()

    def publish_final(self) -> None:
        """Publish the state of the last step, even if state snapshots are off."""
        training = self._training
        if not training.context.control_socket:
            return
        if self._thread is not None:
            self._thread.join()
        if self._step == training.step:
            return
        if not self._segments:
            self._allocate_segments(self._outbox.size_bytes, 1)
        if not self._segments:
            return
        slot = 1 - self._newest
        try:
            parts, meta = self._state()
        except NotSerializable as error:
            print(f"clusterd: no state snapshot of step {training.step}: {error}", flush=True)
            return
        meta["sums"] = sums_to_bytes(copies_to_segment(self._segments[slot], parts).run())
        # The next ranks may run on this very host: do not wait for the replica on a second one.
        self._ask_agent(PublishSegment(self._name(slot), meta, wait=False))

    def _state(self) -> tuple[list[SegmentPart], dict[str, Any]]:
        """Live tensors of this rank's share of the state, and the metadata that accompanies them."""
        training = self._training
        rank_scalars = scalars.collect(training, training.shape)  # first: it refuses state that cannot be stored
        live = check_shards(training, training.shape, self._layout, training.context.rank)
        tensors = self._layout.tensors
        clone_changing(training, live, (tensors[part.tensor] for part in self._outbox.parts))
        parts = [segment_part(part, tensors[part.tensor], live, part.offset) for part in self._outbox.parts]
        meta = {
            "step": training.step,
            "plan": training.context.plan.to_dict(),
            "scalars": rank_scalars,
        }
        return parts, meta

    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @cached_property
    def _layout(self) -> Layout:
        return layout(self._training.shape, self._training.context.plan)

    @cached_property
    def _outbox(self) -> Outbox:
        return state_snapshot_outbox(self._layout.deduplicated(), self._training.context.rank)

    def _allocate_segments(self, size_bytes: int, count: int) -> None:
        size = max(size_bytes, 8)  # a rank with nothing to write publishes too, so that the step is complete
        began_s, first_step = time.monotonic(), self._training.step
        for slot in range(count):
            made = self._ask_agent(MakeSegment(self._name(slot), size))
            if made is None:
                return
            segment = Segment(made.path, size_bytes=size)
            segment.populate_for_writing()
            if (gpu := accelerator.of(self._training.device)) is not None:
                segment.pin(gpu)
            self._segments.append(segment)
        step = self._training.step
        if self._every and step // self._every > first_step // self._every:
            took_s = time.monotonic() - began_s
            print(
                f"clusterd: state snapshots begin after step {step}: preparing {count * size / 1e9:.1f} GB of host "
                f"memory for them took {took_s:.1f} s; until now a lost host would have cost these steps",
                flush=True,
            )

    def _ask_agent(self, request: Request[R]) -> R | None:
        """Ask the agent; training goes on without a state snapshot if it is absent or refuses."""
        try:
            return self._control.ask(request)
        except (AgentRefused, AgentAbsent) as error:
            print(f"clusterd: no state snapshot of step {self._training.step}: {error}", flush=True)
            return None

    def _name(self, slot: int) -> str:
        context = self._training.context
        return f"{context.job}.{context.attempt}.g{context.generation}.snap{context.rank}.{slot}"
