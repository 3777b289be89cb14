"""Batches of a replica: nested as the script makes them, with equal cuts and random numbers everywhere."""

from __future__ import annotations

import random
from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from clusterd.plans.plan import Plan
from clusterd.train.data import loader

CPU = torch.device("cpu")


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Encoding(UserDict[str, torch.Tensor]):
    """Like the output of tokenizers: a mapping that is not a dict."""


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples made on request: input and target depend on the same random draw."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = (torch.rand(3) + random.random() + np.random.random()) / 3
        return index + noise, noise


def test_every_nesting_is_cut_into_micro_batches() -> None:
    """A part that is skipped would be whole in every micro-batch."""
    samples = [{"pair": Pair(torch.tensor(i), torch.tensor(-i)), "name": str(i), "parts": [i, i]} for i in range(4)]
    batch = loader.to_device(default_collate(samples), CPU)
    part = loader.slice_batch(batch, 1, 3)
    assert isinstance(part["pair"], Pair)
    assert part["pair"].right.tolist() == [-1, -2]
    assert part["name"] == ["1", "2"]
    assert [p.tolist() for p in part["parts"]] == [[1, 2], [1, 2]]
    encoding = loader.slice_batch(Encoding(ids=torch.arange(4)), 2, 4)
    assert isinstance(encoding, Encoding)
    assert encoding["ids"].tolist() == [2, 3]
    with pytest.raises(TypeError):
        loader.slice_batch(object(), 0, 1)


def batches(replica: int, workers: int, first_step: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for batch in loader.batches(
        Noisy(), Plan(dp=2), replica, CPU, global_batch=4, seed=3, first_step=first_step, steps=4, num_workers=workers
    ):
        found.append(batch)
        torch.rand(len(found) + workers)  # a stage's dropout, which differs from the others'
        random.seed(len(found) + workers), np.random.seed(len(found))
    return found


@pytest.mark.parametrize("workers", [0, 1])
def test_stages_of_a_replica_draw_alike_and_replicas_do_not(workers: int) -> None:
    torch.manual_seed(1)
    first = batches(0, workers)
    torch.manual_seed(2)
    last, other = batches(0, workers), batches(1, workers)
    for (inputs, _), (_, targets) in zip(first, last, strict=True):
        assert torch.allclose(inputs % 1, targets, atol=1e-5)
    noise = torch.cat([*(t for _, t in first), *(t for _, t in other)])
    assert len(noise.unique(dim=0)) == len(noise)


def test_a_resumed_run_draws_the_same_numbers() -> None:
    whole, rest = batches(1, 0), batches(1, 0, first_step=2)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(whole[2:], rest, strict=True))


def test_samples_of_different_lengths_are_put_together_as_the_script_says() -> None:
    ragged = [(torch.arange(n), n) for n in range(1, 9)]

    def padded(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.nn.utils.rnn.pad_sequence([tokens for tokens, _ in samples], batch_first=True)
        return inputs, torch.tensor([target for _, target in samples])

    for inputs, targets in loader.batches(
        ragged, Plan(), 0, CPU, global_batch=4, seed=3, first_step=0, steps=2, num_workers=0, collate_fn=padded
    ):
        assert inputs.shape == (4, int(targets.max()))


class Growing(torch.utils.data.Dataset[Any]):
    """Samples in a unit that the script changes."""

    unit = 1

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor(index * self.unit), 0


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_read_what_the_script_has_changed_from_the_next_epoch_on(workers: int) -> None:
    """As where a loop of plain torch iterates a `DataLoader` anew in each epoch."""
    data, stale = Growing(), [False]
    read = loader.batches(
        data, Plan(), 0, CPU, global_batch=4, seed=0, first_step=0, steps=6, num_workers=workers, sampler=range(8),
        is_stale=lambda: stale[0],
    )  # fmt: skip
    found = []
    for step, (inputs, _) in enumerate(read):
        found.append(inputs.tolist())
        if step == 0:
            data.unit, stale[0] = 10, True
    first, second = [0, 1, 2, 3], [4, 5, 6, 7]
    assert found == [first, second, *[[10 * n for n in part] for part in (first, second, first, second)]]
