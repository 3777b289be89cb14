"""The smallest job that a model can be described in."""

from __future__ import annotations

from typing import Any

import torch

from clusterd.train.process.job import Job


def small(model: Any, tp_plan: dict[str, str] | None, **changes: Any) -> Job:
    return Job(
        model=model,
        loss=lambda output, target: (output - target).square().mean(),
        data=[(torch.zeros(4), torch.zeros(4))] * 8,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        global_batch=4,
        steps=1,
        tp_plan=tp_plan,
        **changes,
    )
