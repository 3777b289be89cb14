"""Gradients that are not proportional to the loss are trained as in one process, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import slow
from rank_pool import RankPool
from scenarios import Recorded, job
from small_job import small
from torch import nn
from torch.nn import functional as F

from clusterd.train.inspect.describe import describe
from plans.legality import check
from plans.plan import Plan

STEPS = 5
ALL = (
    "dp=1", "accumulation=2", "checkpointing", "tp=2", "pp=2,accumulation=2", "dp=2", "dp=2,shares=6:10",
    "dp=2,zero=1", "dp=2,zero=3", "dp=2,tp=2", "dp=2,tp=2,zero=3",
)  # fmt: skip


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("model", "trains"),
    [
        ("gpt", ALL),
        ("balanced", ("dp=1", "checkpointing", "tp=2", "dp=2", "dp=2,zero=1", "dp=2,zero=3", "dp=2,tp=2,zero=3")),
        ("bent", ("dp=1", "checkpointing")),
        ("frequent", ("dp=1", "checkpointing", "tp=2")),
    ],
)
def test_plans_are_ruled_out_that_would_weight_them_otherwise(model: str, trains: tuple[str, ...]) -> None:
    shape = describe(job(Recorded(64), model=model), trace=False)
    assert tuple(plan for plan in ALL if not check(Plan.parse(plan), shape)) == trains


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", slow("dp=2,zero=1"), slow("tp=2"), slow("dp=2,tp=2,zero=3")])
def test_an_auxiliary_gradient_counts_as_in_one_process(ranks: RankPool, tmp_path: Path, plan: str) -> None:
    options = {"model": "balanced", "optimizer": "momentum", "steps": STEPS}
    alone = ranks.run(tmp_path / "alone", "dp=1", **options).checked()
    assert ranks.run(tmp_path / "plan", plan, **options).checked().losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("model", "plan", "says"),
    [
        ("balanced", "accumulation=2", "the backward pass adds gradients of its own"),
        ("bent", "dp=2", "the backward pass clips, or otherwise distorts, gradients of each part"),
    ],
)
def test_where_it_would_not_it_is_said(ranks: RankPool, tmp_path: Path, model: str, plan: str, says: str) -> None:
    """The auxiliary gradient counted twice, and losses differed silently."""
    for rank in ranks.run(tmp_path, plan, model=model, steps=STEPS).ranks:
        assert (rank.exit_code, "Traceback" in rank.output) == (96, False)
        assert says in rank.output


def convolved(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    y = F.max_pool1d(F.relu(layer(x).clamp(-9, 9))[None], 2)
    return F.normalize(y) + y.norm(dim=-1, keepdim=True) + y.std(-1, keepdim=True)


def selected(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    y = layer(x)
    top = y.topk(2, -1)
    y = y.masked_fill(y > 1, 0.0).softmax(-1).gather(-1, top.indices) * top.values
    return torch.where(y > 0, y, y.abs().sqrt()).cumsum(-1)


def quantised(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    y = layer(x)
    return y + (y.round() - y).detach() + y.sign() + y.floor()


def penalised(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    x = x.clone().requires_grad_()
    y = layer(x).tanh()
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + gradient


def reversed_on_the_way(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    y = layer(x)
    y.register_hook(lambda gradient: gradient * -0.3)
    return y * 2


def normed_on_the_way(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    y = layer(x)
    y.register_hook(lambda gradient: gradient / gradient.norm())
    return y * 2


def decayed_on_the_way(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    y = layer(x)
    y.register_hook(lambda gradient: gradient.add(y.detach(), alpha=0.1))
    return y * 2


@pytest.mark.parametrize(
    ("compute", "added", "bent"),
    [
        (convolved, False, False),
        (selected, False, False),
        (quantised, False, False),
        (penalised, False, False),
        (reversed_on_the_way, False, False),
        (normed_on_the_way, False, True),
        (decayed_on_the_way, True, False),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_side_effects_are_distinguished_from_autograd(
    compute: Callable[[torch.Tensor, nn.Module], torch.Tensor], added: bool, bent: bool, precision: str
) -> None:
    class Computing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return compute(x, self.layer)

    of_output = replace(small(Computing, None, precision=precision), loss=lambda output, _: output.square().mean())
    shape = describe(of_output, trace=False)
    assert (shape.gradients_added, shape.gradients_bent) == (added, bent)
    assert shape.written_known
