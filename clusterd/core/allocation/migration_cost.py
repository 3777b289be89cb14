"""Whether a running job may be moved now, and what that costs it: between proposing a move and its being worth it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clusterd.core.estimates.attained_service import executed_s
from clusterd.core.estimates.first_fit import USABLE_SHARE
from clusterd.core.estimates.job_forecast import JobForecast
from clusterd.core.performance_table import Estimate
from clusterd.core.state import Job
from clusterd.core.view import View
from clusterd.types import HostState

MOVE_S = 30.0
"""What a move is taken to cost where none was made yet."""

RESTART_S = 60.0
"""Likewise, a move through host memory: ranks end, and new ones start and build their model."""


@dataclass(frozen=True, slots=True)
class MigrationThresholds:
    """How eagerly running jobs are changed."""

    grow: float = 2.0  # times its cost that a growth must bring beyond its cost
    shrink: float = 2.0  # seconds spared to the one who waits, for each second that others lose
    budget: float = 0.3  # of a job's life that moves may cost in all
    settle: float = 2.0  # times its cost between two moves of a job
    settle_s: float = 10.0  # ... and at least so long
    price: float = 1.0  # of a device-second, in seconds of delay for each job that could use it
    thrift: float = 0.3  # likewise, where nobody waits
    failed_s: float = 30.0  # after a move that failed; longer after several in a row


DEFAULT_THRESHOLDS = MigrationThresholds()


@dataclass(frozen=True, slots=True)
class MigrationCosts:
    """Of the jobs of one view, by these habits."""

    view: View
    thresholds: MigrationThresholds

    def move_s(self, job: Job) -> float:
        """What a move of this job costs: as moves of its model took, or of any, or a guess."""
        return _of_model(job, self.view.move_costs_s, MOVE_S)

    def cost_s(self, p: JobForecast, offer: Estimate) -> float:
        """What it costs to have the job run so: a move, or, without room for old and new ranks, a restart."""
        if fits_beside(p, offer):
            return self.move_s(p.job)
        return _of_model(p.job, self.view.restart_costs_s, RESTART_S)

    def may_move(self, p: JobForecast) -> bool:
        """Not pinned, not moved a moment ago, and its hosts are there."""
        job = p.job
        if job.pinned is not None or job.step < 1 or p.now is None:
            return False
        if any(self.view.hosts[d.host].state is not HostState.UP for d in p.devices):
            return False
        last = job.migrations[-1] if job.migrations else None
        if last is None:
            return True
        since_s = self.view.now_s - (last.ended_s if last.ended_s is not None else last.started_s)
        settle_s = max(self.thresholds.settle * self.move_s(job), self.thresholds.settle_s)
        return since_s >= (job.back_off_s(self.thresholds.failed_s) if last.failure else settle_s)

    def within_budget(self, p: JobForecast, offer: Estimate) -> bool:
        """All its moves, this one included, stay within a share of its life."""
        made = sum(not m.failure for m in p.job.migrations)
        life_s = executed_s(p.job, self.view.now_s) + p.left_s(offer)
        return made * self.move_s(p.job) + self.cost_s(p, offer) <= self.thresholds.budget * life_s


def fits_beside(p: JobForecast, offer: Estimate) -> bool:
    """Its ranks can be made ready while the old ones train; of a simulated job nobody knows the memory."""
    if not p.devices:
        return True
    there = p.now.device_bytes if p.now is not None else 0
    return not p.job.needs_exclusive_memory and there + offer.device_bytes <= USABLE_SHARE * min(
        d.memory_bytes for d in p.devices
    )


def _of_model(job: Job, known: Mapping[str, float], guess_s: float) -> float:
    return known[job.model] if job.model in known else max(known.values(), default=guess_s)
