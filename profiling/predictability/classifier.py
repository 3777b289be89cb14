"""Calibrated probability that a job is predictable: boosted trees over what is known of it and of earlier jobs.

User, model and name count by how many jobs that were over when the job was submitted had the same, and by the share of
predictable ones among them. Words of further columns count by that share and as a number. Numbers count as they are.
Trees minimise log loss, which makes their probabilities calibrated where the future is like the past; the evaluation
shows whether it was.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from clusterd.profiling.coefficients import Array
from clusterd.profiling.predictability.boosting import BoostedTrees, fit
from clusterd.profiling.predictability.job_table import JobRecord

PSEUDO_JOBS = 2.0
"""Number of jobs as which the share of all earlier jobs counts in the share of a few."""

LEAST_JOBS = 50


@dataclass(slots=True)
class History:
    """Numbers of jobs that are over, and of predictable ones, by group; numbers that stand for categories."""

    seen: defaultdict[tuple[str, ...], list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))
    codes: dict[tuple[str, str], float] = field(default_factory=dict)

    def add(self, job: JobRecord) -> None:
        """Count a job that is over."""
        for group in ((), *_groups(job), *_categories(job)):
            counts = self.seen[group]
            counts[0] += 1.0
            counts[1] += job.is_predictable

    def features(self, job: JobRecord, *, online: bool) -> list[float]:
        """Features of a job that is submitted now; `online`: those of its first steps too."""
        count, good = self.seen[()]
        overall = (good + 0.5 * PSEUDO_JOBS) / (count + PSEUDO_JOBS)
        row = [job.size, job.requested_s]
        for group in _groups(job):
            count, good = self.seen.get(group, (0.0, 0.0))
            share = (good + overall * PSEUDO_JOBS) / (count + PSEUDO_JOBS)
            row += [share, count] if all(group) else [math.nan, math.nan]
        for category in _categories(job):
            count, good = self.seen.get(category, (0.0, 0.0))
            share = (good + overall * PSEUDO_JOBS) / (count + PSEUDO_JOBS)
            row += [share, self.codes.setdefault(category, float(len(self.codes)))]
        row += [value for value in job.further.values() if isinstance(value, float)]
        return [*row, job.fit_error] if online else row


def _groups(job: JobRecord) -> tuple[tuple[str, ...], ...]:
    family = re.sub(r"\d+", "", job.name)
    return (
        ("user", job.user),
        ("model", job.model),
        ("both", job.user, job.model),
        ("family", job.user, family),
        ("name", job.user, job.name),
    )


def _categories(job: JobRecord) -> list[tuple[str, str]]:
    return [(column, value) for column, value in job.further.items() if isinstance(value, str)]


@dataclass(frozen=True, slots=True)
class Classifier:
    """Boosted trees, and the history of the jobs that they were fitted to."""

    trees: BoostedTrees
    history: History
    online: bool

    def probability(self, jobs: Sequence[JobRecord]) -> Array:
        """Probability of each job, submitted now, that it is predictable, shape (jobs,)."""
        return self.trees.probability(
            np.array([self.history.features(job, online=self.online) for job in jobs], dtype=np.float64)
        )


def train(jobs: Sequence[JobRecord], *, online: bool) -> Classifier:
    """Classifier from jobs that are over, in the order of submission."""
    features, history = features_of(jobs, online=online)
    return Classifier(fit(features, np.array([job.is_predictable for job in jobs])), history, online)


def features_of(jobs: Sequence[JobRecord], *, online: bool) -> tuple[Array, History]:
    """Features of each job by those that were over when it was submitted, shape (jobs, features); history of all.

    Args:
        jobs: in the order of submission; where times are unknown, each is over before the next.
    """
    history = History()
    running: list[tuple[float, int]] = []
    table = []
    for index, job in enumerate(jobs):
        while running and not running[0][0] > job.submitted_s:
            history.add(jobs[heapq.heappop(running)[1]])
        table.append(history.features(job, online=online))
        heapq.heappush(running, (end_s(job), index))
    for _, index in running:
        history.add(jobs[index])
    return np.array(table, dtype=np.float64), history


def end_s(job: JobRecord) -> float:
    """Time at which the job was over; minus infinity where times are unknown."""
    end = job.submitted_s + job.actual_s
    return -math.inf if math.isnan(end) else end
