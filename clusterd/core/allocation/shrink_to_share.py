"""Size of a shrinking victim: at once down to its target size, as every migration costs it as much.

The devices beyond those asked for go to other jobs in the same pass or the next. A target below the current size means
that others have a better use for the rest; in a burst of arrivals one migration of a large job serves many small ones.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from clusterd.core.allocation.pass_context import PassContext
from clusterd.core.allocation.victim_search import Change, EvictionPlan
from clusterd.core.ledger import per_host
from clusterd.core.performance_table import Estimate
from clusterd.types import JobId


def shrink_to_share(ctx: PassContext, eviction: EvictionPlan, preemptible: Container[JobId] = ()) -> EvictionPlan:
    """The same evictions, each victim down to its target size.

    Args:
        preemptible: victims by right of priority or guarantee: these shrink no further than they must.
    """
    changes = [
        c if c.victim.job.id in preemptible else _to_share(ctx, c, max(ctx.targets.of(c.victim), c.victim.curve.least))
        for c in eviction.changes
    ]
    return replace(eviction, changes=tuple(changes))


def _to_share(ctx: PassContext, change: Change, share: int) -> Change:
    """Change of a victim to its target size on one host, the one with most of its devices."""
    offer_now = change.offer
    if offer_now is None or share >= offer_now.devices:
        return change
    victim = change.victim
    here = per_host(change.devices)
    host = max(here, key=lambda h: (here[h], h))

    def is_fit(x: Estimate) -> bool:
        # Down to its share it is not stopped where for less it is moved alive.
        is_dear = ctx.costs.cost_s(victim, x) > ctx.costs.cost_s(victim, offer_now)
        return len(x.shape) == 1 and x.devices == share <= here[host] and not is_dear

    offer = next((x for x in victim.curve.upto(share) if is_fit(x) and ctx.worth.may_move_for_others(victim, x)), None)
    if offer is None:
        return change
    devices = [d for d in change.devices if d.host == host and d.name == offer.device_type][: offer.devices]
    return replace(change, offer=offer, devices=devices) if len(devices) == offer.devices else change
