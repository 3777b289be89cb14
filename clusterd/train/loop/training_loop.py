"""The steps of one rank, and what can happen between two of them: a stop, a move, the loss of peers."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from clusterd.train.checkpoint.asynchronous import AsyncCheckpointer
from clusterd.train.loop import peers
from clusterd.train.loop.consensus import StepConsensus
from clusterd.train.loop.phases import peak_bytes
from clusterd.train.loop.step import Stepper
from clusterd.train.migration.snapshots import StateSnapshots
from clusterd.train.migration.source import MigrationSource
from clusterd.train.parallel.apply_plan import ParallelModel
from clusterd.train.parallel.mesh import COLLECTIVE_TIMEOUT_S
from clusterd.train.parallel.optimizers import RankOptimizer
from clusterd.train.process import exits
from clusterd.train.process.context import Context
from clusterd.train.process.control import Control, Message
from clusterd.train.process.job import Job, Outcome
from clusterd.train.process.seeding import seed_step
from clusterd.train.state import scalars
from clusterd.train.state.attributes import Attributes
from clusterd.train.state.plain_data import NotSerializable
from plans.model_shape import ModelShape

ORPHAN_WAIT_S = 600.0

SYNCHRONOUS_STEPS = 5
"""After a move; in them all wait for each other: where memory runs out it does so then, and nobody may be ahead."""

UPDATE_WAIT_S = 2.0
"""For a device to end an update that waits for nobody."""

INCONSISTENT_STEP = -1
"""The step of a rank whose parameters are of none."""

OnStep = Callable[[int, float, float, "dict[str, Any]"], None]
"""Called on every rank with a finished step: its number, the global loss, its seconds; now and then where they went."""


class SteppedTraining(Protocol):
    """The part of `clusterd.train.rank_main.Training` that steps."""

    job: Job
    context: Context
    device: torch.device
    parallel: ParallelModel
    optimizer: RankOptimizer
    attributes: Attributes
    scheduler: Any
    stepper: Stepper
    step: int

    @property
    def shape(self) -> ModelShape:
        """Of the whole model."""

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """This replica's share of each step that is left."""


