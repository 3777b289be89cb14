"""Evaluation of the classifier on a table: AUC and calibration for jobs that it was not trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from clusterd.profiling.coefficients import Array
from clusterd.profiling.predictability.boosting import fit
from clusterd.profiling.predictability.classifier import LEAST_JOBS, end_s, features_of, train
from clusterd.profiling.predictability.job_table import JobRecord

FOLDS = 5
"""Parts of a table: in time order, each but the first is predicted from all before it; shuffled, from all others."""

SEED = 0
BINS = 10


def judge(jobs: Sequence[JobRecord], *, online: bool) -> dict[str, Any]:
    """AUC and calibration of probabilities for jobs that the classifier was not trained on, as plain values.

    Raises:
        ValueError: too few jobs, or all of them end alike.
    """
    if len(jobs) < LEAST_JOBS:
        raise ValueError(f"{len(jobs)} jobs are too few; give at least {LEAST_JOBS}")
    timed = all(not math.isnan(job.submitted_s) for job in jobs)
    probability, truth = (_in_time_order if timed else _shuffled)(jobs, online=online)
    if truth.all() or not truth.any():
        raise ValueError("all jobs that are judged are alike; give jobs that ran as requested and others")
    bins = [
        {"jobs": len(part), "predicted": float(probability[part].mean()), "actual": float(truth[part].mean())}
        for part in np.array_split(np.argsort(probability, kind="stable"), BINS)
    ]
    return {
        "split": "time order" if timed else "shuffled folds",
        "further_features": list(jobs[0].further),
        "jobs": len(truth),
        "predictable": float(truth.mean()),
        "auc": auc(probability, truth),
        "brier": float(((probability - truth) ** 2).mean()),
        "calibration_error": sum(b["jobs"] * abs(b["predicted"] - b["actual"]) for b in bins) / len(truth),
        "bins": bins,
    }


def _in_time_order(jobs: Sequence[JobRecord], *, online: bool) -> tuple[Array, NDArray[np.bool_]]:
    """Probability and truth of each job after the first part, from jobs that were over before its part began."""
    features, _ = features_of(jobs, online=online)
    predictable = np.array([job.is_predictable for job in jobs])
    ends = np.array([end_s(job) for job in jobs])
    bounds = np.linspace(0, len(jobs), FOLDS + 1).astype(int)
    found = []
    for begin, end in pairwise(bounds[1:]):
        over = np.flatnonzero(ends[:begin] <= jobs[begin].submitted_s)
        found.append(fit(features[over], predictable[over]).probability(features[begin:end]))
    return np.concatenate(found), predictable[bounds[1] :]


def _shuffled(jobs: Sequence[JobRecord], *, online: bool) -> tuple[Array, NDArray[np.bool_]]:
    """Probability and truth of each job, from the other parts of the shuffled table."""
    order = np.random.default_rng(SEED).permutation(len(jobs))
    probability = np.empty(len(jobs))
    for part in np.array_split(np.arange(len(jobs)), FOLDS):
        judged = order[part].tolist()
        classifier = train([jobs[index] for index in np.delete(order, part).tolist()], online=online)
        probability[judged] = classifier.probability([jobs[index] for index in judged])
    return probability, np.array([job.is_predictable for job in jobs])


def auc(probability: Array, truth: NDArray[np.bool_]) -> float:
    """Probability that a job of the positive class gets the higher value of two; ties count half."""
    ranks = scipy.stats.rankdata(probability)
    positive = int(truth.sum())
    return float((ranks[truth].sum() - positive * (positive + 1) / 2) / (positive * (len(truth) - positive)))
