"""Calibrated probability that a job is predictable: boosted trees over what is known of it and of earlier jobs.

User, model and name count by how many jobs that were over when the job was submitted had the same, and by the share of
predictable ones among them. Words of further columns count by that share and as a number. Numbers count as they are.
Trees are small and minimise log loss over histograms of the features (after LightGBM), which makes their probabilities
calibrated where the future is like the past; the evaluation shows whether it was. Features may be NaN, which is a value
of its own above all others. The same rows give the same trees.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from clusterd.profiling.coefficients import Array
from clusterd.profiling.table import TableError, read_rows, read_text

REQUIRED = ("name", "user", "model", "size", "requested_s", "actual_s", "end")
"""Columns of a table without labels; one with column `predictable` may have any of them."""

OPTIONAL = ("submitted_s", "fit_error")
LABEL = "predictable"
COMPLETED = frozenset({"completed", "complete", "finished", "succeeded", "pass"})
"""Words in column `end` for a job that did all its work."""

LABELS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
WITHIN = 2.0
"""Largest ratio of the actual and the requested time, either way, of a predictable job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job: what is known at its submission, and how it ended if it is over."""

    name: str = ""
    user: str = ""
    model: str = ""
    size: float = math.nan  # devices
    requested_s: float = math.nan  # run time that the user gave; nan: none
    actual_s: float = math.nan
    end: str = ""
    submitted_s: float = math.nan  # nan: unknown
    fit_error: float = math.nan  # mean relative error of the online fit of its first steps; nan: not measured
    label: bool | None = None  # given by the table, in place of the rule
    further: Mapping[str, float | str] = field(default_factory=dict)  # numbers (nan: none) and words by column

    @property
    def is_predictable(self) -> bool:
        """True if it did all its work, in about the requested time where there was one."""
        if self.label is not None:
            return self.label
        if self.end not in COMPLETED:
            return False
        return math.isnan(self.requested_s) or is_within(self.actual_s, self.requested_s)


def is_within(actual_s: float, expected_s: float) -> bool:
    """True if a job ran about as long as expected."""
    return expected_s / WITHIN <= actual_s <= expected_s * WITHIN


def read_jobs(path: Path) -> list[JobRecord]:
    """Read a table of jobs, in the order of their submission where it tells that.

    Raises:
        TableError: the file cannot be read, or a value is missing, not a number, or out of range.
    """
    text = read_text(path)
    header, _ = read_rows(str(path), text, ())
    labelled = LABEL in header
    _, rows = read_rows(str(path), text, () if labelled else REQUIRED)
    lines = list(rows)
    textual = {
        column: not all(_is_number(values.get(column)) for _, values in lines)
        for column in header
        if column not in (*REQUIRED, *OPTIONAL, LABEL)
    }
    jobs = [_read_job(path, line, values, textual, labelled=labelled) for line, values in lines]
    if all(not math.isnan(job.submitted_s) for job in jobs):
        jobs.sort(key=lambda job: job.submitted_s)
    return jobs


def _is_number(text: str | None) -> bool:
    """True for a finite number, and for an empty value."""
    try:
        return math.isfinite(float((text or "").strip() or 0.0))
    except ValueError:
        return False


def _read_job(
    path: Path, line: int, values: dict[str, str], textual: Mapping[str, bool], *, labelled: bool
) -> JobRecord:
    def text(column: str) -> str:
        return (values.get(column) or "").strip()

    def wrong(column: str, remedy: str) -> TableError:
        return TableError(f"{path}, line {line}, column {column}: {text(column)!r}; {remedy}")

    def number(column: str, least: float, *, needed: bool = False) -> float:
        if not text(column) and not needed:
            return math.nan
        try:
            value = float(text(column))
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < least:
            raise wrong(column, f"give a number of at least {least:g}")
        return value

    label = LABELS.get(text(LABEL).lower())
    if labelled and label is None:
        raise wrong(LABEL, "write 1 or 0")
    if None in values:
        raise TableError(f"{path}, line {line}: more values than the header names; remove them or quote the commas")
    end = text("end").lower()
    if not end and not labelled:
        raise TableError(f"{path}, line {line}, column end: empty; write completed, failed, cancelled or timeout")
    return JobRecord(
        name=text("name"),
        user=text("user"),
        model=text("model"),
        size=number("size", 0.0, needed=not labelled),
        requested_s=number("requested_s", 0.0),
        actual_s=number("actual_s", 0.0, needed=not labelled),
        end=end,
        submitted_s=number("submitted_s", -math.inf),
        fit_error=number("fit_error", 0.0),
        label=label,
        further={column: text(column) if is_text else number(column, -math.inf) for column, is_text in textual.items()},
    )


DEPTH = 3
RATE = 0.05
"""Share of each tree's correction that is applied."""

LEAST_TREES, MOST_TREES = 100, 400
ROWS_PER_TREE = 20
"""Rows for one more tree: small tables are fitted less closely."""

BINS = 32
LEAST_ROWS = 5
"""Rows on each side of a split."""

RIDGE = 5.0
"""Added to the second derivative of the loss in a leaf."""

_Bins = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Split:
    """Rows of a leaf with a bin above `bin` go to a new leaf, the others stay."""

    leaf: int
    feature: int
    bin: int
    new_leaf: int


