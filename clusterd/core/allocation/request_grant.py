"""Grant for a job without a performance model: the requested devices and a plan for them, or the reason why not.

A job gets the devices that it requests, or none yet. Its plan is the requested one where that is legal and fits; else
the simplest legal plan that fits the memory of those devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from clusterd.core.allocation.requirements import (
    admitted_devices,
    beyond_every_host,
    empty_hosts,
    least_devices,
    never,
    serving,
    shortage,
)
from clusterd.core.booked import Placement
from clusterd.core.estimates.first_fit import ChosenPlan, Impossible, choose, fewer
from clusterd.core.estimates.request_forecast import requested_plans
from clusterd.core.ledger import Ledger
from clusterd.core.placement.place import fitting, kinds_for, place, place_beside
from clusterd.core.state import InspectionState, Job
from clusterd.core.view import Refusal, View
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan
from clusterd.types import Device, JobKind
from clusterd.units import duration


@dataclass(frozen=True, slots=True)
class Grant:
    """Plan and placement for a queued job."""

    plan: Plan | None
    placement: Placement
    reason: str


INSPECTION_S = 300.0
"""Time limit of a script to reach ``clusterd.train.run`` when its model is inspected."""

LEARNING = (
    "its model is being learned: its script runs up to clusterd.train.run, without devices, for "
    f"{duration(INSPECTION_S)} at most"
)


def allocate(job: Job, view: View, free: Ledger | None = None) -> Grant | Refusal:
    """Grant devices and a plan to one queued job, or refuse with the reason.

    Args:
        free: resources out of which to grant; None: those that are free now.
    """
    free = free if free is not None else view.free
    wanted = job.spec.resources
    if job.not_before_s > view.now_s:
        return Refusal(job.id, job.reason)
    known, impossible = serving(job, view)
    if impossible is not None:
        return Refusal(job.id, impossible)
    beyond = view.quotas.why_not(job.spec, least_devices(job))
    if beyond is not None:
        return Refusal(job.id, beyond)
    if job.spec.kind is JobKind.CHECKPOINTABLE:
        some = at_some_size(job, free, view.quotas.left(job.spec))
        return some or shortage(job, view, least_devices(job))
    if job.spec.kind is not JobKind.ELASTIC:
        placement = place_beside(job, free) if wanted.share > 1 else None
        placement = placement or place(job, free, wanted.devices, group=1, nodes=wanted.nodes)
        if placement is None:
            return shortage(job, view, wanted.devices)
        return Grant(None, placement, _started(job, placement, None))
    if job.inspection.state is not InspectionState.DONE or job.inspection.shape is None:
        return Refusal(job.id, LEARNING)
    table = view.performance_tables.get(job.inspection.model)
    if table is not None and table.is_whole and not job.spec.booking:
        return Refusal(job.id, "none of the ways in which it can run fits the hosts that are there for it")
    choice = _as_pinned(job, view) or _choice(job, max(wanted.devices, 1), known)
    if isinstance(choice, Impossible):
        return Refusal(job.id, choice.reason, is_permanent=True)
    beyond = view.quotas.why_not(job.spec, choice.plan.ranks)
    if beyond is not None:
        return Refusal(job.id, beyond)
    placement = place(job, free, choice.plan.ranks, group=choice.plan.tp, nodes=None)
    if placement is None:
        return shortage(job, view, choice.plan.ranks)
    return Grant(choice.plan, placement, _started(job, placement, choice))


def place_again(job: Job, grant: Grant, free: Ledger) -> Placement | None:
    """Another placement of a grant; None: it does not fit."""
    plan = grant.plan
    if plan is not None:
        return place(job, free, plan.ranks, group=plan.tp, nodes=None)
    return place(job, free, job.spec.resources.devices, group=1, nodes=job.spec.resources.nodes)


def objection_to_size(job: Job, view: View, plan: Plan) -> str | None:
    """Reason why a running checkpointable job could never continue at this size; None: it could."""
    text = Plan(**{name: getattr(plan, name) for name in ("dp", *_dimensions_in(job.spec.command))})
    if plan != text and plan not in requested_plans(replace(job, pinned=None)):
        return f"its command has no place for all of {plan}: it would be told of {text} alone"
    here = len(job.attempt.devices) if job.attempt is not None else 0
    beyond = view.quotas.why_not(job.spec, plan.ranks - here)
    if beyond is not None:
        return beyond
    at_size = replace(job, pinned=plan)
    known = [d for d in admitted_devices(job, view) if view.hosts[d.host].unusable is None]
    impossible = never(at_size, view, known)
    return impossible.reason if impossible else beyond_every_host(at_size, view)


def _dimensions_in(command: Iterable[str]) -> list[str]:
    """Dimensions of the plan that a templated command receives, besides dp, its number of processes."""
    text_of_command = " ".join(command)
    return [name for name in ("tp", "pp", "zero", "accumulation") if f"{{{name}}}" in text_of_command]


def at_some_size(job: Job, free: Ledger, most: int) -> Grant | None:
    """Best of a checkpointable job's plans that fits on at most `most` free devices; None: none fits."""
    for plan in requested_plans(job):
        placement = place(job, free, plan.ranks, group=plan.tp, nodes=None) if plan.ranks <= most else None
        if placement is not None:
            hosts = ", ".join(dict.fromkeys(str(place.host) for place in placement.ranks))
            return Grant(plan, placement, f"{plan} on {hosts}: the best of its plans that there is room for")
    return None


def _choice(job: Job, count: int, devices: Iterable[Device]) -> ChosenPlan | Impossible:
    """Plan for `count` devices of the available kinds; the same in every pass while the hosts stay the same.

    Fewer devices, where plans were found to train the job otherwise than one process.
    """
    shape = ModelShape.from_dict(job.inspection.shape or {})
    # "cuda" first: placement prefers it too.
    kinds = sorted({d.kind for d in devices}, reverse=True)
    first: Impossible | None = None
    for number in fewer(count) if job.failures.bounds.rejected and job.spec.resources.plan is None else [count]:
        for kind in kinds:
            memory_bytes = min(d.memory_bytes for d in devices if d.kind == kind)
            choice = choose(shape, number, kind, memory_bytes, job.spec.resources.plan, job.failures.bounds)
            if isinstance(choice, ChosenPlan):
                if first is None:
                    return choice
                return replace(choice, reason=f"on {number} of the {count} devices that it asked for: {first.reason}")
            first = first or choice
    assert first is not None
    return first


def _as_pinned(job: Job, view: View) -> ChosenPlan | None:
    """The plan to which the job is pinned; None: it would not fit even if nothing else ran."""
    plan = job.pinned
    if plan is None or plan.ranks > view.quotas.most(job.spec):
        return None
    for kind in kinds_for(job):
        there = [fitting(job, host, kind) for host in empty_hosts(job, view) if host.host.unusable is None]
        devices = [d for here in there for d in here]
        if sum(len(here) // plan.tp * plan.tp for here in there) < plan.ranks:
            continue
        shape, memory_bytes = ModelShape.from_dict(job.inspection.shape or {}), min(d.memory_bytes for d in devices)
        choice = choose(shape, plan.ranks, kind, memory_bytes, plan, job.failures.bounds)
        if isinstance(choice, ChosenPlan):
            return choice
    return None


def _started(job: Job, placement: Placement, choice: ChosenPlan | None) -> str:
    hosts = ", ".join(dict.fromkeys(str(place.host) for place in placement.ranks))
    if choice is None:
        return f"started on {hosts}"
    return f"{choice.plan} on {hosts}: {choice.reason}"
