"""Forecast of a job's remaining training, and its predictability (after AITurbo).

The loss of stochastic gradient descent falls as ``loss(k) = 1 / (b0 k + b1) + b2`` (Optimus, section 3.1). A job is
predictable if its features at submission make that likely, or if the curve fitted to older steps predicts the newer
ones. Demotion has a larger error threshold than promotion (hysteresis).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy

from clusterd.profiling.coefficients import Array

LEAST_POINTS = 10
PROMOTE_ERROR = 0.10
DEMOTE_ERROR = 0.20
IN_A_ROW = 3
_FITTED = 200


@dataclass(frozen=True, slots=True)
class LossCurve:
    """``loss(k) = 1 / (b0 k + b1) + b2`` with all three at least 0."""

    b0: float
    b1: float
    b2: float  # limit of the loss
    error: float  # typical relative error on the fitted points

    def loss(self, step: float) -> float:
        """Loss after `step` steps."""
        return 1.0 / (self.b0 * step + self.b1) + self.b2

    def step_of(self, loss: float) -> float | None:
        """Step at which the curve reaches `loss`; None if it never does."""
        if loss <= self.b2 or self.b0 <= 0:
            return None
        return max((1.0 / (loss - self.b2) - self.b1) / self.b0, 0.0)


def fit_loss(steps: Sequence[float], losses: Sequence[float]) -> LossCurve | None:
    """Fit a curve to measured losses; None if fewer than `LEAST_POINTS` are finite or no curve can be fitted.

    Losses are smoothed by a median of three, thinned to a few hundred, and weighted more the newer they are.
    """
    k, y = np.asarray(steps, dtype=np.float64), np.asarray(losses, dtype=np.float64)
    usable = np.isfinite(k) & np.isfinite(y)
    k, y = k[usable], y[usable]
    if len(k) < LEAST_POINTS:
        return None
    order = np.argsort(k, kind="stable")
    k, y = k[order], _median_of_three(y[order])
    if len(k) > _FITTED:
        parts = np.array_split(np.arange(len(k)), _FITTED)
        k, y = np.array([k[p].mean() for p in parts]), np.array([np.median(y[p]) for p in parts])
    top, low = float(y.max()), float(y.min())
    # A loss may be negative (log-likelihoods of densities): subtract a floor below all losses before the fit.
    offset = min(low, 0.0) - 0.01 * (top - low) if low <= 0 else 0.0
    y = y - offset
    top, low = top - offset, low - offset
    if top <= 0 or k[-1] <= k[0]:
        return None
    span, scale = float(k[-1]), top
    x, z = k / span, y / scale
    weight = 0.5 + 0.5 * np.linspace(0.0, 1.0, len(z))

    def residual(b: Array) -> Array:
        return np.asarray((1.0 / (b[0] * x + b[1]) + b[2] - z) * weight / max(float(z.mean()), 1e-9))

    least = np.array([0.0, 1e-9, 0.0])
    most = np.array([1e9, 1e9, max(low / scale, 0.0) + 1e-6])
    best = None
    for floor in (0.9 * low / scale, 0.3 * low / scale):
        start = np.array([1.0 / max(z[-1] - floor, 0.05) - 1.0, 1.0 / max(z[0] - floor, 0.05), floor])
        inside = np.clip(start, least + 1e-7, most - 1e-7)
        found = scipy.optimize.least_squares(residual, inside, bounds=(least, most), loss="soft_l1", f_scale=0.05)
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None
    b0, b1, b2 = (float(v) for v in best.x)
    error = float(np.median(np.abs(1.0 / (b0 * x + b1) + b2 - z)) / max(float(np.abs(z).mean()), 1e-9))
    return LossCurve(b0 / (span * scale), b1 / scale, b2 * scale + offset, error)


def _median_of_three(y: Array) -> Array:
    if len(y) < 3:
        return y
    inner = np.median(np.stack([y[:-2], y[1:-1], y[2:]]), axis=0)
    return np.concatenate([y[:1], inner, y[-1:]])


def held_out_error(steps: Sequence[float], losses: Sequence[float]) -> float | None:
    """Mean relative error on the newest fifth of the points of a curve fitted to the rest; None with too few points."""
    newest = max(len(steps) // 5, 2)
    curve = fit_loss(steps[:-newest], losses[:-newest])
    if curve is None:
        return None
    seen = _median_of_three(np.asarray(losses[-newest - 1 :], dtype=np.float64))[1:]
    expected = np.array([curve.loss(k) for k in steps[-newest:]])
    range_ = float(np.nanmax(losses) - np.nanmin(losses))
    size = np.maximum(np.abs(seen), 0.05 * max(range_, 1e-12))
    error = float(np.mean(np.abs(expected - seen) / size))
    return error if math.isfinite(error) else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Features of a job at submission."""

    submitted_before: bool = False  # by the same owner, with the same command
    steps: int = 0  # requested number of steps; 0: not given
    target_loss: float | None = None  # loss at which the job ends
    devices: int = 1  # requested number of devices
    learning_rate: float | None = None
    known_model: bool = False  # the model was measured before on this cluster


