"""Fit of the coefficients to measured step times, and predictions with their uncertainty.

Bounded robust least squares on the logarithm of the step time, with the prior as further residuals; the posterior is
approximated as normal around the optimum (Laplace). If the cluster's structure is unknown, each possible structure is
fitted and weighted by its evidence: predictions are mixtures, and their intervals include the uncertain structure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy

from clusterd.profiling.coefficients import ALL, HARDWARE, INDEX, Array, Prior
from clusterd.profiling.model import Rows, Structure, predict

_STEP = 1e-4
_PART_USED = INDEX["part_used_card"]

_EXPLAINED = 3.0
"""Largest residual of an explained measurement, in assumed errors."""


@dataclass(frozen=True, slots=True)
class FitOptions:
    """Assumed errors of measurements and of the performance model, for any model and cluster.

    Errors are standard deviations of the logarithm of the step time.
    """

    noise: float = 0.025  # of a measurement
    misfit: float = 0.12  # of the performance model, on a plan unlike the measured ones
    assumed: float = 6.0  # number of measurements as which the assumed noise counts
    robust: float = 2.0  # residuals above this many noises count less
    overlaps: tuple[tuple[float, float], ...] = ((0.1, 0.4), (0.5, 0.3), (2.0, 0.3))  # overlap: prior weights
    overlap_width: float = 0.6
    cards: tuple[tuple[int, float], ...] = (
        (1, 0.25),
        (2, 0.35),
        (4, 0.2),
        (8, 0.2),
    )  # devices per network card: prior weights


DEFAULT_FIT = FitOptions()


@dataclass(frozen=True, slots=True)
class Posterior:
    """Normal distribution of the coefficients' logarithms under one structure."""

    structure: Structure
    logs: Array
    covariance: Array
    weight: float
    residuals: Array  # logarithms of the measured step times less those of the fit, shape (measurements,)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Log-normal distributions of predicted step times; arrays of shape (rows,)."""

    median_s: Array
    width: Array  # standard deviation of the logarithm, including the noise of a measurement

    def interval(self, share: float = 0.9) -> tuple[Array, Array]:
        """Central interval into which a measurement falls with probability `share`, in seconds: lower, upper."""
        z = float(scipy.special.ndtri(0.5 + share / 2.0))
        return self.median_s * np.exp(-z * self.width), self.median_s * np.exp(z * self.width)


@dataclass(frozen=True, slots=True)
class Fit:
    """Posterior of the coefficients after measurements."""

    posteriors: tuple[Posterior, ...]
    options: FitOptions
    noise: float  # of a measurement, pooled from the assumed noise and the residuals
    rows: Rows  # that were measured

    @property
    def measured(self) -> int:
        """Number of measurements."""
        return len(self.rows)

    @property
    def best(self) -> Posterior:
        """Posterior under the most likely structure."""
        return max(self.posteriors, key=lambda p: p.weight)

    def predict(self, rows: Rows) -> Prediction:
        """Predict the step times of `rows`."""
        gain, unlike = self._corrections(rows)
        means, variances, weights = [], [], []
        for p in self.posteriors:
            if p.weight < 1e-3:
                continue
            log_s, jacobian = linearise(p.logs, rows, p.structure, p.covariance)
            means.append(log_s + gain @ p.residuals)
            variances.append(np.einsum("ij,jk,ik->i", jacobian, p.covariance, jacobian))
            weights.append(p.weight)
        w = np.array(weights)[:, None] / sum(weights)
        mean = (w * np.array(means)).sum(axis=0)
        spread = (w * (np.array(variances) + (np.array(means) - mean) ** 2)).sum(axis=0)
        return Prediction(np.exp(mean), np.sqrt(spread + self.noise**2 + unlike))

    def covariance(self, rows: Rows) -> tuple[Array, Array]:
        """Covariance of the logarithms of the step times by the coefficients, shape (rows, rows), and their means.

        Taken over all possible structures: if these disagree about two rows in the same way, measuring one row informs
        about the other. Errors of the model itself are left out: they tell of few other rows.
        """
        gain, _ = self._corrections(rows)
        means, found = [], np.zeros((len(rows), len(rows)))
        for p in self.posteriors:
            log_s, jacobian = linearise(p.logs, rows, p.structure, p.covariance)
            means.append(log_s + gain @ p.residuals)
            found = found + p.weight * (jacobian @ p.covariance @ jacobian.T)
        weights = np.array([p.weight for p in self.posteriors])
        mean = weights @ np.array(means)
        deviation = np.array(means) - mean
        return found + (deviation.T * weights) @ deviation, mean

    def _corrections(self, rows: Rows) -> tuple[Array, Array]:
        """Weights of measured residuals in each row, shape (rows, measured), and the variance that is left, (rows,).

        Errors of the performance model are alike for like plans, so that a measurement corrects and vouches for them.
        """
        misfit = self.options.misfit**2
        alike = misfit * _likeness(rows, self.rows)
        among = misfit * _likeness(self.rows, self.rows) + self.noise**2 * np.eye(self.measured)
        gain = np.linalg.solve(among, alike.T).T
        return np.asarray(gain), np.asarray(np.maximum(misfit - (gain * alike).sum(axis=1), 0.0))


