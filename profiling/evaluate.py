"""Evaluation of the performance model: choose trials from a table of step times, predict the other rows.

The choice of trials sees the plans and allocations of all rows, but the step times of chosen rows only; so does the
fit. Models share nothing unless the caller asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterd.profiling.coefficients import Array, Prior
from clusterd.profiling.design import DesignOptions, next_trials
from clusterd.profiling.fit import DEFAULT_FIT, Fit, FitOptions, Prediction, fit, share_cards, share_hardware
from clusterd.profiling.model import Row, Rows
from clusterd.profiling.table import Measured

AIMS: Mapping[str, tuple[float, float]] = {
    "mean_error": (0.0, 0.04),
    "multi_node_mean_error": (0.0, 0.045),
    "regret_mean": (0.0, 0.01),
    "regret_within_5pct": (0.9, 1.0),
    "coverage_90": (0.80, 0.98),
}
"""Smallest and largest acceptable value of each figure."""


@dataclass(frozen=True, slots=True)
class Method:
    """All settings that are fixed before the table is read."""

    prior: Prior
    fit: FitOptions = DEFAULT_FIT
    design: DesignOptions = DesignOptions(jitter=0.1)  # noqa: RUF009 - frozen


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of profiling one model once, compared with all its measurements."""

    chosen: tuple[int, ...]
    fit: Fit
    prediction: Prediction
    held_out: Array  # indices of the rows that were not trials
    errors: Array  # relative, signed; shape (rows,)
    covered: NDArray[np.bool_]  # true for rows inside their 90% interval; shape (rows,)
    regrets: tuple[float, ...]  # relative loss by the chosen plan, per allocation with several plans
    device_seconds: float  # sum over one step of each trial
    by_trials: tuple[dict[str, dict[str, float]], ...]  # figures of model and rule after the 1st, 2nd, ... trial


def default_method() -> Method:
    """Settings of the product, for unknown hardware."""
    return Method(Prior.typical())