# Log-odds of being predictable. Of 8,692 jobs (AITurbo) 15% were not: 41% of first submissions, 4% of later ones; most
# of those were short explorations that failed. ln(0.59/0.41) = 0.36 and ln(0.96/0.04) = 3.2 determine the first two
# weights; the others are small, with the signs that the same data shows.
INTERCEPT = 0.1
WEIGHTS = {
    "submitted_before": 2.8,
    "known_model": 0.8,
    "says_when_done": 0.5,
    "long": 0.4,  # 10,000 steps or more: not an exploration
    "short": -0.5,  # fewer than 200 steps: likely an exploration
    "several_devices": 0.3,
    "odd_learning_rate": -0.8,  # above 0.1: usually diverges
}


def probability_predictable(job: Submission) -> float:
    """Probability at submission that a job is predictable, where too few jobs are over to train a classifier."""
    features = {
        "submitted_before": job.submitted_before,
        "known_model": job.known_model,
        "says_when_done": job.steps > 0 or job.target_loss is not None,
        "long": job.steps >= 10_000,
        "short": 0 < job.steps < 200,
        "several_devices": job.devices > 1,
        "odd_learning_rate": job.learning_rate is not None and job.learning_rate > 0.1,
    }
    odds = INTERCEPT + sum(WEIGHTS[name] for name, holds in features.items() if holds)
    return 1.0 / (1.0 + math.exp(-odds))


@dataclass(frozen=True, slots=True)
class Predictability:
    """Predictability of a job's last step, with the reason."""

    predictable: bool
    reason: str
    good: int = 0  # consecutive small held-out errors
    bad: int = 0  # consecutive large held-out errors

    @classmethod
    def at_submission(cls, probability: float, source: str) -> Predictability:
        """Predictability from a probability at submission, and what that comes from."""
        return cls(probability >= 0.5, f"{probability:.0%} of jobs submitted like this are predictable, by {source}")

    def observe(self, error: float | None) -> Predictability:
        """Update with one more held-out error of the loss curve (`held_out_error`); None changes nothing."""
        if error is None:
            return self
        good = self.good + 1 if error <= PROMOTE_ERROR else 0
        bad = self.bad + 1 if error > DEMOTE_ERROR else 0
        if not self.predictable and good >= IN_A_ROW:
            return Predictability(True, f"the loss curve was within {PROMOTE_ERROR:.0%} {IN_A_ROW} times running", good)
        if self.predictable and bad >= IN_A_ROW:
            return Predictability(
                False, f"the loss curve was off by more than {DEMOTE_ERROR:.0%} {IN_A_ROW} times running", 0, bad
            )
        return replace(self, good=good, bad=bad)