def _likeness(some: Rows, others: Rows) -> Array:
    """Correlation of the performance model's errors between rows, shape (some, others).

    Plans are alike that run the same code on micro-batches of about the same size: one unit of distance is a doubling,
    or another kind of plan.
    """
    places = []
    for f in (some.features, others.features):
        doublings = np.log2([f.tp, f.pp, f.share / f.micro])
        places.append(np.array([*doublings, f.zero, f.offload + f.offload_parameters, f.checkpointing]))
    distance = places[0][:, :, None] - places[1][:, None, :]
    return np.asarray(np.exp(-0.5 * (distance**2).sum(axis=0)))


def fit(
    rows: Rows,
    step_times_s: Sequence[float] | Array,
    prior: Prior,
    options: FitOptions = DEFAULT_FIT,
    *,
    start: Fit | None = None,
) -> Fit:
    """Fit the coefficients to measurements; without any, the result is the prior.

    Args:
        step_times_s: measured seconds of each row, shape (rows,).
        start: an earlier fit with the same structures, whose optima the search starts from.
    Raises:
        ValueError: a row has no step time that is positive and finite.
    """
    times = np.asarray(step_times_s, dtype=np.float64)
    if times.shape != (len(rows),) or not np.all(np.isfinite(times)) or np.any(times <= 0):
        raise ValueError("each row needs one step time above 0 seconds")
    found = _fit_structures(rows, np.log(times), prior, options, start)
    noise = _pooled_noise(found, options)
    if noise > 1.3 * options.noise:
        # Measurements or performance model are less accurate than assumed: fit again with a larger noise.
        looser = replace(options, noise=noise)
        found = _fit_structures(rows, np.log(times), prior, looser, found)
        noise = max(noise, _pooled_noise(found, options))
        options = looser
    return Fit(found.posteriors, options, noise, rows)


@dataclass(frozen=True, slots=True)
class _Found:
    posteriors: tuple[Posterior, ...]
    residuals: Array  # under the most likely structure
    free: float  # measurements less the coefficients that they determine, under that structure


def _fit_structures(
    rows: Rows, target: Array, general: Prior, options: FitOptions, start: Fit | _Found | None
) -> _Found:
    posteriors: list[Posterior] = []
    evidences, residuals, determined = [], [], []
    modes = [(c, o, wc * wo) for c, wc in options.cards for o, wo in options.overlaps]
    for index, (devices_per_card, overlap, weight) in enumerate(modes):
        structure = Structure(devices_per_card)
        prior = general.holding("overlap", overlap, options.overlap_width)
        first = None if start is None else start.posteriors[index].logs
        if first is None and index >= len(options.overlaps):
            first = posteriors[index - len(options.overlaps)].logs  # same overlap, other network cards
        logs, cost = _optimise(rows, target, prior, options, structure, first)
        log_s, jacobian = linearise(logs, rows, structure)
        misfit = (log_s - target) / options.noise
        robust = 1.0 / np.sqrt(1.0 + (misfit / options.robust) ** 2)
        known = prior.whitening.T @ prior.whitening
        precision = known + (jacobian * (robust / options.noise**2)[:, None]).T @ jacobian
        covariance = np.linalg.inv(precision)
        determined.append(len(prior.mean) - float((covariance * known).sum()))
        _, determinant = np.linalg.slogdet(precision * np.outer(prior.width, prior.width))
        evidences.append(math.log(weight) - cost - 0.5 * float(determinant))
        posteriors.append(Posterior(structure, logs, (covariance + covariance.T) / 2.0, 0.0, robust * (target - log_s)))
        residuals.append(log_s - target)
    likeliest = max(evidences)
    weights = [math.exp(e - likeliest) for e in evidences]
    total = sum(weights)
    weighed = tuple(replace(p, weight=w / total) for p, w in zip(posteriors, weights, strict=True))
    best = int(np.argmax(weights))
    return _Found(weighed, residuals[best], len(rows) - determined[best])


