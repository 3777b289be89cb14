"""The order of a script's sampler is that of the samples, on every rank and after every restart."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, WeightedRandomSampler

from clusterd.train.data.order import SampleOrder
from clusterd.train.process.exits import Refused

LENGTHS = [1 + i * 7 % 13 for i in range(64)]


class Bucketed:
    """Batches of samples of like length, in an order that its own generator draws."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(3)

    def __iter__(self) -> Iterator[list[int]]:
        order = sorted(range(64), key=LENGTHS.__getitem__)
        batches = [order[i : i + 8] for i in range(0, 64, 8)]
        for number in self.random.permutation(len(batches)):
            yield batches[number]


def weighted() -> Any:
    return WeightedRandomSampler([float(n) for n in LENGTHS], 64, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize(
    "make",
    [
        weighted,
        Bucketed,
        lambda: RandomSampler(range(64)),
        lambda: BatchSampler(RandomSampler(range(60)), 8, drop_last=False),
        lambda: range(63, -1, -1),
    ],
)
def test_each_process_gets_the_same_order_from_any_step_on(make: Any) -> None:
    order = SampleOrder(64, 8, 1, make())
    batches = [order.batch(step).tolist() for step in range(3 * order.steps_per_epoch)]
    torch.manual_seed(77)
    random.seed(77)
    resumed = SampleOrder(64, 8, 1, make())
    for step in reversed(range(len(batches))):
        assert resumed.batch(step).tolist() == batches[step]
        parts = [resumed.share(step, (3, 5), replica) for replica in range(2)]
        assert parts[0] + parts[1] == batches[step]


def test_epochs_differ_and_buckets_stay_whole() -> None:
    order = SampleOrder(64, 8, 1, Bucketed())
    epochs = [[order.batch(step).tolist() for step in range(start, start + 8)] for start in (0, 8)]
    assert epochs[0] != epochs[1]
    assert sorted(map(sorted, epochs[0])) == sorted(map(sorted, epochs[1]))
    assert all(max(LENGTHS[i] for i in b) - min(LENGTHS[i] for i in b) <= 2 for b in epochs[0])


class Shrinking:
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(64 - 16 * self.epoch))


@pytest.mark.parametrize(
    ("sampler", "says"),
    [
        (["a"] * 64, "neither numbers of samples nor lists"),
        ([[0, 1, 2], [3, 4, 5], [6, 7, 8]], "a batch of 3 samples; the global batch has 8"),
        (range(100), "yields 0 to 95; the data have 64"),
        (range(7), "fewer samples in an epoch than the global batch of 8"),
        (Shrinking(), "yields 6 batches in epoch 1, fewer than the 8"),
    ],
)
def test_what_a_sampler_must_give_is_said(sampler: Any, says: str) -> None:
    with pytest.raises(Refused, match=says):
        SampleOrder(64, 8, 1, sampler).batch(8 + 7)
