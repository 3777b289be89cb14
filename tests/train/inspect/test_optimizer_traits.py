"""Properties of an optimizer, found by running it on small parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scenarios import OPTIMIZERS, Recorded, job

from clusterd.plans.legality import check
from clusterd.plans.plan import Plan
from clusterd.train.inspect.describe import describe
from clusterd.train.inspect.optimizer_traits import optimizer_traits


def described(**options: Any) -> Any:
    return describe(job(Recorded(64), **options))


def test_an_optimizer_that_begins_at_rate_zero_is_still_found_out() -> None:
    """A schedule warms it up; zero updates are equal for every optimizer."""
    for optimizer, alike in ((torch.optim.Adafactor, False), (torch.optim.AdamW, True)):
        traits = optimizer_traits(lambda p, o=optimizer: o(p, lr=0.0))  # type: ignore[misc]
        assert traits == (alike, True, optimizer.__name__)


@pytest.mark.parametrize(
    ("optimizer", "traits"),
    [
        ("clipping", (False, False)),
        ("large factored", (False, True)),
        ("late ratio", (False, True)),
        ("lookahead", (True, True)),
    ],
)
def test_an_optimizer_is_probed_with_large_gradients_large_matrices_and_later_steps(
    optimizer: str, traits: tuple[bool, bool]
) -> None:
    """Two updates of a small matrix look elementwise with each of them."""
    assert optimizer_traits(OPTIMIZERS[optimizer])[:2] == traits


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("optimizer", ["rows by names", "rows by marks", "rows and others"])
def test_an_optimizer_that_chooses_among_parameters_is_tried_on_each_kind(optimizer: str) -> None:
    """On a matrix without a name it looked elementwise, and tensors that it treats as a whole were cut."""
    shape = described(model="marked", optimizer=optimizer)
    assert (shape.optimizer_elementwise, shape.optimizer_by_tensor) == (False, True)


def test_an_optimizer_that_looks_across_tensors_leaves_the_model_whole() -> None:
    shape = described(optimizer="common scale")
    assert not shape.optimizer_by_tensor
    for plan in ("dp=2,zero=1", "pp=2,accumulation=2", "tp=2", "dp=2,zero=3"):
        assert any("trial updates of " in why for why in check(Plan.parse(plan), shape)), plan
    assert check(Plan.parse("dp=2,offload=optimizer"), shape) == []
