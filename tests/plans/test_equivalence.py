"""Every plan trains the same model: the same samples, losses and parameters.

Real processes over gloo on loopback. AdamW alone would hide errors of gradient scale, so plain SGD runs too.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from rank_pool import RankPool, Run

from clusterd.plans.plan import Plan

RELATIVE = 1e-5
STEPS, BATCH = 20, 16
DEPTH = 2  # with embedding and head, four layers: as many as the longest pipeline has stages
OPTIMIZERS = ("sgd", "adamw")

PLANS = [
    "dp=2,tp=2",
    "dp=2,pp=2,accumulation=4",
    "dp=2,zero=3,checkpointing",
    "dp=2,zero=3,offload=parameters",
    "dp=3,shares=2:5:9,accumulation=2",
]

SLOW = [
    "accumulation=4",
    "checkpointing",
    "dp=2,offload=optimizer",
    "zero=3,offload=parameters",
    "dp=2,shares=5:11",
    "dp=4",
    "dp=4,zero=3",
    "dp=2,tp=2,zero=3",
    "dp=4,zero=1",
    "dp=4,zero=2",
    "tp=4",
    "pp=4,accumulation=4",
    "dp=2,pp=2,accumulation=2,schedule=gpipe",
    "dp=2,tp=2,pp=2,accumulation=2",
    "dp=2,zero=3,offload=optimizer",
    "dp=2,accumulation=4",
    "dp=2,pp=2,zero=1,accumulation=2",
    "pp=4,accumulation=4,schedule=gpipe",
    "tp=2,pp=2,accumulation=2",
    "dp=2,tp=2,zero=1",
    "dp=2,zero=3,shares=3:13,accumulation=3",
    "dp=2,zero=3,accumulation=4",
    "dp=2,pp=2,zero=2,accumulation=4,schedule=gpipe",
    "dp=2,tp=2,shares=6:10",
    "tp=2,pp=2,accumulation=2,checkpointing",
    "dp=2,tp=2,zero=2,accumulation=2",
    "dp=2,tp=2,pp=2,zero=1,accumulation=2",
    "dp=2,tp=2,pp=2,zero=3,accumulation=2,checkpointing",
    "dp=2,tp=2,pp=2,zero=2,accumulation=4,schedule=gpipe,offload=optimizer,shares=4:12",
    "tp=2,pp=4,accumulation=8",
    "dp=2,pp=2,zero=3,accumulation=2",
]


@pytest.fixture(scope="module")
def one_process(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Result of a single process."""
    runs = ranks.run_each(
        tmp_path_factory.mktemp("one"), "dp=1", [{"optimizer": o, "depth": DEPTH} for o in OPTIMIZERS]
    )
    return dict(zip(OPTIMIZERS, [run.checked() for run in runs], strict=True))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("plan", [*PLANS, *(pytest.param(p, marks=pytest.mark.slow) for p in SLOW)])
