"""A rank that outlives its peers, or whose plan does not fit: it keeps its state for the ranks that go on."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from clusterd.protocol.control import PeersLost
from clusterd.protocol.rank import Orphaned
from clusterd.train.loop import peers
from clusterd.train.loop.rank_training import Training
from clusterd.train.migration.source import MigrationSource
from clusterd.train.parallel.mesh import COLLECTIVE_TIMEOUT_S
from clusterd.train.process import accelerator, exits
from clusterd.train.process.control import Control

WAIT_S = 600.0
"""Time that a survivor waits for a migration, or a stop."""

UPDATE_WAIT_S = 2.0
"""Time for a device to finish an update that waits for no peer."""

INCONSISTENT_STEP = -1
"""Step reported by a rank whose parameters belong to no step."""


class LastStep:
    """End of the last step, which a device may still be working on.

    Attributes:
        ended_at_s: wall time.
    """

    def __init__(self, device: torch.device) -> None:
        self.gpu = accelerator.of(device)
        self.ended_at_s = time.time()
        self._update_done: Any = None  # event of the device

    def queued(self) -> None:
        """Record that the update is done, or queued on the device."""
        self.ended_at_s = time.time()
        if self.gpu is not None:
            self._update_done = self.gpu.record_event()

    def wait(self) -> None:
        """Wait until the device has done all that was queued."""
        if self.gpu is not None:
            self.gpu.synchronize()
            self.ended_at_s = time.time()

    def is_done(self) -> bool:
        """True if the update is complete on the device, or completes within `UPDATE_WAIT_S`."""
        deadline = time.monotonic() + UPDATE_WAIT_S
        try:
            while self._update_done is not None and not self._update_done.query():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.01)
        except RuntimeError:  # the device itself failed
            return False
        return True


class Survivor:
    """Detects that peers are gone, and keeps this rank's state then.

    Args:
        copied: waits until no copy reads the state any more.
        replicated: each replica has the whole state, and waits for the sum of the losses within a step.
    """

    def __init__(
        self,
        training: Training,
        control: Control,
        migration: MigrationSource,
        copied: Callable[[], None],
        *,
        replicated: bool,
    ) -> None:
        self._training, self._control, self._migration, self._replicated = training, control, migration, replicated
        self._copied = copied
        self.last_step = LastStep(training.device)
        self._disconnected = False
        self._disconnecting = threading.Lock()
        self._last_whole_step = 0  # step that was complete on the device at the disconnect
        needs_watch = self.last_step.gpu is not None and dist.is_initialized()
        self._hang_detector = peers.HangDetector(COLLECTIVE_TIMEOUT_S if needs_watch else None, self._on_peers_lost)
        control.on(PeersLost, lambda event: self._on_peers_lost(event.reason))

    def begin(self) -> None:
        """Begin to watch for a step that does not end."""
        self._hang_detector.begin()

    def end(self) -> None:
        """End the watch: the step is done."""
        self._hang_detector.end()

    def close(self) -> None:
        """End the watch for good: no step follows."""
        self._hang_detector.close()

    def check(self) -> None:
        """Raise after a disconnect: on a GPU, aborted groups raise nothing and their results may be garbage."""
        if self._disconnected:
            raise ConnectionError("peers are gone")

    def handle(self, error: Exception, log_last: Callable[[bool], None]) -> NoReturn:
        """Keep the state for other ranks if `error` is the loss of peers, or a plan that does not fit.

        Args:
            log_last: logs the last step, with its loss where that was summed.
        Raises:
            SystemExit: code 0: this rank's state was handed over or is not needed.
            Exception: `error`, if it is another one.
        """
        out_of_memory = self._ran_out_of_memory(error)
        if not (out_of_memory or self._is_orphaned(error)):
            raise error
        self._keep_state(error, out_of_memory, log_last)
        raise SystemExit(0) from error

    def _is_orphaned(self, error: Exception) -> bool:
        """True if peers are lost, this rank is not at fault, and its state is consistent."""
        training = self._training
        if training.context.launcher != "clusterd" or not self._control.connected or training.stepper.updating:
            return False
        return self._disconnected or (peers.is_peer_loss(error) and exits.classify_error(error, where="") is None)

    def _ran_out_of_memory(self, error: Exception) -> bool:
        """True if the plan of a migration does not fit; the previous plan did, and the job can return to it.

        The first plan of an attempt has no predecessor, and its failure ends the attempt.
        """
        training = self._training
        if training.context.migration is None or not self._control.connected or training.stepper.updating:
            return False
        return isinstance(exits.classify_error(error, where=""), exits.DeviceOutOfMemory)

    def _keep_state(self, error: Exception, out_of_memory: bool, log_last: Callable[[bool], None]) -> None:
        """Keep the state of the last full step until a migration takes it over or a stop arrives.

        Raises:
            Exception: `error`, if neither came in time.
        """
        training = self._training
        cause_text = "out of memory" if out_of_memory else "peers are gone"
        print(f"clusterd: {cause_text} after step {training.step}: {exits.first_line(error)}", flush=True)
        may_finish = training.stepper.complete and self._replicated and self._gradients_complete()
        self._disconnect()
        is_whole = self.last_step.gpu is None or self._replicated or self._last_whole_step == training.step
        log_last(self._replicated)
        # The traceback's frames hold the step's activations; the next ranks need that memory.
        cause: BaseException | None = error
        while cause is not None:  # a pipeline stage wraps the error
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__
        training.stepper.clear(gradients=not may_finish)
        step = training.step if is_whole else INCONSISTENT_STEP
        self._control.report(Orphaned(step, may_finish, out_of_memory))
        deadline = time.monotonic() + WAIT_S
        while (migration := self._migration.wait_for_migration(deadline - time.monotonic())) is not None:
            if may_finish and migration.step == training.step + 1:
                # Another survivor completed the reduction and updated its parameters; this rank must follow.
                self._copied()
                training.stepper.update()
                training.step += 1
                may_finish = False
            if self._migration.hand_over(self.last_step.ended_at_s) == "stop" or migration.frees_source_memory:
                break
        if not self._control.requested("stop"):
            raise error
        print(f"clusterd: stopped after step {training.step}: {self._control.reason_for('stop')}", flush=True)

    def _gradients_complete(self) -> bool:
        """True if gradients are complete on the device too, and not just queued."""
        gpu = self.last_step.gpu
        return gpu is None or (not self._disconnected and bool(gpu.current_stream().query()))

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
            step = self._training.step
            if not self._disconnected:
                self._last_whole_step = step if self.last_step.is_done() else INCONSISTENT_STEP
            self._disconnected = True
        peers.shut_down_connections()
