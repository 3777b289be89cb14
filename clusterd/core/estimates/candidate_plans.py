"""Candidate plans of a job: the estimates of its model among which a policy may choose.

As published, schedulers keep the user's plan: at the size that was asked for, or with more or fewer replicas of it.
Ours takes any plan. That is one question with several answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from clusterd.core.performance_table import Estimate, PerformanceTable
from clusterd.core.state import Job
from clusterd.plans.plan import Plan

ENOUGH = 3
"""Plans that must be measured before a performance table is used: with fewer it is mostly prior."""


class PlanFreedom(Enum):
    """Freedom of a policy with a job's plan."""

    ASKED = "asked"  # the user's plan, on as many devices as asked
    REPLICAS = "replicas"  # the user's plan with any number of replicas
    SIZE = "size"  # any plan, on as many devices as asked
    ANY = "any"


@dataclass(frozen=True)
class CandidatePlans:
    """Estimates by device type and number of devices; for each shape its fastest plan, fastest shape first."""

    sizes: Mapping[str, Mapping[int, tuple[Estimate, ...]]]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Numbers of devices, of whatever type, on which the job can run."""
        return tuple(sorted({count for sizes in self.sizes.values() for count in sizes}))

    @cached_property
    def fastest(self) -> dict[int, Estimate]:
        """The fastest estimate for each number of devices."""
        found: dict[int, Estimate] = {}
        for sizes in self.sizes.values():
            for count, some in sizes.items():
                if count not in found or some[0].step_time_s < found[count].step_time_s:
                    found[count] = some[0]
        return dict(sorted(found.items()))

    @cached_property
    def by_speed(self) -> dict[int, tuple[Estimate, ...]]:
        """All estimates for each number of devices, fastest first, whatever the type."""
        found: dict[int, list[Estimate]] = {}
        for sizes in self.sizes.values():
            for count, some in sizes.items():
                found.setdefault(count, []).extend(some)
        return {n: tuple(sorted(some, key=lambda x: x.step_time_s)) for n, some in sorted(found.items())}


class CandidatePlansCache:
    """Candidate plans by model and request; jobs that agree in these share them."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[PerformanceTable, CandidatePlans]] = {}

    def of(
        self, job: Job, performance_tables: Mapping[str, PerformanceTable], choice: PlanFreedom
    ) -> CandidatePlans | None:
        """Candidate plans of a job; None: it has no performance model, or none of its requested plans is known."""
        table = performance_tables.get(job.inspection.model) if job.inspection.model else None
        if table is None or table.measured < min(ENOUGH, len(table.estimates)):
            return None
        wanted = job.spec.resources
        key = (job.inspection.model, wanted.plan, wanted.devices, wanted.kind, job.failures.bounds, choice)
        known = self._known.get(key)
        if known is None or known[0] is not table:
            known = (table, _candidates(job, table, choice))
            self._known[key] = known
        return known[1] if known[1].sizes else None


def _candidates(job: Job, table: PerformanceTable, choice: PlanFreedom) -> CandidatePlans:
    requested, asked = job.spec.resources.plan, max(job.spec.resources.devices, 1)
    sizes: dict[str, dict[int, list[Estimate]]] = {}
    for (device_type, shape), some in table.by_shape.items():
        count = sum(shape)
        if choice in (PlanFreedom.ASKED, PlanFreedom.SIZE) and count != asked:
            continue
        allowed = [x for x in some if may_fit(job, x) and _is_allowed(x.plan, requested, choice)]
        if allowed:
            sizes.setdefault(device_type, {}).setdefault(count, []).append(allowed[0])
    return CandidatePlans(
        {
            device_type: {
                n: tuple(sorted(found, key=lambda x: (x.step_time_s, len(x.shape))))
                for n, found in sorted(some.items())
            }
            for device_type, some in sizes.items()
        }
    )


def may_fit(job: Job, offer: Estimate) -> bool:
    """True unless the job's bounds rule the estimate's plan or memory out."""
    return job.failures.bounds.admits(offer.plan, offer.device_bytes)


def _is_allowed(plan: Plan, requested: Plan | None, choice: PlanFreedom) -> bool:
    if requested is None or choice in (PlanFreedom.SIZE, PlanFreedom.ANY):
        return True
    return is_alike(plan, requested)


def is_alike(plan: Plan, requested: Plan) -> bool:
    """True where two plans differ in the number of replicas alone."""
    return (plan.tp, plan.pp, plan.zero, plan.offload, plan.checkpointing) == (
        requested.tp,
        requested.pp,
        requested.zero,
        requested.offload,
        requested.checkpointing,
    )
