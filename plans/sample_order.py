"""Sample order: a function of the seed alone, never of the plan.

The order of an epoch is a permutation that can be evaluated at any position without building it (a Feistel network over
the index bits, iterated until the index is inside the data set). So a resumed or migrated job needs no more state than
its step number, a billion samples cost nothing, and every version of every library gives the same order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_ROUNDS = 6
_U64 = (1 << 64) - 1


class TooFewSamples(ValueError):
    """The data set does not fill one global batch."""


def steps_per_epoch(samples: int, global_batch: int) -> int:
    """Full global batches in an epoch; a partial last one is dropped.

    Raises:
        TooFewSamples: there is not even one.
    """
    if samples < global_batch:
        raise TooFewSamples(f"the data set has {samples} samples, fewer than the global batch of {global_batch}")
    return samples // global_batch


def step_indices(samples: int, global_batch: int, seed: int, step: int) -> Indices:
    """Data-set indices of one global batch, in order.

    Args:
        samples: length of the data set.
        step: counted from 0 over all epochs.
    """
    epoch, batch = divmod(step, steps_per_epoch(samples, global_batch))
    start = batch * global_batch
    return permuted(samples, seed, epoch, np.arange(start, start + global_batch, dtype=np.int64))


def permuted(length: int, seed: int, epoch: int, positions: Indices) -> Indices:
    """Entries at `positions` of the permutation of ``range(length)`` for (`seed`, `epoch`)."""
    half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
    keys = [mix(mix(seed & _U64) ^ mix((epoch << 8 | r) + 1)) for r in range(_ROUNDS)]
    values = _feistel(positions.astype(np.uint64), half_bits, keys)
    # Cycle walking: iterating a permutation of a larger range until it re-enters ours gives a permutation of ours.
    while (outside := values >= length).any():
        values[outside] = _feistel(values[outside], half_bits, keys)
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half_bits: int, keys: list[int]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ np.uint64(key)) & mask)
    return left << bits | right


def _mix(x: Any) -> Any:
    """Finaliser of splitmix64 (Steele, Lea, Flood 2014); arrays wrap around silently, as intended."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def mix(x: int) -> int:
    """Hash of `x` below 2**64; a bijection."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _U64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _U64
    return x ^ x >> 31
