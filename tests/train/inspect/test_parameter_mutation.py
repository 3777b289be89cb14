"""A forward pass that writes into parameters trains as in one process, or is refused."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from cases import slow
from migration_driver import Mover
from rank_pool import RankPool
from scenarios import Recorded, job
from small_job import small
from snapshot_agent import Agent, at_step, settle
from torch import nn

from clusterd.plans.layout import layout
from clusterd.plans.legality import check
from clusterd.plans.plan import Plan
from clusterd.plans.snapshots import state_snapshot_outbox
from clusterd.train.inspect.describe import describe
from clusterd.train.loop.rank_training import Training
from clusterd.train.migration import snapshots
from clusterd.train.migration.snapshots import StateSnapshots
from clusterd.train.process.context import Context
from clusterd.train.process.control import Control
from clusterd.train.state.copying import CopyBatch
from clusterd.train.state.segments import Segment
from tests.hang import HANG_S

STEPS = 6
ALL = (
    "dp=1", "accumulation=2", "checkpointing", "offload=optimizer", "tp=2", "pp=2,accumulation=2",
    "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3",
)  # fmt: skip


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("model", "trains"),
    [
        ("gpt", ALL),
        ("renormed", ("dp=1", "accumulation=2", "checkpointing", "tp=2", "pp=2,accumulation=2")),
        ("clipped", ("dp=1", "accumulation=2", "checkpointing", "tp=2", "pp=2,accumulation=2", "dp=2")),
        ("following", ("dp=1", "offload=optimizer", "tp=2", "dp=2", "dp=2,zero=1")),
    ],
)
def test_plans_are_ruled_out_that_would_repeat_or_lose_it(model: str, trains: tuple[str, ...]) -> None:
    shape = describe(job(Recorded(64), model=model))
    reasons = {plan: check(Plan.parse(plan), shape) for plan in ALL}
    assert tuple(plan for plan, why in reasons.items() if not why) == trains
    assert all(len(why) == 1 and "embed.t" in why[0] for why in reasons.values() if why)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        slow("renormed", "tp=2"),
        ("renormed", "pp=2,accumulation=2"),
        slow("renormed", "dp=1,accumulation=4,checkpointing"),
        slow("clipped", "dp=2,pp=2,accumulation=2"),
        ("clipped", "dp=2,accumulation=2"),
        ("following", "dp=2,zero=1"),
        slow("following", "dp=2,tp=2"),
        slow("following", "offload=optimizer"),
    ],
)
def test_the_remaining_plans_train_as_one_process(ranks: RankPool, tmp_path: Path, model: str, plan: str) -> None:
    weights, losses = [], []
    for name, under in (("alone", "dp=1"), ("plan", plan)):
        file = tmp_path / f"{name}.pt"
        options: dict[str, Any] = {"model": model, "steps": STEPS, "optimizer": "sgd", "save": str(file)}
        losses.append(ranks.run(tmp_path / name, under, **options).checked().losses)
        weights.append(torch.load(file, weights_only=True))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3"])
def test_writes_to_buffers_do_not_make_replicas_diverge(ranks: RankPool, tmp_path: Path, plan: str) -> None:
    """Each replica shortened other rows of the embedding, and losses did not show it for a while."""
    for rank in ranks.run(tmp_path, plan, model="renormed", steps=STEPS).ranks:
        assert (rank.exit_code, "Traceback" in rank.output) == (96, False)
        assert "writes values into embed.token.weight that depend on its own samples" in rank.output


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("model", ["centred", "late following"])
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=2", "dp=2,zero=3", "accumulation=2", "offload=optimizer"])
def test_a_real_pass_finds_what_a_fake_one_misses(ranks: RankPool, tmp_path: Path, model: str, plan: str) -> None:
    """The write depends on a value, which fake tensors lack, or begins later."""
    run = ranks.run(tmp_path, plan, model=model, steps=STEPS)
    if (model, plan) == ("late following", "dp=2"):  # the same on all replicas
        alone = ranks.run(tmp_path / "alone", "dp=1", model=model, steps=STEPS).checked()
        assert run.checked().losses == pytest.approx(alone.losses, rel=1e-5)
        return
    assert 96 in {rank.exit_code for rank in run.ranks}
    refusal = (
        r"the forward pass writes .*embed\.|depends on how the batch is cut|computes something else than one process"
    )
    assert any(re.search(refusal, r.output) and "Traceback" not in r.output for r in run.ranks)
    assert len(run.losses) <= (0 if model == "centred" else 3)


class Writing(nn.Module):
    """Writes into a parameter in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(4, 4), nn.Parameter(torch.ones(4), requires_grad=False)
        self._how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self._how == "mean":
                self.table.lerp_(x.mean(0), 0.5)
            if self._how == "noise":
                self.layer.weight.add_(torch.randn(4, 4))
            if self._how == "noise like":
                self.layer.weight.data += torch.randn_like(self.layer.weight)
            if self._how == "rows":
                self.layer.weight[0].zero_()
            if self._how == "foreach":
                torch._foreach_mul_([self.layer.weight, self.table], 0.5)
            if self._how == "replaced":
                self.layer.weight = nn.Parameter(self.layer.weight.clone())
            if self._how == "shape":
                self.table.copy_(torch.ones_like(x[0]))
        return self.layer(x) * self.table


