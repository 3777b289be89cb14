"""Training loop of one rank, and events between two steps: a stop, a migration, the loss of peers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from clusterd.protocol.control import UseCores
from clusterd.protocol.rank import Trains
from clusterd.train.checkpoint import export
from clusterd.train.checkpoint.asynchronous import AsyncCheckpointer
from clusterd.train.loop.alternating_step import AlternatingStepper
from clusterd.train.loop.callbacks import Callbacks, ModelCalls, OwnLoop
from clusterd.train.loop.consensus import StepConsensus
from clusterd.train.loop.evaluation import Evaluator, Interrupted
from clusterd.train.loop.rank_training import Training
from clusterd.train.loop.replicas import ReplicaComparison
from clusterd.train.loop.resumption import Resumption
from clusterd.train.loop.step_record import StepLog, StepRecord
from clusterd.train.loop.survivor import Survivor
from clusterd.train.migration.snapshots import StateSnapshots
from clusterd.train.migration.source import MigrationSource
from clusterd.train.process import exits
from clusterd.train.process.control import Control
from clusterd.train.process.job import Outcome
from clusterd.train.process.plain_data import NotSerializable
from clusterd.train.process.seeding import seed_step
from clusterd.train.state import scalars

SYNCHRONOUS_STEPS = 5
"""First steps after a migration, in which all ranks wait for each other.

If memory runs out, it does so in these steps, and then no rank may be ahead of the others.
"""

CALL_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop that all ranks agreed on, if they did."""

    reason: str = ""
    done: bool = False  # the job has met its goal
    saves: bool = False  # a checkpoint, because another job may go on from it


