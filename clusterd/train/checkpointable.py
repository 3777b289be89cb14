"""For scripts with a training loop of their own (``kind = "checkpointable"``): hear when to save, tell how far it is.

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

SIGTERM, which comes where nobody listens on the agent's socket, means the same as a request to stop. A script that does
not use this at all saves when it gets SIGTERM, and ends. Under several ranks each hears for itself: let one decide, or
agree by a reduction. Needs neither torch nor clusterd's loop; outside clusterd nothing is ever requested.
"""

from __future__ import annotations

import time
from types import TracebackType

from clusterd.train.process import context as contexts
from clusterd.train.process.control import Control, Message, stop_on_sigterm
from clusterd.train.process.steps_log import StepsLog


class Requests:
    """What the cluster wants of this process, and what it is told."""

    def __init__(self) -> None:
        """Begin to listen."""
        self._context = contexts.read()
        self._control = Control(self._context)
        self._control.on("checkpoint", self._on_checkpoint)
        self._control.start()
        self._sigterm = stop_on_sigterm(self._control)
        self._sigterm.__enter__()
        self._control.send_status({"event": "ready"})
        self._log: StepsLog | None = None
        self._path: str | None = None
        self._last_s = time.perf_counter()

    @property
    def save(self) -> bool:
        """Somebody wants the state on disk now (``clusterd checkpoint``)."""
        return self._control.requested("checkpoint")

    @property
    def stop(self) -> bool:
        """The job is to be started again elsewhere, or ended: save and leave, with exit code 0."""
        return self._control.requested("stop")

    @property
    def path(self) -> str | None:
        """Where the request wants the checkpoint, if it says; the script may have a place of its own."""
        return self._path

    def saved(self, step: int, path: str) -> None:
        """The state after `step` is whole in `path`."""
        self._control.withdraw("checkpoint")
        asked, self._path = self._path, None
        self._control.report(
            "checkpointed", path=path, asked=asked or path, step=step, bytes=0, blocked_s=0.0, write_s=0.0
        )

    def progress(self, step: int, loss: float, samples: int = 0, steps: int = 0) -> None:
        """A step is done; rank 0 writes it down for ``clusterd ls``."""
        now_s = time.perf_counter()
        took_s, self._last_s = now_s - self._last_s, now_s
        if self._context.rank != 0 or self._context.steps_file is None:
            return
        if self._log is None:
            plan = str(self._context.plan)
            self._log = StepsLog(self._context.steps_file, first_step=step, steps=steps, plan=plan, samples=samples)
        self._log.step(step, loss, took_s)

    def close(self) -> None:
        """Listen no more."""
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

    def _on_checkpoint(self, message: Message) -> None:
        self._path = str(message.get("path") or "") or None
        self._control.request("checkpoint", "clusterd checkpoint")