def _pooled_noise(found: _Found, options: FitOptions) -> float:
    """Noise estimated from the residuals, with the assumed noise weighted as several measurements.

    The weight is needed because a fit to few measurements leaves small residuals, whatever the noise.
    """
    squares = options.assumed * options.noise**2 + float(found.residuals @ found.residuals)
    return math.sqrt(squares / (options.assumed + max(found.free, 0.0)))


def linearise(logs: Array, rows: Rows, structure: Structure, covariance: Array | None = None) -> tuple[Array, Array]:
    """Logarithms of the step times, shape (rows,), and their Jacobian by `logs`, shape (rows, coefficients).

    Args:
        covariance: of `logs`. With it, the slope by `part_used_card` is that over one standard deviation: at its median
            the term is too small to have a slope, although it may be large.
    """
    steps = np.full(len(logs), _STEP)
    if covariance is not None:
        steps[_PART_USED] = np.sqrt(covariance[_PART_USED, _PART_USED])
    moved = np.vstack([logs, logs + np.diag(steps)])
    log_s = np.log(predict(moved, rows, structure))
    return log_s[0], ((log_s[1:] - log_s[0]) / steps[:, None]).T


def _optimise(
    rows: Rows, target: Array, prior: Prior, options: FitOptions, structure: Structure, start: Array | None
) -> tuple[Array, float]:
    """Optimum, and the negative logarithm of the posterior there up to a constant.

    The search begins at `start`; without one, or if a measurement is not explained there, on a rough grid.
    """
    if not len(target):
        return prior.mean.copy(), 0.0
    low, high = prior.mean - 4.0 * prior.width, prior.mean + 4.0 * prior.width
    noise, whitening = options.noise, prior.whitening

    def scaled(log_s: Array, logs: Array) -> tuple[Array, Array]:
        z = (log_s - target) / noise
        # Soft-L1 loss written as a residual, whose square is the loss: the prior's residuals stay plain squares.
        size = np.sqrt(1.0 + (z / options.robust) ** 2)
        soft = np.sign(z) * options.robust * np.sqrt(2.0 * (size - 1.0))
        return soft, whitening @ (logs - prior.mean)

    cache: dict[bytes, tuple[Array, Array]] = {}

    def at(logs: Array) -> tuple[Array, Array]:
        key = logs.tobytes()
        if key not in cache:
            cache.clear()
            cache[key] = linearise(logs, rows, structure)
        return cache[key]

    def residual(logs: Array) -> Array:
        return np.concatenate(scaled(at(logs)[0], logs))

    def jacobian(logs: Array) -> Array:
        log_s, slopes = at(logs)
        z = (log_s - target) / noise
        size = np.sqrt(1.0 + (z / options.robust) ** 2)
        soft = np.abs(options.robust * np.sqrt(2.0 * (size - 1.0)))
        # d soft / d z, which tends to 1 at z = 0.
        factor = np.where(soft > 1e-6, np.abs(z) / (size * np.maximum(soft, 1e-12)), 1.0)
        return np.vstack([slopes * (factor / noise)[:, None], whitening])

    def search(first: Array) -> tuple[Array, float]:
        found = scipy.optimize.least_squares(
            residual,
            np.clip(first, low + 1e-6, high - 1e-6),
            jacobian,
            bounds=(low, high),
            x_scale=prior.width,
            max_nfev=60,
            ftol=1e-6,
            xtol=1e-6,
        )
        return found.x, float(found.cost)

    if start is not None:
        best, least = search(start)
        if np.all(np.abs(at(best)[0] - target) < _EXPLAINED * noise):
            return best, least
        again, cost = search(_rough(rows, target, prior, structure))
        return (again, cost) if cost < least else (best, least)
    return search(_rough(rows, target, prior, structure))


