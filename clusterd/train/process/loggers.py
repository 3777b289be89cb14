"""Writers of a run's numbers for other tools: TensorBoard, Weights & Biases, or an object of the script's own.

They run on rank 0 only. A run keeps its identity across moves, restarts and ``clusterd resume``, and a step that is
repeated after a loss replaces the one that was written before.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from clusterd.process_attributes import SEED_VARIABLE
from clusterd.train.process.context import Context
from clusterd.train.process.exits import Refused, first_line


class Logger(Protocol):
    """Receiver of numbers by name; the script may pass objects of its own."""

    def write(self, step: int, values: Mapping[str, float]) -> object:
        """Receive the values of a step."""


class TensorBoard:
    """Event files of TensorBoard in ``runs/NAME`` below the working directory, or below `TENSORBOARD_DIR`.

    Reading stops at the first step of a later file, so that steps that were repeated are shown once.
    """

    module = "tensorboard"

    def __init__(self, run: str, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(os.environ.get("TENSORBOARD_DIR", "runs")) / run
        self._writer = SummaryWriter(str(folder), purge_step=first_step)
        print(f"clusterd: TensorBoard's files are in {folder.absolute()}", flush=True)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, whose settings are its own environment variables (``WANDB_PROJECT``)."""

    module = "wandb"

    def __init__(self, run: str, first_step: int) -> None:
        import wandb

        name = os.environ.get("CLUSTERD_JOB_NAME") or run
        self._run = wandb.init(id=run, name=os.environ.get("WANDB_NAME", name), resume="allow")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


KNOWN: Mapping[str, type[TensorBoard] | type[WeightsAndBiases]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


def check(loggers: Sequence[str | Logger]) -> None:
    """Check before anything is trained that every logger exists here.

    Raises:
        Refused: naming it, and what to install.
    """
    for logger in loggers:
        if isinstance(logger, str):
            if logger not in KNOWN:
                raise Refused(f"loggers names {logger!r}; there are {', '.join(KNOWN)}, and objects with write()")
            if importlib.util.find_spec(KNOWN[logger].module) is None:
                raise Refused(
                    f"loggers names {logger!r}, which is not installed in this environment: pip install {logger}"
                )
        elif not callable(getattr(logger, "write", None)):
            raise Refused(f"loggers has a {type(logger).__name__}, which has no write(step, values)")


class Loggers:
    """Loggers of a run from its first step here on; one that fails is reported once and left out."""

    def __init__(self, loggers: Sequence[str | Logger], context: Context, first_step: int) -> None:
        self._open: dict[str, Any] = {}
        run = run_id(context)
        for logger in loggers:
            if isinstance(logger, str):
                self._guarded(logger, lambda: self._open.setdefault(logger, KNOWN[logger](run, first_step)))  # noqa: B023
            else:
                self._open[type(logger).__name__] = logger

    def write(self, step: int, values: Mapping[str, Any], prefix: str = "") -> None:
        """Write the numbers of a step; nested ones by ``NAME/PART``."""
        numbers = {f"{prefix}{name}": value for name, value in _flat(values)}
        for name, logger in [*self._open.items()]:
            self._guarded(name, lambda: logger.write(step, numbers))  # noqa: B023

    def close(self) -> None:
        """Write what is buffered."""
        for name, logger in [*self._open.items()]:
            if callable(close := getattr(logger, "close", None)):
                self._guarded(name, close)

    def _guarded(self, name: str, action: Callable[[], object]) -> None:
        """Act, and leave the logger out if it fails: a full disk or a lost connection is no reason to stop training."""
        try:
            action()
        except Exception as error:
            self._open.pop(name, None)
            print(f"clusterd: {name} is left out from now on: {type(error).__name__}: {first_line(error)}", flush=True)


def run_id(context: Context) -> str:
    """Identity of a run across its moves and restarts, and across jobs that continue one another."""
    job = os.environ.get(SEED_VARIABLE) or context.job
    return f"{os.environ.get('CLUSTERD_JOB_NAME', 'job')}-{job}" if job else "run"


def _flat(values: Mapping[str, Any], path: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{path}{name}/")
        elif isinstance(value, (int, float)):
            found.append((f"{path}{name}", float(value)))
    return found
