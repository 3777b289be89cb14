"""The stand-in for a GPU refuses what a GPU refuses: operations on tensors of the device and of the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from one_device import DEVICE, MixedDevices, OneDevice
from rank_pool import RankPool


def on_device(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


@pytest.mark.parametrize(
    "mixes",
    [
        lambda: on_device(3) + torch.randn(3),
        lambda: torch.randn(2, 3) @ on_device(3).double().reshape(-1).float(),
        lambda: on_device(3).cpu() * on_device(3),
        lambda: torch.zeros(3).to(DEVICE) + torch.zeros(3),
        lambda: torch.stack([on_device(2), torch.ones(2)]),
        lambda: torch.nn.Linear(3, 3).to(DEVICE)(torch.ones(1, 3)),
        lambda: on_device(3).add_(torch.arange(3)),
    ],
)
def test_tensors_of_two_places_are_refused(mixes: Callable[[], object]) -> None:
    with OneDevice(), pytest.raises(MixedDevices, match="of the device and of the host"):
        mixes()


@pytest.mark.parametrize(
    "stays",
    [
        lambda: on_device(3) + on_device(3),
        lambda: on_device(3).cpu() + torch.randn(3),
        lambda: on_device(3) * torch.tensor(2.0),
        lambda: on_device(3).copy_(torch.randn(3)),
        lambda: on_device(3)[torch.tensor([0, 2])],
        lambda: on_device(3) + torch.zeros(3, device=on_device(1).device),
        lambda: torch.nn.Linear(3, 3).to(DEVICE)(on_device(1, 3)).sum().backward(),
    ],
)
def test_what_a_gpu_computes_is_computed(stays: Callable[[], object]) -> None:
    with OneDevice():
        stays()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2"])
def test_ranks_train_as_on_a_cpu_and_mix_nothing(plan: str, ranks: RankPool, tmp_path: Path) -> None:
    """The same losses, from steps in which CUDA would have found all tensors of an operation in one place."""
    options = {"depth": 1, "steps": 4}
    run = ranks.run_each(tmp_path, plan, [options, {**options, "stand_in": True}])
    assert run[1].checked().losses == pytest.approx(run[0].checked().losses, rel=1e-5)


def test_a_step_of_one_replica_does_not_wait_for_the_device(ranks: RankPool, tmp_path: Path) -> None:
    """Twelve steps wait as often as six: before the first step, and after the last."""
    options: dict[str, Any] = {"depth": 1, "clip_norm": 1.0, "stand_in": True}
    runs = [ranks.run(tmp_path / str(steps), "dp=1", steps=steps, **options) for steps in (6, 12)]
    few, many = (run.checked().ranks[0].result["gpu"]["waits"] for run in runs)
    assert few == many


def test_waits_for_the_device_are_counted() -> None:
    with OneDevice() as places:
        on_device(3).sum().item()
        on_device(3).cpu()
        assert bool(on_device(1) < 9.0)
        torch.randn(3).tolist()
    assert places.waits == {"item": 1, "copy to the host": 1, "__bool__": 1}
