"""Source side of the proof that a migration carries the state; see `clusterd.train.state.next_steps`.

The state is copied between two steps that all ranks agreed on, beside the forward and backward pass of the next one. It
is published once the steps after it are done, with what they were.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from clusterd.process_attributes import lower_priority
from clusterd.protocol.control import MakeSegment, PublishSegment
from clusterd.train.migration.spec import MigrationSpec, sums_to_bytes
from clusterd.train.parallel import precision
from clusterd.train.process import accelerator
from clusterd.train.process.control import Control
from clusterd.train.process.plain_data import NotSerializable
from clusterd.train.process.script_variables import script_variables
from clusterd.train.state import scalars
from clusterd.train.state.copy_plan import segment_part
from clusterd.train.state.copying import copies_to_segment
from clusterd.train.state.local_shards import clone_changing, local_shards
from clusterd.train.state.next_steps import STEPS, NextSteps
from clusterd.train.state.segments import Segment
from clusterd.train.state.training import Training

POLL_S = 0.1


class CarryProof:
    """Proofs of one running rank, one at a time."""

    def __init__(self, training: Training, control: Control) -> None:
        self._training, self._control = training, control
        self._changed = threading.Condition()
        self._wanted: tuple[MigrationSpec, Segment | None] | None = None
        self._taken: tuple[int, dict[str, Any]] | None = None  # step of the state, and what accompanies it
        self._copied = threading.Event()
        self._copied.set()
        self._steps = NextSteps()
        self._count = STEPS  # before an evaluation that changes learning rates, which the target ranks do not make
        self._why_not = ""  # the state could not be taken
        self._ended = False  # no step follows

    def run(self, migration: MigrationSpec, is_over: Callable[[], bool]) -> None:
        """Publish a state and the steps after it, on a thread beside training.

        Without enough steps left, or in time, there is no proof, and the target ranks learn so.
        """
        training, deadline = self._training, time.monotonic() + migration.proof_s
        size_bytes = migration.packing.outbox(training.context.rank).size_bytes
        if not size_bytes:
            self._take_part(migration, None, is_over, deadline)
            return
        name = migration.of_proof.outbox_name(training.context.rank)
        segment = Segment(self._control.ask(MakeSegment(name, size_bytes)).path, size_bytes=size_bytes)
        try:
            meta = self._take_part(migration, segment, is_over, deadline)
            if not is_over():
                self._control.ask(PublishSegment(name, meta or {"skipped": self._why_not or "no steps were left"}))
        finally:
            self._copied.wait()
            segment.close()

    def begin(self, why_not: str) -> None:
        """Begin to copy the state, between two steps, unless there is a reason against it."""
        with self._changed:
            wanted, training = self._wanted, self._training
            if wanted is None or self._taken is not None:
                return
            migration, segment = wanted
            self._control.withdraw("prove")
            if why_not:
                self._why_not = why_not
                return
            try:
                state = scalars.collect(training, migration.shape)
                meta: dict[str, Any] = {"step": training.step, "scalars": state, "variables": script_variables()}
            except NotSerializable as error:
                self._why_not = str(error)
                return
            self._taken, self._steps = (training.step, meta), NextSteps()
            by_metric = training.schedule is not None and training.schedule.by_metric
            self._count = 1 if by_metric and training.evaluations.is_due(training.step + 1) else STEPS
            if segment is None:
                return
            self._copied.clear()  # from here on the segment stays mapped, although the migration may be over
        try:
            self._copy(migration, segment, meta)
        except Exception as error:
            self._give_up(error)
            self._copied.set()

    def _give_up(self, error: Exception) -> None:
        """End the proof without a result; training goes on."""
        with self._changed:
            self._taken, self._why_not = None, f"{type(error).__name__}: {error}"
            self._changed.notify_all()

    def _copy(self, migration: MigrationSpec, segment: Segment, meta: dict[str, Any]) -> None:
        """Begin to copy this rank's state."""
        training, tensors = self._training, migration.transfers.old.tensors
        live = local_shards(training, migration.shape)
        parts = migration.packing.outbox(training.context.rank).parts
        clone_changing(training, live, (tensors[part.tensor] for part in parts))
        places = [segment_part(part, tensors[part.tensor], live, part.offset) for part in parts]
        copies = copies_to_segment(segment, places)
        gpu = accelerator.of(training.device)
        done = gpu.record_event() if gpu is not None else None

        def copy() -> None:
            try:
                lower_priority()
                meta["sums"] = sums_to_bytes(copies.run(after=done))
            except Exception as error:
                self._give_up(error)
            finally:
                self._copied.set()

        threading.Thread(target=copy, name="clusterd-proof").start()

    def end(self) -> None:
        """End a proof under way: no step follows, and its thread would keep the process."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def before_step(self) -> None:
        """Have the next step measure what the proof compares."""
        if self._taken is None or self._wanted is None:
            return
        if self._training.step == self._taken[0]:
            self._training.stepper.measured_parameters = self._training.parameter_names
            self._steps.autocast = precision.around(self._training.device.type)
        elif self._training.step == self._taken[0] + 1 and self._count > 1:
            self._steps.rates = self._training.rates()

    def copied(self) -> None:
        """Wait until no copy reads the state any more."""
        self._copied.wait()

    def record(self, step: int, loss: float) -> None:
        """Record a finished step."""
        if self._taken is None or len(self._steps.losses) >= self._count or step <= self._taken[0]:
            return
        training = self._training
        with self._changed:
            self._steps.losses.append(loss)
            if step == self._taken[0] + 1:
                self._steps.norms = training.measured_norms()
            self._changed.notify_all()

    def _take_part(
        self, migration: MigrationSpec, segment: Segment | None, is_over: Callable[[], bool], deadline: float
    ) -> dict[str, Any] | None:
        """Metadata of the copied state; None: it was not copied, or the steps after it were not made."""
        own = migration, segment
        with self._changed:
            self._wanted, self._taken, self._why_not = own, None, ""
        self._control.request("prove", f"migration {migration.id}")
        try:
            while not (is_over() or self._why_not or self._ended) and time.monotonic() < deadline:
                with self._changed:
                    if (meta := self._meta()) is not None:
                        return meta
                    self._changed.wait(POLL_S)
                if self._control.requested("stop"):
                    break
            return self._meta()
        finally:
            with self._changed:
                if self._wanted is own:  # else the next migration has begun
                    self._wanted = None
                    self._control.withdraw("prove")

    def _meta(self) -> dict[str, Any] | None:
        """Metadata of the state, once it is copied and the steps after it are done; None before."""
        if self._taken is None or len(self._steps.losses) < self._count or not self._copied.is_set():
            return None
        return {**self._taken[1], "next": self._steps.to_dict()}
