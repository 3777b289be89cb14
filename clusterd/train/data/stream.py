"""Streams: data without numbered samples, which have a position instead (``state_dict``, ``load_state_dict``).

Every rank reads the whole stream and collates its replica's share of each global batch. So the samples of a step and
their order do not depend on the plan, and one position, that after the step, is the state of all ranks.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from clusterd.train.data import fingerprint
from clusterd.train.data.fingerprint import Fingerprint
from clusterd.train.data.loader import DATA_STAGE, ignore_sigterm, pair_on_device, running
from clusterd.train.process.exits import Refused
from clusterd.train.process.job import Job
from clusterd.train.process.plain_data import NotSerializable, from_plain, plain_with_tensors
from clusterd.train.process.run_in_fork import run_in_fork
from clusterd.train.process.seeding import seed_everything, seed_step
from plans.plan import Plan

POSITION_BYTES_MAX = 1 << 20
"""Limit for a position: it is part of a message, in each state snapshot."""

HOW_TO = (
    "give it `def state_dict(self): return {'read': self.read}` and `def load_state_dict(self, state): self.read = "
    "state['read']`, let __iter__ begin at self.read, count each sample there before it yields it, and set self.read = "
    "0 at the end"
)

Position = dict[str, Any]
"""epoch: number of times that the stream has ended; state: its ``state_dict`` as plain values."""


def is_stream(data: Any) -> bool:
    """True for data that can only be iterated."""
    return isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__getitem__"))


def first_samples(data: Any, count: int) -> list[Any]:
    """First samples of a data set, or the next ones of a stream, which stays where it is.

    Raises:
        IndexError: there are fewer.
    """
    if not is_stream(data):
        return [data[index] for index in range(count)]
    check_has_position(data)
    state = copy.deepcopy(data.state_dict())
    samples = list(islice(iter(data), count))
    if state is not None:
        data.load_state_dict(state)
    if len(samples) < count:
        raise IndexError(f"the stream has {len(samples)} samples")
    return samples


def check_has_position(data: Any) -> None:
    """Check that a stream can save its position.

    Raises:
        Refused: it cannot.
    """
    if not (hasattr(data, "state_dict") and hasattr(data, "load_state_dict")):
        raise Refused(
            f"data is a stream ({type(data).__name__}) without a position, so that no move, restart or checkpoint "
            f"could go on with it: {HOW_TO}; or use a map-style data set (__len__ and __getitem__), or torchdata's "
            "StatefulDataLoader with batch_size=None"
        )


def stream_fingerprint(data: Any, job: str) -> Fingerprint:
    """Fingerprint of a stream, from its first samples; checks that a new process goes on exactly at its position.

    Each reading has a forked child of its own, which leaves the stream as it is.

    Raises:
        Refused: the position is not that of the next sample, or cannot be stored.
    """
    check_has_position(data)
    count = fingerprint.SAMPLES
    first, position = run_in_fork(lambda: _read(data, 1, count, None))
    again, _ = run_in_fork(lambda: _read(data, 1, count, None))
    resumed, _ = run_in_fork(lambda: _read(data, 2, 0, position))
    following = fingerprint.drop_random(first[count:], again[count:])
    pairs = zip(following, resumed, strict=False)
    if len(following) != len(resumed) or any(a is not None and not fingerprint.alike(a, b) for a, b in pairs):
        raise Refused(
            f"the stream {type(data).__name__} does not go on at its position: after {min(count, len(first))} samples, "
            f"state_dict, and load_state_dict in a new process, it yields other samples than without: {HOW_TO}"
        )
    samples = [[i, summary] for i, summary in enumerate(fingerprint.drop_random(first[:count], again[:count]))]
    return {"job": job, "length": None, "draws": False, "samples": samples}


def _read(data: Any, seed: int, count: int, position: Position | None) -> tuple[list[Any], Position]:
    """Summaries of `count` samples and of as many as a fingerprint has, and the position between them."""
    # Another seed than before: an order that is drawn from the global generators is in no position.
    seed_everything(seed)
    reader = _Reader(data, position)
    summaries: list[Any] = []
    between = reader.position()
    for index in range(count + fingerprint.SAMPLES):
        seed_everything(index if position is None else fingerprint.SAMPLES + index)
        sample = list(islice(reader.iterator, 1))
        if not sample:
            break
        summaries.append(fingerprint.summary(sample[0]))
        if len(summaries) <= count:
            between = reader.position()
    if (size := len(json.dumps(between))) > POSITION_BYTES_MAX:
        raise Refused(f"the position of the stream has {size} bytes: let it name the next sample, and not contain some")
    return summaries, between


class Stream:
    """A job's stream on this rank, and its position after each step.

    Raises:
        Refused: it has no position.
    """

    def __init__(self, data: Any) -> None:
        check_has_position(data)
        self._data = data
        self._start: Position | None = None  # None: where the script left it
        self._positions: dict[int, Position] = {}

    def position(self, step: int) -> Position | None:
        """Position after a step, the last one or the one before; None: no sample was read."""
        return self._positions.get(step, self._start)

    def restore(self, position: Position | None) -> None:
        """Go on at a `position` of other ranks; None: where the script left the stream."""
        self._start = position

    def batches(
        self, job: Job, plan: Plan, replica: int, device: torch.device, first_step: int, *, collates: bool
    ) -> Iterator[tuple[Any, Any]]:
        """(input, target) of the replica's share of each step, on `device`.

        Args:
            collates: False on ranks that need no samples; they follow the position.
        """
        shares = plan.batch_shares(job.global_batch)
        start = sum(shares[:replica])
        share = slice(start, start + shares[replica]) if collates else None
        loader = DataLoader(
            _Shares(self._data, self.position(first_step), job, share, first_step),
            batch_size=None,
            # One process can read ahead; several would read the same samples.
            num_workers=min(job.num_workers, 1),
            collate_fn=_unchanged,
            pin_memory=device.type == "cuda",
            worker_init_fn=ignore_sigterm,
        )
        with running(iter(loader)) as fetched:
            for step in range(first_step, job.steps):
                batch, position = next(fetched)
                self._positions = {step + 1: position, **{k: p for k, p in self._positions.items() if k == step}}
                yield pair_on_device(batch, device) if collates else (None, None)


class _Shares(IterableDataset):  # type: ignore[misc]  # torch is not followed
    """Collated share of each step, and the position after it."""

    def __init__(self, data: Any, position: Position | None, job: Job, share: slice | None, first_step: int) -> None:
        self._data, self._position, self._job = data, position, job
        self._share, self._first_step = share, first_step

    def __iter__(self) -> Iterator[tuple[Any, Position]]:
        job = self._job
        reader = _Reader(self._data, self._position)
        for step in range(self._first_step, job.steps):
            # All replicas read all samples, and must draw the same numbers for them.
            seed_step(job.seed, step, 0, DATA_STAGE)
            samples = reader.read(job.global_batch)
            yield (job.collate_fn(samples[self._share]) if self._share is not None else None), reader.position()


class _Reader:
    """A stream from a position on, over all epochs.

    Attributes:
        iterator: over the rest of this epoch.
    """

    def __init__(self, data: Any, position: Position | None) -> None:
        self._data, self._epoch = data, 0
        if position is not None:
            self._epoch = int(position["epoch"])
            if position["state"] is not None:
                data.load_state_dict(from_plain(position["state"]))
        self.iterator = self._begun()

    def position(self) -> Position:
        """Position of the next sample.

        Raises:
            Refused: it cannot be stored.
        """
        try:
            return {"epoch": self._epoch, "state": plain_with_tensors(self._data.state_dict(), "position")}
        except NotSerializable as error:
            raise Refused(f"the stream cannot save its position: {error}") from error

    def read(self, count: int) -> list[Any]:
        """Next samples, of one epoch: fewer at its end are dropped.

        Raises:
            Refused: an epoch has fewer.
        """
        samples = list(islice(self.iterator, count))
        if len(samples) == count:
            return samples
        self._epoch += 1
        self.iterator = self._begun()
        samples = list(islice(self.iterator, count))
        if len(samples) < count:
            raise Refused(
                f"the stream has ended, and yields {len(samples)} samples when it is iterated again, fewer than the "
                f"global batch of {count}: let __iter__ begin anew after the last sample"
            )
        return samples

    def _begun(self) -> Iterator[Any]:
        if hasattr(self._data, "set_epoch"):  # as Hugging Face's data sets and torch's samplers have it
            self._data.set_epoch(self._epoch)
        return iter(self._data)


def _unchanged(batch: Any) -> Any:
    return batch
