"""Streams: data without numbered samples, which have a position instead (``state_dict``, ``load_state_dict``).

Every rank reads the whole stream and collates its replica's share of each global batch. So the samples of a step and
their order do not depend on the plan, and one position, that after the step, is the state of all ranks.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from clusterd.plans.plan import Plan
from clusterd.train.data import fingerprint
from clusterd.train.data.loader import DATA_STAGE, ignore_sigterm, pair_on_device, running
from clusterd.train.process import held
from clusterd.train.process.exits import Refused
from clusterd.train.process.job import Job
from clusterd.train.process.plain_data import NotSerializable, from_plain, plain_with_tensors
from clusterd.train.process.seeding import preserved_generators, seed_step

POSITION_BYTES_MAX = 1 << 20
"""Limit for a position: it is part of a message, in each state snapshot."""

HOW_TO = (
    "give it `def state_dict(self): return {'read': self.read}` and `def load_state_dict(self, state): self.read = "
    "state['read']`, let __iter__ begin at self.read, count each sample there before it yields it, and set self.read = "
    "0 at the end"
)

Position = dict[str, Any]
"""epoch: number of times that the stream has ended; state: its ``state_dict`` as plain values; next: what tells the
samples of the next step, if they were read."""

DIGESTED, DIGEST_PARTS_MAX = 1 << 12, 100
"""Elements of a tensor, and parts of a sample, that tell whether it is the same."""


def is_stream(data: Any) -> bool:
    """True for data that can only be iterated."""
    return isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__getitem__"))


KEPT = 8
"""First samples that are kept for those who need some and do not train."""

_kept: list[tuple[Any, list[Any]]] = []  # data, and its samples


def _kept_of(data: Any) -> list[Any] | None:
    return next((samples for known, samples in _kept if known is data), None)


def _keep(data: Any, samples: list[Any]) -> list[Any]:
    _kept[:] = [(known, other) for known, other in _kept if known is not data]
    _kept.append((data, samples))
    return samples


def keep_first_samples(data: Any) -> None:
    """Read the first samples of a map-style data set, once: forks that need some would share its open files."""
    if _kept_of(data) is None:
        with preserved_generators(), held.preserved(data):
            _keep(data, [data[index] for index in range(min(KEPT, len(data)))])


def first_samples(data: Any, count: int) -> list[Any]:
    """First samples of a data set, as they were kept; a process that ends without training may read a stream.

    Raises:
        IndexError: there are fewer.
        Refused: there is none.
    """
    if (samples := _kept_of(data)) is None:
        read = list(islice(iter(data), KEPT)) if is_stream(data) else [data[i] for i in range(count)]
        samples = _keep(data, read)
    if len(samples) < count and not is_stream(data):
        samples += [data[index] for index in range(len(samples), count)]
    if not samples and is_stream(data):
        raise Refused("the stream has no sample, or none that a process of num_workers can send (pickle)")
    if len(samples) < count:
        raise IndexError(f"the stream has {len(samples)} samples")
    return samples[:count]


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


class _Item(NamedTuple):
    """Reading of a step: the collated share of a replica, the position after it, and a digest of its samples."""

    batch: Any
    position: Position
    digest: list[Any]
    samples: list[Any] | bytes | None  # the first ones of the first step; pickled by another process


class Stream:
    """A job's stream on this rank, and its position after each step.

    It is read to train on it, and by nobody else. A batch is read one step ahead: with a position goes what the next
    samples are, and the process that continues there compares them.

    Args:
        strict: samples that differ are refused, and not only told.
    Raises:
        Refused: it has no position.
    """

    def __init__(self, data: Any, *, strict: bool = False) -> None:
        check_has_position(data)
        self._data, self._strict = data, strict
        self._start: Position | None = None  # None: where the script left it
        self._positions: dict[int, Position] = {}
        self._fetched: Iterator[_Item] | None = None
        self._ahead: tuple[int, _Item | Exception | None] = 0, None  # of this step

    def position(self, step: int) -> Position | None:
        """Position after a step, the last one or the one before; None: no sample was read."""
        position = self._positions.get(step, self._start)
        following, item = self._ahead
        if position is None or following != step + 1 or not isinstance(item, _Item):
            return position
        return {**position, "next": item.digest}

    def restore(self, position: Position | None) -> None:
        """Go on at a `position` of other ranks; None: where the script left the stream."""
        if self._fetched is None or _place(position) != _place(self._start):
            self._start, self._fetched = position, None

    def open(self, job: Job, plan: Plan, replica: int, first_step: int, *, collates: bool) -> None:
        """Read the first batch, which the first step gets.

        Raises:
            Refused: its samples are not those that the position names.
        """
        self._fetched = self._read(job, plan, replica, first_step, collates)
        self._ahead = first_step + 1, (first := next(self._fetched, None))
        if first is None:
            return
        samples = first.samples
        _keep(self._data, pickle.loads(samples) if isinstance(samples, bytes) else samples or [])
        expected = (self._start or {}).get("next")
        if expected is not None and not fingerprint.alike(expected, first.digest):
            text = (
                f"the stream {type(self._data).__name__} does not go on at its position after step {first_step}: with "
                "state_dict there and load_state_dict in a new process, it yields other samples than without: "
                f"{HOW_TO}, and let nothing depend on the rank"
            )
            if self._strict:
                raise Refused(text)
            print(f"clusterd: {text}", flush=True)

    def samples(self) -> list[Any]:
        """First samples of the batch that the next step gets, as far as they can be told; empty: none was read."""
        return list(_kept_of(self._data) or ()) if self._fetched is not None else []

    def batches(
        self, job: Job, plan: Plan, replica: int, device: torch.device, first_step: int, *, collates: bool
    ) -> Iterator[tuple[Any, Any]]:
        """(input, target) of the replica's share of each step, on `device`.

        Args:
            collates: False on ranks that need no samples; they follow the position.
        """
        if self._fetched is None or self._ahead[0] != first_step + 1:
            self.open(job, plan, replica, first_step, collates=collates)
        fetched = self._fetched
        assert fetched is not None
        for step in range(first_step, job.steps):
            item = self._ahead[1]
            self._check_same(step + 1, item)
            if isinstance(item, Exception):
                raise item
            assert item is not None
            self._positions = {step + 1: item.position, **{k: p for k, p in self._positions.items() if k == step}}
            try:
                self._ahead = step + 2, next(fetched, None)
            except Exception as error:  # the end of a stream concerns the step that needs the samples
                self._ahead = step + 2, error
            yield pair_on_device(item.batch, device) if collates else (None, None)

    def _check_same(self, step: int, item: _Item | Exception | None) -> None:
        """Compare what all ranks have read for a step.

        Raises:
            Refused: on all ranks, if some have read other samples.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, item.digest if isinstance(item, _Item) else [])  # a shard may end earlier
        for rank, other in enumerate(every):
            if not fingerprint.alike(every[0], other):
                raise Refused(
                    f"the stream {type(self._data).__name__} yields other samples for step {step} on rank {rank} than "
                    f"on rank 0. {fingerprint.NO_SHARDS}"
                )

    def _read(self, job: Job, plan: Plan, replica: int, first_step: int, collates: bool) -> Iterator[_Item]:
        shares = plan.batch_shares(job.global_batch)
        start = sum(shares[:replica])
        share = slice(start, start + shares[replica]) if collates else None
        loader = DataLoader(
            _Shares(self._data, self.position(first_step), job, share, first_step),
            batch_size=None,
            # One process can read ahead; several would read the same samples.
            num_workers=min(job.num_workers, 1),
            collate_fn=_unchanged,
            worker_init_fn=ignore_sigterm,
        )
        with running(iter(loader)) as fetched:
            yield from fetched


