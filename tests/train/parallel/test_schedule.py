"""Schedules that are shorter than the training are told of."""

from __future__ import annotations

from typing import Any

import pytest
from torch.optim import lr_scheduler

from clusterd.train.parallel.schedule import rate_beyond


@pytest.mark.parametrize(
    ("factory", "steps", "says"),
    [
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 100), 100, ""),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 100), 150, "rises again beyond step 100, to 48% of its highest"),
        (lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=101), 150, "the schedule ends at step 10"),
        (lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=100), 150, ""),
        (lambda o: lr_scheduler.StepLR(o, 10), 150, ""),
        (lambda o: lr_scheduler.ReduceLROnPlateau(o), 150, ""),
    ],
)
def test_a_schedule_that_is_too_short_is_told_of(factory: Any, steps: int, says: str) -> None:
    found = rate_beyond(factory, 100, steps)
    assert says in found if says else not found
