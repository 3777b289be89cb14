"""The samples of one replica, step by step, read ahead."""

from __future__ import annotations

import atexit
import copy
import signal
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from clusterd.train.process.exits import PlanRefused, Refused
from clusterd.train.process.seeding import seed_step
from plans.plan import Plan, even_shares
from plans.sample_order import TooFewSamples, mix, replica_indices, steps_per_epoch

_DATA_STREAM = 0xFFFF
"""In the place of a pipeline stage in `seed_step`: no stage draws the same numbers."""


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
    collate_fn: Callable[[list[Any]], Any] = default_collate,
) -> Iterator[tuple[Any, Any]]:
    """(input, target) of the replica's share of each step, on `device`.

    Raises:
        Refused: the data set is too small, or has no length.
    """
    try:
        samples = len(dataset)
        steps_per_epoch(samples, global_batch)
    except TypeError:
        raise Refused("data has no length; it must be a map-style data set (__len__ and __getitem__)") from None
    except TooFewSamples as error:
        raise Refused(str(error)) from None
    loader = DataLoader(
        dataset,
        batch_sampler=ShareSampler(samples, plan.batch_shares(global_batch), seed, replica, first_step, steps),
        num_workers=num_workers,
        collate_fn=collate_fn,
        pin_memory=device.type == "cuda",
        worker_init_fn=_ignore_sigterm,
        # Replicas, and runs that go on at another step, must not augment other samples with the same numbers again.
        generator=torch.Generator().manual_seed(mix(mix(seed & 0xFFFFFFFF) ^ (first_step << 32 | replica)) >> 1),
    )
    fetched = iter(loader)
    end = partial(_stop_workers, fetched)
    atexit.register(end)  # it runs before that of multiprocessing, which would wait for workers that heed no SIGTERM
    try:
        for step in range(first_step, steps):
            # Without workers the data set draws here. Stages of one replica read the same samples, one for its inputs
            # and one for its targets: what is drawn must be the same for both.
            seed_step(seed, step, replica, _DATA_STREAM)
            inputs, targets = as_pair(next(fetched))
            yield to_device(inputs, device), to_device(targets, device)
    finally:
        atexit.unregister(end)
        end()


def as_pair(batch: Any) -> tuple[Any, Any]:
    """A batch as (input, target).

    Raises:
        Refused: it is something else; a map would come apart into its keys.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise Refused(
            f"data[i] must be (input, target); it is a {type(batch).__name__}"
            + (f" of {len(batch)}" if isinstance(batch, (tuple, list, Mapping)) else "")
        )
    return batch[0], batch[1]


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors of a nested batch, on `device`."""
    return map_batch(value, lambda part: part.to(device, non_blocking=True) if isinstance(part, torch.Tensor) else part)


def slice_batch(value: Any, start: int, stop: int) -> Any:
    """Samples [start, stop) of a nested batch.

    Raises:
        TypeError: a part of it cannot be cut, so that every micro-batch would get all of it.
    """
    return map_batch(value, lambda part: part[start:stop])


def check_sliceable(batch: Any, samples: int) -> None:
    """Finds out whether a nested batch can be cut between its samples.

    Raises:
        PlanRefused: a part of it has them along no dimension, or along another than the first.
    """

    def check(part: Any) -> None:
        size = part.shape[:1] if isinstance(part, torch.Tensor) else (len(part),) if hasattr(part, "__len__") else ()
        if tuple(size) != (samples,):
            what = f"a tensor of {tuple(part.shape)}" if isinstance(part, torch.Tensor) else f"a {type(part).__name__}"
            raise PlanRefused(
                f"a batch of {samples} samples has {what}, which cannot be cut into micro-batches: the first dimension "
                "of each tensor that collate_fn makes must be that of the samples"
            )

    map_batch(batch, check)


def map_batch(value: Any, transform: Callable[[Any], Any]) -> Any:
    """A batch as `torch.utils.data.default_collate` makes it, with `transform` of its tensors and lists of texts."""
    if isinstance(value, Mapping):
        parts = {k: map_batch(v, transform) for k, v in value.items()}
        if isinstance(value, dict) or not isinstance(value, MutableMapping):
            return parts
        same = copy.copy(value)  # a tokenizer's batch, whose items are attributes too
        same.update(parts)
        return same
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_batch(v, transform) for v in value))
    if isinstance(value, (list, tuple)) and not all(isinstance(v, (str, bytes)) for v in value):
        return type(value)(map_batch(v, transform) for v in value)
    return transform(value)


def micro_batch_sizes(share: int, accumulation: int) -> list[int]:
    """Sizes that differ by at most one, larger ones first."""
    return list(even_shares(share, accumulation))


def _stop_workers(fetched: Any) -> None:
    """Have them end; whoever is busy with a sample when it is asked is killed."""
    if hasattr(fetched, "_shutdown_workers"):
        fetched._shutdown_workers()
        for worker in fetched._workers:
            worker.kill()


def _ignore_sigterm(_worker: int) -> None:
    # A stop reaches the whole process group; the rank finishes its step, so its workers must too. They end with it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
