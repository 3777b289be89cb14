"""Step times on mixed device types, from those on each type alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clusterd.simulate.truth import ModelTruth
from plans.plan import Plan, replicas


def truth_of(model: ModelTruth, plan: Plan, hosts: Sequence[Sequence[str]]) -> float | None:
    """Seconds per step with these device types on each host; None: it is not known to run there.

    On mixed types every replica lies on one type and takes a share of the batch; the slowest sets the pace. A replica's
    speed is that of the same plan on the same shape, were all of its type: so the traffic between replicas counts
    once, at the pace of the slower type.
    """
    kinds = sorted({kind for some in hosts for kind in some})
    shape = [len(some) for some in hosts]
    if len(kinds) == 1:
        as_it_is = model.step_time_s(plan, kinds[0], shape)
        return as_it_is if as_it_is is not None else model.step_time_s(replace(plan, shares=()), kinds[0], shape)
    shares = plan.batch_shares(model.global_batch)
    per_replica = plan.ranks // plan.dp
    ranks = [kind for some in hosts for kind in some]
    worst = 0.0
    for replica, share in enumerate(shares):
        mine = {ranks[plan.rank_of(stage, replica, shard)] for stage in range(plan.pp) for shard in range(plan.tp)}
        if len(mine) != 1 or per_replica * plan.dp != len(ranks):
            return None
        alone = _alone(model, plan, mine.pop(), shape)
        if alone is None:
            return None
        worst = max(worst, alone[0] * share / alone[1])
    return worst


def _alone(model: ModelTruth, plan: Plan, kind: str, shape: Sequence[int]) -> tuple[float, int] | None:
    """Step time of the plan with its batch cut as evenly as can be, all on one type, and the largest share there."""
    even = replicas(plan.dp, model.global_batch).shares
    cuts = [replace(plan, shares=shares) for shares in dict.fromkeys(((), even))]
    key = tuple(sorted(shape, reverse=True))
    for table in (model.step_times_s, model.beyond):
        for cut in cuts:
            if (cut, kind, key) in table:
                return table[cut, kind, key], -(-model.global_batch // plan.dp)
    return None
