"""Design of trials: the plans whose measurement is most informative per device-second.

Greedy V-optimal design: the next trial is the one whose measurement, under the current fit, most reduces the mean
variance of the target predictions, less a price for device-seconds and for further hosts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiling.coefficients import Array
from profiling.fit import Fit, linearise, row_error
from profiling.model import Rows


@dataclass(frozen=True, slots=True)
class DesignOptions:
    """Limits and prices of trials."""

    budget: int = 7  # trials
    most_hosts: int = 2
    further: int = 1  # trials on more than `most_hosts` hosts, where collectives may behave differently
    batch: int = 1  # trials between refits
    price: float = 0.08  # log gain that each doubling of device-seconds must bring
    host_price: float = 0.1  # log gain that using more than one host must bring
    further_price: float = 0.5  # log gain that using more than `most_hosts` must bring beyond that
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
    far = (hosts > options.most_hosts).astype(bool)
    allowed = ~far if far[done].sum() >= options.further else np.full(len(far), True)
    allowed[done] = False
    if wanted <= 0 or not allowed.any():
        return []
    covariance = _covariance(fit, targets, candidates)
    count = 0 if targets is candidates else len(targets)
    asked = len(targets)
    noise = row_error(candidates, fit.options, fit.noise) ** 2 + fit.options.misfit**2 / 2.0
    relative = np.log2(np.maximum(device_seconds, 1e-9) / device_seconds[allowed].min())
    price = options.price * relative + options.host_price * (hosts > 1) + options.further_price * far
    chosen: list[int] = []
    while len(chosen) < wanted and allowed.any():
        own = np.diag(covariance)[count:] + noise
        shared = covariance[:asked, count:]
        gain = (shared**2 / own).mean(axis=0) / np.diag(covariance)[:asked].mean()
        score = np.log(np.maximum(gain, 1e-12)) - price
        if random is not None and options.jitter:
            score = score + options.jitter * random.standard_normal(len(score))
        score[~allowed] = -np.inf
        best = int(np.argmax(score))
        chosen.append(best)
        allowed[best] = False
        if far[[*done, *chosen]].sum() >= options.further:
            allowed[far] = False
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
        log_s, jacobian = linearise(p.logs, rows, p.structure)
        means.append(log_s)
        weights.append(p.weight)
        inner += p.weight * (jacobian @ p.covariance @ jacobian.T)
    deviation = np.array(means) - np.average(means, axis=0, weights=weights)
    return np.asarray(inner + (deviation.T * np.array(weights)) @ deviation)
