"""Training loop of one rank, and events between two steps: a stop, a migration, the loss of peers."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from clusterd.protocol.control import PeersLost, UseCores
from clusterd.protocol.rank import Orphaned, Trains
from clusterd.train.checkpoint import export
from clusterd.train.checkpoint.asynchronous import AsyncCheckpointer
from clusterd.train.loop import peers
from clusterd.train.loop.callbacks import Callbacks
from clusterd.train.loop.consensus import StepConsensus
from clusterd.train.loop.evaluation import Evaluator, Interrupted
from clusterd.train.loop.phases import MemoryUse
from clusterd.train.loop.rank_training import Training
from clusterd.train.loop.replicas import ReplicaComparison
from clusterd.train.loop.resumption import Resumption
from clusterd.train.migration.snapshots import StateSnapshots
from clusterd.train.migration.source import MigrationSource
from clusterd.train.parallel.mesh import COLLECTIVE_TIMEOUT_S
from clusterd.train.process import accelerator, exits
from clusterd.train.process.control import Control
from clusterd.train.process.job import Outcome
from clusterd.train.process.plain_data import NotSerializable
from clusterd.train.process.seeding import all_generator_states, seed_step
from clusterd.train.state import scalars

ORPHAN_WAIT_S = 600.0

SYNCHRONOUS_STEPS = 5
"""First steps after a migration, in which all ranks wait for each other.

If memory runs out, it does so in these steps, and then no rank may be ahead of the others.
"""

UPDATE_WAIT_S = 2.0
"""Time for a device to finish an update that waits for no peer."""

INCONSISTENT_STEP = -1
"""Step reported by a rank whose parameters belong to no step."""


class StepLog(Protocol):
    """Log of finished steps, called on every rank."""

    def step(self, step: int, loss: float | None, time_s: float, details: dict[str, Any]) -> None:
        """Record a step: its number, the global loss if known, its seconds; on timed steps, its phases."""

    def evaluation(self, step: int, metrics: dict[str, float], time_s: float) -> None:
        """Record an evaluation after a step."""

    def metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Record the script's own metrics after a step."""


