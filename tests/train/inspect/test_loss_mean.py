"""Losses that are not means over samples are detected before a plan cuts the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model import GPT
from rank_pool import RankPool
from scenarios import LOSSES, Recorded, cross_entropy, job
from torch import nn
from torch.nn import functional as F

from clusterd.train.inspect import loss_mean
from clusterd.train.inspect.describe import describe
from plans.legality import check
from plans.plan import Plan

STEPS = 3


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (LOSSES["mean"], "mean"),
        (LOSSES["sum"], "sum"),
        (LOSSES["some words"], "other"),
        (lambda logits, _: F.cross_entropy(logits.mean(1) @ logits.mean(1).T, torch.arange(len(logits))), "other"),
        (lambda logits, _: F.binary_cross_entropy(logits, torch.ones_like(logits)), "mean"),
        (lambda logits, target: cross_entropy(logits + torch.randn_like(logits), target), "mean"),
        (lambda logits, target: cross_entropy(logits, target.tolist()), "mean"),
    ],
    ids=["mean", "sum", "words that count", "pairs", "probabilities", "drawn", "mistaken"],
)
def test_losses_are_classified_by_their_value_on_parts(loss: Callable[..., Any], kind: str) -> None:
    assert describe(replace(job(Recorded(64), depth=1), loss=loss), trace=False).loss == kind


class Complete(GPT):
    """Computes its loss itself and returns it, as models of Hugging Face do."""

    def __init__(self, kind: str) -> None:
        super().__init__(depth=1, width=32, vocabulary=64)
        self.kind = kind

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = super().forward(tokens)
        if self.kind == "pairs":
            means = logits.mean(1)
            return {"loss": F.cross_entropy(means @ means.T, torch.arange(len(tokens)))}
        words = tokens.where(tokens > 20, -100) if self.kind == "words that count" else tokens
        return {"loss": cross_entropy(logits, words, reduction="sum" if self.kind == "sum" else "mean")}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("computes", "kind"), [("mean", "mean"), ("sum", "sum"), ("words that count", "other"), ("pairs", "other")]
)
def test_a_loss_that_the_model_computes_is_classified_too(
    computes: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas trained on other losses than one process, and the log did not say so."""
    of_model = replace(job(Recorded(64)), model=lambda: Complete(computes), loss=lambda output, _: output["loss"])
    assert describe(of_model, trace=False).loss == kind
    monkeypatch.setattr(loss_mean, "PARAMETERS_MAX", 100)
    assert describe(of_model, trace=False).loss == "unknown"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("plan", ["dp=1", "dp=2"])
def test_random_numbers_of_the_model_are_reported(ranks: RankPool, tmp_path: Path, plan: str) -> None:
    run = ranks.run(tmp_path, plan, script="unet_random_timesteps", steps=2).checked()
    text = "the model draws random numbers"
    assert sum(rank.output.count(text) for rank in run.ranks) == (plan == "dp=2")


def test_draws_are_found_in_a_pass_that_fake_tensors_cannot_end() -> None:
    """wav2vec 2.0 reads values of the labels, then masks spans by NumPy's generator."""

    class Reading(GPT):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            assert int(tokens.max()) < 64
            return super().forward(tokens)

    class Masked(Reading):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) * float(np.random.random())

    sizes = {"depth": 1, "width": 32, "vocabulary": 64}
    drawing = [replace(job(Recorded(64), depth=1), model=partial(of, **sizes)) for of in (Reading, Masked)]
    assert [describe(each, trace=False).draws for each in drawing] == [False, True]
    counting = replace(drawing[0], loss=LOSSES["some words"])
    assert describe(counting, trace=False).loss == "other"


def test_a_dropout_of_nothing_draws_nothing() -> None:
    def model(p: float) -> nn.Module:
        attention = nn.TransformerEncoderLayer(32, 4, 64, dropout=p, batch_first=True)
        return nn.Sequential(nn.Embedding(64, 32), attention, nn.Linear(32, 64))

    plain = job(Recorded(64), layers=False, tp_plan=False)
    drawing = [replace(plain, model=partial(model, p)) for p in (0.0, 0.1)]
    assert [describe(each, trace=False).draws for each in drawing] == [False, True]


@pytest.mark.slow
def test_a_loss_that_computes_with_parameters_of_the_model_leaves_it_whole() -> None:
    """A pipeline's last stage silently trained its own copies of all others."""
    made: list[GPT] = []

    def model() -> GPT:
        made[:] = [GPT(depth=2, width=32, vocabulary=64)]
        return made[0]

    def decayed(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits, target) + 0.01 * torch.stack([p.norm() for p in made[0].parameters()]).sum()

    own = torch.ones(64, requires_grad=True)  # independent of the model

    def weighed(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits * own, target)

    plans = ["dp=2", "accumulation=2", "dp=2,zero=1", "dp=2,zero=2", "tp=2", "pp=2,accumulation=2"]
    for loss, fit in ((decayed, plans[:3]), (weighed, plans)):
        shape = describe(replace(job(Recorded(64)), model=model, loss=loss), tp_degrees=[2], trace=False)
        assert [plan for plan in plans if not check(Plan.parse(plan), shape)] == fit


def test_outputs_that_are_too_large_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if type(logits) is torch.Tensor:
            asked.append(len(logits))
        return cross_entropy(logits, target, reduction="sum")

    of_bytes = replace(job(Recorded(64), depth=1), loss=loss)
    each = 16 * 64
    for most, kind, largest in ((4 * each, "sum", [4]), (3 * each, "sum", [2]), (each, "mean", [])):
        asked.clear()
        monkeypatch.setattr(loss_mean, "ELEMENTS_MAX", most)
        assert describe(of_bytes, trace=False).loss == kind
        assert asked[:1] == largest


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=1", "accumulation=2", "pp=2,accumulation=2"])
def test_a_loss_may_have_a_dimension_of_one(ranks: RankPool, tmp_path: Path, plan: str) -> None:
    plain = ranks.run(tmp_path / "plain", "dp=1", steps=STEPS).checked()
    run = ranks.run(tmp_path / "plan", plan, steps=STEPS, loss="in a list").checked()
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("plan", ["dp=2", "accumulation=2", "pp=2,accumulation=2"])
def test_a_sum_is_not_trained_where_the_batch_is_cut(ranks: RankPool, tmp_path: Path, plan: str) -> None:
    """Each replica's loss silently counted half."""
    for rank in ranks.run(tmp_path, plan, steps=STEPS, loss="sum").ranks:
        assert (rank.exit_code, "Traceback" in rank.output) == (96, False)
        assert "the loss sums over samples: return their mean" in rank.output


@pytest.mark.slow
def test_where_the_batch_is_whole_a_sum_is_trained(ranks: RankPool, tmp_path: Path) -> None:
    alone, cut = (ranks.run(tmp_path / p, p, steps=STEPS, loss="sum").checked() for p in ("dp=1", "tp=2"))
    assert cut.losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("plan", "said"), [("dp=1", 0), ("dp=2", 1), ("accumulation=2", 1), ("tp=2", 0)])
def test_a_mean_over_counted_elements_is_reported_under_accumulation(
    ranks: RankPool, tmp_path: Path, plan: str, said: int
) -> None:
    run = ranks.run(tmp_path, plan, steps=STEPS, loss="some words").checked()
    text = "the loss of a batch is not the mean over its samples"
    assert sum(rank.output.count(text) for rank in run.ranks) == said