class TrainingLoop:
    """Steps to the last one, or until all ranks agree to stop.

    Args:
        arrived_by: the move that made this rank; the daemon is told when it trains.
    """

    def __init__(self, training: SteppedTraining, control: Control, on_step: OnStep, *, migration_id: str = "") -> None:
        self._training, self._control, self._on_step = training, control, on_step
        self._migration_id = migration_id
        self._migration = MigrationSource(training, control)
        self._checkpointer = AsyncCheckpointer(training, control)
        self._snapshots = StateSnapshots(training, control, training.context.snapshot_every)
        self._pending: tuple[int, float, StepConsensus] | None = None
        self._loss = float("nan")
        self._missing_checksum = 0.0  # as the last agreement had it that was looked into
        self._ended_at_s = time.time()
        self._disconnected = False
        self._disconnecting = threading.Lock()
        self._target_reached = False  # when it is stopped: it is where it was to get
        self._consensus: StepConsensus | None = None
        plan = training.context.plan
        self._replicated = plan.dp > 1 and plan.zero == 0 and training.context.launcher == "clusterd"
        self._synchronous_until = training.step + SYNCHRONOUS_STEPS if training.context.migration is not None else 0
        self._update_done: Any = None  # event on the device: the last step is done there
        self._last_whole_step = 0  # a step that was, when connections were torn up
        self._cores = 0  # to compute on from the next step on; 0: as it is
        needs_watch = training.device.type == "cuda" and dist.is_initialized()
        self._hang_detector = peers.HangDetector(COLLECTIVE_TIMEOUT_S if needs_watch else None, self._on_peers_lost)
        control.on("peers_lost", lambda message: self._on_peers_lost(str(message.get("reason", ""))))
        control.on("cores", self._on_cores)

    def run(self) -> Outcome:
        """All steps.

        Returns:
            How it ended; the last step is logged.
        Raises:
            CheckpointFailed: the job is to leave a checkpoint, and its state cannot be in one.
            SystemExit: code 0: peers died, and what this rank held was handed over or is not needed.
        """
        training = self._training
        if training.context.final:
            # What cannot be in a checkpoint is better known now than after the last step.
            try:
                scalars.collect(training, training.shape, lazy_saved_separately=True)
            except NotSerializable as error:
                raise exits.CheckpointFailed(f"the job is to leave a checkpoint, and cannot: {error}") from error
        try:
            stopped = self._steps()
        except Exception as error:
            out_of_memory = self._ran_out_of_memory(error)
            if not (out_of_memory or self._is_orphaned(error)):
                raise
            self._wait_as_orphan(error, out_of_memory)
            raise SystemExit(0) from error
        finally:
            self._hang_detector.close()
        self._checkpointer.finish()
        if stopped:
            print(f"clusterd: stopped after step {training.step} of {training.job.steps}: {stopped}", flush=True)
        return Outcome(step=training.step, loss=self._loss, stopped=stopped, done=not stopped or self._target_reached)

    def leave_checkpoint(self) -> None:
        """After the last step, on every rank, and after all else that is to be left of it.

        Raises:
            CheckpointFailed: it could not be written.
        """
        if self._training.context.final:
            self._checkpointer.take_final(self._training.context.final)

    def _steps(self) -> str:
        """Returns why it was stopped, if it was."""
        training, control = self._training, self._control
        job, coordinates = training.job, training.context.coordinates
        started = time.perf_counter()
        training.stepper.phases.begin(training.step + 1)
        for inputs, targets in training.batches():
            if self._migration_id:
                control.report("trains", id=self._migration_id, step=training.step, at_s=time.time())
                self._migration_id = ""
            if self._cores:
                self._apply_cores()
            seed_step(job.seed, training.step, coordinates.replica, coordinates.stage)
            training.stepper.phases.lap("input")
            self._hang_detector.begin()
            training.stepper.step(inputs, targets, self._reach_consensus)
            self._ended_at_s = time.time()
            if training.device.type == "cuda":
                self._update_done = torch.cuda.Event()
                self._update_done.record()
            training.step += 1
            consensus = self._consensus
            assert consensus is not None
            self._snapshots.begin()
            # A step is settled after the next one: nobody waits for a reduction.
            signals = self._settle()
            self._hang_detector.end()
            now = time.perf_counter()
            self._pending = (training.step, now - started, consensus)
            started = now
            training.stepper.phases.begin(training.step + 1)
            if "stop" in signals:
                self._settle()
                self._target_reached = "done" in signals
                if "keep" in signals:
                    self._snapshots.publish_final()
                return control.reason_for("stop")
            if "checkpoint" in signals:
                # What the step under way was asked for too is asked again with the next one.
                self._settle()
                self._checkpointer.take()
                started = time.perf_counter()
            if "quiesce" in signals and training.step < job.steps:
                self._end_of_step()
                self._settle()
                if self._migration.hand_over(self._ended_at_s) == "stop":
                    if control.requested("keep"):
                        self._snapshots.publish_final()
                    return control.reason_for("stop")
                started = time.perf_counter()
        self._settle()
        return ""

    def _apply_cores(self) -> None:
        """On the thread that computes: others have a number of their own."""
        torch.set_num_threads(self._cores)
        self._cores = 0
        count, step = torch.get_num_threads(), self._training.step + 1
        print(f"clusterd: computes on {count} CPU thread{'s' * (count > 1)} from step {step} on", flush=True)

    def _reach_consensus(self, contribution: torch.Tensor) -> None:
        self._consensus = StepConsensus(contribution, self._control.flags(), self._training.parallel.without_gradient())
        if self._replicated or self._training.step < self._synchronous_until:
            self._consensus.wait()
        self._check_connected()
        self._snapshots.copied()

    def _check_connected(self) -> None:
        """Groups that were torn down on a GPU raise nothing: what was reduced may be anything."""
        if self._disconnected:
            raise ConnectionError("peers are gone")

    def _settle(self) -> set[str]:
        """Logs the pending step; returns what all ranks were asked for in it."""
        if self._pending is None:
            return set()
        step, time_s, consensus = self._pending
        self._loss, signals = consensus.result()
        self._check_connected()
        if (missing := consensus.missing_checksum()) != self._missing_checksum:
            self._training.parallel.check_same_gradients(consensus.missing)
            self._missing_checksum = missing
        self._pending = None
        self._on_step(step, self._loss, time_s, self._details())
        return signals

    def _details(self) -> dict[str, Any]:
        """Phases and peak memory of the step that is settled, where they were taken."""
        phases = self._training.stepper.phases.read()
        if not phases:
            return {}
        device_bytes, host_bytes = peak_bytes(self._training.device)
        return {"phases": phases, "device_bytes": device_bytes, "host_bytes": host_bytes}

    def _end_of_step(self) -> None:
        if self._training.device.type == "cuda":
            torch.cuda.synchronize(self._training.device)
            self._ended_at_s = time.time()

    # --- when peers are gone ------------------------------------------------------------------------------------------

    def _is_orphaned(self, error: Exception) -> bool:
        """Whether others are gone and not this rank is at fault, and what it holds is whole."""
        training = self._training
        if training.context.launcher != "clusterd" or not self._control.connected or training.stepper.updating:
            return False
        return self._disconnected or (peers.is_peer_loss(error) and exits.classify_error(error, where="") is None)

    def _ran_out_of_memory(self, error: Exception) -> bool:
        """Whether a plan that the job was moved to does not fit: what it had before does, and can have it back.

        The first plan of an attempt has nothing to go back to, and ends it.
        """
        training = self._training
        if training.context.migration is None or not self._control.connected or training.stepper.updating:
            return False
        return isinstance(exits.classify_error(error, where=""), exits.DeviceOutOfMemory)

    def _wait_as_orphan(self, error: Exception, out_of_memory: bool) -> None:
        """Keeps the state of the last full step until somebody takes it, or nobody wants it.

        Raises:
            Exception: `error`, when nobody came.
        """
        training = self._training
        cause_text = "out of memory" if out_of_memory else "peers are gone"
        print(f"clusterd: {cause_text} after step {training.step}: {exits.first_line(error)}", flush=True)
        may_finish = training.stepper.complete and self._replicated and self._gradients_complete()
        self._disconnect()
        is_whole = training.device.type != "cuda" or self._replicated or self._last_whole_step == training.step
        if self._pending is not None:
            # Done, though its loss may never have been summed up; replicas waited for that within the step.
            step, time_s, consensus = self._pending
            self._on_step(step, consensus.result()[0] if self._replicated else float("nan"), time_s, {})
        # The step's activations hang on the frames of its traceback, and the ranks to come need their room.
        cause: BaseException | None = error
        while cause is not None:  # a pipeline stage wraps what happened in it
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__
        training.stepper.clear(gradients=not may_finish)
        step = training.step if is_whole else INCONSISTENT_STEP
        self._control.report("orphaned", step=step, updated=True, may_finish=may_finish, out_of_memory=out_of_memory)
        deadline = time.monotonic() + ORPHAN_WAIT_S
        while (migration := self._migration.wait_for_migration(deadline - time.monotonic())) is not None:
            if may_finish and migration.step == training.step + 1:
                # Another survivor got through the reduction and changed its parameters: so must this one.
                self._snapshots.copied()
                training.stepper.update()
                training.step += 1
                may_finish = False
            if self._migration.hand_over(self._ended_at_s) == "stop" or migration.frees_source_memory:
                break
        if not self._control.requested("stop"):
            raise error
        print(f"clusterd: stopped after step {training.step}: {self._control.reason_for('stop')}", flush=True)

    def _gradients_complete(self) -> bool:
        """Whether what is complete for the interpreter is so for the device too, before its streams are torn up."""
        device = self._training.device
        return device.type != "cuda" or (not self._disconnected and bool(torch.cuda.current_stream(device).query()))

    def _on_cores(self, message: Message) -> None:
        self._cores = max(int(message["each"]), 1)

    def _on_peers_lost(self, reason: str) -> None:
        """Somebody knows before the connections do: a host that is gone closes none."""
        print(f"clusterd: peers are gone: {reason}", flush=True)
        self._disconnect()

    def _disconnect(self) -> None:
        """Ends all connections, having noted which step the device has ended.

        It may hold the next update already, queued behind a sum that never came and that this makes up.
        """
        with self._disconnecting:  # of two threads, the one that comes second would see what the first has made up
            step = self._training.step
            if not self._disconnected:
                self._last_whole_step = step if self._is_update_done() else INCONSISTENT_STEP
            self._disconnected = True
        peers.shut_down_connections()

    def _is_update_done(self) -> bool:
        """Whether the update of the last step is made on the device too, or is in a moment."""
        deadline = time.monotonic() + UPDATE_WAIT_S
        try:
            while self._update_done is not None and not self._update_done.query():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.01)
        except RuntimeError:  # the device is gone itself
            return False
        return True
