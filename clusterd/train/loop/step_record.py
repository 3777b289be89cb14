"""Record of finished steps."""

from __future__ import annotations

from typing import Any, Protocol

from clusterd.train.checkpoint.asynchronous import AsyncCheckpointer
from clusterd.train.loop.callbacks import Callbacks
from clusterd.train.loop.consensus import StepConsensus
from clusterd.train.loop.phases import MemoryUse
from clusterd.train.loop.rank_training import Training
from clusterd.train.loop.resumption import Resumption
from clusterd.train.loop.survivor import Survivor
from clusterd.train.migration.source import MigrationSource


class StepLog(Protocol):
    """Log of finished steps, called on every rank."""

    def step(self, step: int, loss: float | None, time_s: float, details: dict[str, Any]) -> None:
        """Record a step: its number, the global loss if known, its seconds; on timed steps, its phases."""

    def evaluation(self, step: int, metrics: dict[str, float], time_s: float) -> None:
        """Record an evaluation after a step."""

    def metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Record the script's own metrics after a step."""


class StepRecord:
    """Log of steps, and who is told of them: each is settled after the next one, so that no rank waits for its loss.

    Attributes:
        loss: of the last settled step.
    """

    def __init__(
        self,
        training: Training,
        log: StepLog,
        survivor: Survivor,
        migration: MigrationSource,
        resumption: Resumption,
        callbacks: Callbacks,
        checkpointer: AsyncCheckpointer,
    ) -> None:
        self._training, self._log, self._survivor = training, log, survivor
        self._migration, self._resumption = migration, resumption
        self._callbacks, self._checkpointer = callbacks, checkpointer
        self._pending: tuple[int, float, StepConsensus] | None = None
        self._missing_checksum = 0.0  # of the last consensus that was examined
        self._memory_use = MemoryUse(training.device, alone=training.context.migration is None)
        self.loss = float("nan")

    def add(self, step: int, time_s: float, consensus: StepConsensus) -> None:
        """Add a step, to be settled after the next one."""
        self._pending = step, time_s, consensus
        if self._training.started is not None and "first step" not in self._training.started.seconds:
            self._training.started.end("first step")

    def settle(self) -> set[str]:
        """Log the pending step; return the flags that all ranks agreed on in it."""
        if self._pending is None:
            return set()
        step, time_s, consensus = self._pending
        self.loss, signals = consensus.result()
        self._survivor.check()
        if (missing := consensus.missing_checksum()) != self._missing_checksum:
            self._training.parallel.check_same_gradients(consensus.missing)
            self._missing_checksum = missing
        self._pending = None
        self._migration.record(step, self.loss)
        self._resumption.record(step, self.loss)
        details = self._measured(consensus, time_s) | self._details()
        self._log.step(step, self.loss, time_s, details)
        if self._training.context.rank == 0:
            self._callbacks.call("on_step", step, {"loss": self.loss, **details})
            self.report_checkpoints()
        return signals

    def log_unsettled(self, is_summed: bool) -> None:
        """Log the pending step after the loss of peers: it is done, though its loss may never have been summed."""
        if self._pending is not None:
            step, time_s, consensus = self._pending
            self._log.step(step, consensus.result()[0] if is_summed else None, time_s, {})

    def report_checkpoints(self) -> None:
        """Tell the script of checkpoints that are complete, on rank 0."""
        on_checkpoint = self._training.job.on_checkpoint
        while self._training.context.rank == 0 and self._checkpointer.written:
            written = self._checkpointer.written.popleft()
            self._resumption.written(*written)
            if on_checkpoint is not None:
                on_checkpoint(*written)

    def _measured(self, consensus: StepConsensus, time_s: float) -> dict[str, Any]:
        """Learning rate, speed, gradient norm and the script's own metrics of the settled step."""
        found: dict[str, Any] = {}
        if consensus.learning_rate is not None:
            found["lr"] = consensus.learning_rate
        if time_s > 0:
            found["samples_per_s"] = round(self._training.job.global_batch / time_s, 3)
        return found | self._training.stepper.read_values(consensus.sums())

    def _details(self) -> dict[str, Any]:
        """Phases and memory of the settled step, if it was timed; of the first one, phases of the start."""
        started, self._training.started = self._training.started, None
        found: dict[str, Any] = {"start": started.record()} if started is not None else {}
        phases = self._training.stepper.phases.read()
        return found | ({"phases": phases, **self._memory_use.read()} if phases else {})
