"""Batches of one replica, step by step, with prefetching."""

from __future__ import annotations

import atexit
import copy
import signal
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from clusterd.plans.plan import Plan, even_shares
from clusterd.plans.sample_order import Indices, mix
from clusterd.train.data.order import SampleOrder
from clusterd.train.process.exits import PlanRefused, Refused
from clusterd.train.process.seeding import seed_step

DATA_STAGE = 0xFFFF
"""Stage number of the data set in `seed_step`: no pipeline stage draws the same numbers."""


class ShareSampler:
    """Yields the indices of this replica's share for each step from `first_step` (counted from 0)."""

    def __init__(self, order: SampleOrder, shares: tuple[int, ...], replica: int, first_step: int, steps: int) -> None:
        self._order, self._shares = order, shares
        self._replica, self._first_step, self._steps = replica, first_step, steps

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self._first_step, self._steps):
            yield self._order.share(step, self._shares, self._replica)

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
    draws_seed: int | None = None,
    first_step: int,
    steps: int,
    num_workers: int,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    sampler: Iterable[Any] | None = None,
    on_epoch: Callable[[int, Indices], object] = lambda *_: None,
    is_stale: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Any, Any]]:
    """(input, target) of the replica's share of each step, on `device`.

    Args:
        seed: of the order, and of random numbers that the data set draws.
        draws_seed: of these instead.
        on_epoch: see `SampleOrder`.
        is_stale: asked between epochs: workers have an old copy of the data set, and new ones are to read on.
    Raises:
        Refused: the data set is too small, or has no length.
    """
    order = order_of(dataset, global_batch, seed, sampler, on_epoch)
    while first_step < steps:
        loader = DataLoader(
            dataset,
            batch_sampler=ShareSampler(order, plan.batch_shares(global_batch), replica, first_step, steps),
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=device.type == "cuda",
            worker_init_fn=ignore_sigterm,
            # Replicas, and runs resumed at another step, must not augment different samples with the same numbers.
            generator=torch.Generator().manual_seed(mix(mix(seed & 0xFFFFFFFF) ^ (first_step << 32 | replica)) >> 1),
        )
        begun = first_step
        with running(iter(loader)) as fetched:
            for step in range(begun, steps):
                if num_workers and step > begun and step % order.steps_per_epoch == 0 and is_stale():
                    break
                # Without workers the data set draws here. The first and last stages of a replica read the same samples,
                # for inputs and targets: both must draw the same numbers.
                seed_step(seed if draws_seed is None else draws_seed, step, replica, DATA_STAGE)
                yield pair_on_device(next(fetched), device)
                first_step = step + 1


@contextmanager
def running(fetched: Iterator[Any]) -> Iterator[Iterator[Any]]:
    """Context of an iterator over a data loader, whose workers end with it, or with the process."""
    end = partial(stop_workers, fetched)
    atexit.register(end)  # runs before multiprocessing's own, which would wait for workers that ignore SIGTERM
    try:
        yield fetched
    finally:
        atexit.unregister(end)
        end()


def check_length(data: Any) -> None:
    """Check that a data set has a length.

    Raises:
        Refused: it has none.
    """
    if not hasattr(data, "__len__"):
        raise Refused(
            "data has no length; it must be a map-style data set (__len__ and __getitem__), or a stream (__iter__, "
            "state_dict and load_state_dict)"
        )


def order_of(
    dataset: Any,
    global_batch: int,
    seed: int,
    sampler: Iterable[Any] | None,
    on_epoch: Callable[[int, Indices], object] = lambda *_: None,
) -> SampleOrder:
    """Order of the samples of a map-style data set.

    Raises:
        Refused: the data set is smaller than a global batch, or has no length.
    """
    check_length(dataset)
    return SampleOrder(len(dataset), global_batch, seed, sampler, on_epoch)


class Keywords(UserDict[str, Any]):
    """A batch whose entries are keyword arguments of the model: ``model(**batch)``, ``loss(output, batch)``."""


