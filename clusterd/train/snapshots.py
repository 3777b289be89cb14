"""Snapshots in memory: every few steps a copy of this rank's share of the state, in the agent's hands.

The copy is taken beside the next step's forward and backward pass, and is complete before a parameter changes. Two
segments take turns, so that one is whole at any moment.

Buffers are the exception: a forward pass changes them. They are copied apart before it begins.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, Protocol

import torch

from clusterd.train import scalars
from clusterd.train.boxes import Trained, holdings
from clusterd.train.context import Context
from clusterd.train.control import AgentAbsent, AgentRefused, Control
from clusterd.train.leaving import piece_of
from clusterd.train.moving import sums_to_bytes
from clusterd.train.segments import Segment, fill
from plans.layout import layout
from plans.model_shape import ModelShape
from plans.snapshots import snapshot_of


class Kept(Trained, Protocol):
    """The part of `clusterd.train.entry.Training` that is kept."""

    context: Context
    device: torch.device
    scheduler: Any
    step: int

    @property
    def shape(self) -> ModelShape:
        """Of the whole model."""


class Snapshots:
    """Of one running rank.

    Args:
        every: steps from one to the next; 0: none are taken.
    """

    def __init__(self, training: Kept, control: Control, every: int) -> None:
        self._training, self._control, self._every = training, control, every
        self._segments: list[Segment] = []
        self._newest = 1  # index of the segment that was published last
        self._copied = threading.Event()
        self._copied.set()
        self._thread: threading.Thread | None = None
        if every > 0 and training.context.control_socket:
            self._shared = layout(training.shape, training.context.plan).shared_out()
            self._outbox = snapshot_of(self._shared, training.context.rank)
            self._thread = threading.Thread(target=self._make_room, name="clusterd-snapshots", daemon=True)
            self._thread.start()

    def begin(self) -> None:
        """After a step: begins a snapshot if it is time for one, there is room, and the last one is done."""
        if not self._every or self._training.step % self._every or len(self._segments) < 2 or self._busy():
            return
        training = self._training
        which = 1 - self._newest
        live = holdings(training, training.shape)
        tensors = self._shared.tensors
        for tensor in (tensors[part.tensor] for part in self._outbox.parts):
            if tensor.kind == "buffer":
                key = tensor.name, tensor.kind
                live[key] = replace(live[key], tensors=tuple(t.clone() for t in live[key].tensors if t is not None))
        pieces = [piece_of(part, tensors[part.tensor], live, part.offset) for part in self._outbox.parts]
        meta = {
            "step": training.step,
            "plan": training.context.plan.to_dict(),
            "scalars": scalars.collect(training.optimizer, training.scheduler, training.shape),
        }
        self._copied.clear()

        def keep() -> None:
            try:
                meta["sums"] = sums_to_bytes(fill(self._segments[which], pieces))
            finally:
                self._copied.set()
            if self._tell("publish", name=self._name(which), meta=meta) is not None:
                self._newest = which

        self._thread = threading.Thread(target=keep, name="clusterd-snapshot", daemon=True)
        self._thread.start()

    def copied(self) -> None:
        """Returns when nothing reads the state any more; before it changes."""
        self._copied.wait()

    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _make_room(self) -> None:
        size = max(self._outbox.size_bytes, 8)  # a rank that has nothing to write says that too: the step is whole
        for which in (0, 1):
            answer = self._tell("segment", name=self._name(which), bytes=size)
            if answer is None:
                return
            segment = Segment(answer["path"], size_bytes=size)
            segment.touch()
            if self._training.device.type == "cuda":
                segment.pin()
            self._segments.append(segment)

    def _tell(self, verb: str, **arguments: Any) -> dict[str, Any] | None:
        """Training does not depend on it: without an agent, or without room, there is no snapshot."""
        try:
            return self._control.ask(verb, **arguments)
        except (AgentRefused, AgentAbsent) as error:
            print(f"clusterd: no snapshot of step {self._training.step}: {error}", flush=True)
            return None

    def _name(self, which: int) -> str:
        context = self._training.context
        return f"{context.job}.{context.attempt}.g{context.generation}.snap{context.rank}.{which}"