def _place(position: Position | None) -> Any:
    return position and (position["epoch"], position["state"])


class _Shares(IterableDataset):  # type: ignore[misc]  # torch is not followed
    """Readings of the steps, in order."""

    def __init__(self, data: Any, position: Position | None, job: Job, share: slice | None, first_step: int) -> None:
        self._data, self._position, self._job = data, position, job
        self._share, self._first_step = share, first_step

    def __iter__(self) -> Iterator[_Item]:
        job = self._job
        reader = _Reader(self._data, self._position)
        for step in range(self._first_step, job.steps):
            # All replicas read all samples, and must draw the same numbers for them.
            seed_step(job.seed, step, 0, DATA_STAGE)
            samples = reader.read(job.global_batch)
            batch = job.collate_fn(samples[self._share]) if self._share is not None else None
            digest = [part for sample in (samples[0], samples[-1]) for part in fingerprint.summary(sample, DIGESTED)]
            first = _sent(samples[:KEPT]) if step == self._first_step else None
            yield _Item(batch, reader.position(), digest[:DIGEST_PARTS_MAX], first)


def _sent(samples: list[Any]) -> list[Any] | bytes | None:
    if get_worker_info() is None:
        return samples
    try:
        return pickle.dumps(samples)
    except Exception:  # an object of the script's own; nothing but a description needs it
        return None


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
            position = {"epoch": self._epoch, "state": plain_with_tensors(self._data.state_dict(), "position")}
        except NotSerializable as error:
            raise Refused(f"the stream cannot save its position: {error}") from error
        if (size := len(json.dumps(position))) > POSITION_BYTES_MAX:
            raise Refused(
                f"the position of the stream has {size} bytes: let it name the next sample, and not contain some"
            )
        return position

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
