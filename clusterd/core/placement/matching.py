"""Several jobs on mixed workers at once: who gets which, work being shared in proportion to speed.

After sampling-based placement (TPDS 35(6), 2024): a *category* says how many workers each job has; within one, workers
are matched to jobs as on a market. Its auction is an assignment problem, solved as one; categories are drawn around
what each job's work would give it, a few instead of all; the best are improved by moving and swapping single workers.
"""

from __future__ import annotations

import numpy as np
import scipy  # its parts when they are first used: a daemon starts in two thirds of the time
from numpy.typing import NDArray

Array = NDArray[np.float64]
Owners = NDArray[np.int64]

SAMPLES = 10
SAMPLES_LEAST = 3
SEATS = 1024
DESCENTS = 3
ROUNDS = 6
SPREAD = 0.6


def total_s(work: Array, rates: Array, owners: Owners) -> float:
    """Sum of completion times when each job's workers share its work in proportion to their speed."""
    speed = np.zeros(len(work))
    np.add.at(speed, owners, rates[owners, np.arange(rates.shape[1])])
    if np.any(speed <= 0):
        return float("inf")
    return float((work / speed).sum())


def match(
    work: Array, rates: Array, *, samples: int | None = None, seed: int = 0, counts: Owners | None = None
) -> Owners:
    """The job of each worker, for a small sum of completion times; every job gets at least one worker.

    Args:
        work: samples of each job left, (jobs,).
        rates: samples per second of each job on each worker, (jobs, workers); 0 where it cannot run.
        samples: categories to look at; default: fewer where there are many workers, and single ones matter less.
        counts: workers of each job, (jobs,), where that is settled: only which ones is asked.
    Raises:
        ValueError: fewer workers than jobs, or a job that can run on no worker, or counts that are not all workers.
    """
    jobs, workers = rates.shape
    if workers < jobs or work.shape != (jobs,):
        raise ValueError(f"{jobs} jobs cannot each have one of {workers} workers: choose who is to run first")
    if np.any(rates.max(axis=1) <= 0):
        raise ValueError(f"job {int(np.argmin(rates.max(axis=1)))} can run on none of the workers")
    if counts is not None:
        if counts.shape != (jobs,) or counts.min() < 1 or counts.sum() != workers:
            raise ValueError(f"{counts.tolist()} are not {workers} workers for {jobs} jobs, at least one each")
        return _descend(work, rates, _market(work, rates, counts), may_move=False)
    random = np.random.default_rng(seed)
    root = np.sqrt(work / rates.mean(axis=1))
    found: dict[bytes, tuple[float, Owners]] = {}
    for sample in range(samples or min(SAMPLES, max(SAMPLES_LEAST, SEATS // workers))):
        weights = root * (random.lognormal(0.0, SPREAD, jobs) if sample else 1.0)
        owners = _market(work, rates, _category(weights, workers))
        found[owners.tobytes()] = (total_s(work, rates, owners), owners)
    best = sorted(found.values(), key=lambda item: item[0])[:DESCENTS]
    improved = [_descend(work, rates, owners) for _, owners in best]
    return min(improved, key=lambda owners: total_s(work, rates, owners))


def _category(weights: Array, workers: int) -> Owners:
    """Whole numbers of workers in these proportions, at least one each."""
    jobs = len(weights)
    exact = weights / weights.sum() * (workers - jobs)
    counts = np.floor(exact).astype(np.int64)
    rest = workers - jobs - int(counts.sum())
    counts[np.argsort(-(exact - counts), kind="stable")[:rest]] += 1
    return np.asarray(counts + 1, dtype=np.int64)


def _market(work: Array, rates: Array, counts: Owners) -> Owners:
    """Matching of greatest value, where a worker's value is what it takes off the job's completion time."""
    seats = np.repeat(np.arange(len(work)), counts)
    columns = np.arange(rates.shape[1])
    speed = rates.mean(axis=1) * counts
    best: tuple[float, Owners] | None = None
    for _ in range(ROUNDS):
        value = (work / speed**2)[:, None] * rates
        bind, worker = scipy.optimize.linear_sum_assignment(value[seats], maximize=True)
        owners = np.empty(rates.shape[1], dtype=np.int64)
        owners[worker] = seats[bind]
        now = total_s(work, rates, owners)
        if best is not None and now >= best[0] - 1e-12:
            break
        best = (now, owners)
        speed = np.maximum(np.bincount(owners, rates[owners, columns], len(work)), 1e-12)
    assert best is not None
    return best[1]


def _descend(work: Array, rates: Array, owners: Owners, may_move: bool = True) -> Owners:
    """Single workers to other jobs, and pairs exchanged, while that makes the sum smaller."""
    jobs, workers = rates.shape
    owners = owners.copy()
    columns = np.arange(workers)
    while True:
        own = rates[owners, columns]
        speed = np.bincount(owners, own, jobs)
        counts = np.bincount(owners, minlength=jobs)
        time = work / np.maximum(speed, 1e-12)
        # Moves: worker k from its job to job j.
        without = speed[owners] - own
        lost = np.where(counts[owners] > 1, work[owners] / np.maximum(without, 1e-12) - time[owners], np.inf)
        won = work[:, None] / (speed[:, None] + rates) - time[:, None]
        move = lost[None, :] + won
        move[owners, columns] = np.inf
        if not may_move:
            move[:] = np.inf
        # Swaps: workers a and b of different jobs.
        theirs = rates[owners]  # (a, b): worker b's speed for worker a's job
        after = work[owners][:, None] / np.maximum(without[:, None] + theirs, 1e-12) - time[owners][:, None]
        swap = after + after.T
        swap[owners[:, None] == owners[None, :]] = np.inf
        # The best of each worker; changes that share no job do not know of each other, and are made together.
        target, partner = np.argmin(move, axis=0), np.argmin(swap, axis=1)
        gains = np.concatenate([move[target, columns], swap[columns, partner]])
        touched = np.zeros(jobs, dtype=bool)
        changed = False
        worth = -1e-9 * max(float(time.sum()), 1e-12)
        for index in np.argsort(gains):
            if gains[index] > worth:
                break
            worker = int(index) % workers
            other = int(target[worker]) if index < workers else int(owners[partner[worker]])
            mine = int(owners[worker])
            if touched[mine] or touched[other]:
                continue
            touched[[mine, other]] = changed = True
            if index >= workers:
                owners[partner[worker]] = mine
            owners[worker] = other
        if not changed:
            return owners
