"""Calibrated probability that a job is predictable: logistic regression over what earlier jobs of its kind did.

A job's features use only jobs that were over when it was submitted: how many of the same user, model, name and name
without digits there were, and which share of them was predictable. The regression minimises log loss under a normal
prior, which makes its probabilities calibrated where the future is like the past; the evaluation shows whether it was.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from profiling.coefficients import Array
from profiling.predictability.job_table import JobRecord

PSEUDO_JOBS = 2.0
"""Number of jobs as which the share of all earlier jobs counts in the share of a few."""

PRIOR_WIDTH = 1.0
"""Standard deviation of the prior of each weight, for standardised features."""

FOLDS = 5
"""Parts of a table in time order; each but the first is predicted from all before it."""

BINS = 10
LEAST_JOBS = 50


@dataclass(frozen=True, slots=True)
class Classifier:
    """Weights of standardised features."""

    mean: Array
    scale: Array
    weights: Array  # the first is the intercept

    def probability(self, features: Array) -> Array:
        """Probability of each job that it is predictable, shape (jobs,)."""
        return np.asarray(scipy.special.expit(_design(features, self.mean, self.scale) @ self.weights))


def train(features: Array, predictable: NDArray[np.bool_]) -> Classifier:
    """Classifier from jobs that are over."""
    mean, scale = features.mean(axis=0), np.maximum(features.std(axis=0), 1e-9)
    rows, sign = _design(features, mean, scale), np.where(predictable, 1.0, -1.0)
    widths = np.array([10.0] + [PRIOR_WIDTH] * features.shape[1])

    def loss(weights: Array) -> tuple[float, Array]:
        z = sign * (rows @ weights)
        slope = -(sign * scipy.special.expit(-z)) @ rows + weights / widths**2
        return float(np.logaddexp(0.0, -z).sum() + 0.5 * ((weights / widths) ** 2).sum()), slope

    found = scipy.optimize.minimize(loss, np.zeros(rows.shape[1]), jac=True, method="L-BFGS-B")
    return Classifier(mean, scale, np.asarray(found.x))


def _design(features: Array, mean: Array, scale: Array) -> Array:
    # A value far outside those trained on says no more than one at their edge.
    return np.column_stack([np.ones(len(features)), np.clip((features - mean) / scale, -4.0, 4.0)])


def features_of(jobs: Sequence[JobRecord], *, online: bool) -> Array:
    """Features of each job, shape (jobs, features); `online`: those of its first steps too.

    Args:
        jobs: in the order of submission.
    """
    seen: defaultdict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])  # jobs, predictable ones
    running: list[tuple[float, int]] = []
    table = []
    for index, job in enumerate(jobs):
        while running and not running[0][0] > job.submitted_s:  # all are over where times are unknown
            over = jobs[heapq.heappop(running)[1]]
            for group in ((), *_groups(over)):
                seen[group][0] += 1.0
                seen[group][1] += over.is_predictable
        count, good = seen[()]
        overall = (good + 0.5 * PSEUDO_JOBS) / (count + PSEUDO_JOBS)
        row = []
        for group in _groups(job):
            count, good = seen[group]
            share = (good + overall * PSEUDO_JOBS) / (count + PSEUDO_JOBS)
            row += [float(scipy.special.logit(share)), math.log1p(count)]
        timed = not math.isnan(job.requested_s)
        row += [math.log1p(job.size), float(timed), math.log1p(job.requested_s) if timed else 0.0]
        if online:
            fitted = not math.isnan(job.fit_error)
            row += [float(fitted), math.log(job.fit_error + 1e-3) if fitted else 0.0]
        table.append(row)
        end_s = job.submitted_s + job.actual_s
        heapq.heappush(running, (-math.inf if math.isnan(end_s) else end_s, index))
    return np.array(table)


def _groups(job: JobRecord) -> tuple[tuple[str, ...], ...]:
    family = re.sub(r"\d+", "", job.name)
    return (
        ("user", job.user),
        ("model", job.model),
        ("both", job.user, job.model),
        ("family", job.user, family),
        ("name", job.user, job.name),
    )


def judge(jobs: Sequence[JobRecord], *, online: bool) -> dict[str, Any]:
    """AUC and calibration of probabilities for jobs that the classifier was not trained on, as plain values.

    Raises:
        ValueError: too few jobs, or all of them end alike.
    """
    predictable = np.array([job.is_predictable for job in jobs])
    if len(jobs) < LEAST_JOBS:
        raise ValueError(f"{len(jobs)} jobs are too few; give at least {LEAST_JOBS}")
    features = features_of(jobs, online=online)
    bounds = np.linspace(0, len(jobs), FOLDS + 1).astype(int)
    probability = np.concatenate(
        [
            train(features[:begin], predictable[:begin]).probability(features[begin:end])
            for begin, end in pairwise(bounds[1:])
        ]
    )
    truth = predictable[bounds[1] :]
    if truth.all() or not truth.any():
        raise ValueError("all jobs that are judged are alike; give jobs that ran as requested and others")
    bins = [
        {"jobs": len(part), "predicted": float(probability[part].mean()), "actual": float(truth[part].mean())}
        for part in np.array_split(np.argsort(probability, kind="stable"), BINS)
    ]
    return {
        "jobs": len(truth),
        "predictable": float(truth.mean()),
        "auc": auc(probability, truth),
        "brier": float(((probability - truth) ** 2).mean()),
        "calibration_error": sum(b["jobs"] * abs(b["predicted"] - b["actual"]) for b in bins) / len(truth),
        "bins": bins,
    }


def auc(probability: Array, truth: NDArray[np.bool_]) -> float:
    """Probability that a job of the positive class gets the higher value of two; ties count half."""
    ranks = scipy.stats.rankdata(probability)
    positive = int(truth.sum())
    return float((ranks[truth].sum() - positive * (positive + 1) / 2) / (positive * (len(truth) - positive)))
