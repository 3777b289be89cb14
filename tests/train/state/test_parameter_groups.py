"""Learning rates go on as in one process, whatever groups of parameters the ranks of a plan have."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch
from rank_pool import RankPool
from torch import nn
from torch.optim import lr_scheduler as schedulers

from clusterd.train.process.exits import PlanRefused
from clusterd.train.state import parameter_groups

NAMES = ["layer0", "layer1", "layer2", "head"]
STEPS, MOVES = 30, (7, 13, 19, 24)

RATES = {"backbone": 0.05, "head": 0.5, "all": 0.1, **{name: 0.1 * (i + 1) for i, name in enumerate(NAMES)}}


def one_group(names: list[str]) -> dict[str, list[str]]:
    return {"all": names}


def backbone_and_head(names: list[str]) -> dict[str, list[str]]:
    """Groups that would be empty on a stage are left out."""
    groups = {"backbone": [n for n in names if n != "head"], "head": [n for n in names if n == "head"]}
    return {name: some for name, some in groups.items() if some}


def one_for_each(names: list[str]) -> dict[str, list[str]]:
    return {name: [name] for name in names}


LAYOUTS = [one_group, backbone_and_head, one_for_each]


class Decay:
    """A rate's factor, as an object with state."""

    def __init__(self, factor: float) -> None:
        self.factor, self.calls = factor, 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return self.factor**step


def _cosine(o: Any) -> Any:
    return schedulers.CosineAnnealingLR(o, 20)


def _warm(o: Any) -> Any:
    return schedulers.LinearLR(o, 0.1, total_iters=5)


def _sequential(o: Any) -> Any:
    return schedulers.SequentialLR(o, [_warm(o), _cosine(o)], [5])


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: schedulers.StepLR(o, 3, 0.8),
    "multi step": lambda o: schedulers.MultiStepLR(o, [5, 10, 15, 21], 0.5),
    "cosine": _cosine,
    "warm restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4, 2),
    "one cycle": lambda o: schedulers.OneCycleLR(o, [g["lr"] for g in o.param_groups], total_steps=40),
    "one cycle in three": lambda o: schedulers.OneCycleLR(o, 0.3, total_steps=40, three_phase=True),
    "cyclic": lambda o: schedulers.CyclicLR(o, [g["lr"] / 9 for g in o.param_groups], 0.4, 3, mode="triangular2"),
    "lambdas": lambda o: schedulers.LambdaLR(o, [lambda s, r=g["lr"]: 1 / (1 + r * s) for g in o.param_groups]),
    "objects": lambda o: schedulers.LambdaLR(o, [Decay(1 - g["lr"] / 9) for g in o.param_groups]),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, [lambda s: 0.97] * len(o.param_groups)),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.9),
    "polynomial": lambda o: schedulers.PolynomialLR(o, 25, 2.0),
    "linear": lambda o: schedulers.LinearLR(o, 0.2, total_iters=12),
    "constant": lambda o: schedulers.ConstantLR(o, 0.3, 9),
    "sequential": _sequential,
    "chained": lambda o: schedulers.ChainedScheduler([_warm(o), schedulers.ExponentialLR(o, 0.95)], o),
    "sequential of four": lambda o: schedulers.SequentialLR(
        o, [_warm(o), schedulers.ConstantLR(o, 0.5, 4), _cosine(o), schedulers.StepLR(o, 2)], [4, 9, 20]
    ),
    "sequential in sequential": lambda o: schedulers.SequentialLR(
        o, [_sequential(o), schedulers.ExponentialLR(o, 0.9)], [14]
    ),
    "chained with sequential": lambda o: schedulers.ChainedScheduler([_sequential(o), schedulers.StepLR(o, 4)], o),
}

PLANS = {"one": [NAMES], "two stages": [NAMES[:2], NAMES[2:]], "uneven": [NAMES[:1], NAMES[1:]], "dp": [NAMES, NAMES]}


class Rank:
    """Optimizer and scheduler over the parameters of one rank."""

    def __init__(self, names: list[str], layout: Any, schedule: Callable[[Any], Any]) -> None:
        parameters = {name: nn.Parameter(torch.zeros(1)) for name in names}
        groups = [{"params": [parameters[n] for n in some], "lr": RATES[k]} for k, some in layout(names).items()]
        self.optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        self.scheduler = schedule(self.optimizer)
        local = [(name, p, p) for name, p in parameters.items()]
        self.shown: Any = SimpleNamespace(
            optimizer=self.optimizer, holder=self.optimizer, local=local, groups_made=len(self.optimizer.param_groups)
        )

    def rates(self) -> Iterator[tuple[str, float, float]]:
        names = {id(p): name for name, p, _ in self.shown.local}
        for group in self.optimizer.param_groups:
            yield from ((names[id(p)], group["lr"], group["momentum"]) for p in group["params"])


