"""Request of a script to evaluate its model while it trains."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluation of the model on a data set of its own: in evaluation mode, without gradients, each sample once.

    Args:
        data: map-style data set, as for training.
        metric: (model output, target) to the mean over the samples given, to a pair (sum, weight) whose sums over all
            samples are divided, or to a dict of such values by name. Default: the loss.
        every: steps between two evaluations, or epochs as text: ``"epoch"``, ``"2 epochs"``; 0: at the end only.
        at_end: evaluate after the last step, too.
        batch: samples of which `metric` is computed at once, under every plan. Default: 16, or the global batch if
            that has fewer.
        whole: `metric` gets outputs and targets of all samples at once, joined along their first dimension, in host
            memory of rank 0: for F1 and others that are no mean over samples.
        monitor: name of the metric by which `patience` and `save_best` judge; default: the first one.
        mode: "min" or "max": the better direction of that metric.
        patience: evaluations without an improvement after which training ends; None: no limit.
        save_best: file for the ``state_dict`` of the best model so far, on a file system that all hosts share.
        collate_fn: default: that of training.
    """

    data: Any
    metric: Callable[[Any, Any], Any] | None = None
    every: int | str = "epoch"
    at_end: bool = True
    batch: int | None = None
    monitor: str = ""
    mode: str = "min"
    patience: int | None = None
    save_best: str | None = None
    collate_fn: Callable[[Any], Any] | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: naming the invalid one.
        """
        self.steps_between(1)
        if self.mode not in ("min", "max"):
            raise ValueError(f"Evaluation: mode is {self.mode!r}; it must be 'min' or 'max'")
        if self.batch is not None and self.batch < 1:
            raise ValueError(f"Evaluation: batch is {self.batch}; it must be at least 1")
        if self.whole and self.metric is None:
            raise ValueError("Evaluation: whole gives all samples to a metric, and there is none")
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"Evaluation: patience is {self.patience}; it must be at least 1")

    def steps_between(self, steps_per_epoch: int) -> int:
        """Steps between two evaluations; 0: none before the end."""
        if isinstance(self.every, int) and self.every >= 0:
            return self.every
        found = re.fullmatch(r"(?:(\d+) )?epochs?", str(self.every))
        if not found:
            raise ValueError(f"Evaluation: every is {self.every!r}; it must be steps, or epochs as '2 epochs'")
        return int(found[1] or 1) * steps_per_epoch
