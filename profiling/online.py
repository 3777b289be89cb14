"""Online fit: updated with every step that a job runs, and with detection of drift."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from clusterd.profiling.coefficients import Prior
from clusterd.profiling.fit import DEFAULT_FIT, Fit, FitOptions, fit
from clusterd.profiling.model import Row, Rows

DRIFT_NOISES = 4.0
"""A drift is detected when the sum of deviations passes this many noises (Page's test)."""
SLACK_NOISES = 0.75
"""Part of each deviation that is attributed to noise and not summed."""
STEPS = 20
"""Number of steps whose median makes one measurement; the time of a single step is too noisy."""
_OBSERVATIONS_MAX = 200


@dataclass(frozen=True, slots=True)
class Observation:
    """Measured step time of one plan on one allocation."""

    row: Row
    step_time_s: float
    trial: bool = True  # measured in a trial; False: while the job ran normally


@dataclass(frozen=True, slots=True)
class OnlineFit:
    """Fit of one model on one type of device, with its observations."""

    prior: Prior
    fit: Fit
    observations: tuple[Observation, ...] = ()
    options: FitOptions = DEFAULT_FIT
    pending: tuple[float, ...] = ()  # step times of the running plan, not yet enough for a measurement
    pending_row: Row | None = None
    slower: float = 0.0  # sums of Page's test, in noises
    faster: float = 0.0
    drifts: int = 0  # number of drifts detected
    reasons: tuple[str, ...] = field(default=())

    @classmethod
    def start(
        cls, prior: Prior, observations: Sequence[Observation] = (), options: FitOptions = DEFAULT_FIT
    ) -> OnlineFit:
        """Fit the given observations, or return the prior if there are none."""
        retained = tuple(observations)
        return cls(prior, _fit(retained, prior, options), retained, options)

    def observe(self, *observations: Observation) -> OnlineFit:
        """Add observations and fit again."""
        return replace(
            self,
            observations=(retained := self.observations + observations),
            fit=_fit(retained, self.prior, self.options),
        )

    def update(self, row: Row, step_times_s: Sequence[float]) -> OnlineFit:
        """Add steps that the job ran under `row`.

        The median of `STEPS` steps makes one measurement, to which the model is fitted again. If measurements of one
        plan are persistently slower (or faster) than before, the hardware has drifted (another load on the host, a hot
        device, a slow link): earlier measurements are scaled by the same factor, so that all predictions follow at
        once, and the new measurement replaces those of the same plan. `drifts` counts such drifts, `reasons` describes
        them.

        Raises:
            ValueError: a step time is not positive and finite.
        """
        if any(not math.isfinite(t) or t <= 0 for t in step_times_s):
            raise ValueError("step times must be above 0 seconds")
        before = self.pending if row == self.pending_row else ()
        pending = [*before, *step_times_s]
        state = replace(self, pending_row=row)
        while len(pending) >= STEPS:
            state = state._measured(row, median(pending[:STEPS]))
            pending = pending[STEPS:]
        return replace(state, pending=tuple(pending))

    def _measured(self, row: Row, step_time_s: float) -> OnlineFit:
        same = [o for o in self.observations if o.row == row]
        noise = self.fit.noise
        if not same:
            return self.observe(Observation(row, step_time_s, trial=False))
        usual_s = median(o.step_time_s for o in same)
        noise = max(noise, _scatter([o.step_time_s for o in same]))
        deviation = math.log(step_time_s / usual_s) / noise
        slower = max(0.0, self.slower + deviation - SLACK_NOISES)
        faster = max(0.0, self.faster - deviation - SLACK_NOISES)
        if max(slower, faster) < DRIFT_NOISES:
            retained = (*self.observations, Observation(row, step_time_s, trial=False))[-_OBSERVATIONS_MAX:]
            # Repeated measurements of one plan add little: fit again only after the 1st, 2nd, 4th, 8th, ...
            again = len(same) & (len(same) - 1) == 0
            fitted = _fit(retained, self.prior, self.options) if again else self.fit
            return replace(self, observations=retained, fit=fitted, slower=slower, faster=faster)
        factor = step_time_s / usual_s
        scaled = tuple(replace(o, step_time_s=o.step_time_s * factor) for o in self.observations if o.row != row)
        retained = (*scaled, Observation(row, step_time_s, trial=False))
        change = "slower" if factor > 1 else "faster"
        return replace(
            self,
            observations=retained,
            fit=_fit(retained, self.prior, self.options),
            slower=0.0,
            faster=0.0,
            drifts=self.drifts + 1,
            reasons=(
                *self.reasons,
                f"{row.plan} became {abs(factor - 1):.0%} {change}: from {usual_s:.4g} s a step to {step_time_s:.4g} s",
            ),
        )


def _scatter(times_s: Sequence[float]) -> float:
    """Robust standard deviation of the logarithm of repeated measurements; 5% for fewer than five, a common value."""
    if len(times_s) < 5:
        return 0.05
    logs = np.log(times_s)
    return float(1.4826 * np.median(np.abs(logs - np.median(logs))))


def _fit(observations: Sequence[Observation], prior: Prior, options: FitOptions) -> Fit:
    by_row: dict[Row, list[float]] = {}
    for o in observations:
        by_row.setdefault(o.row, []).append(o.step_time_s)
    rows = Rows.of(by_row)
    return fit(rows, np.array([median(times) for times in by_row.values()]), prior, options)
