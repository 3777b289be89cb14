"""Third stage, second half: running jobs that must leave a drained host, and those that grow into what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clusterd.core.allocation import resize_unmodelled
from clusterd.core.allocation.migration_cost import fits_beside
from clusterd.core.allocation.pass_context import Bargain
from clusterd.core.estimates.job_forecast import WORTHWHILE, Prospect
from clusterd.core.performance_table import Estimate, evenly
from clusterd.core.placement.heterogeneous_search import Found, as_if_free, shared_by
from clusterd.types import JobId
from clusterd.units import duration


@dataclass(slots=True)
class Growing(Bargain):
    """Moves for the sake of those who are moved."""

    # --- those who must leave -----------------------------------------------------------------------------------------

    def evacuate(self) -> None:
        """Jobs on drained hosts: the fastest offer, no larger than what they have, that there is room for elsewhere."""
        for p in self.running:
            why = resize_unmodelled.must_leave(p.job, self.view)
            if not why:
                continue
            offers = p.curve.upto(len(p.devices))
            if p.job.pinned is not None:
                offers = tuple(x for x in offers if p.now is not None and x.plan == p.now.plan)
            found = self._or_mixed_elsewhere(p, self._find_anew(p, offers))
            if found is not None:
                offer, devices = found
                own = {d.id for d in p.devices}
                self.room.take(devices, {}, {})
                self._occupy(p.left_s(offer), [d for d in devices if d.id not in own])
                self._move(p, offer, devices, why)

    def _or_mixed_elsewhere(self, p: Prospect, found: Found | None) -> Found | None:
        """What was found for one who must leave, or devices of several types where these are faster."""
        mixing, now = self.mixing, p.now
        if mixing is None:
            return found

        def look() -> Found | None:
            return mixing.best(
                p,
                len(p.devices),
                lambda step_s, _: step_s,
                (1.0 - WORTHWHILE) * found[0].step_time_s if found is not None else float("inf"),
                lambda x: p.job.pinned is None or (now is not None and evenly(x.plan) == evenly(now.plan)),
            )

        return as_if_free(self.room, p, look) or found

    # --- those who grow -----------------------------------------------------------------------------------------------

    def grow(self) -> None:
        """Who is better off with what nobody waits for."""
        wishes: list[tuple[float, JobId, Prospect, list[Estimate]]] = []
        mixed = self._who_may_mix()
        for p in self.running:
            if p.job.id in self.moved or not self._may_move(p):
                continue
            offers = sorted(
                ((self._gain_s(p, x), x) for x in p.curve.upto(self._at_most(p))),
                key=lambda item: -item[0],
            )
            good: list[Estimate] = []
            for gain_s, x in offers:
                if _is_now(p, x):
                    break  # what follows gains less than staying does: only where steps are slower than is believed
                if gain_s > self.habits.grow * self.mobility.cost_s(p, x) and self.mobility.within_budget(p, x):
                    good.append(x)
            gain_s, best = (offers[0][0], good[0]) if good else (0.0, None)
            if not good and p.job.id in mixed and (found := self._mixed_anew(p, 0.0)) is not None:
                gain_s, best = self._gain_s(p, found[0]), found[0]
            if best is not None:
                more = max(best.devices - len(p.devices), 1)
                wishes.append((gain_s / more, p.job.id, p, good))
        for _, _, p, good in sorted(wishes, key=lambda w: (-w[0], w[1])):
            self._grow_one(p, good, p.job.id in mixed)

    def _who_may_mix(self) -> set[JobId]:
        """Those with most time left: for them devices of other types are looked at."""
        if self.mixing is None or self.room.total == 0:
            return set()
        return {p.job.id for p in sorted(self.running, key=lambda p: (-p.now_s, p.job.id))[: self.mixing.left]}

    def _mixed_anew(self, p: Prospect, gain_s: float) -> Found | None:
        """Devices of several types for one who runs, where these gain more than what was found."""
        mixing, cost_s = self.mixing, self.mobility.move_s(p.job)
        assert mixing is not None
        price = self._price(p, self.habits.thrift)
        now_s = p.now_s * (1.0 + price * len(p.devices))
        least_s = max(gain_s + WORTHWHILE * p.now_s, self.habits.grow * cost_s)

        def look() -> Found | None:
            return mixing.best(
                p,
                self._most_mixed(p, self._at_most(p)),
                lambda step_s, devices: (p.steps_left * step_s + cost_s) * (1.0 + price * devices),
                now_s - least_s,
                lambda x: _is_faster(p, x) and fits_beside(p, x) and self.mobility.within_budget(p, x),
            )

        found = as_if_free(self.room, p, look)
        own = {d.id for d in p.devices}
        if found is None or not self._may_pass(p, found[0], [d for d in found[1] if d.id not in own]):
            return None
        return found

    def _grow_one(self, p: Prospect, offers: Sequence[Estimate], may_mix: bool) -> None:
        found = self._find_anew(p, offers)
        if may_mix:
            found = self._mixed_anew(p, self._gain_s(p, found[0]) if found is not None else 0.0) or found
        if found is None:
            return
        offer, devices = found
        own = {d.id for d in p.devices}
        more = [d for d in devices if d.id not in own]
        self.room.take(more, {}, {})
        self.view.quotas.take(p.job.spec.tenant, len(more))
        self._occupy(p.left_s(offer), more)
        self.spare -= max(len(devices) - max(self.sizes.get(p.job.id, 0), len(p.devices)), 0)
        saved_s, cost_s = p.now_s - p.left_s(offer), self.mobility.cost_s(p, offer)
        saved = f"saves {duration(saved_s)} of {duration(p.now_s)}, for {duration(cost_s)}{shared_by(offer)}"
        self._move(p, offer, devices, saved)


def _is_now(p: Prospect, offer: Estimate) -> bool:
    now = p.now
    return now is not None and (offer.plan, offer.shape, offer.by_type) == (now.plan, now.shape, now.by_type)


def _is_faster(p: Prospect, offer: Estimate) -> bool:
    """Than what it runs as, both as believed: that it is measured to be slower is nothing that a move would mend."""
    return p.now is None or offer.step_time_s < p.now.step_time_s