class TrainingLoop:
    """Runs steps to the last one, or until all ranks agree to stop.

    Attributes:
        training: the job under its plan on this rank.
        stopped: reason of a stop that all ranks agreed on; empty: none.

    Args:
        migration_id: the migration that created this rank; the rank reports its first step under it.
        restored: directory of the checkpoint that the job goes on from.
    """

    def __init__(
        self, training: Training, control: Control, log: StepLog, *, migration_id: str = "", restored: str = ""
    ) -> None:
        self.training, self._control, self._log = training, control, log
        self._ends_early = False
        self.stopped = ""
        self._signals: set[str] = set()  # that all ranks agreed on in the last settled step
        self._started = time.perf_counter()  # of the current step
        self._is_first = training.context.rank == 0
        self._migration_id = migration_id
        self._migration = MigrationSource(training, control)
        self._checkpointer = AsyncCheckpointer(training, control)
        self._snapshots = StateSnapshots(training, control, training.context.snapshot_every)
        self._pending: tuple[int, float, StepConsensus] | None = None
        self._loss = float("nan")
        self._missing_checksum = 0.0  # of the last consensus that was examined
        self._ended_at_s = time.time()
        self._disconnected = False
        self._disconnecting = threading.Lock()
        self._target_reached = False  # at a stop: the job has met its goal
        self._saves = False  # at a stop: a checkpoint, because another job may go on from it
        self._consensus: StepConsensus | None = None
        self._batches: Iterator[tuple[Any, Any]] | None = None  # those of the next steps, once they are read
        plan = training.context.plan
        self._replicated = plan.dp > 1 and plan.zero == 0 and training.context.launcher == "clusterd"
        self._synchronous_until = training.step + SYNCHRONOUS_STEPS if training.context.migration is not None else 0
        self._replicas = ReplicaComparison(training)
        self._resumption = Resumption(training, restored)
        self._callbacks = Callbacks(training, control)
        self._fresh: tuple[Any, ...] | None = None  # generators at the start of a step whose draws matter
        self._drew = True
        self._memory_use = MemoryUse(training.device, alone=training.context.migration is None)
        self._update_done: Any = None  # device event: the last step's update is done
        self._last_whole_step = 0  # step that was complete on the device at the disconnect
        self._cores = 0  # CPU threads from the next step on; 0: no change
        self._gpu = accelerator.of(training.device)
        needs_watch = self._gpu is not None and dist.is_initialized()
        self._hang_detector = peers.HangDetector(COLLECTIVE_TIMEOUT_S if needs_watch else None, self._on_peers_lost)
        control.on(PeersLost, lambda event: self._on_peers_lost(event.reason))
        control.on(UseCores, self._on_cores)

    def check(self) -> None:
        """Say before the first step, not after the last, if the final state can be restored under this plan only."""
        training = self.training
        if training.context.final:
            try:
                scalars.collect(training, training.shape, lazy_saved_separately=True)
            except NotSerializable as error:
                plan = training.context.plan
                print(f"clusterd: the job must leave a checkpoint, which will be for {plan} only: {error}", flush=True)

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Batch of each step, to be given to `step`; between them, the loop acts on events.

        Raises:
            Refused: a batch was not given to `step`.
        """
        training = self.training
        self.check()
        if training.evaluations.ends_training:  # restarted between the early end and the exit
            return
        self._evaluate_if_due()
        self._started = time.perf_counter()
        training.stepper.phases.begin(training.step + 1)
        if self.has_ended():
            return
        self._batches = training.batches()
        for number, (inputs, targets) in enumerate(self._batches, start=training.step + 1):
            self._report_training()
            if self._cores:
                self._apply_cores()
            yield inputs, targets
            if training.step != number:
                raise exits.Refused(
                    f"the batch of step {number} was not given to run.step(), which needs each batch once"
                )
            if self._migration.has_begun() and self._gpu is not None:
                self._gpu.empty_cache()  # target ranks start on this GPU
            self._snapshots.begin()  # with what the script's own loop changed after the step
            pauses = bool(self._signals) or training.evaluations.is_due(training.step)
            self._obey(self._signals)
            self._evaluate_if_due()
            if self.has_ended():
                return
            if "prove" in self._signals:  # what an evaluation leaves is part of the state
                self._settle()
                self._migration.begin_proof()
            if pauses:
                self._started = time.perf_counter()
                training.stepper.phases.restart()
        self._settle()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context of what the script does between two steps and is not part of a step's time."""
        began_s = time.perf_counter()
        yield
        self._hang_detector.end()
        self._started += time.perf_counter() - began_s
        self.training.stepper.phases.restart()

    def log(self, metrics: dict[str, float]) -> None:
        """Record the script's own metrics of the last step."""
        self._log.metrics(self.training.step, metrics)

    @property
    def evaluator(self) -> Evaluator:
        """Evaluator of the model as it is now."""
        return Evaluator(self.training, self._control.flags, self._hang_detector.begin)

    def step(self, inputs: Any, targets: Any) -> StepConsensus:
        """Run the next step on this replica's share of its global batch."""
        training = self.training
        coordinates = training.context.coordinates
        seed_step(training.job.seed, training.step, coordinates.replica, coordinates.stage)
        training.stepper.phases.lap("input")
        self._migration.before_step()
        if self._fresh is not None:
            self._fresh = all_generator_states()
        self._hang_detector.begin()
        training.stepper.step(inputs, targets, self._reach_consensus, self._copied)
        self._ended_at_s = time.time()
        if self._gpu is not None:
            self._update_done = self._gpu.record_event()
        training.step += 1
        consensus = self._consensus
        assert consensus is not None
        # A step is settled after the next one, so that no rank waits for the reduction.
        self._signals = self._settle()
        now = time.perf_counter()
        self._pending = (training.step, now - self._started, consensus)
        self._started = now
        self._replicas.end()
        self._replicas.begin()
        self._hang_detector.end()
        training.stepper.phases.begin(training.step + 1)
        return consensus

    def handle(self, error: Exception) -> NoReturn:
        """Keep the state for other ranks if `error` is the loss of peers, or a plan that does not fit.

        Raises:
            SystemExit: code 0: this rank's state was handed over or is not needed.
            Exception: `error`, if it is another one.
        """
        self._migration.end()
        try:
            out_of_memory = self._ran_out_of_memory(error)
            if not (out_of_memory or self._is_orphaned(error)):
                raise error
            self._wait_as_orphan(error, out_of_memory)
            raise SystemExit(0) from error
        finally:
            self._hang_detector.close()

    def end(self) -> Outcome:
        """Return the outcome after the last batch; the last step is logged."""
        training = self.training
        self._hang_detector.close()
        self._settle()
        self._migration.end()
        self._checkpointer.finish()
        self._call_on_checkpoint()
        if self.stopped:
            print(f"clusterd: stopped after step {training.step} of {training.job.steps}: {self.stopped}", flush=True)
        done = not self.stopped or self._target_reached
        return Outcome(step=training.step, loss=self._loss, stopped=self.stopped, done=done)

    def leave_checkpoint(self) -> None:
        """Write the last checkpoint, on every rank, after everything else that the job leaves.

        After the last step, if the job is to leave one; at a stop that ends the job, so that another can go on from it.

        Raises:
            CheckpointFailed: it could not be written.
        """
        ends_early, final = bool(self.stopped) and not self._target_reached, self.training.context.final
        if ends_early and self._saves and self.training.step:
            self._checkpointer.take_at_stop()
        elif final and not ends_early:
            self._checkpointer.take_final(final)
        if self._checkpointer.written:
            self._control.flush()  # the daemon must know of the checkpoint before it hears of the exit
        if ends_early and self._saves and self.training.step:
            self._make_next_step()
        self._batches = None
        self._call_on_checkpoint()

    def _make_next_step(self) -> None:
        """Make the step after a checkpoint for its sake alone: who goes on from it compares."""
        training = self.training
        if training.stream is not None or training.step >= training.job.steps:
            return
        try:
            made = training.try_steps(1, training.job.seed, self._batches)
        except Exception as error:  # the checkpoint is complete without it
            why = exits.first_line(error) or type(error).__name__
            print(f"clusterd: the step after the checkpoint, which a resumed job compares, failed: {why}", flush=True)
            return
        self._resumption.record(training.step + 1, made.losses[0], drew=made.drew)

    def has_ended(self) -> bool:
        """True if no step follows: a stop, or an early end."""
        return bool(self.stopped) or self._ends_early

    def _obey(self, signals: set[str]) -> None:
        """Act between two steps on flags that all ranks agreed on."""
        training, control = self.training, self._control
        if "refuse" in signals:
            why = [control.reason_for("refuse")]
            dist.broadcast_object_list(why)
            raise exits.PlanRefused(why[0])
        if "stop" in signals:
            self._settle()
            self._target_reached = "done" in signals
            if "keep" in signals:
                self._snapshots.publish_final()
            self._saves = "save" in signals
            self.stopped = control.reason_for("stop")
            return
        if "checkpoint" in signals:
            # A flag that this step carries too is carried again by the next one.
            self._settle()
            self._checkpointer.take()
            self._fresh = ()
        if "quiesce" in signals and training.step < training.job.steps:
            self._end_of_step()
            self._settle()
            if self._migration.hand_over(self._ended_at_s) == "stop":
                if control.requested("keep"):
                    self._snapshots.publish_final()
                self._saves = control.requested("save")
                self.stopped = control.reason_for("stop")

    def _evaluate_if_due(self) -> None:
        """Evaluate after the last step, if that is due.

        A stop or a migration ends an evaluation between two batches; the ranks that go on with the job repeat it.
        """
        training = self.training
        while not self.has_ended() and training.evaluations.is_due(training.step):
            self._report_training()
            signals = self._settle()
            self._signals |= signals
            self._obey(signals)
            if self.has_ended():
                return
            try:
                self._evaluate()
            except Interrupted as interrupted:
                self._obey(interrupted.flags)
            finally:
                self._hang_detector.end()

    def _evaluate(self) -> None:
        training, evaluations = self.training, self.training.evaluations
        request = evaluations.request
        assert request is not None
        began_s = time.perf_counter()
        interrupted_by = {"stop", "quiesce"} if training.step < training.job.steps else {"stop"}
        metrics = self.evaluator.means(
            request.data,
            request.metric,
            batch=request.batch,
            collate_fn=request.collate_fn,
            whole=request.whole,
            interrupted_by=frozenset(interrupted_by),
        )
        is_best = evaluations.record(training.step, metrics)
        if training.schedule is not None:
            training.schedule.evaluated(metrics[evaluations.monitored(metrics)])
        if is_best and request.save_best is not None:
            export.save(training, request.save_best)
        self._log.evaluation(training.step, metrics, time.perf_counter() - began_s)
        if self._is_first:
            self._callbacks.call("on_evaluate", training.step, metrics)
        if evaluations.ends_training and training.step < training.job.steps:
            self._ends_early = True
            print(
                f"clusterd: training ends after step {training.step}: no better evaluation since step "
                f"{evaluations.best_step}",
                flush=True,
            )

    def _report_training(self) -> None:
        """Report once that this rank of a migration trains."""
        if self._migration_id:
            self._control.report(Trains(self._migration_id, self.training.step, time.time()))
            self._migration_id = ""

    def _apply_cores(self) -> None:
        """Set the thread count on the thread that computes: each thread has its own."""
        torch.set_num_threads(self._cores)
        self._cores = 0
        count, step = torch.get_num_threads(), self.training.step + 1
        print(f"clusterd: using {count} CPU thread{'s' * (count > 1)} from step {step} on", flush=True)

    def _reach_consensus(self, contribution: torch.Tensor) -> None:
        training = self.training
        if self._fresh is not None:
            self._drew, self._fresh = all_generator_states() != self._fresh, None
        self._consensus = StepConsensus(
            contribution,
            self._control.flags(),
            training.parallel.without_gradient(),
            training.stepper.reported_values(),
            training.optimizer.learning_rate,
        )
        if self._replicated or self.training.step < self._synchronous_until:
            self._consensus.wait()
        self._check_connected()
        self._copied()

    def _copied(self) -> None:
        """Wait until no copy reads the state any more."""
        self._snapshots.copied()
        self._migration.copied()

    def _check_connected(self) -> None:
        """Raise after a disconnect: on a GPU, aborted groups raise nothing and their results may be garbage."""
        if self._disconnected:
            raise ConnectionError("peers are gone")

    def _settle(self) -> set[str]:
        """Log the pending step; return the flags that all ranks agreed on in it."""
        if self._pending is None:
            return set()
        step, time_s, consensus = self._pending
        self._loss, signals = consensus.result()
        self._check_connected()
        if (missing := consensus.missing_checksum()) != self._missing_checksum:
            self.training.parallel.check_same_gradients(consensus.missing)
            self._missing_checksum = missing
        self._pending = None
        self._migration.record(step, self._loss)
        self._resumption.record(step, self._loss, drew=self._drew)
        details = self._measured(consensus, time_s) | self._details()
        self._log.step(step, self._loss, time_s, details)
        if self._is_first:
            self._call_back(step, details)
        return signals

    def _call_back(self, step: int, details: dict[str, Any]) -> None:
        self._callbacks.call("on_step", step, {"loss": self._loss, **details})
        self._call_on_checkpoint()

    def _call_on_checkpoint(self) -> None:
        on_checkpoint = self.training.job.on_checkpoint
        while self._is_first and self._checkpointer.written:
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
            found["samples_per_s"] = round(self.training.job.global_batch / time_s, 3)
        return found | self.training.stepper.read_values(consensus.sums())

    def _details(self) -> dict[str, Any]:
        """Phases and memory of the settled step, if it was timed."""
        phases = self.training.stepper.phases.read()
        if not phases:
            return {}
        return {"phases": phases, **self._memory_use.read()}

    def _end_of_step(self) -> None:
        if self._gpu is not None:
            self._gpu.synchronize()
            self._ended_at_s = time.time()

    # --- loss of peers -----------------------------------------------------------------------------------------------

    def _is_orphaned(self, error: Exception) -> bool:
        """True if peers are lost, this rank is not at fault, and its state is consistent."""
        training = self.training
        if training.context.launcher != "clusterd" or not self._control.connected or training.stepper.updating:
            return False
        return self._disconnected or (peers.is_peer_loss(error) and exits.classify_error(error, where="") is None)

    def _ran_out_of_memory(self, error: Exception) -> bool:
        """True if the plan of a migration does not fit; the previous plan did, and the job can return to it.

        The first plan of an attempt has no predecessor, and its failure ends the attempt.
        """
        training = self.training
        if training.context.migration is None or not self._control.connected or training.stepper.updating:
            return False
        return isinstance(exits.classify_error(error, where=""), exits.DeviceOutOfMemory)

    def _wait_as_orphan(self, error: Exception, out_of_memory: bool) -> None:
        """Keep the state of the last full step until a migration takes it over or a stop arrives.

        Raises:
            Exception: `error`, if neither came in time.
        """
        training = self.training
        cause_text = "out of memory" if out_of_memory else "peers are gone"
        print(f"clusterd: {cause_text} after step {training.step}: {exits.first_line(error)}", flush=True)
        may_finish = training.stepper.complete and self._replicated and self._gradients_complete()
        self._disconnect()
        is_whole = self._gpu is None or self._replicated or self._last_whole_step == training.step
        if self._pending is not None:
            # Done, though its loss may never have been summed; replicas wait for the sum within the step.
            step, time_s, consensus = self._pending
            self._log.step(step, consensus.result()[0] if self._replicated else None, time_s, {})
        # The traceback's frames hold the step's activations; the next ranks need that memory.
        cause: BaseException | None = error
        while cause is not None:  # a pipeline stage wraps the error
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__
        training.stepper.clear(gradients=not may_finish)
        step = training.step if is_whole else INCONSISTENT_STEP
        self._control.report(Orphaned(step, may_finish, out_of_memory))
        deadline = time.monotonic() + ORPHAN_WAIT_S
        while (migration := self._migration.wait_for_migration(deadline - time.monotonic())) is not None:
            if may_finish and migration.step == training.step + 1:
                # Another survivor completed the reduction and updated its parameters; this rank must follow.
                self._copied()
                training.stepper.update()
                training.step += 1
                may_finish = False
            if self._migration.hand_over(self._ended_at_s) == "stop" or migration.frees_source_memory:
                break
        if not self._control.requested("stop"):
            raise error
        print(f"clusterd: stopped after step {training.step}: {self._control.reason_for('stop')}", flush=True)

    def _gradients_complete(self) -> bool:
        """True if gradients are complete on the device too, and not just queued."""
        return self._gpu is None or (not self._disconnected and bool(self._gpu.current_stream().query()))

    def _on_cores(self, event: UseCores) -> None:
        self._cores = max(event.each, 1)

    def _on_peers_lost(self, reason: str) -> None:
        """Handle a report that peers are gone, which may precede a connection error: a dead host closes none."""
        print(f"clusterd: peers are gone: {reason}", flush=True)
        self._disconnect()

    def _disconnect(self) -> None:
        """Shut down all connections, after recording the step that the device has completed.

        The next update may already be queued on the device, behind a reduction that never completed; aborting it lets
        the update run with garbage.
        """
        with self._disconnecting:  # a second thread would see the effect of the first one's abort
            step = self.training.step
            if not self._disconnected:
                self._last_whole_step = step if self._is_update_done() else INCONSISTENT_STEP
            self._disconnected = True
        peers.shut_down_connections()

    def _is_update_done(self) -> bool:
        """True if the last step's update is complete on the device, or completes within `UPDATE_WAIT_S`."""
        deadline = time.monotonic() + UPDATE_WAIT_S
        try:
            while self._update_done is not None and not self._update_done.query():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.01)
        except RuntimeError:  # the device itself failed
            return False
        return True