@dataclass(frozen=True, slots=True)
class Tree:
    """Splits in order from leaf 0, and the log-odds that each leaf adds."""

    splits: tuple[Split, ...]
    values: Array

    def leaves(self, bins: _Bins) -> _Bins:
        """Leaf of each row."""
        leaf = np.zeros(len(bins), dtype=np.intp)
        for split in self.splits:
            leaf[(leaf == split.leaf) & (bins[:, split.feature] > split.bin)] = split.new_leaf
        return leaf


@dataclass(frozen=True, slots=True)
class BoostedTrees:
    """Sum of trees over binned features."""

    columns: NDArray[np.intp]  # features that differ between rows
    edges: tuple[Array, ...]  # between the bins of each of them
    intercept: float
    trees: tuple[Tree, ...]

    def probability(self, features: Array) -> Array:
        """Probability of the positive class, shape (rows,)."""
        bins = _binned(features[:, self.columns], self.edges)
        odds = np.full(len(features), self.intercept)
        for tree in self.trees:
            odds += tree.values[tree.leaves(bins)]
        return np.asarray(scipy.special.expit(odds))


def fit_trees(features: Array, positive: NDArray[np.bool_]) -> BoostedTrees:
    """Trees fitted to rows, shape (rows, features), and their classes."""
    edges = tuple(_edges(column) for column in features.T)
    bins = _binned(features, edges)
    columns = np.flatnonzero(np.ptp(bins, axis=0))
    edges, bins = tuple(edges[column] for column in columns), bins[:, columns]
    share = (positive.sum() + 1.0) / (len(positive) + 2.0)
    intercept = float(scipy.special.logit(share))
    odds = np.full(len(bins), intercept)
    trees = []
    for _ in range(int(np.clip(len(bins) // ROWS_PER_TREE, LEAST_TREES, MOST_TREES))):
        p = scipy.special.expit(odds)
        tree = _grow(bins, p - positive, p * (1.0 - p))
        odds += tree.values[tree.leaves(bins)]
        trees.append(tree)
    return BoostedTrees(columns, edges, intercept, tuple(trees))


def _grow(bins: _Bins, slope: Array, curvature: Array) -> Tree:
    """Tree of Newton steps for the derivatives of the loss in each row."""
    leaf = np.zeros(len(bins), dtype=np.intp)
    splits: list[Split] = []
    level, count = [0], 1
    for _ in range(DEPTH):
        below = []
        for number in level:
            rows = np.flatnonzero(leaf == number)
            found = _best_split(bins[rows], slope[rows], curvature[rows])
            if found is None:
                continue
            feature, bin_ = found
            leaf[rows[bins[rows, feature] > bin_]] = count
            splits.append(Split(number, feature, bin_, count))
            below += [number, count]
            count += 1
        level = below
    slopes = np.bincount(leaf, slope, minlength=count)
    curvatures = np.bincount(leaf, curvature, minlength=count)
    return Tree(tuple(splits), -RATE * slopes / (curvatures + RIDGE))


def _best_split(bins: _Bins, slope: Array, curvature: Array) -> tuple[int, int] | None:
    """Feature and bin whose split lowers the loss most; None if no split does."""
    rows, features = bins.shape
    if not features:
        return None
    cells = (bins + np.arange(features) * (BINS + 1)).ravel()

    def below(weights: Array) -> Array:  # sums over the rows up to each bin, shape (features, bins)
        sums = np.bincount(cells, np.repeat(weights, features), minlength=features * (BINS + 1))
        return np.asarray(sums.reshape(features, BINS + 1).cumsum(axis=1))

    left, left_curvature, left_rows = below(slope), below(curvature), below(np.ones(rows))
    total, total_curvature = slope.sum(), curvature.sum()
    gain = left**2 / (left_curvature + RIDGE) - total**2 / (total_curvature + RIDGE)
    gain += (total - left) ** 2 / (np.maximum(total_curvature - left_curvature, 0.0) + RIDGE)
    gain[(left_rows < LEAST_ROWS) | (rows - left_rows < LEAST_ROWS)] = 0.0
    best = int(gain.argmax())
    # Rounding leaves a tiny gain where a split changes nothing.
    return divmod(best, BINS + 1) if gain.flat[best] > 1e-9 else None


def _edges(column: Array) -> Array:
    values = np.unique(column[~np.isnan(column)])
    if len(values) <= BINS:
        return np.asarray((values[1:] + values[:-1]) / 2.0)
    return np.unique(np.quantile(column[~np.isnan(column)], np.linspace(0.0, 1.0, BINS + 1)[1:-1]))


def _binned(features: Array, edges: tuple[Array, ...]) -> _Bins:
    """Bin of each value; NaN has the bin after the last."""
    bins = np.empty(features.shape, dtype=np.intp)
    for index, between in enumerate(edges):
        column = features[:, index]
        bins[:, index] = np.where(np.isnan(column), len(between) + 1, np.searchsorted(between, column, side="right"))
    return bins


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
    return Classifier(fit_trees(features, np.array([job.is_predictable for job in jobs])), history, online)


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


FOLDS = 5
"""Parts of a table: in time order, each but the first is predicted from all before it; shuffled, from all others."""

SEED = 0
CALIBRATION_BINS = 10


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
        for part in np.array_split(np.argsort(probability, kind="stable"), CALIBRATION_BINS)
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
        found.append(fit_trees(features[over], predictable[over]).probability(features[begin:end]))
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