def test_equivalence(plan: str, one_process: dict[str, Run], ranks: RankPool, tmp_path: Path) -> None:
    runs = ranks.run_each(tmp_path, plan, [{"optimizer": o, "depth": DEPTH} for o in OPTIMIZERS])
    for optimizer, run in zip(OPTIMIZERS, runs, strict=True):
        expected = one_process[optimizer]
        assert len(run.checked().losses) == STEPS
        assert run.losses == pytest.approx(expected.losses, rel=RELATIVE), optimizer
        assert_same_samples(run, expected, Plan.parse(plan))
    # Adam divides small gradients by small numbers, so only plain SGD shows that parameters are equal.
    assert_same_parameters(runs[0], one_process["sgd"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "dp=2,zero=3,shares=3:13",
        pytest.param("tp=2,pp=2,accumulation=2", marks=pytest.mark.slow),
        pytest.param("dp=2,tp=2,shares=5:11", marks=pytest.mark.slow),
    ],
)
def test_equivalence_with_clipping_groups_and_a_schedule(plan: str, ranks: RankPool, tmp_path: Path) -> None:
    """A warm-up, two parameter groups with different weight decay, and a limit that every gradient exceeds."""
    options: dict[str, Any] = {"warmup": True, "clip_norm": 0.05, "depth": DEPTH}
    # AdamW is nearly invariant to gradient scale, so a wrong norm would show under SGD only.
    variations = [{"optimizer": "two groups", **options}, {"optimizer": "momentum", **options}]
    unclipped = {**variations[1], "clip_norm": None}
    *one, free = [run.checked() for run in ranks.run_each(tmp_path / "one", "dp=1", [*variations, unclipped])]
    many = [run.checked() for run in ranks.run_each(tmp_path / "many", plan, variations)]
    for run, expected in zip(many, one, strict=True):
        assert run.losses == pytest.approx(expected.losses, rel=RELATIVE)
    assert one[1].losses[-1] != pytest.approx(free.losses[-1], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1,accumulation=2", "dp=2,tp=2"])
def test_equivalence_where_the_model_leaves_parameters_out(plan: str, ranks: RankPool, tmp_path: Path) -> None:
    """A parameter without gradient is no failure, under replicas either, and is not decayed."""
    options: dict[str, Any] = {"model": "frozen", "depth": DEPTH, "optimizer": "nesterov"}
    one = ranks.run(tmp_path / "one", "dp=1", **options).checked()
    run = ranks.run(tmp_path / "many", plan, **options).checked()
    assert run.losses == pytest.approx(one.losses, rel=RELATIVE)
    assert_same_parameters(run, one)


@pytest.mark.slow
def test_equivalence_over_epochs_of_odd_length(ranks: RankPool, tmp_path: Path) -> None:
    """53 samples make three batches of 16 per epoch; five are left, different ones in each epoch."""
    one = ranks.run(tmp_path / "one", "dp=1", samples=53, depth=DEPTH).checked()
    run = ranks.run(tmp_path / "two", "dp=2", samples=53, depth=DEPTH).checked()
    assert run.losses == pytest.approx(one.losses, rel=RELATIVE)
    assert_same_samples(run, one, Plan(dp=2))
    asked = one.ranks[0].result["asked"]
    epochs = [asked[i : i + 48] for i in range(0, len(asked) - 47, 48)]
    assert all(len(set(epoch)) == 48 for epoch in epochs)
    assert len({tuple(sorted(epoch)) for epoch in epochs}) > 1


class TorchCannot(Exception):
    """Error that torch itself raises on CPU ranks."""


# Kept in the matrix: `clusterd.train.parallel.apply_plan` implements each differently, until torch supports it.
TORCH_CANNOT = {
    "fsdp1": "FSDP needs a non-CPU accelerator device, but no accelerator device is detected",
    "pinned offload": "Cannot access accelerator device when none is available|Found no NVIDIA driver",  # CUDA builds
    "ddp over tp": "got mixed torch.Tensor and DTensor",
    "ddp under 1f1b": "rebuilt parameter indices size is not same as original model parameters size",
    "context parallel": "does not have a sharding strategy registered",
}


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(w, marks=pytest.mark.xfail(strict=True, raises=TorchCannot, reason=e))
        for w, e in TORCH_CANNOT.items()
    ],
)
def test_equivalence_by_ways_closed_on_cpu(way: str, ranks: RankPool, tmp_path: Path) -> None:
    run = ranks.run(tmp_path, "dp=2", way=way)
    if any(re.search(TORCH_CANNOT[way], rank.output) for rank in run.ranks):
        raise TorchCannot(TORCH_CANNOT[way])
    run.checked()


def assert_same_samples(run: Run, expected: Run, plan: Plan) -> None:
    """Each replica read its share of each global batch, in order; middle stages read nothing."""
    order = expected.ranks[0].result["asked"]
    shares = plan.batch_shares(BATCH)
    for number, rank in enumerate(run.ranks):
        at = plan.coordinates(number)
        start = sum(shares[: at.replica])
        reads = at.stage in (0, plan.pp - 1)
        share = [i for s in range(STEPS) for i in order[s * BATCH + start : s * BATCH + start + shares[at.replica]]]
        assert rank.result["asked"] == (share if reads else [])


def assert_same_parameters(run: Run, expected: Run) -> None:
    """Every parameter of the whole model is on some rank, under its global name, with the same values."""
    whole = expected.ranks[0].result["parameters"]
    seen: set[str] = set()
    for rank in run.ranks:
        for name, values in rank.result["parameters"].items():
            assert values == pytest.approx(whole[name], abs=1e-5), name
            seen.add(name)
    assert seen == set(whole)