class TrainingLoop:
    """Runs steps to the last one, or until all ranks agree to stop.

    Attributes:
        training: the job under its plan on this rank.
        own_loop: what watches a loop of the script's own.

    Args:
        migration_id: the migration that created this rank; the rank reports its first step under it.
        restored: directory of the checkpoint that the job goes on from.
    """

    def __init__(
        self, training: Training, control: Control, log: StepLog, *, migration_id: str = "", restored: str = ""
    ) -> None:
        self.training, self._control, self._log = training, control, log
        self._stop = Stop()
        self._signals: set[str] = set()  # that all ranks agreed on in the last settled step
        self._started = time.perf_counter()  # of the current step
        self._migration_id = migration_id
        self._batches: Iterator[tuple[Any, Any]] | None = None  # those of the next steps, once they are read
        self._consensus: StepConsensus | None = None
        self._cores = 0  # CPU threads from the next step on; 0: no change
        context = training.context
        self._replicated = context.plan.dp > 1 and context.plan.zero == 0 and context.launcher == "clusterd"
        self._synchronous_until = training.step + SYNCHRONOUS_STEPS if context.migration is not None else 0
        self._migration = MigrationSource(training, control)
        self._checkpointer = AsyncCheckpointer(training, control)
        self._snapshots = StateSnapshots(training, control, context.snapshot_every)
        self._replicas = ReplicaComparison(training)
        self._resumption = Resumption(training, restored)
        model_calls = ModelCalls(training)
        self._callbacks = Callbacks(training, control, model_calls)
        self.own_loop = OwnLoop(training, model_calls, self.all_call)
        self._proves = False  # the next step's state is to be copied for a proof
        self._calls = 0  # of `all_call`
        self._survivor = Survivor(training, control, self._migration, self._copied, replicated=self._replicated)
        self._record = StepRecord(
            training, log, self._survivor, self._migration, self._resumption, self._callbacks, self._checkpointer
        )
        control.on(UseCores, self._on_cores)

    @property
    def stopped(self) -> str:
        """Reason of a stop that all ranks agreed on; empty: none."""
        return self._stop.reason

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
        self.own_loop.begins()
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
            self.own_loop.opens((inputs, targets))
            yield inputs, targets
            self.own_loop.closes()
            if training.step != number:
                times = "not given to run.step(), which needs each batch once"
                if training.step > number:
                    times = (
                        f"given to run.step() {training.step - number + 1} times: several updates on the same samples "
                        "are steps of their own, with a `sampler` that yields these again"
                    )
                raise exits.Refused(f"the batch of step {number} was {times}")
            if self._migration.has_begun() and (gpu := self._survivor.last_step.gpu) is not None:
                gpu.empty_cache()  # target ranks start on this GPU
            self._snapshots.begin()  # with what the script's own loop changed after the step
            pauses = bool(self._signals) or training.evaluations.is_due(training.step)
            self._obey(self._signals)
            self._evaluate_if_due()
            if self.has_ended():
                return
            self._proves = "prove" in self._signals
            if pauses:
                self._started = time.perf_counter()
                training.stepper.phases.restart()
        self._record.settle()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context of what the script does between two steps and is not part of a step's time."""
        began_s = time.perf_counter()
        with self.own_loop.unwatched():
            yield
        self._survivor.end()
        self._started += time.perf_counter() - began_s
        self.training.stepper.phases.restart()

    def all_call(self, what: str) -> None:
        """Wait until the loops of all ranks have made the same call, before its collective operations begin.

        Raises:
            Refused: another rank goes on with the next step, or makes another call.
        """
        if (store := self._store_of_loops()) is None:
            return
        rank, step = self.training.context.rank, self.training.step
        self._calls += 1
        store.set(f"{self._calls}.{rank}", what)
        waiting = set(range(dist.get_world_size()))
        while waiting:
            for other in sorted(waiting):
                calls = store.check([f"{self._calls}.{other}"])
                if calls and store.get(f"{self._calls}.{other}").decode() == what:
                    waiting.remove(other)
                elif calls or (store.check([f"step {other}"]) and int(store.get(f"step {other}")) > step):
                    raise exits.Refused(
                        f"rank {rank} {what} after step {step}, and rank {other} did not: the script's loop must make "
                        "the same calls on all ranks, and end on all of them after the same step"
                    )
            self._survivor.check()
            time.sleep(CALL_POLL_S)

    def _store_of_loops(self) -> Any:
        """Store for calls of the ranks' loops; None: there is one rank, or no loop of the script's own."""
        if not (self.training.job.own_loop and dist.is_initialized()):
            return None
        return dist.PrefixStore("loop", dist.distributed_c10d._get_default_store())

    def log(self, metrics: dict[str, float]) -> None:
        """Record the script's own metrics of the last step."""
        self._log.metrics(self.training.step, metrics)

    @property
    def evaluator(self) -> Evaluator:
        """Evaluator of the model as it is now."""
        return Evaluator(self.training, self._control.flags, self._survivor.begin)

    def step(self, inputs: Any, targets: Any, only: Sequence[str] = ()) -> StepConsensus:
        """Run the next step on this replica's share of its global batch; `only` these of several losses.

        Raises:
            Refused: the job has no such losses.
        """
        training = self.training
        if only:
            self._choose(only)
        coordinates = training.context.coordinates
        if (store := self._store_of_loops()) is not None:
            store.set(f"step {training.context.rank}", str(training.step + 1))
        self.own_loop.before_step((inputs, targets))
        if self._proves:  # what an evaluation and the script's own loop leave is part of the state
            self._proves = False
            self._record.settle()
            changes_data = "changes its data before it makes a step" if self.own_loop.changes_data else ""
            what = self.own_loop.changes_steps or changes_data
            self._migration.begin_proof(f"the script's loop {what}" if what else "")
        seed_step(training.job.seed, training.step, coordinates.replica, coordinates.stage)
        training.stepper.phases.lap("input")
        self._migration.before_step()
        self._resumption.before_step()
        self._survivor.begin()
        training.stepper.step(inputs, targets, self._reach_consensus, self._copied)
        if only:
            self._choose(())
        self._survivor.last_step.queued()
        training.step += 1
        consensus = self._consensus
        assert consensus is not None
        # A step is settled after the next one, so that no rank waits for the reduction.
        self._signals = self._record.settle()
        now = time.perf_counter()
        self._record.add(training.step, now - self._started, consensus)
        self._started = now
        self._replicas.end()
        self._replicas.begin()
        self._survivor.end()
        training.stepper.phases.begin(training.step + 1)
        self.own_loop.opens()
        return consensus

    def _choose(self, only: Sequence[str]) -> None:
        stepper, known = self.training.stepper, list(self.training.job.losses)
        if unknown := sorted({*only} - {*known}):
            has = f"the losses of this job are {', '.join(known)}" if known else "this job has one loss"
            raise exits.Refused(f"run.step(batch, only=...) names {unknown[0]!r}, and {has}")
        if isinstance(stepper, AlternatingStepper):
            stepper.only = only
        self.own_loop.chosen = ", ".join(only) or "all"
        self.own_loop.changes_steps = self.own_loop.changes_steps or "chooses which losses a step has"

    def handle(self, error: Exception) -> NoReturn:
        """Keep the state for other ranks if `error` is the loss of peers, or a plan that does not fit.

        Raises:
            SystemExit: code 0: this rank's state was handed over or is not needed.
            Exception: `error`, if it is another one.
        """
        self._migration.end()
        try:
            self._survivor.handle(error, self._record.log_unsettled)
        finally:
            self._survivor.close()

    def end(self) -> Outcome:
        """Return the outcome after the last batch; the last step is logged."""
        training = self.training
        if not self.has_ended() and training.step < training.job.steps:
            self.all_call("left its loop")
        self._survivor.close()
        self._record.settle()
        self._migration.end()
        self._checkpointer.finish()
        self._record.report_checkpoints()
        if self.stopped:
            print(f"clusterd: stopped after step {training.step} of {training.job.steps}: {self.stopped}", flush=True)
        done = not self.stopped or self._stop.done
        return Outcome(step=training.step, loss=self._record.loss, stopped=self.stopped, done=done)

    def leave_checkpoint(self) -> None:
        """Write the last checkpoint, on every rank, after everything else that the job leaves.

        After the last step, if the job is to leave one; at a stop that ends the job, so that another can go on from it.

        Raises:
            CheckpointFailed: it could not be written.
        """
        ends_early, final = bool(self.stopped) and not self._stop.done, self.training.context.final
        if ends_early and self._stop.saves and self.training.step:
            self._checkpointer.take_at_stop()
        elif final and not ends_early:
            self._checkpointer.take_final(final)
        if self._checkpointer.written:
            self._control.flush()  # the daemon must know of the checkpoint before it hears of the exit
        if ends_early and self._stop.saves and self.training.step:
            self._make_next_step()
        self._batches = None
        self._record.report_checkpoints()

    def _make_next_step(self) -> None:
        """Make the step after a checkpoint for its sake alone: who goes on from it compares."""
        training = self.training
        by_loop = self.own_loop.changed or self.own_loop.changes_steps
        if (what := self.own_loop.changes_steps) and training.context.rank == 0:
            print(f"clusterd: no resumed job compares its first step: the script's loop {what}", flush=True)
        if training.stream is not None or training.step >= training.job.steps or by_loop:
            return  # it is read once; there is none; or the script's loop would have made it another one
        try:
            made = training.try_steps(1, training.job.seed, self._batches)
        except Exception as error:  # the checkpoint is complete without it
            why = exits.first_line(error) or type(error).__name__
            print(f"clusterd: the step after the checkpoint, which a resumed job compares, failed: {why}", flush=True)
            return
        self._resumption.record(training.step + 1, made.losses[0], drew=made.drew)

    def has_ended(self) -> bool:
        """True if no step follows: a stop, or an early end."""
        return bool(self.stopped) or self.training.evaluations.ends_training

    def _obey(self, signals: set[str]) -> None:
        """Act between two steps on flags that all ranks agreed on."""
        training, control = self.training, self._control
        if "refuse" in signals:
            why = [control.reason_for("refuse")]
            dist.broadcast_object_list(why)
            raise exits.PlanRefused(why[0])
        if "stop" in signals:
            self._record.settle()
            if "keep" in signals:
                self._snapshots.publish_final()
            self._stop = Stop(control.reason_for("stop"), done="done" in signals, saves="save" in signals)
            return
        if "checkpoint" in signals:
            # A flag that this step carries too is carried again by the next one.
            self._record.settle()
            self._checkpointer.take()
            self._resumption.checkpointed()
        if "quiesce" in signals and training.step < training.job.steps:
            self._survivor.last_step.wait()
            self._record.settle()
            if self._migration.hand_over(self._survivor.last_step.ended_at_s) == "stop":
                if control.requested("keep"):
                    self._snapshots.publish_final()
                self._stop = Stop(control.reason_for("stop"), saves=control.requested("save"))

    def _evaluate_if_due(self) -> None:
        """Evaluate after the last step, if that is due.

        A stop or a migration ends an evaluation between two batches; the ranks that go on with the job repeat it.
        """
        training = self.training
        while not self.has_ended() and training.evaluations.is_due(training.step):
            self._report_training()
            signals = self._record.settle()
            self._signals |= signals
            self._obey(signals)
            if self.has_ended():
                return
            try:
                self._evaluate()
            except Interrupted as interrupted:
                self._obey(interrupted.flags)
            finally:
                self._survivor.end()

    def _evaluate(self) -> None:
        training, evaluations = self.training, self.training.evaluations
        request = evaluations.request
        assert request is not None
        began_s = time.perf_counter()
        training.optimizer.share_writes()
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
        if training.context.rank == 0:
            self._callbacks.call("on_evaluate", training.step, metrics)
        if evaluations.ends_training and training.step < training.job.steps:
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
        self._resumption.after_backward()
        self._consensus = StepConsensus(
            contribution,
            self._control.flags(),
            training.parallel.without_gradient(),
            training.stepper.reported_values(),
            training.optimizer.learning_rate,
        )
        if self._replicated or self.training.step < self._synchronous_until:
            self._consensus.wait()
        self._survivor.check()
        self._copied()

    def _copied(self) -> None:
        """Wait until no copy reads the state any more."""
        self._snapshots.copied()
        self._migration.copied()

    def _on_cores(self, event: UseCores) -> None:
        self._cores = max(event.each, 1)
