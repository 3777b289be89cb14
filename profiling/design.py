"""Design of trials: the most informative ones about relevant plans per second of device time.

Greedy V-optimal: the next trial is the one whose measurement, under the model as it stands, most reduces the mean
variance of the predictions that will be asked for; less a price per device-second, and per further host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiling.coefficients import Array
from profiling.fit import Fit, linearise
from profiling.model import Rows


@dataclass(frozen=True, slots=True)
class DesignOptions:
    """Limits and prices of trials."""

    budget: int = 7  # trials
    most_hosts: int = 2
    batch: int = 1  # trials between refits
    price: float = 0.08  # gain that a trial must bring more, for each doubling of its device-seconds
    host_price: float = 0.1  # ... for a second host
    jitter: float = 0.0  # of scores, so that repeats differ


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
        targets: what predictions will be asked for.
        candidates: what could be tried.
        hosts: of each candidate.
        device_seconds: expected cost of each candidate.
        done: candidates that have been tried.
    """
    wanted = min(options.batch, options.budget - len(done))
    allowed = (hosts <= options.most_hosts).astype(bool)
    allowed[done] = False
    if wanted <= 0 or not allowed.any():
        return []
    covariance = _covariance(fit, targets, candidates)
    count = 0 if targets is candidates else len(targets)
    asked = len(targets)
    noise = fit.noise**2 + fit.options.misfit**2 / 2.0
    relative = np.log2(np.maximum(device_seconds, 1e-9) / device_seconds[allowed].min())
    chosen: list[int] = []
    while len(chosen) < wanted and allowed.any():
        own = np.diag(covariance)[count:] + noise
        shared = covariance[:asked, count:]
        gain = (shared**2 / own).mean(axis=0) / np.diag(covariance)[:asked].mean()
        score = np.log(np.maximum(gain, 1e-12)) - options.price * relative - options.host_price * (hosts > 1)
        if random is not None and options.jitter:
            score = score + options.jitter * random.standard_normal(len(score))
        score[~allowed] = -np.inf
        best = int(np.argmax(score))
        chosen.append(best)
        allowed[best] = False
        column = covariance[:, count + best]
        covariance = covariance - np.outer(column, column) / own[best]
    return chosen


def _covariance(fit: Fit, targets: Rows, candidates: Rows) -> Array:
    """Of the logarithms of all predictions, targets first.

    Over all structures that may be: where they disagree on two rows alike, measuring one tells of the other.
    """
    rows = targets
    if candidates is not targets:
        rows = Rows(np.concatenate([targets.values, candidates.values], axis=1))
    means, inner, weights = [], np.zeros((len(rows), len(rows))), []
    for p in fit.posteriors:
        log_s, jacobian = linearise(p.logs, rows, p.structure)
        means.append(log_s)
        weights.append(p.weight)
        inner += p.weight * (jacobian @ p.covariance @ jacobian.T)
    deviation = np.array(means) - np.average(means, axis=0, weights=weights)
    return np.asarray(inner + (deviation.T * np.array(weights)) @ deviation)
