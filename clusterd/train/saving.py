"""Checkpoints on request: agreed on by all ranks, copied between two steps, written beside the training."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Protocol

import torch.distributed as dist

from clusterd.train.checkpoint import Checkpointed, Staged, stage, write
from clusterd.train.control import Control, Message
from plans.layout import layout
from plans.model_shape import ModelShape

POLL_S = 0.1


class Saved(Checkpointed, Protocol):
    """The part of `clusterd.train.entry.Training` that is saved."""

    @property
    def shape(self) -> ModelShape:
        """Of the whole model."""


class Checkpoints:
    """Checkpoints of one running rank, one at a time."""

    def __init__(self, training: Saved, control: Control) -> None:
        self._training, self._control = training, control
        self._news = threading.Condition()
        self._paths: deque[str] = deque()
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        control.on("checkpoint", self._on_checkpoint)

    def take(self) -> None:
        """Between two steps, on every rank: copies the state, and lets a thread write it."""
        with self._news:
            while not self._paths:  # others were asked a moment earlier
                if self._control.requested("stop"):
                    return
                self._news.wait(POLL_S)
            path = self._paths.popleft()
            if not self._paths:
                self._control.withdraw("checkpoint")
        began = time.perf_counter()
        self.finish()
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")  # the training's own groups are busy while it is used
        training = self._training
        shape = training.shape
        staged = stage(training, shape, layout(shape, training.context.plan))
        blocked_s = time.perf_counter() - began
        self._thread = threading.Thread(
            target=self._write, args=[staged, path, blocked_s], name="clusterd-checkpoint", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Waits until the one that is being written is complete."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _on_checkpoint(self, message: Message) -> None:
        with self._news:
            self._paths.append(str(message["path"]))
            self._news.notify_all()
        self._control.request("checkpoint", f"to {message['path']}")

    def _write(self, staged: Staged, path: str, blocked_s: float) -> None:
        began = time.perf_counter()
        about = {"path": path, "step": staged.step}
        try:
            write(staged, path, self._group)
        except Exception as error:  # a full disk is no reason to stop training
            self._control.say("checkpoint_failed", why=f"{type(error).__name__}: {error}", **about)
            return
        self._control.say(
            "checkpointed", bytes=staged.bytes, blocked_s=blocked_s, write_s=time.perf_counter() - began, **about
        )
