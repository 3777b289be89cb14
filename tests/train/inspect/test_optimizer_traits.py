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
from clusterd.train.parallel.optimizer_slots import ParameterSpec, optimizer_state


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


@pytest.mark.parametrize(
    "choice", [lambda p: p.numel() >= 64, lambda p: p.shape[0] > p.shape[-1], lambda p: float(p.detach().std()) > 1]
)
def test_groups_by_size_or_values_leave_the_tensors_whole(choice: Any) -> None:
    """A rank's factory gets shards, of which it chose others for weight decay."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        chosen = [p for p in parameters if choice(p)]
        others = [p for p in parameters if all(p is not c for c in chosen)]
        return torch.optim.AdamW([{"params": chosen}, {"params": others, "weight_decay": 0.0}])

    shapes = (16, 16), (16, 6), (16,)
    elementwise, by_tensor, name = optimizer_traits(
        optimizer, [ParameterSpec(s, torch.float32, True, {}) for s in shapes]
    )
    assert (elementwise, by_tensor) == (False, True)
    assert "names or dim()" in name


def test_groups_by_dimensions_may_be_cut() -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        matrices, others = ([p for p in parameters if (p.dim() > 1) == which] for which in (True, False))
        return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], fused=True)

    specs = [ParameterSpec(s, torch.float32, True, {}) for s in ((16, 16), (16,), (1,))]
    assert optimizer_traits(optimizer, specs) == (True, True, "AdamW")


def test_an_optimizer_of_sparse_gradients_is_tried_with_some() -> None:
    """It takes no others: trials failed, and so did every start from a checkpoint, with a traceback."""
    specs = [ParameterSpec((16, 6), torch.float32, True, {})]
    assert optimizer_traits(torch.optim.SparseAdam, specs) == (True, True, "SparseAdam")
    (slots,) = optimizer_state(torch.optim.SparseAdam, specs).slots
    assert {name for name, _ in slots} == {"exp_avg", "exp_avg_sq"}


def test_a_factory_that_leaves_out_parameters_is_told_so() -> None:
    """The reason was an empty list of parameters, of a trial."""
    specs = [ParameterSpec((16, 6), torch.float32, True, {}) for _ in range(5)]
    *_, name = optimizer_traits(lambda p: torch.optim.AdamW(list(p)[4:]), specs)
    assert name == "the optimizer, whose factory leaves out parameters that it is given (form groups of all of them),"
