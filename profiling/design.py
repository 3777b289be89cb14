"""Design of trials: the plans whose measurement tells most about the choice of the final plan.

Greedy V-optimal design: the next trial is the one whose measurement, under the current fit, most reduces the sum of the
variances of the target predictions, each weighted by its stake: the probability that the plan is the fastest of the two
when compared with the best prediction on its allocation. A plan that is certainly slow has none, however uncertain.
Nothing else is weighed: most of a trial's cost is its migration, which is alike for all. Of equally informative trials
the one of the fewest device-seconds comes first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy

from clusterd.profiling.coefficients import Array
from clusterd.profiling.fit import Fit
from clusterd.profiling.model import Rows


@dataclass(frozen=True, slots=True)
class DesignOptions:
    """Limits of trials."""

    budget: int = 7  # trials
    most_hosts: int | None = None  # of a trial; None: any number
    batch: int = 1  # trials between refits
    jitter: float = 0.0  # standard deviation of noise added to scores, so that repeats differ


DEFAULT_DESIGN = DesignOptions()


def next_trials(
    fit: Fit,
    targets: Rows,
    candidates: Rows,
    hosts: Array,
    device_seconds: Array,
    done: list[int],
    options: DesignOptions = DEFAULT_DESIGN,
    random: np.random.Generator | None = None,
) -> list[int]:
    """Indices of the candidates to run next, best first; empty when the budget is spent.

    Args:
        targets: rows whose prediction matters.
        candidates: rows that could be measured.
        hosts: number of hosts of each candidate, shape (candidates,).
        device_seconds: expected cost of each candidate, shape (candidates,).
        done: indices of candidates that have been measured.
    """
    wanted = min(options.batch, options.budget - len(done))
    allowed = np.full(len(hosts), True) if options.most_hosts is None else hosts <= options.most_hosts
    allowed[done] = False
    if wanted <= 0 or not allowed.any():
        return []
    rows = targets
    if candidates is not targets:
        rows = Rows(np.concatenate([targets.values, candidates.values], axis=1))
    covariance, log_s = fit.covariance(rows)
    count = 0 if targets is candidates else len(targets)
    asked = len(targets)
    noise = fit.noise**2
    chosen: list[int] = []
    while len(chosen) < wanted and allowed.any():
        own = np.diag(covariance)[count:] + noise
        shared = covariance[:asked, count:]
        stakes = _stakes(targets, log_s[:asked], covariance[:asked, :asked])
        score = np.log(np.maximum(stakes @ (shared**2 / own), 1e-300))
        if random is not None and options.jitter:
            score = score + options.jitter * random.standard_normal(len(score))
        score[~allowed] = -np.inf
        best = int(np.lexsort((device_seconds, -score))[0])
        chosen.append(best)
        allowed[best] = False
        column = covariance[:, count + best]
        covariance = covariance - np.outer(column, column) / own[best]
    return chosen


def _stakes(rows: Rows, log_s: Array, covariance: Array) -> Array:
    """Probability of each row to be faster than the best prediction on its allocation; 1 for that one itself."""
    f = rows.features
    places = np.stack([f.dp * f.tp * f.pp, f.hosts, f.host_ranks, f.whole, f.batch])
    _, place = np.unique(places, axis=1, return_inverse=True)
    place = place.reshape(-1)
    order = np.lexsort((log_s, place))
    best = order[np.searchsorted(place[order], np.arange(place.max() + 1))][place]
    variance = np.diag(covariance)
    apart = np.sqrt(np.maximum(variance + variance[best] - 2.0 * covariance[np.arange(len(best)), best], 1e-12))
    chance = scipy.special.ndtr((log_s[best] - log_s) / apart)
    return np.asarray(np.where(best == np.arange(len(best)), 1.0, chance))