def as_pair(batch: Any) -> tuple[Any, Any]:
    """Inputs and targets of a batch; a mapping is both, and so is an object with attributes (a batch of graphs).

    Raises:
        Refused: it is none of these.
    """
    if isinstance(batch, Mapping):
        return Keywords(batch), batch
    if _is_object(batch):
        return batch, batch
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise Refused(
            "a batch must be (input, target), either of them nested, or a mapping for model(**batch) and loss(output, "
            "batch), or an object with .to(device) for model(batch) and loss(output, batch); it is a "
            + type(batch).__name__
            + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
            + ": let data[i] or collate_fn return one of these"
        )
    return batch[0], batch[1]


def as_batch(inputs: Any, targets: Any) -> Any:
    """Batch of which these are the inputs and targets; see `as_pair`."""
    if isinstance(inputs, Keywords):
        return inputs.data
    return inputs if inputs is targets and _is_object(inputs) else (inputs, targets)


def _is_object(batch: Any) -> bool:
    return not isinstance(batch, torch.Tensor) and callable(getattr(batch, "to", None))


def pair_on_device(batch: Any, device: torch.device) -> tuple[Any, Any]:
    """Inputs and targets on `device`; see `as_pair`."""
    inputs, targets = as_pair(batch)
    moved = to_device(inputs, device)
    if isinstance(inputs, Keywords):
        return moved, moved.data
    return moved, moved if inputs is targets else to_device(targets, device)


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Call the model on the inputs of a batch."""
    return model(**inputs) if isinstance(inputs, Keywords) else model(inputs)


def to_device(value: Any, device: torch.device) -> Any:
    """Move the tensors of a nested batch, and objects that can be moved (a batch of graphs), to `device`."""

    def moved(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.to(device, non_blocking=True)
        return part.to(device) if callable(getattr(part, "to", None)) else part

    return map_batch(value, moved)


def slice_batch(value: Any, start: int, stop: int) -> Any:
    """Samples [start, stop) of a nested batch.

    Raises:
        TypeError: a part of it cannot be sliced.
    """
    return map_batch(value, lambda part: part[start:stop])


def check_sliceable(batch: Any, samples: int) -> None:
    """Check that a nested batch can be cut between its samples.

    Raises:
        PlanRefused: the first dimension of some part is not that of the samples.
    """

    def check(part: Any) -> None:
        size = part.shape[:1] if isinstance(part, torch.Tensor) else (len(part),) if hasattr(part, "__len__") else ()
        cut = part[:1] if tuple(size) == (samples,) else None
        if type(cut) is not type(part):  # some batches of graphs return a list
            kind = f"a tensor of {tuple(part.shape)}" if isinstance(part, torch.Tensor) else f"a {type(part).__name__}"
            raise PlanRefused(
                f"a batch of {samples} samples has {kind}, which cannot be cut into micro-batches: the first dimension "
                "of each tensor that collate_fn makes, or the script's loop, must be that of the samples"
            )

    map_batch(batch, check)


def map_batch(value: Any, transform: Callable[[Any], Any]) -> Any:
    """Apply `transform` to the tensors and text lists of a batch nested as by `torch.utils.data.default_collate`."""
    if isinstance(value, Mapping):
        parts = {k: map_batch(v, transform) for k, v in value.items()}
        if isinstance(value, dict) or not isinstance(value, MutableMapping):
            return parts
        same = copy.copy(value)  # a tokenizer's BatchEncoding: keep its type
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


def stop_workers(fetched: Any) -> None:
    """Stop the loader workers; kill those that are busy with a sample."""
    if hasattr(fetched, "_shutdown_workers"):
        fetched._shutdown_workers()
        for worker in fetched._workers:
            worker.kill()


def ignore_sigterm(_worker: int) -> None:
    """Make a loader worker ignore SIGTERM."""
    # SIGTERM reaches the whole process group; the rank finishes its step and needs its workers until then.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
