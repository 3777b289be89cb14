"""Checkpoints on request: agreed on by all ranks, copied between two steps, written beside the training."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from typing import Protocol

import torch.distributed as dist

from clusterd.train.checkpoint.dcp import StatefulTraining, stage
from clusterd.train.checkpoint.dcp_files import Staged, write
from clusterd.train.process.control import Control, Message
from clusterd.train.process.exits import CheckpointFailed
from clusterd.train.state.plain_data import NotSerializable
from plans.layout import layout
from plans.model_shape import ModelShape

PATIENCE_S, RETRY_S = 3600.0, 30.0
"""With the last checkpoint."""


class CheckpointedTraining(StatefulTraining, Protocol):
    """The part of `clusterd.train.rank_main.Training` that is saved."""

    @property
    def shape(self) -> ModelShape:
        """Of the whole model."""


class AsyncCheckpointer:
    """Checkpoints of one running rank, one at a time."""

    def __init__(self, training: CheckpointedTraining, control: Control) -> None:
        self._training, self._control = training, control
        self._lock = threading.Lock()
        self._paths: deque[str] = deque()
        self._taken_before_request: str | None = None
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self.failure = ""  # of the last one
        self._can_travel = True
        control.on("checkpoint", self._on_checkpoint)

    def take(self, path: str | None = None) -> None:
        """Between two steps, on every rank: copies the state, and lets a thread write it.

        Args:
            path: where to, if nobody needs to be asked.
        """
        began = time.perf_counter()
        self.finish()
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")  # the training's own groups are busy while it is used
        path = path or self._path()
        training = self._training
        shape = training.shape
        staged, self.failure = None, ""
        try:
            staged = stage(training, shape, layout(shape, training.context.plan))
        except NotSerializable as error:
            self.failure, self._can_travel = str(error), False
        # One that has nothing to write must not leave the others waiting for it.
        self.failure = next(filter(None, self._gather(self.failure)), "")
        if staged is None or self.failure:
            self._control.report("checkpoint_failed", why=self.failure, path=path, step=training.step)
            return
        blocked_s = time.perf_counter() - began
        self._thread = threading.Thread(
            target=self._write, args=[staged, path, blocked_s], name="clusterd-checkpoint", daemon=True
        )
        self._thread.start()

    def take_final(self, path: str) -> None:
        """After the last step, on every rank; nobody has the state but we, so a full disk is given time to be emptied.

        Raises:
            CheckpointFailed: it cannot be written.
        """
        waits_s = itertools.chain((1.0, 2.0, 5.0, 10.0), itertools.repeat(RETRY_S, int(PATIENCE_S / RETRY_S)))
        for wait_s in itertools.chain(waits_s, (None,)):
            self.take(path)
            self.finish()
            if not self.failure:
                return
            # Together, or some would wait for others that have ended.
            goes_on = wait_s is not None and self._can_travel and not self._control.requested("stop")
            if wait_s is None or not all(self._gather("yes" if goes_on else "")):
                break
            print(
                f"clusterd: the last checkpoint cannot be written: {self.failure}; tried again for an hour, clusterd "
                "cancel ends that",
                flush=True,
            )
            time.sleep(wait_s)
        raise CheckpointFailed(f"the last checkpoint could not be written: {self.failure}")

    def finish(self) -> None:
        """Waits until the one that is being written is complete."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _path(self) -> str:
        """Where to: as the first rank was told that was; the word to others may be late, or lost with an agent."""
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
        """What every rank says, by rank."""
        if self._group is None:
            return [value]
        gathered = [""] * dist.get_world_size()
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def _on_checkpoint(self, message: Message) -> None:
        path = str(message["path"])
        with self._lock:
            if path == self._taken_before_request:  # the word for the last one, at last
                self._taken_before_request = None
                return
            self._paths.append(path)
            self._control.request("checkpoint", f"to {path}")

    def _write(self, staged: Staged, path: str, blocked_s: float) -> None:
        began = time.perf_counter()
        about = {"path": path, "step": staged.step}
        try:
            write(staged, path, self._group)
        except Exception as error:  # a full disk is no reason to stop training
            self.failure = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self._control.report("checkpoint_failed", why=self.failure, **about)
            return
        self._control.report(
            "checkpointed", bytes=staged.bytes, blocked_s=blocked_s, write_s=time.perf_counter() - began, **about
        )