@pytest.mark.parametrize(
    ("how", "written", "by_samples", "anew"),
    [
        ("", (), False, False),
        ("mean", ("table",), True, True),
        ("noise", ("layer.weight",), True, True),
        ("noise like", ("layer.weight",), True, True),
        ("rows", ("layer.weight",), False, False),
        ("foreach", ("table", "layer.weight"), False, True),
        ("replaced", ("layer.weight",), True, True),
        ("shape", ("table",), False, True),
    ],
)
def test_writes_to_parameters_are_classified(how: str, written: tuple[str, ...], by_samples: bool, anew: bool) -> None:
    shape = describe(small(lambda: Writing(how), None))
    assert shape.written == written
    assert (bool(shape.written_by_samples), bool(shape.written_anew)) == (by_samples, anew)


def test_a_renormed_table_that_is_the_output_layer_too_sees_rows_that_were_not_looked_up() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4, max_norm=1.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x.long()) @ self.table.weight.T

    shape = describe(small(Tied, None))
    assert shape.written_anew == "table.weight"


def test_shards_write_no_partial_features_into_replicated_tensors() -> None:
    class Measuring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
            self.mean = nn.Parameter(torch.zeros(()), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.up(x)
            self.mean.data.lerp_(y.detach().mean(), 0.5)
            return self.down(y)

    shape = describe(small(Measuring, {"up": "colwise", "down": "rowwise"}), tp_degrees=[2])
    assert "mean is replicated, but partial features are written into it" in dict(shape.tp_refused)[2]


def test_a_snapshot_has_such_parameters_as_they_were_after_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next forward pass writes while the others are copied."""
    forward = threading.Event()
    copies_to_segment = snapshots.copies_to_segment

    def late(*arguments: Any) -> CopyBatch:
        assert forward.wait(HANG_S)
        return copies_to_segment(*arguments)

    monkeypatch.setattr(snapshots, "copies_to_segment", late)
    context = Context(control_socket="an agent's")
    made = Training(job(Recorded(32), depth=1, steps=100, model="following"), context, torch.device("cpu"), None)
    made.optimizer.make_state()
    taken = StateSnapshots(made, cast(Control, Agent(tmp_path)), every=10)
    settle(taken)
    target = dict(made.parallel.module.named_parameters())["embed.target.bias"]
    target.data.fill_(160.0)
    at_step(made, taken, 10)
    target.data.fill_(16.0)
    forward.set()
    settle(taken)
    shared = layout(made.shape, Plan()).deduplicated()
    part = next(
        p for p in state_snapshot_outbox(shared, 0).parts if shared.tensors[p.tensor].name == "embed.target.bias"
    )
    kept = Segment(str(tmp_path / ".0.g0.snap0.0")).view(torch.float32, (32,), part.offset)
    assert kept.tolist() == [160.0] * 32


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2", slow("dp=2,zero=1"), slow("dp=3,shares=2:5:9")])
def test_a_write_that_is_the_same_on_all_replicas_is_trained(plan: str, ranks: RankPool, tmp_path: Path) -> None:
    """A moving average of weights, in a forward pass that fake tensors cannot run."""
    options = {"model": "averaged", "steps": 6, "depth": 2, "layers": False}
    alone = ranks.run(tmp_path / "alone", "dp=1", **options).checked()
    run = ranks.run(tmp_path / "plan", plan, **options).checked()
    assert run.losses == pytest.approx(alone.losses, rel=1e-4)
    assert run.ranks[1].result["sums"] == pytest.approx(alone.ranks[0].result["sums"], rel=1e-3, abs=1e-3)


@pytest.mark.slow
def test_a_moving_average_moves_and_goes_on_from_a_state_snapshot(
    moving: Callable[..., Mover], undisturbed: Callable[..., list[float]]
) -> None:
    mover = moving(model="averaged", layers=False, rank_file={"snapshot_every": 1})
    mover.start("dp=1")
    for plan in ("dp=2", "dp=2,zero=1"):
        mover.train(3)
        mover.move(plan)
    mover.train(6)
    mover.wait(lambda: mover.newest_snapshot()[1] > 0)
    before = [step for generation in mover.generations for step in generation.steps()]
    step = mover.recover("dp=1")
    mover.train(step + 5)
    mover.stop()
    expected = undisturbed(model="averaged", layers=False)
    for found in (before, mover.now.steps()):
        assert [s["loss"] for s in found] == [pytest.approx(expected[s["step"] - 1], rel=1e-4) for s in found]
