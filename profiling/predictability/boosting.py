"""Gradient boosting of small trees on log loss, over histograms of the features (after LightGBM).

Features may be NaN, which is a value of its own above all others. The same rows give the same trees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from clusterd.profiling.coefficients import Array

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


def fit(features: Array, positive: NDArray[np.bool_]) -> BoostedTrees:
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