def profile(rows: Sequence[Measured], method: Method, budget: int, seed: int) -> Outcome:
    """Choose trials, fit, predict.

    Args:
        seed: of the jitter of scores, which decides between nearly equal trials.
    """
    features = Rows.of(m.row for m in rows)
    times = np.array([m.step_time_s for m in rows])
    hosts = np.array([m.hosts for m in rows])
    devices = np.array([m.row.allocation.devices for m in rows])
    # At least a third of a small table is held out.
    affordable = min(budget, max(1, len(rows) - max(1, len(rows) // 3)))
    options = replace(method.design, budget=affordable)
    random = np.random.default_rng(seed)
    chosen: list[int] = []
    by_trials = []
    state = fit(features[[]], [], method.prior, method.fit)
    prediction = state.predict(features)
    while more := next_trials(state, features, features, hosts, prediction.median_s * devices, chosen, options, random):
        chosen += more
        state = fit(features[chosen], times[chosen], method.prior, method.fit)
        prediction = state.predict(features)
        by_trials.append(_compare(rows, features, times, chosen, prediction))
    low, high = prediction.interval(0.9)
    held_out = np.setdiff1d(np.arange(len(rows)), chosen)
    return Outcome(
        chosen=tuple(chosen),
        fit=state,
        prediction=prediction,
        held_out=held_out,
        errors=prediction.median_s / times - 1.0,
        covered=(times >= low) & (times <= high),
        regrets=_regrets(rows, times, prediction.median_s),
        device_seconds=float((times * devices)[chosen].sum()),
        by_trials=tuple(by_trials),
    )


def rule(rows: Rows, chosen: Sequence[int], times: Array) -> Array:
    """Yardstick: seconds in proportion to samples per device, pipeline bubble and recomputation.

    The factor is the geometric mean over the measured rows `chosen`.
    """
    f = rows.features
    work = f.batch / (f.dp * f.tp * f.pp) * (f.micro + f.pp - 1.0) / f.micro * (1.0 + f.checkpointing / 3.0)
    return np.asarray(work * np.exp(np.log(times[chosen] / work[chosen]).mean()))


def _compare(
    rows: Sequence[Measured], features: Rows, times: Array, chosen: Sequence[int], prediction: Prediction
) -> dict[str, dict[str, float]]:
    """Figures of the model and of `rule` after the trials `chosen`; NaN where no row tells."""
    held_out = np.setdiff1d(np.arange(len(rows)), chosen)
    beyond = features.features.hosts[held_out] > features.features.hosts[chosen].max()
    low, high = (np.log(end / times)[held_out] for end in prediction.interval(0.9))
    covered = (low <= 0) & (high >= 0)
    found = {}
    for name, predicted in (("model", prediction.median_s), ("rule", rule(features, chosen, times))):
        errors = np.abs(predicted / times - 1.0)[held_out]
        regrets = _regrets(rows, times, predicted)
        found[name] = {"error": float(errors.mean()), "regret": fmean(regrets) if regrets else math.nan}
    return {
        "model": {
            **found["model"],
            "coverage": float(covered.mean()),
            "coverage_within": float(covered[~beyond].mean()) if not beyond.all() else math.nan,
            "coverage_beyond": float(covered[beyond].mean()) if beyond.any() else math.nan,
            "width": float((high - low).mean()),
            # Interval score of Gneiting and Raftery on the logarithm: width, and 2 / 10% of each miss.
            "score": float((high - low + 20.0 * (np.maximum(low, 0.0) + np.maximum(-high, 0.0))).mean()),
        },
        "rule": found["rule"],
    }


def _regrets(rows: Sequence[Measured], times: Array, predicted: Array) -> tuple[float, ...]:
    choices: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for index, one in enumerate(rows):
        choices.setdefault((one.row.workload.global_batch, one.row.allocation.counts), []).append(index)
    return tuple(
        # Plans of equal prediction are chosen equally often.
        float(times[among][predicted[among] <= predicted[among].min() * (1.0 + 1e-9)].mean() / times[among].min() - 1.0)
        for among in choices.values()
        if len(among) > 1
    )


def _over_trials(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Figures after each number of trials, averaged over models and seeds, and the quantiles of regret."""
    found = []
    for count in range(max(len(o.by_trials) for o in outcomes)):
        some = [o.by_trials[count] for o in outcomes if len(o.by_trials) > count]
        entry: dict[str, Any] = {"count": count + 1, "profiles": len(some)}
        for kind in ("model", "rule"):
            values = {name: [f[kind][name] for f in some if not math.isnan(f[kind][name])] for name in some[0][kind]}
            entry[kind] = {name: _mean(known) for name, known in values.items()}
            if regrets := values["regret"]:
                entry[kind] |= {"regret_95": float(np.quantile(regrets, 0.95)), "regret_max": max(regrets)}
        found.append(entry)
    return found


@dataclass(slots=True)
class _Tally:
    errors: list[float] = field(default_factory=list)
    multi: list[float] = field(default_factory=list)
    covered: list[float] = field(default_factory=list)
    regrets: list[float] = field(default_factory=list)

    def add(self, one: Measured, error: float, covered: bool) -> None:
        self.errors.append(error)
        self.covered.append(float(covered))
        if one.hosts > 1:
            self.multi.append(error)

    def figures(self) -> dict[str, float | None]:
        return {
            "mean_error": _mean(self.errors),
            "max_error": max(self.errors, default=None),
            "multi_node_mean_error": _mean(self.multi),
            "multi_node_max_error": max(self.multi, default=None),
            "coverage_90": _mean(self.covered),
            "regret_mean": _mean(self.regrets),
            "regret_max": max(self.regrets, default=None),
        }


DISTANCES = ("0", "1", "2", "3-4", "5+")
"""Groups of rows by their number of hosts beyond the most of a trial."""

COUNTS = ("one host", "even", "odd")
"""Groups of rows: on one host; an even number of devices on each of several; an odd one on some."""


def _distance(beyond: int) -> str:
    return DISTANCES[max(beyond, 0) if beyond <= 2 else 3 if beyond <= 4 else 4]


def _parity(counts: Sequence[int]) -> str:
    return COUNTS[0 if len(counts) == 1 else 2 if any(n % 2 for n in counts) else 1]


def _ordered(groups: Mapping[str, _Tally], order: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {g: {**_without_regret(groups[g]), "rows": len(groups[g].errors)} for g in order if g in groups}


def _average(by_model: Mapping[str, Any], name: str, order: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Errors and coverage of each group; models weighted equally, `rows` summed over models and seeds."""
    found = {}
    for group in order:
        if some := [m[name][group] for m in by_model.values() if group in m[name]]:
            found[group] = {
                "mean_error": _mean([x["mean_error"] for x in some]),
                "max_error": max(x["max_error"] for x in some),
                "coverage_90": _mean([x["coverage_90"] for x in some]),
                "rows": sum(x["rows"] for x in some),
            }
    return found


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def evaluate(
    models: Mapping[str, Sequence[Measured]],
    *,
    budget: int = 7,
    seeds: int = 20,
    method: Method | None = None,
    leave_one_out: bool = True,
    one_cluster: bool = False,
) -> dict[str, Any]:
    """Evaluate all models; returns figures overall (models weighted equally), by model and by family, as plain values.

    Args:
        models: measured rows by model.
        one_cluster: all models ran on the same hosts: each model's prior uses the estimates of links and network cards
            from the other models' trials, as in a running cluster. Otherwise models share nothing.
        leave_one_out: compute `leave_one_model_out_error` too, which takes most of the time.
    Raises:
        ValueError: no model has two rows.
    """
    chosen = default_method() if method is None else method
    different = {name: _once(rows) for name, rows in models.items()}
    usable = {name: rows for name, rows in different.items() if len(rows) > 1}
    if not usable:
        raise ValueError("no model has 2 different rows: one to measure and one to predict; add measurements")
    methods = [_methods(usable, chosen, budget, seed, one_cluster) for seed in range(seeds)]
    by_model: dict[str, dict[str, Any]] = {}
    families: dict[str, _Tally] = {}
    distances: dict[str, dict[str, _Tally]] = {name: {} for name in usable}
    parities: dict[str, dict[str, _Tally]] = {name: {} for name in usable}
    pooled: list[float] = []
    within: list[float] = []
    outcomes: list[Outcome] = []
    for name, rows in usable.items():
        tally = _Tally()
        own: dict[str, _Tally] = {}
        multi_choice: list[float] = []
        for seed in range(seeds):
            outcome = profile(rows, methods[seed][name], budget, seed)
            outcomes.append(outcome)
            tally.regrets += outcome.regrets
            if outcome.regrets:
                multi_choice.append(float(fmean(outcome.regrets) <= 0.05))
            tried = max(rows[i].hosts for i in outcome.chosen)
            for i in outcome.held_out.tolist():
                one, error, covered = rows[i], abs(float(outcome.errors[i])), bool(outcome.covered[i])
                tallies = [tally]
                for groups, group in (
                    (own, one.family),
                    (families, one.family),
                    (distances[name], _distance(one.hosts - tried)),
                    (parities[name], _parity(one.row.allocation.counts)),
                ):
                    tallies.append(groups.setdefault(group, _Tally()))
                for t in tallies:
                    t.add(one, error, covered)
        pooled += tally.covered
        within += multi_choice
        by_model[name] = {
            **tally.figures(),
            "regret_within_5pct": _mean(multi_choice),
            "rows": len(rows),
            "trials": len(outcome.chosen),
            "families": {family: _without_regret(t) for family, t in own.items()},
            "hosts_beyond": _ordered(distances[name], DISTANCES),
            "counts": _ordered(parities[name], COUNTS),
        }
    figures = {
        key: _mean([m[key] for m in by_model.values() if m[key] is not None])
        for key in ("mean_error", "multi_node_mean_error", "regret_mean")
    }
    figures["regret_within_5pct"] = _mean(within)
    figures["coverage_90"] = _mean(pooled)
    figures["leave_one_model_out_error"] = (
        leave_one_model_out(usable, budget=budget, method=chosen) if leave_one_out else None
    )
    return {
        "figures": figures,
        "by_trials": _over_trials(outcomes),
        "models": by_model,
        "families": {family: _without_regret(t) for family, t in families.items()},
        "hosts_beyond": _average(by_model, "hosts_beyond", DISTANCES),
        "counts": _average(by_model, "counts", COUNTS),
        "skipped": [name for name in models if name not in usable],
        "budget": budget,
        "seeds": seeds,
    }


def _once(rows: Sequence[Measured]) -> list[Measured]:
    """Merge repeated rows into one with the median time, so that no held-out row repeats a trial."""
    repeats: dict[Row, list[Measured]] = {}
    for one in rows:
        repeats.setdefault(one.row, []).append(one)
    return [replace(same[0], step_time_s=median(m.step_time_s for m in same)) for same in repeats.values()]


def _methods(
    models: Mapping[str, Sequence[Measured]], method: Method, budget: int, seed: int, one_cluster: bool
) -> dict[str, Method]:
    if not one_cluster:
        return dict.fromkeys(models, method)
    fits = {name: profile(rows, method, budget, seed).fit for name, rows in models.items()}
    found = {}
    for name in models:
        others = {other: known for other, known in fits.items() if other != name}
        prior = share_hardware(method.prior, others)
        found[name] = replace(method, prior=prior, fit=share_cards(method.fit, others))
    return found


def _without_regret(tally: _Tally) -> dict[str, float | None]:
    return {name: value for name, value in tally.figures().items() if not name.startswith("regret")}


def variants(method: Method) -> list[Method]:
    """Alternatives to `method`: narrower and wider priors, less and more noise."""
    return [
        replace(method, prior=method.prior.scaled(width), fit=replace(method.fit, noise=noise))
        for width in (0.7, 1.0, 1.4)
        for noise in (0.015, 0.025, 0.04)
    ]


SEEDS = 3
"""Runs of one variant, whose errors are averaged."""


def leave_one_model_out(models: Mapping[str, Sequence[Measured]], *, budget: int, method: Method) -> float | None:
    """Mean error of each model under the variant that is best for the *other* models; None with fewer than two."""
    if len(models) < 2:
        return None
    errors: dict[str, list[float]] = {}
    for name, rows in models.items():
        errors[name] = []
        for variant in variants(method):
            of_seeds = []
            for seed in range(SEEDS):
                outcome = profile(rows, variant, budget, seed)
                of_seeds.append(float(np.abs(outcome.errors[outcome.held_out]).mean()))
            errors[name].append(fmean(of_seeds))
    left_out = []
    for name in models:
        others = [fmean(errors[other][v] for other in models if other != name) for v in range(len(errors[name]))]
        left_out.append(errors[name][int(np.argmin(others))])
    return fmean(left_out)


def met(name: str, value: float | None) -> bool | None:
    """True if a figure meets its aim; None without an aim or a figure."""
    if value is None or name not in AIMS or not math.isfinite(value):
        return None
    least, most = AIMS[name]
    return least <= value <= most
