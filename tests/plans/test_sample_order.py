"""The sample order is a permutation that can be evaluated at any position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterd.plans.sample_order import TooFewSamples, permuted, step_indices


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 1000))
def test_an_epoch_has_every_sample_once(length: int, seed: int, epoch: int) -> None:
    assert sorted(permuted(length, seed, epoch, np.arange(length))) == list(range(length))


def test_the_order_looks_random() -> None:
    order = permuted(10_000, 5, 0, np.arange(10_000))
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
    # Neighbours in the order are far apart, as in a random permutation (a third of the length on average).
    assert abs(np.abs(np.diff(order)).mean() / 10_000 - 1 / 3) < 0.02


def test_seeds_and_epochs_differ() -> None:
    orders = {tuple(permuted(50, seed, epoch, np.arange(50))) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_the_order_never_changes_between_versions() -> None:
    """A job that outlives an upgrade of anything must not see a sample twice."""
    assert permuted(1000, 3, 2, np.arange(6)).tolist() == PINNED


def test_a_billion_samples_cost_nothing() -> None:
    assert len(set(step_indices(10**9, 512, 0, 10**6).tolist())) == 512


def test_a_data_set_smaller_than_a_batch_is_refused() -> None:
    with pytest.raises(TooFewSamples, match="3 samples"):
        step_indices(3, 4, 0, 0)


PINNED = [252, 481, 680, 871, 336, 728]
