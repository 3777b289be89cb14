"""Migrations that users ask for, to a plan or to devices."""

from __future__ import annotations

from clusterd.core.allocation.migration_targets import may_stay, move_to, spread
from clusterd.core.estimates.heterogeneous_speed import in_proportion
from clusterd.core.ledger import of_ranks
from clusterd.core.placement.place import candidates
from clusterd.core.state import Job
from clusterd.core.view import Move, Refusal, View
from clusterd.plans.legality import check
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan
from clusterd.types import AttemptState, DeviceId, JobKind


def requested(job: Job, view: View, plan: Plan | None, devices: tuple[DeviceId, ...], by: str) -> Move | Refusal:
    """Migration that a user asked for, or the reason why it cannot be made."""
    attempt = job.attempt
    if attempt is None or attempt.plan is None or attempt.state is not AttemptState.RUNNING:
        if job.spec.kind is JobKind.COMMAND:
            return Refusal(job.id, f"{job.spec.name} is a command: only elastic and checkpointable jobs are moved")
        why = "what is over is not moved" if job.state.is_final else "it can be moved while it runs"
        return Refusal(job.id, f"{job.spec.name} is {job.state.value}: {why}")
    requested = plan or attempt.plan
    count = requested.ranks
    own = of_ranks(view.hosts, attempt)
    if devices:
        known = {d.id: d for h in view.hosts.values() for d in h.devices}
        missing = [d for d in devices if d not in known]
        if missing:
            return Refusal(job.id, f"there is no device {missing[0]}: clusterd host ls")
        chosen = [known[d] for d in devices]
    else:
        here = [d for d in own if may_stay(job, d, view)]
        hosts = candidates(job, view.free) if not job.spec.booking else []
        usable = [*here, *(d for h in hosts for d in h.devices if own and d.kind == own[0].kind)]
        chosen = spread(usable, count, requested.tp, prefer=here)
        if len(chosen) < count:  # tensor-parallel shards across hosts: slow, but the user asked for it
            chosen = spread(usable, count, 1, prefer=here)
    if len(chosen) != count:
        return Refusal(job.id, f"{requested} needs {count} devices, {len(chosen)} are given or free for it")
    several = check(requested, kinds={d.kind for d in chosen})
    if several:
        return Refusal(job.id, "; ".join(several))
    if plan is None or not plan.shares:  # a user's own shares stay
        batch = ModelShape.from_dict(job.inspection.shape or {}).global_batch
        requested = in_proportion(view.performance_tables.get(job.inspection.model), requested, chosen, batch)
    return move_to(job, chosen, requested, f"asked for by {by}" if by else "asked for", None)
