"""Which runs to try: those that teach most about the plans that matter, per second of device time.

Greedy V-optimal: the next trial is the one whose measurement, under the model as it stands, most reduces the mean
variance of the predictions that will be asked for; less a price per device-second, and per further host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiling.coefficients import Array
from profiling.fit import Fit, _linearise
from profiling.model import Rows


@dataclass(frozen=True, slots=True)
class DesignOptions:
    """What a trial may be, and what it costs."""

    budget: int = 7  # trials
    most_hosts: int = 2
    batch: int = 1  # trials between refits
    price: float = 0.08  # gain that a trial must bring more, for each doubling of its device-seconds
    host_price: float = 0.1  # ... for a second host
    jitter: float = 0.0  # of scores, so that repeats differ


def next_trials(
    fit: Fit,
    targets: Rows,
    candidates: Rows,
    hosts: Array,
    device_seconds: Array,
    done: list[int],
    options: DesignOptions = DesignOptions(),
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
    states = []
    for p in fit.posteriors:
        if p.weight < 0.02:
            continue
        _, of_targets = _linearise(p.logs, targets, p.structure)
        _, of_candidates = _linearise(p.logs, candidates, p.structure)
        states.append((p.weight, p.covariance, of_targets, of_candidates))
    noise = fit.noise**2 + fit.options.misfit**2 / 2.0
    relative = np.log2(np.maximum(device_seconds, 1e-9) / device_seconds[allowed].min())
    chosen: list[int] = []
    while len(chosen) < wanted and allowed.any():
        gain = np.zeros(len(candidates))
        for weight, covariance, of_targets, of_candidates in states:
            shared = of_targets @ covariance @ of_candidates.T  # (targets, candidates)
            own = np.einsum("ij,jk,ik->i", of_candidates, covariance, of_candidates) + noise
            before = np.einsum("ij,jk,ik->i", of_targets, covariance, of_targets)
            left = before[:, None] - shared**2 / own
            gain += weight * (1.0 - left.mean(axis=0) / before.mean())
        score = np.log(np.maximum(gain, 1e-12)) - options.price * relative - options.host_price * (hosts > 1)
        if random is not None and options.jitter:
            score = score + options.jitter * random.standard_normal(len(score))
        score[~allowed] = -np.inf
        best = int(np.argmax(score))
        chosen.append(best)
        allowed[best] = False
        states = [
            (w, covariance - np.outer(v := covariance @ c[best], v) / (c[best] @ v + noise), t, c)
            for w, covariance, t, c in states
        ]
    return chosen
