"""Assignment of several jobs to mixed hosts: near the exact optimum, and legal."""

from __future__ import annotations

import numpy as np
import pytest

from clusterd.core.placement.matching import _category, match, total_s
from tests.benchmarks.placement import instance, optimum


@pytest.mark.parametrize("seed", range(3))
def test_small_instances_are_solved_within_a_few_hundredths(seed: int) -> None:
    """Three jobs on nine workers, all ways enumerated."""
    work, rates = instance(3, 9, seed, alike=True)
    whose = match(work, rates, seed=seed)
    assert set(whose.tolist()) == {0, 1, 2}
    best = optimum(work, rates)
    assert best <= total_s(work, rates, whose) * (1 + 1e-9)
    assert total_s(work, rates, whose) <= 1.05 * best


def test_a_job_stays_off_workers_where_it_cannot_run() -> None:
    """The first job needs the memory of the last worker."""
    rates = np.array([[0.0, 0.0, 5.0], [5.0, 5.0, 5.0]])
    assert match(np.array([100.0, 100.0]), rates).tolist() == [1, 1, 0]


def test_more_jobs_than_workers_are_refused() -> None:
    """The policy decides which jobs wait, not the matching."""
    with pytest.raises(ValueError, match="choose who is to run first"):
        match(np.ones(3), np.ones((3, 2)))


@pytest.mark.parametrize("seed", range(3))
def test_counts_that_are_settled_are_kept_and_the_best_workers_found(seed: int) -> None:
    """Against every way to give two, three and four of nine workers."""
    work, rates = instance(3, 9, seed, alike=False)
    counts = np.array([2, 3, 4])
    whose = match(work, rates, counts=counts)
    assert np.bincount(whose).tolist() == counts.tolist()
    best = min(total_s(work, rates, np.array(way)) for way in set(permutations_of(counts.tolist())))
    assert best <= total_s(work, rates, whose) * (1 + 1e-9) <= 1.03 * best
    with pytest.raises(ValueError, match="are not 9 workers"):
        match(work, rates, counts=np.array([2, 3, 3]))


def permutations_of(counts: list[int]) -> list[tuple[int, ...]]:
    """All ways to give so many workers to each job."""
    if not any(counts):
        return [()]
    return [
        (job, *rest)
        for job, count in enumerate(counts)
        if count
        for rest in permutations_of([n - (i == job) for i, n in enumerate(counts)])
    ]


def test_workers_that_are_left_over_go_to_the_largest_remainders() -> None:
    """After one worker each, three are left for shares of 0.9 and 2.1."""
    assert _category(np.array([0.3, 0.7]), 5).tolist() == [2, 3]
    assert _category(np.array([0.5, 0.5]), 6).tolist() == [3, 3]
