"""Arguments of `train.run` that are something else are refused by name, before torch meets them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from clusterd.train.process.evaluation import Evaluation
from clusterd.train.process.exits import Refused
from clusterd.train.process.job import check_arguments

NET = nn.Linear(4, 1)
SGD = torch.optim.SGD(NET.parameters(), lr=0.1)
RIGHT: dict[str, Any] = {
    "model": nn.Identity, "loss": nn.MSELoss(), "data": [], "optimizer": torch.optim.SGD, "global_batch": 8, "steps": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model", NET, "model is of type Linear; it must be a function, as in model=lambda: Net(...), which makes it"),
        ("optimizer", SGD, "optimizer is of type SGD; it must be a function, as in optimizer=lambda parameters: "),
        ("optimizer", {"a": SGD}, "optimizer is of type SGD; it must be a function"),
        ("scheduler", torch.optim.lr_scheduler.StepLR(SGD, 1), "scheduler is of type StepLR; it must be a function"),
        ("loss", None, "loss is missing: train.run and train.session need model, loss, data, optimizer, "),
        ("global_batch", "8", "global_batch is of type str; it must be a whole number"),
        ("global_batch", 0, "global_batch is 0; it must be 1 or more"),
        ("steps", 3.5, "steps is of type float; it must be a whole number"),
        ("steps", True, "steps is of type bool; it must be a whole number"),
        ("evaluate", (Evaluation(data=[], every=1),), "evaluate is of type tuple; it must be one train.Evaluation"),
        ("layers", "blocks", "layers is a text; it must be a list of names: layers=['blocks']"),
        ("tp_plan", ["a"], "tp_plan is of type list; it must be a map of styles by module name"),
        ("sampler", 5, "sampler is of type int; it must be an iterable of numbers of samples"),
        ("on_step", 5, "on_step is of type int; it must be a function"),
    ],
)
def test_arguments_that_are_something_else_are_refused_by_name(name: str, value: Any, message: str) -> None:
    check_arguments(RIGHT)
    with pytest.raises(Refused) as refused:
        check_arguments({**RIGHT, name: value})
    assert message in str(refused.value)
