"""Order of a job's samples: a permutation of its own, or that of the script's sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from clusterd.plans.sample_order import Indices, TooFewSamples, mix, step_indices, steps_per_epoch
from clusterd.train.process import held
from clusterd.train.process.exits import Refused
from clusterd.train.process.seeding import preserved_generators, seed_everything


class SampleOrder:
    """Samples of each global batch, the same on every rank and under every plan.

    A sampler is iterated with all generators, its own too, seeded by (seed, epoch), and after ``set_epoch``, if it has
    that. One that changes as it is iterated, because it counts its epochs itself, is iterated for the earlier ones too,
    and is then as before: a process that begins in the middle gets the same order. An epoch has as many batches as the
    first one.

    Args:
        sampler: yields numbers of samples, or lists of as many as a global batch has; None: a permutation.
        on_epoch: called with what a sampler has yielded for an epoch, whenever it was asked.
    Raises:
        Refused: there are fewer samples than a global batch has, or the sampler gives no such numbers.
    """

    def __init__(
        self,
        samples: int,
        global_batch: int,
        seed: int,
        sampler: Iterable[Any] | None = None,
        on_epoch: Callable[[int, Indices], object] = lambda *_: None,
    ) -> None:
        self._samples, self._global_batch, self._seed, self._sampler = samples, global_batch, seed, sampler
        self._epoch: tuple[int, Indices] | None = None
        self._on_epoch = on_epoch
        self._counts = False  # the sampler changes as it is iterated
        try:
            self.steps_per_epoch = steps_per_epoch(samples, global_batch) if sampler is None else len(self._read(0))
        except TooFewSamples as error:
            raise Refused(str(error)) from None
        if not self.steps_per_epoch:
            raise Refused(f"sampler yields fewer samples in an epoch than the global batch of {global_batch}")

    def batch(self, step: int) -> Indices:
        """Samples of the global batch of a step, counted from 0, in order."""
        if self._sampler is None:
            return step_indices(self._samples, self._global_batch, self._seed, step)
        epoch, number = divmod(step, self.steps_per_epoch)
        batches = self._read(epoch)
        if number >= len(batches):
            raise Refused(
                f"sampler yields {len(batches)} batches in epoch {epoch}, fewer than the {self.steps_per_epoch} of the "
                "first one: it must yield as many in each epoch"
            )
        found: Indices = batches[number]
        return found

    def share(self, step: int, shares: tuple[int, ...], replica: int) -> list[int]:
        """Contiguous share of that batch that `replica` takes."""
        start = sum(shares[:replica])
        found: list[int] = self.batch(step)[start : start + shares[replica]].tolist()
        return found

    def _read(self, epoch: int) -> Indices:
        """All full batches of an epoch, a row for each."""
        if self._epoch is None or self._epoch[0] != epoch:
            with preserved_generators(), held.preserved(self._sampler) as has_changed:
                for earlier in range(epoch if self._counts else 0):
                    self._iterated(earlier)
                self._epoch = epoch, self._as_batches(self._iterated(epoch))
                self._counts = has_changed() and not hasattr(self._sampler, "set_epoch")
            self._on_epoch(*self._epoch)
        return self._epoch[1]

    def _iterated(self, epoch: int) -> list[Any]:
        number = mix(mix(self._seed & 0xFFFFFFFF) ^ (epoch << 32 | 0xFFFD)) >> 1
        seed_everything(number)
        sampler: Any = self._sampler
        for generator in held.generators({"": sampler}).values():
            held.seed_generator(generator, number)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        return list(sampler)

    def _as_batches(self, items: list[Any]) -> Indices:
        size = self._global_batch
        if items and isinstance(items[0], (list, tuple, np.ndarray)):
            if items and len(items[-1]) < size:
                items.pop()  # a partial last batch
            if wrong := next((len(item) for item in items if len(item) != size), 0):
                raise Refused(
                    f"sampler yields a batch of {wrong} samples; the global batch has {size}, under every plan"
                )
            items = [index for item in items for index in item]
        try:
            numbers = np.asarray([int(index) for index in items[: len(items) // size * size]], dtype=np.int64)
        except (TypeError, ValueError):
            raise Refused("sampler yields neither numbers of samples nor lists of them") from None
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < self._samples):
            raise Refused(f"sampler yields {numbers.min()} to {numbers.max()}; the data have {self._samples} samples")
        return numbers.reshape(-1, size)
