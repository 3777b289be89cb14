"""Asynchronous checkpoints: requested at any time, agreed on by all ranks, copied between two steps.

A thread writes the copy while training goes on.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from pathlib import Path

import torch.distributed as dist

from clusterd.plans.layout import layout
from clusterd.protocol import rank
from clusterd.protocol.control import TakeCheckpoint
from clusterd.train.checkpoint import same_plan
from clusterd.train.checkpoint.dcp import stage
from clusterd.train.checkpoint.dcp_files import Staged, write
from clusterd.train.process.control import Control
from clusterd.train.process.exits import CheckpointFailed
from clusterd.train.process.plain_data import NotSerializable
from clusterd.train.state.training import Training

PATIENCE_S, RETRY_S = 3600.0, 30.0
"""Time limit of the final checkpoint, and interval between its attempts."""


class AsyncCheckpointer:
    """Checkpoints of one running rank, one at a time."""

    def __init__(self, training: Training, control: Control) -> None:
        self._training, self._control = training, control
        self._lock = threading.Lock()
        self._paths: deque[str] = deque()
        self._taken_before_request: str | None = None
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self.failure = ""  # of the last one
        self.written: deque[tuple[int, str]] = deque()  # step and directory of those that no one has been notified of
        control.on(TakeCheckpoint, self._on_checkpoint)

    def take(self, path: str | None = None, *, collects: bool = False) -> None:
        """Copy the state, between two steps on every rank, and write it on a thread.

        Args:
            path: target directory; None: the one requested.
            collects: as for `write`.
        """
        began = time.perf_counter()
        self.finish()
        self._connect()
        path = path or self._path()
        training = self._training
        shape = training.shape
        self.failure, why = "", ""
        placed = layout(shape, training.context.plan)
        try:
            staged = stage(training, shape, placed)
        except NotSerializable as error:
            why = str(error)
        # All ranks write a checkpoint of one kind.
        if why := next(filter(None, self._gather(why)), ""):
            staged = same_plan.stage(training, shape, placed, why)
        blocked_s = time.perf_counter() - began
        self._thread = threading.Thread(
            target=self._write, args=[staged, path, collects, blocked_s], name="clusterd-checkpoint", daemon=True
        )
        self._thread.start()

    def take_final(self, path: str) -> None:
        """Write the final checkpoint, after the last step on every rank.

        Only the ranks have the state then, so the write is retried, to give time to free a full disk.

        Raises:
            CheckpointFailed: it cannot be written.
        """
        waits_s = itertools.chain((1.0, 2.0, 5.0, 10.0), itertools.repeat(RETRY_S, int(PATIENCE_S / RETRY_S)))
        for wait_s in itertools.chain(waits_s, (None,)):
            self.take(path)
            self.finish()
            if not self.failure:
                return
            # Decide together, or some ranks would wait for others that have exited.
            goes_on = wait_s is not None and not self._control.requested("stop")
            if wait_s is None or not all(self._gather("yes" if goes_on else "")):
                break
            print(
                f"clusterd: the final checkpoint cannot be written: {self.failure}; retrying for an hour, stop with "
                "clusterd cancel",
                flush=True,
            )
            time.sleep(wait_s)
        raise CheckpointFailed(f"the final checkpoint could not be written: {self.failure}")

    def take_at_stop(self) -> None:
        """Write a checkpoint before the job ends early, once: whoever waits for the devices does not wait for a disk.

        Raises:
            CheckpointFailed: it cannot be written.
        """
        self._connect()
        # The stop may have reached some ranks only; without a directory of all hosts it is one of the attempt.
        shared = next(filter(None, self._gather(self._control.save_directory)), "")
        path = shared or self._own_directory()
        self.take(path, collects=not shared and self._training.context.hosts > 1)
        self.finish()
        if self.failure:
            self._control.flush()  # the daemon must know why before it hears of the exit
            raise CheckpointFailed(f"the checkpoint at the stop could not be written: {self.failure}")
        if shared or self._training.context.rank == 0:
            print(f"clusterd: saved step {self._training.step} in {path}", flush=True)

    def _own_directory(self) -> str:
        directory = self._training.context.directory
        assert directory is not None
        return str(directory / "checkpoint")

    def finish(self) -> None:
        """Wait until the checkpoint in progress is complete."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _connect(self) -> None:
        """Make the group of checkpoints; training uses its own groups meanwhile."""
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")

    def _path(self) -> str:
        """Directory of the next checkpoint, as requested from the lowest rank that has the request.

        The request may reach other ranks later, or never if an agent dies.
        """
        with self._lock:
            mine = self._paths[0] if self._paths else ""
        path = next(filter(None, self._gather(mine)))
        with self._lock:
            requested = bool(self._paths) and self._paths[0] == path
            if requested:
                self._paths.popleft()
            self._taken_before_request = None if requested else path
            if not self._paths:
                self._control.withdraw("checkpoint")
        return path

    def _gather(self, value: str) -> list[str]:
        """Value of every rank, by rank."""
        if self._group is None:
            return [value]
        gathered = [""] * dist.get_world_size()
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def _on_checkpoint(self, event: TakeCheckpoint) -> None:
        path = event.path
        with self._lock:
            if path == self._taken_before_request:  # late request for the last checkpoint
                self._taken_before_request = None
                return
            self._paths.append(path)
            self._control.request("checkpoint", f"to {path}")

    def _write(self, staged: Staged, path: str, collects: bool, blocked_s: float) -> None:
        began = time.perf_counter()
        try:
            write(staged, path, self._group, collects=collects)
        except Exception as error:  # a full disk is no reason to stop training
            self.failure = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self._control.report(rank.CheckpointFailed(path, self.failure, staged.step))
            if self._training.context.rank == 0:
                print(f"clusterd: step {staged.step} was not saved in {path}: {self.failure}", flush=True)
            return
        self.written.append((staged.step, path))
        took_s = time.perf_counter() - began
        own = self._training.context.directory
        done = rank.Checkpointed(
            staged.step,
            path,
            bytes=staged.bytes,
            blocked_s=blocked_s,
            write_s=took_s,
            on_host=own is not None and Path(path).is_relative_to(own),
        )
        self._control.report(done)
