"""Requests and progress of scripts with their own training loop (``kind = "checkpointable"``).

    from clusterd.train.checkpointable import Requests

    requests = Requests()
    for step in range(first, steps):
        train_one_step()
        requests.progress(step + 1, loss)
        if requests.save or requests.stop:
            save(path)
            requests.saved(step + 1, path)
        if requests.stop:
            break

SIGTERM counts as a request to stop. A script that does not use this module saves when it gets SIGTERM, and exits. With
several ranks each receives requests by itself: let one rank decide, or agree by an all-reduce. The module needs neither
torch nor clusterd's loop; outside clusterd nothing is ever requested.
"""

from __future__ import annotations

import time
from types import TracebackType

from clusterd.protocol.control import Ready, TakeCheckpoint
from clusterd.protocol.rank import Checkpointed
from clusterd.train.process import context as contexts
from clusterd.train.process.control import Control, stop_on_sigterm
from clusterd.train.process.steps_log import StepsLog


class Requests:
    """The cluster's requests to this process, and the process's reports to the cluster."""

    def __init__(self) -> None:
        """Connect to the agent and start to receive requests."""
        self._context = contexts.read()
        self._control = Control(self._context)
        self._control.on(TakeCheckpoint, self._on_checkpoint)
        self._control.start()
        self._sigterm = stop_on_sigterm(self._control)
        self._sigterm.__enter__()
        self._control.send_status(Ready())
        self._log: StepsLog | None = None
        self._path: str | None = None
        self._last_s = time.perf_counter()

    @property
    def save(self) -> bool:
        """The state is wanted on disk now (``clusterd checkpoint``)."""
        return self._control.requested("checkpoint")

    @property
    def stop(self) -> bool:
        """The job is to restart elsewhere or to end: save and exit with code 0."""
        return self._control.requested("stop")

    @property
    def path(self) -> str | None:
        """Path that the request names for the checkpoint, if any; the script may use its own."""
        return self._path

    def saved(self, step: int, path: str) -> None:
        """Report that the state after `step` is complete in `path`."""
        self._control.withdraw("checkpoint")
        asked, self._path = self._path, None
        self._control.report(Checkpointed(step, path, asked or path))

    def progress(self, step: int, loss: float, samples: int = 0, steps: int = 0) -> None:
        """Report a finished step; rank 0 records it for ``clusterd ls``."""
        now_s = time.perf_counter()
        took_s, self._last_s = now_s - self._last_s, now_s
        if self._context.rank != 0 or self._context.steps_file is None:
            return
        if self._log is None:
            plan = str(self._context.plan)
            self._log = StepsLog(self._context.steps_file, first_step=step, steps=steps, plan=plan, samples=samples)
        self._log.step(step, loss, took_s)

    def close(self) -> None:
        """Stop receiving requests."""
        self._sigterm.__exit__(None, None, None)
        self._control.close()
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> Requests:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _on_checkpoint(self, event: TakeCheckpoint) -> None:
        self._path = event.path or None
        self._control.request("checkpoint", "clusterd checkpoint")