_GRID = tuple(
    (INDEX[name], np.array(steps))
    for name, steps in (
        ("compute_rate", np.linspace(-3.0, 3.0, 13)),
        ("network_rate", np.linspace(-3.0, 3.0, 13)),
        ("part_used_card", (0.0, 1.4, 2.8)),
    )
)


def _rough(rows: Rows, target: Array, prior: Prior, structure: Structure) -> Array:
    """Starting point: the best of a grid over the three most uncertain coefficients.

    Far from the optimum a term that is too small to matter has no gradient, and the fit would adjust others instead.
    """
    grid = [steps if np.any(rows.features.whole % 2) else steps[:1] for _, steps in _GRID[2:]]
    steps = np.stack(np.meshgrid(*(steps for _, steps in _GRID[:2]), *grid), axis=-1).reshape(-1, len(_GRID))
    tries = np.tile(prior.mean, (len(steps), 1))
    for column, (index, _) in enumerate(_GRID):
        tries[:, index] += steps[:, column] * prior.width[index]
    off = np.abs(np.log(predict(tries, rows, structure)) - target).mean(axis=-1) / 0.2
    return np.asarray(tries[int(np.argmin(off + 0.5 * (steps**2).sum(axis=-1) / max(len(rows), 1)))])


OF_OTHER_MODELS = 1.3
"""Factor on the standard deviations of what was fitted for other models."""


def share_hardware(prior: Prior, fits: Mapping[str, Fit]) -> Prior:
    """Prior for a model on hardware on which other models were measured.

    Only coefficients of the hardware are shared: efficiency and overlap differ between models.

    Args:
        fits: of the other models, by name.
    """
    for index in HARDWARE:
        prior = _told(prior, index, [(known, 0.0, ALL[index].varies) for known in fits.values()], OF_OTHER_MODELS)
    return prior


def from_other_type(prior: Prior, known: Fit, speed_up: float, uncertainty: float) -> Prior:
    """Prior for a model on a type of device where it never ran, from its fit on another type.

    What its code does is the same on both, and the time to launch its layers nearly so; links are those of other hosts.

    Args:
        speed_up: logarithm of the speed of this type relative to the other.
        uncertainty: standard deviation of `speed_up`.
    """
    for index, c in enumerate(ALL):
        if c.name == "compute_rate":
            prior = _told(prior, index, [(known, speed_up, uncertainty)])
        elif c.of == "model" or c.name == "launch_s":
            prior = _told(prior, index, [(known, 0.0, c.varies)])
    return prior


def _told(prior: Prior, index: int, told: Sequence[tuple[Fit, float, float]], discount: float = 1.0) -> Prior:
    """The prior with one coefficient as fits of elsewhere tell it.

    Args:
        told: each fit, how far the coefficient lies from its own, and the standard deviation of that (logarithms).
    """
    width = float(prior.width[index])
    values, precisions = [float(prior.mean[index])], [width**-2]
    for known, apart, varies in told:
        variance = float(known.best.covariance[index, index]) * discount**2 + varies**2
        # Precision that measurements added to the prior, so that the prior is not counted once per fit.
        precisions.append(max(1.0 / variance - width**-2, 0.0))
        values.append(float(known.best.logs[index]) + apart)
    mean = float(np.average(values, weights=precisions))
    return prior.holding(ALL[index].name, math.exp(mean), 1.0 / math.sqrt(sum(precisions)))


def share_cards(options: FitOptions, fits: Mapping[str, Fit]) -> FitOptions:
    """Options whose weights of devices per network card follow the fits of other models on the same hosts."""
    logs = {card: math.log(weight) for card, weight in options.cards}
    total = sum(weight for _, weight in options.cards)
    for known in fits.values():
        for card, weight in options.cards:
            found = sum(p.weight for p in known.posteriors if p.structure.devices_per_card == card)
            logs[card] += math.log(max(found, 0.02) / (weight / total))
    most = max(logs.values())
    # No possibility is excluded, because a few runs may mislead by chance.
    weights = {card: max(math.exp(log - most), 0.01) for card, log in logs.items()}
    return replace(options, cards=tuple((card, w / sum(weights.values())) for card, w in weights.items()))
