"""Design of trials: the plans whose measurement is most informative.

Greedy V-optimal design: the next trial is the one whose measurement, under the current fit, most reduces the mean
variance of the target predictions. Nothing else is weighed: most of a trial's cost is its migration, which is alike for
all. Of equally informative trials the one of the fewest device-seconds comes first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterd.profiling.coefficients import Array
from clusterd.profiling.fit import Fit, linearise
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
    covariance = _covariance(fit, targets, candidates)
    count = 0 if targets is candidates else len(targets)
    asked = len(targets)
    noise = fit.noise**2
    chosen: list[int] = []
    while len(chosen) < wanted and allowed.any():
        own = np.diag(covariance)[count:] + noise
        shared = covariance[:asked, count:]
        score = np.log(np.maximum((shared**2 / own).mean(axis=0), 1e-300))
        if random is not None and options.jitter:
            score = score + options.jitter * random.standard_normal(len(score))
        score[~allowed] = -np.inf
        best = int(np.lexsort((device_seconds, -score))[0])
        chosen.append(best)
        allowed[best] = False
        column = covariance[:, count + best]
        covariance = covariance - np.outer(column, column) / own[best]
    return chosen


def _covariance(fit: Fit, targets: Rows, candidates: Rows) -> Array:
    """Covariance of the logarithms of the predictions, targets first: shape (rows, rows).

    Taken over all possible structures: if these disagree about two rows in the same way, measuring one row informs
    about the other.
    """
    rows = targets
    if candidates is not targets:
        rows = Rows(np.concatenate([targets.values, candidates.values], axis=1))
    means, inner, weights = [], np.zeros((len(rows), len(rows))), []
    for p in fit.posteriors:
        log_s, jacobian = linearise(p.logs, rows, p.structure, p.covariance)
        means.append(log_s)
        weights.append(p.weight)
        inner += p.weight * (jacobian @ p.covariance @ jacobian.T)
    deviation = np.array(means) - np.average(means, axis=0, weights=weights)
    return np.asarray(inner + (deviation.T * np.array(weights)) @ deviation)
