"""The steps of one rank, and what can happen between two of them: a stop, a move, the loss of peers."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from clusterd.train.checkpoint.asynchronous import Checkpoints
from clusterd.train.loop import peers
from clusterd.train.loop.consensus import Agreement
from clusterd.train.loop.phases import peak_bytes
from clusterd.train.loop.step import Stepper
from clusterd.train.migration.snapshots import Snapshots
from clusterd.train.migration.source import Leaving
from clusterd.train.parallel.apply_plan import Parallel
from clusterd.train.parallel.mesh import COLLECTIVE_TIMEOUT_S
from clusterd.train.parallel.optimizers import RankOptimizer
from clusterd.train.process import exits
from clusterd.train.process.context import Context
from clusterd.train.process.control import Control, Message
from clusterd.train.process.job import Job, Outcome
from clusterd.train.process.seeding import seed_step
from clusterd.train.state import scalars
from clusterd.train.state.attributes import Attributes
from clusterd.train.state.plain_data import CannotTravel
from plans.model_shape import ModelShape

ORPHAN_WAIT_S = 600.0

FIRST_STEPS = 5
"""After a move; in them all wait for each other: where memory runs out it does so then, and nobody may be ahead."""

SETTLES_S = 2.0
"""For a device to end an update that waits for nobody."""

TORN = -1
"""The step of a rank whose parameters are of none."""

StepSeen = Callable[[int, float, float, "dict[str, Any]"], None]
"""Called on every rank with a finished step: its number, the global loss, its seconds; now and then where they went."""


class Trained(Protocol):
    """The part of `clusterd.train.rank_main.Training` that steps."""

    job: Job
    context: Context
    device: torch.device
    parallel: Parallel
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


class Loop:
    """Steps to the last one, or until all ranks agree to stop.

    Args:
        arrived_by: the move that made this rank; the daemon is told when it trains.
    """

    def __init__(self, training: Trained, control: Control, seen: StepSeen, *, arrived_by: str = "") -> None:
        self._training, self._control, self._seen = training, control, seen
        self._arrived_by = arrived_by
        self._leaving = Leaving(training, control)
        self._checkpoints = Checkpoints(training, control)
        self._snapshots = Snapshots(training, control, training.context.snapshot_every)
        self._pending: tuple[int, float, Agreement] | None = None
        self._loss = float("nan")
        self._lacking = 0.0  # as the last agreement had it that was looked into
        self._ended_at_s = time.time()
        self._cut_off = False
        self._tearing = threading.Lock()
        self._done = False  # when it is stopped: it is where it was to get
        self._agreement: Agreement | None = None
        plan = training.context.plan
        self._replicated = plan.dp > 1 and plan.zero == 0 and training.context.launcher == "clusterd"
        self._waits_until = training.step + FIRST_STEPS if training.context.move is not None else 0
        self._updated: Any = None  # event on the device: the last step is done there
        self._whole = 0  # a step that was, when connections were torn up
        self._cores = 0  # to compute on from the next step on; 0: as it is
        watched = training.device.type == "cuda" and dist.is_initialized()
        self._hangs = peers.HangWatch(COLLECTIVE_TIMEOUT_S if watched else None, self._lose_peers)
        control.on("peers_lost", lambda message: self._lose_peers(str(message.get("reason", ""))))
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
                scalars.collect(training, training.shape, late_apart=True)
            except CannotTravel as error:
                raise exits.CheckpointFailed(f"the job is to leave a checkpoint, and cannot: {error}") from error
        try:
            stopped = self._steps()
        except Exception as error:
            no_memory = self._ran_out_of_memory(error)
            if not (no_memory or self._is_orphaned(error)):
                raise
            self._wait_as_orphan(error, no_memory)
            raise SystemExit(0) from error
        finally:
            self._hangs.close()
        self._checkpoints.finish()
        if stopped:
            print(f"clusterd: stopped after step {training.step} of {training.job.steps}: {stopped}", flush=True)
        return Outcome(step=training.step, loss=self._loss, stopped=stopped, done=not stopped or self._done)

    def leave_checkpoint(self) -> None:
        """After the last step, on every rank, and after all else that is to be left of it.

        Raises:
            CheckpointFailed: it could not be written.
        """
        if self._training.context.final:
            self._checkpoints.take_last(self._training.context.final)

    def _steps(self) -> str:
        """Returns why it was stopped, if it was."""
        training, control = self._training, self._control
        job, place = training.job, training.context.coordinates
        began = time.perf_counter()
        training.stepper.phases.begin(training.step + 1)
        for inputs, targets in training.batches():
            if self._arrived_by:
                control.say("trains", id=self._arrived_by, step=training.step, at_s=time.time())
                self._arrived_by = ""
            if self._cores:
                self._use_cores()
            seed_step(job.seed, training.step, place.replica, place.stage)
            training.stepper.phases.lap("input")
            self._hangs.begin()
            training.stepper.step(inputs, targets, self._agree)
            self._ended_at_s = time.time()
            if training.device.type == "cuda":
                self._updated = torch.cuda.Event()
                self._updated.record()
            training.step += 1
            agreement = self._agreement
            assert agreement is not None
            self._snapshots.begin()
            # A step is settled after the next one: nobody waits for a reduction.
            signals = self._settle()
            self._hangs.end()
            now = time.perf_counter()
            self._pending = (training.step, now - began, agreement)
            began = now
            training.stepper.phases.begin(training.step + 1)
            if "stop" in signals:
                self._settle()
                self._done = "done" in signals
                if "keep" in signals:
                    self._snapshots.keep()
                return control.why("stop")
            if "checkpoint" in signals:
                # What the step under way was asked for too is asked again with the next one.
                self._settle()
                self._checkpoints.take()
                began = time.perf_counter()
            if "quiesce" in signals and training.step < job.steps:
                self._end_of_step()
                self._settle()
                if self._leaving.depart(self._ended_at_s) == "stop":
                    if control.requested("keep"):
                        self._snapshots.keep()
                    return control.why("stop")
                began = time.perf_counter()
        self._settle()
        return ""

    def _use_cores(self) -> None:
        """On the thread that computes: others have a number of their own."""
        torch.set_num_threads(self._cores)
        self._cores = 0
        count, step = torch.get_num_threads(), self._training.step + 1
        print(f"clusterd: computes on {count} CPU thread{'s' * (count > 1)} from step {step} on", flush=True)

    def _agree(self, contribution: torch.Tensor) -> None:
        self._agreement = Agreement(contribution, self._control.flags(), self._training.parallel.without_gradient())
        if self._replicated or self._training.step < self._waits_until:
            self._agreement.wait()
        self._check_cut_off()
        self._snapshots.copied()

    def _check_cut_off(self) -> None:
        """Groups that were torn down on a GPU raise nothing: what was reduced may be anything."""
        if self._cut_off:
            raise ConnectionError("peers are gone")

    def _settle(self) -> set[str]:
        """Logs the pending step; returns what all ranks were asked for in it."""
        if self._pending is None:
            return set()
        step, time_s, agreement = self._pending
        self._loss, signals = agreement.settle()
        self._check_cut_off()
        if (lacking := agreement.all_lack()) != self._lacking:
            self._training.parallel.check_alike(agreement.lacking)
            self._lacking = lacking
        self._pending = None
        self._seen(step, self._loss, time_s, self._details())
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
        return self._cut_off or (peers.are_lost(error) and exits.of(error, where="") is None)

    def _ran_out_of_memory(self, error: Exception) -> bool:
        """Whether a plan that the job was moved to does not fit: what it had before does, and can have it back.

        The first plan of an attempt has nothing to go back to, and ends it.
        """
        training = self._training
        if training.context.move is None or not self._control.connected or training.stepper.updating:
            return False
        return isinstance(exits.of(error, where=""), exits.DeviceOutOfMemory)

    def _wait_as_orphan(self, error: Exception, no_memory: bool) -> None:
        """Keeps the state of the last full step until somebody takes it, or nobody wants it.

        Raises:
            Exception: `error`, when nobody came.
        """
        training = self._training
        what = "out of memory" if no_memory else "peers are gone"
        print(f"clusterd: {what} after step {training.step}: {exits.first_line(error)}", flush=True)
        may_finish = training.stepper.complete and self._replicated and self._gradients_arrived()
        self._tear_up()
        whole = training.device.type != "cuda" or self._replicated or self._whole == training.step
        if self._pending is not None:
            # Done, though its loss may never have been summed up; replicas waited for that within the step.
            step, time_s, agreement = self._pending
            self._seen(step, agreement.settle()[0] if self._replicated else float("nan"), time_s, {})
        # The step's activations hang on the frames of its traceback, and the ranks to come need their room.
        cause: BaseException | None = error
        while cause is not None:  # a pipeline stage wraps what happened in it
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__
        training.stepper.clear(gradients=not may_finish)
        step = training.step if whole else TORN
        self._control.say("orphaned", step=step, updated=True, may_finish=may_finish, out_of_memory=no_memory)
        deadline = time.monotonic() + ORPHAN_WAIT_S
        while (move := self._leaving.wait_for_move(deadline - time.monotonic())) is not None:
            if may_finish and move.step == training.step + 1:
                # Another survivor got through the reduction and changed its parameters: so must this one.
                self._snapshots.copied()
                training.stepper.update()
                training.step += 1
                may_finish = False
            if self._leaving.depart(self._ended_at_s) == "stop" or move.makes_room:
                break
        if not self._control.requested("stop"):
            raise error
        print(f"clusterd: stopped after step {training.step}: {self._control.why('stop')}", flush=True)

    def _gradients_arrived(self) -> bool:
        """Whether what is complete for the interpreter is so for the device too, before its streams are torn up."""
        device = self._training.device
        return device.type != "cuda" or (not self._cut_off and bool(torch.cuda.current_stream(device).query()))

    def _on_cores(self, message: Message) -> None:
        self._cores = max(int(message["each"]), 1)

    def _lose_peers(self, reason: str) -> None:
        """Somebody knows before the connections do: a host that is gone closes none."""
        print(f"clusterd: peers are gone: {reason}", flush=True)
        self._tear_up()

    def _tear_up(self) -> None:
        """Ends all connections, having noted which step the device has ended.

        It may hold the next update already, queued behind a sum that never came and that this makes up.
        """
        with self._tearing:  # of two threads, the one that comes second would see what the first has made up
            step = self._training.step
            if not self._cut_off:
                self._whole = step if self._is_done() else TORN
            self._cut_off = True
        peers.cut_off()

    def _is_done(self) -> bool:
        """Whether the update of the last step is made on the device too, or is in a moment."""
        deadline = time.monotonic() + SETTLES_S
        try:
            while self._updated is not None and not self._updated.query():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.01)
        except RuntimeError:  # the device is gone itself
            return False
        return True
