"""Forecast of a job's last step from its loss curve, with its predictability (after AITurbo)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from clusterd.profiling.progress import LossCurve, Predictability, fit_loss, held_out_error

POINTS_MOST = 400
JUDGED_EVERY = 1.5
"""Growth of the number of points between two forecasts."""

STEPS_MOST = 1e12
"""Forecasts beyond this count as never: the curve has become flat."""

REPORTED_CHANGE = 0.1
"""Relative change of the forecast that is worth reporting."""


@dataclass(slots=True)
class LossForecast:
    """Losses of one job, and the forecast of its last step."""

    predictability: Predictability
    points: list[tuple[int, float]] = field(default_factory=list)
    judged_at: int = 0  # number of points
    seen: int = 0
    reported: tuple[bool, int | None] | None = None
    why: str = ""

    def add(self, step: int, loss: float | None) -> None:
        """Add a loss; a long run is thinned to every second one, then every fourth, and so on."""
        if loss is None or not math.isfinite(loss) or (self.points and step <= self.points[-1][0]):
            return
        self.seen += 1
        self.points.append((step, loss))
        if len(self.points) > POINTS_MOST:
            self.points = self.points[::2]

    @property
    def is_due(self) -> bool:
        """True if there are enough new points since the last forecast."""
        return self.seen >= 12 and self.seen >= JUDGED_EVERY * self.judged_at

    def judge(self, target: float | None) -> tuple[bool, int | None] | None:
        """Predictability and total steps to the target; None if both are as last reported."""
        self.judged_at = self.seen
        steps = [float(step) for step, _ in self.points]
        losses = [loss for _, loss in self.points]
        self.predictability = self.predictability.observe(held_out_error(steps, losses))
        curve: LossCurve | None = fit_loss(steps, losses) if target is not None else None
        at = curve.step_of(target) if curve is not None and target is not None else None
        found = (self.predictability.predictable, math.ceil(at) if at is not None and at <= STEPS_MOST else None)
        self.why = self.predictability.reason
        if found[1] is not None:
            self.why += f"; the loss curve reaches {target:g} at step {found[1]}"
        if self.reported is not None and self.reported[0] == found[0] and _alike(self.reported[1], found[1]):
            return None
        self.reported = found
        return found


def _alike(one: int | None, other: int | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= REPORTED_CHANGE * max(one, other)
