"""The stand-in for a GPU refuses what a GPU refuses: operations on tensors of the device and of the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2"])
def test_ranks_train_as_on_a_cpu_and_mix_nothing(plan: str, ranks: RankPool, tmp_path: Path) -> None:
    """The same losses, from steps in which CUDA would have found all tensors of an operation in one place."""
    options = {"depth": 1, "steps": 4}
    run = ranks.run_each(tmp_path, plan, [options, {**options, "stand_in": True}])
    assert run[1].checked().losses == pytest.approx(run[0].checked().losses, rel=1e-5)
