"""Proof of a resumption: beside a checkpoint lies the loss of the step after it, which the resumed job must get too.

The job makes that step anyway; one that stops makes it for the checkpoint alone. Rank 0 writes and compares.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from clusterd.train.checkpoint.dcp_files import NEXT_STEP
from clusterd.train.process.exits import Refused
from clusterd.train.process.seeding import all_generator_states
from clusterd.train.state.next_steps import TOLERANCES, relative_difference
from clusterd.train.state.training import Training

KEPT = 100
"""Losses of past steps that are kept for checkpoints which are complete later."""


class Resumption:
    """Losses after checkpoints, on rank 0: written for those of this run, compared for the one it began from.

    Args:
        directory: of the checkpoint that the run goes on from; empty: none.
    """

    def __init__(self, training: Training, directory: str) -> None:
        self._training = training
        self._losses: dict[int, tuple[float, bool]] = {}  # by step; and whether random numbers were drawn in it
        self._waiting: dict[int, str] = {}  # directory by step
        self._expected: dict[str, Any] = {}
        self._fresh: tuple[Any, ...] | None = None  # generators at the start of a step whose draws matter
        self._drew = True
        if directory and training.context.rank == 0:
            with suppress(OSError, ValueError, TypeError, KeyError):
                found = json.loads((Path(directory) / NEXT_STEP).read_text(encoding="utf-8"))
                self._expected = {"loss": float(found["loss"]), **{k: found[k] for k in ("step", "plan", "drew")}}

    def checkpointed(self) -> None:
        """Observe whether the next step draws random numbers: a checkpoint was taken before it."""
        self._fresh = ()

    def before_step(self) -> None:
        """Note the generators, if it matters whether the step draws."""
        if self._fresh is not None:
            self._fresh = all_generator_states()

    def after_backward(self) -> None:
        """Compare the generators with those before the step."""
        if self._fresh is not None:
            self._drew, self._fresh = all_generator_states() != self._fresh, None

    def record(self, step: int, loss: float, *, drew: bool | None = None) -> None:
        """Record a finished step.

        Args:
            drew: it drew random numbers; None: as observed.
        Raises:
            Refused: it is the first after a checkpoint, and the job that wrote that has got another loss.
        """
        if self._training.context.rank:
            return
        self._losses[step] = loss, self._drew if drew is None else drew
        self._losses.pop(step - KEPT, None)
        if self._waiting:
            self._write()
        if self._expected.get("step") == step:
            self._compare(loss)

    def written(self, step: int, directory: str) -> None:
        """Have the loss of the step after a checkpoint written beside it, once it is known."""
        self._waiting[step] = directory
        self._write()

    def _write(self) -> None:
        for step in [step for step in self._waiting if step + 1 in self._losses]:
            (loss, drew), plan = self._losses[step + 1], self._training.context.plan
            drew = drew or plan.pp > 1  # in other stages
            text = json.dumps({"step": step + 1, "loss": loss, "plan": plan.to_dict(), "drew": drew})
            with suppress(OSError):  # the checkpoint is complete without it
                (Path(self._waiting.pop(step)) / NEXT_STEP).write_text(text, encoding="utf-8")

    def _compare(self, loss: float) -> None:
        training, expected = self._training, self._expected
        job, plan = training.job, training.context.plan
        depends_on_plan = expected["drew"] or training.normalises_parts or job.sees_batch == "replica"
        if depends_on_plan and expected["plan"] != plan.to_dict():
            return
        if relative_difference(loss, expected["loss"]) <= TOLERANCES[training.rounds_as][0]:
            return
        there, step = expected["loss"], expected["step"]
        text = (
            f"after the checkpoint, step {step} has a loss of {loss:.6g}, but had one of {there:.6g} where that was "
            "written: state is missing there, or the script, its data or its libraries have changed"
        )
        if training.context.refuses_difference:
            raise Refused(f"{text}. Go on all the same: clusterd resume --accept-difference")
        print(f"clusterd: {text}", flush=True)
