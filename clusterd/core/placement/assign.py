"""Fourth stage, where several jobs start at once on devices of several types: which of them get which.

Each was given its devices in turn, the fastest type first. Their sizes stay; who has devices of which type is a market
(`matching`). Its answer is laid out with the shapes and plans that are known, and taken only if the jobs
then end earlier in all. Who runs already is left where it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clusterd.core.allocation.pass_context import Seated
from clusterd.core.estimates.job_forecast import WORTHWHILE, Prospect
from clusterd.core.ledger import Room, by_type, needs
from clusterd.core.performance_table import Estimate, Outlook
from clusterd.core.placement.heterogeneous_search import Found, Mixing
from clusterd.core.placement.matching import match
from clusterd.core.view import View

MOST_DEVICES = 128
"""Of the jobs that are assigned together: the market's time grows with the square."""


def assign(started: Sequence[Seated], view: View, mixing: Mixing, room: Room) -> list[Found] | None:
    """Another way to share the devices of jobs that start, in their order; None: none that is known is better.

    Args:
        room: any; only its rules are used.
    """
    devices = [device for one in started for device in one.devices]
    kinds = {device.kind for device in devices}
    types = sorted({device.name for device in devices})
    if len(started) < 2 or len(types) < 2 or len(kinds) > 1 or len(devices) > MOST_DEVICES:
        return None
    if len({needs(one.p.job, one.offer) for one in started}) > 1:
        return None  # the hosts' cores and memory were counted for them as they are
    outlooks = [view.outlooks[one.p.job.model] for one in started]
    rates = np.array(
        [
            [_rate(outlook, one.offer, device.name) for device in devices]
            for one, outlook in zip(started, outlooks, strict=True)
        ]
    )
    if np.any(rates <= 0):
        return None  # of some job nothing is known on some type
    work = np.array([one.p.steps_left * outlook.global_batch for one, outlook in zip(started, outlooks, strict=True)])
    whose = match(work, rates, counts=np.array([len(one.devices) for one in started], dtype=np.int64))
    ledger = room.part(devices)
    mixed = Mixing(mixing.mixtures, view, ledger, mixing.there)
    found: list[Found] = []
    before_s = sum(one.p.left_s(one.offer) for one in started)
    after_s = 0.0
    for number, one in enumerate(started):
        limits = {
            name: len(some)
            for name, some in by_type([d for d, owner in zip(devices, whose, strict=True) if owner == number]).items()
        }
        seat = _within(one.p, limits, ledger, mixed)
        if seat is None:
            return None
        ledger.take(seat[1], {}, {})
        found.append(seat)
        after_s += one.p.left_s(seat[0])
    return found if after_s < (1.0 - WORTHWHILE) * before_s else None


def _within(p: Prospect, limits: dict[str, int], ledger: Room, mixed: Mixing) -> Found | None:
    """The fastest that a job can have with so many devices of each type."""
    best: Found | None = None
    for offer in p.curve.upto(sum(limits.values())):
        if offer.devices <= limits.get(offer.device_type, 0):
            devices = ledger.find(p.job, offer)
            if devices is not None:
                best = (offer, devices)
                break
    under = best[0].step_time_s if best is not None else float("inf")
    return mixed.best(p, sum(limits.values()), lambda step_s, _: step_s, under, limits=limits) or best


def _rate(outlook: Outlook, offer: Estimate, name: str) -> float:
    """Samples per second of one device of this type, among about as many as the job has; 0: not known."""
    known = outlook.by_count.get(name, {})
    if not known:
        return 0.0
    nearest = known[min(known, key=lambda count: (abs(count - offer.devices), count))]
    return outlook.global_batch / (nearest.step_time_s * nearest.devices)
