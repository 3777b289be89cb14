"""Between running jobs: one shrinks for another's growth, where that brings in all more than both moves cost.

Growth into what is free comes first (`growing`). What one gives here the other takes in the pass in which it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clusterd.core.allocation.shrink_to_share import to_shares
from clusterd.core.allocation.start_waiting import MOST_CONSIDERED, Steering
from clusterd.core.allocation.victim_search import Clearing, Making
from clusterd.core.estimates.job_forecast import Prospect
from clusterd.core.performance_table import Estimate
from clusterd.core.placement.heterogeneous_search import as_if_free

OFFERS_TRIED = 3
"""Of each who would grow."""


@dataclass(slots=True)
class Exchange(Steering):
    """Moves of two, one for the other's sake."""

    def exchange(self) -> None:
        """Shrinks for those who run on less than their share, first for whom a device brings most."""
        wishes: list[tuple[float, Prospect, list[Estimate]]] = []
        for p in self.running:
            if self.sizes.get(p.job.id, 0) <= len(p.devices) or not self._may_move(p):
                continue
            wider = [x for x in p.curve.upto(self._at_most(p)) if x.devices > len(p.devices)]
            gains = sorted(((self._surplus_s(p, x), x) for x in wider), key=lambda item: -item[0])
            good = [(s, x) for s, x in gains if s > 0 and self.mobility.within_budget(p, x)]
            if good:
                per_device_s = good[0][0] / (good[0][1].devices - len(p.devices))
                wishes.append((per_device_s, p, [x for _, x in good[:OFFERS_TRIED]]))
        wishes.sort(key=lambda w: (-w[0], w[1].job.id))
        for _, p, offers in wishes[:MOST_CONSIDERED]:
            if p.job.id not in self.moved:
                self._give_way(p, offers)

    def _surplus_s(self, p: Prospect, offer: Estimate) -> float:
        """Seconds that it gains by running so, beyond what any growth must bring."""
        return self._gain_s(p, offer) - self.habits.grow * self.mobility.cost_s(p, offer)

    def _give_way(self, p: Prospect, offers: Sequence[Estimate]) -> None:
        best: tuple[float, Making] | None = None
        for offer in offers:
            making = self._clear(p, offer)
            if making is not None:
                saved_s = self._surplus_s(p, offer) - self.habits.shrink * making.lost_s
                if saved_s > 0 and (best is None or saved_s > best[0]):
                    best = (saved_s, making)
        if best is None:
            return
        making = to_shares(best[1], self.sizes, self.mobility)
        for change in making.changes:
            self.room.take(change.devices, {}, {})
            self._move(change.v, change.offer, change.devices, f"gives to {p.job.spec.name}, which is to grow")
        self.room.take(making.now, {}, {})
        self.moved.add(p.job.id)

    def _clear(self, p: Prospect, offer: Estimate) -> Making | None:
        """What would have to change, its own devices counting as free; nobody can sit on those before it has left."""
        clearing = Clearing(self.room, p, [v for v in self._movable() if v is not p])
        making = as_if_free(
            self.room, p, lambda: clearing.make(offer, lambda v: self._sizes_of(v, False), self.mobility.cost_s)
        )
        own = {d.id for d in p.devices}
        if making is None or not making.changes:
            return None
        if any(d.id in own for change in making.changes for d in change.devices):
            return None
        return making if self._may_pass(p, offer, [d for d in making.now if d.id not in own]) else None
