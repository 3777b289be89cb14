"""The samples of one replica, step by step, read ahead."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from clusterd.train.exits import PlanRefused
from plans.plan import Plan
from plans.sample_order import TooFewSamples, replica_indices, steps_per_epoch


class ShareSampler:
    """Yields, for each step from `first_step` (counted from 0), the indices of this replica's share."""

    def __init__(
        self, samples: int, shares: tuple[int, ...], seed: int, replica: int, first_step: int, steps: int
    ) -> None:
        self._order = (samples, shares, seed)
        self._replica, self._first_step, self._steps = replica, first_step, steps

    def __iter__(self) -> Iterator[list[int]]:
        samples, shares, seed = self._order
        for step in range(self._first_step, self._steps):
            yield replica_indices(samples, shares, seed, step, self._replica).tolist()

    def __len__(self) -> int:
        return max(0, self._steps - self._first_step)


def batches(
    dataset: Any,
    plan: Plan,
    replica: int,
    device: torch.device,
    *,
    global_batch: int,
    seed: int,
    first_step: int,
    steps: int,
    num_workers: int,
) -> Iterator[tuple[Any, Any]]:
    """(input, target) of the replica's share of each step, on `device`.

    Raises:
        PlanRefused: the data set is too small, or has no length.
    """
    try:
        samples = len(dataset)
        steps_per_epoch(samples, global_batch)
    except TypeError:
        raise PlanRefused("data has no length; it must be a map-style data set (__len__ and __getitem__)") from None
    except TooFewSamples as error:
        raise PlanRefused(str(error)) from None
    loader = DataLoader(
        dataset,
        batch_sampler=ShareSampler(samples, plan.batch_shares(global_batch), seed, replica, first_step, steps),
        num_workers=num_workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=_ignore_sigterm,
        generator=torch.Generator().manual_seed(seed),
    )
    for batch in loader:
        inputs, targets = batch
        yield moved(inputs, device), moved(targets, device)


def moved(value: Any, device: torch.device) -> Any:
    """Tensors of a nested batch, on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {k: moved(v, device) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(moved(v, device) for v in value)
    return value


def cut(value: Any, start: int, stop: int) -> Any:
    """Samples [start, stop) of a nested batch."""
    if isinstance(value, torch.Tensor):
        return value[start:stop]
    if isinstance(value, dict):
        return {k: cut(v, start, stop) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(cut(v, start, stop) for v in value)
    return value


def micro_batch_sizes(share: int, accumulation: int) -> list[int]:
    """Sizes that differ by at most one, larger ones first."""
    size, rest = divmod(share, accumulation)
    return [size + (i < rest) for i in range(accumulation)]


def _ignore_sigterm(_worker: int) -> None:
    # A stop reaches the whole process group; the rank finishes its step, so its workers must too. They end with it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