def rates_of(ranks: list[Rank]) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for rank in ranks:
        for name, *values in rank.rates():
            assert found.setdefault(name, tuple(values)) == tuple(values), f"{name} differs between replicas"
    return found


def moved(ranks: list[Rank], plan: str, layout: Any, schedule: Callable[[Any], Any]) -> list[Rank]:
    sent = [parameter_groups.collect(rank.shown, rank.scheduler) for rank in ranks]
    received = msgpack.unpackb(msgpack.packb(sent), strict_map_key=False)
    made = [Rank(names, layout, schedule) for names in PLANS[plan]]
    for rank in made:
        parameter_groups.Placement(rank.shown, rank.scheduler, schedule, received).apply()
    return made


def trained(ranks: list[Rank]) -> dict[str, tuple[float, float]]:
    for rank in ranks:
        rank.optimizer.step()
        rank.scheduler.step()
    return rates_of(ranks)


@pytest.mark.parametrize("plans", [("two stages", "one"), ("uneven", "two stages", "uneven"), ("dp", "uneven", "dp")])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_rates_are_those_of_one_process_through_moves_and_resumes(
    kind: str, layout: Any, plans: tuple[str, ...]
) -> None:
    """The rate ended 700 times too high where schedulers within a scheduler were as many as the groups."""
    schedule = SCHEDULES[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone, ranks = [Rank(NAMES, layout, schedule)], [Rank(NAMES, layout, schedule)]
        order = iter(plans)
        for step in range(1, STEPS):
            assert trained(ranks) == pytest.approx(trained(alone), abs=0), step
            if step in MOVES:
                plan = next(order, plans[-1])  # the last ones: a resume under the same plan
                ranks = moved(ranks, plan, layout, schedule)


class History(schedulers.LRScheduler):
    """Keeps a list that gets one value per group late, which no short run of it shows."""

    def __init__(self, optimizer: Any) -> None:
        self.late: list[float] = []
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        if self.last_epoch == 5:
            self.late = [group["lr"] / 2 for group in self.optimizer.param_groups]
        return self.late or [group["lr"] for group in self.optimizer.param_groups]


def _at_most_two(o: Any) -> Any:
    return schedulers.LambdaLR(o, [lambda s: 0.9**s, lambda s: 0.8**s][: len(o.param_groups)])


@pytest.mark.parametrize(
    ("schedule", "says"), [(History, "History.late does not tell"), (_at_most_two, "its factory fails")]
)
def test_a_state_that_no_evidence_places_is_refused(schedule: Any, says: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ranks = [Rank(names, backbone_and_head, schedule) for names in PLANS["two stages"]]
        for _ in range(8):
            trained(ranks)
        with pytest.raises(PlanRefused, match=says):
            moved(ranks, "one", backbone_and_head, schedule)
        again = moved(ranks, "two stages", backbone_and_head, schedule)  # the same groups: nothing has to be placed
        assert trained(again) == trained(ranks)


def test_parameters_of_different_rates_are_not_put_into_one_group() -> None:
    ranks = [Rank(NAMES, one_for_each, SCHEDULES["step"])]
    trained(ranks)
    with pytest.raises(PlanRefused, match="group 0 under this plan has parameters of several groups"):
        moved(ranks, "one", one_group, SCHEDULES["step"])


@pytest.mark.slow
def test_the_losses_of_a_pipeline_are_those_of_one_process(
    moving: Callable[..., Any], undisturbed: Callable[..., list[float]], ranks: RankPool, tmp_path: Path
) -> None:
    """There, back again, and from a checkpoint of the pipeline under the same plan, which was an IndexError."""
    options = {"optimizer": "backbone and head", "schedule": "sequential"}
    expected = undisturbed(**options)
    mover = moving(**options)
    mover.start("dp=1")
    for plan in ("pp=2,accumulation=2", "dp=1", "pp=2,accumulation=2"):
        mover.train(4)
        mover.move(plan)
    mover.train(2)
    step = mover.checkpoint(tmp_path / "checkpoint")["step"]
    losses = [each["loss"] for each in mover.stop()]
    assert losses == pytest.approx(expected[: len(losses)], rel=1e-4)
    rest = [{"depth": 2, **options, "steps": step + 3}]
    left = {"restore": str(tmp_path / "checkpoint")}
    run = ranks.run_each(tmp_path / "resumed", "pp=2,accumulation=2", rest, more=lambda _: left)[0].checked()
    assert run.losses == pytest.approx(expected[step : step + 3], rel=1e-4)
