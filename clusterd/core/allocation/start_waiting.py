"""Third stage, second half: what of the desired sizes is worth doing now, moves not being free.

Five questions, in this order: who must leave a drained host; does a waiting job start now or do better to wait; do
others make room for it; for whom is a place kept; and who grows into what is left. A move is made only if what it saves
is more than what it costs, by a margin, and within a budget for the whole life of a job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clusterd.core.allocation.pass_context import Seated
from clusterd.core.allocation.scale_up import Growing
from clusterd.core.allocation.shrink_to_share import to_shares
from clusterd.core.allocation.victim_search import Clearing, Making
from clusterd.core.estimates.availability import Opening, Reservation
from clusterd.core.estimates.job_forecast import WORTHWHILE, Prospect
from clusterd.core.ledger import seat
from clusterd.core.performance_table import Estimate
from clusterd.core.placement.assign import assign
from clusterd.core.placement.heterogeneous_search import Found, shared_by
from clusterd.core.state import Job
from clusterd.core.view import Refusal, Start
from clusterd.types import Device
from clusterd.units import duration

MOST_CONSIDERED = 12
"""Waiting jobs for which the future and other people's devices are looked at, in one pass."""


@dataclass(slots=True)
class Steering(Growing):
    """One pass over jobs whose speed is known."""

    # --- those who wait -----------------------------------------------------------------------------------------------

    def admit(self, p: Prospect) -> bool:
        """Start the job, make room for it, or say what it waits for; whether it starts now."""
        if self.room.total < p.curve.least and self.considered >= MOST_CONSIDERED:
            return self._refuse(p, None)
        tenant = p.job.spec.tenant
        beyond = self.view.quotas.why_not(tenant, p.curve.least)
        if beyond is not None:
            self.proposal.refusals.append(Refusal(p.job.id, beyond))
            return False
        want = min(max(self.sizes.get(p.job.id, 0), p.curve.least), self.view.quotas.left(tenant))
        offers = p.curve.upto(want)
        offers = tuple(sorted(offers, key=lambda x: self._burden_s(p, x)))
        found = self._or_mixed(p, want, self._seat(p, offers))
        if found is not None and self._is_best(p, found[0], offers[0]) and self._may_pass(p, *found):
            return self._start(p, *found)
        if self.considered >= MOST_CONSIDERED:
            if found is not None and self._may_pass(p, *found):
                return self._start(p, *found)
            return self._refuse(p, None)
        self.considered += 1
        opening = self.forecast.opening(p.job, offers, lambda x: self._burden_s(p, x))
        if found is not None and not self._may_pass(p, *found):
            found = None
        if found is not None and not self._better_later(p, found[0], opening):
            ends_s = self._grown_s(p, found[0], opening)
        else:
            found, ends_s = None, float("inf")
            if opening is not None:
                ends_s = opening.at_s + self._burden_s(p, opening.offer)
        if self._make_room(p, offers, ends_s):
            return False
        return self._start(p, *found) if found is not None else self._refuse(p, opening)

    def _is_best(self, p: Prospect, offer: Estimate, single: Estimate) -> bool:
        """As good as the best on devices of one type."""
        return offer == single or (bool(offer.device_types) and self._burden_s(p, offer) <= self._burden_s(p, single))

    def _or_mixed(self, p: Prospect, want: int, found: Found | None) -> Found | None:
        """What was found for one who waits, or devices of several types where these serve it better."""
        if self.mixing is None or self.mixing.left <= 0:
            return found
        # Every device is somebody's share: a mix that is a little faster takes what others are to have.
        if found is not None and self.spare <= 0:
            return found
        self.mixing.left -= 1
        price = self._price(p, self.habits.price)
        mixed = self.mixing.best(
            p,
            self._most_mixed(p, want),
            lambda step_s, devices: p.steps_left * step_s * (1.0 + price * devices),
            (1.0 - WORTHWHILE) * self._burden_s(p, found[0]) if found is not None else float("inf"),
        )
        if mixed is None or not self._may_pass(p, *mixed):
            return found
        return mixed

    def _seat(self, p: Prospect, offers: Sequence[Estimate]) -> Found | None:
        for offer in offers:
            if offer.devices <= self.room.total:
                devices = self.room.find(p.job, offer)
                if devices is not None:
                    return offer, devices
        return None

    def _better_later(self, p: Prospect, offer: Estimate, opening: Opening | None) -> bool:
        """Waiting for better ends sooner than starting now, growing included."""
        if opening is None:
            return False
        return opening.at_s + self._burden_s(p, opening.offer) < self._grown_s(p, offer, opening)

    def _grown_s(self, p: Prospect, offer: Estimate, opening: Opening | None) -> float:
        """The burden of starting so now and moving to what comes free, where that is less than staying."""
        now_s = self._burden_s(p, offer)
        if opening is None:
            return now_s
        best_s = self._burden_s(p, opening.offer)
        meanwhile_s = opening.at_s * now_s / max(p.left_s(offer), 1e-9)  # its devices paid for
        grown_s = meanwhile_s + self.mobility.move_s(p.job) + best_s * max(1.0 - opening.at_s / max(now_s, 1e-9), 0.0)
        return min(now_s, grown_s)

    def _start(self, p: Prospect, offer: Estimate, devices: list[Device]) -> bool:
        where = seat(p.job, offer, devices)
        self._occupy(p.left_s(offer), devices)
        self.room.take(devices, where.cores, where.memory_bytes)
        self.view.free.take(where.ranks, where.cores, where.memory_bytes)
        self.view.quotas.take(p.job.spec.tenant, len(devices))
        self.spare -= max(len(devices) - self.sizes.get(p.job.id, 0), 0)
        if self.mixing is not None:
            self.started.append(Seated(p, offer, devices, len(self.proposal.starts)))
        self.proposal.starts.append(started_as(p, offer, devices))
        return True

    def share_out(self) -> None:
        """Jobs that start in this pass exchange devices of different types where that serves them better in all.

        Not where a place is kept for somebody: how long each device is held was weighed for that.
        """
        if self.mixing is None or self.reservation is not None:
            return
        found = assign(self.started, self.view, self.mixing, self.room)
        for one, (offer, devices) in zip(self.started, found or [], strict=False):
            self.proposal.starts[one.number] = started_as(one.p, offer, devices)

    def _refuse(self, p: Prospect, opening: Opening | None) -> bool:
        least = p.curve.points[p.curve.least]
        offer = least if opening is None else opening.offer
        if opening is not None:
            if self.reservation is None:
                spare = self.forecast.free_at(offer.device_type, opening.at_s)
                for host, count in opening.hosts.items():
                    spare[host] = spare.get(host, 0) - count
                self.reservation = Reservation(opening.at_s, offer.device_type, spare)
            self.forecast.take(offer.device_type, opening.hosts)
        said = f"waits for {offer.devices} free device{'s' * (offer.devices > 1)}, on which {offer.plan} is worth it"
        self.proposal.refusals.append(Refusal(p.job.id, said, devices=offer.devices))
        return False

    # --- those who make room ------------------------------------------------------------------------------------------

    def _make_room(self, p: Prospect, offers: Sequence[Estimate], ends_s: float) -> bool:
        """Others shrink, or sit elsewhere, where that spares the job more than it costs them; whether room comes."""
        least = offers[-1].devices if ends_s == float("inf") else offers[0].devices
        if self.leaving > 0 and self.room.total + self.leaving >= least > self.room.total:
            self.leaving -= least - self.room.total
            self.proposal.refusals.append(Refusal(p.job.id, "devices for it are being freed", devices=least))
            return True
        claims = {v.job.id for v in self.running if _yields(v.job, p.job)}
        best: tuple[float, Making] | None = None
        clearing = Clearing(self.room, p, self._movable())
        for offer in offers[:3]:
            run_s = self._burden_s(p, offer)
            if run_s >= ends_s and not claims:
                break
            making = clearing.make(offer, lambda v: self._sizes_of(v, v.job.id in claims), self.mobility.cost_s)
            if making is None:
                continue
            lost_s = sum(change.lost_s for change in making.changes if change.v.job.id not in claims)
            saved_s = ends_s - run_s - self.habits.shrink * lost_s
            by_right = bool(claims) and all(change.v.job.id in claims for change in making.changes)
            if not making.changes or not (saved_s > 0 or (by_right and ends_s > run_s)):
                continue
            if best is None or saved_s > best[0]:
                best = (saved_s, making)
        if best is None:
            return False
        making = to_shares(best[1], self.sizes, self.mobility, claims)
        why = (
            f"would be {duration(max(best[0], 0.0))} worse off otherwise" if ends_s < 1e9 else "cannot start otherwise"
        )
        for change in making.changes:
            self.room.take(change.devices, {}, {})
            claim = _claim(p.job) if change.v.job.id in claims else why
            self._move(change.v, change.offer, change.devices, f"makes room for {p.job.spec.name}, which {claim}")
        self.room.take(making.now, {}, {})
        said = f"its {making.offer.devices} devices are being freed"
        self.proposal.refusals.append(Refusal(p.job.id, said, devices=making.offer.devices))
        return True

    def _sizes_of(self, v: Prospect, by_right: bool) -> tuple[Estimate, ...]:
        """What a running job may be changed to for the sake of others, largest first."""
        least = v.curve.least if by_right else max(min(self.sizes.get(v.job.id, 0), len(v.devices)), v.curve.least)
        return tuple(
            x
            for x in v.curve.upto(len(v.devices))
            if x.devices >= least and (by_right or self.mobility.within_budget(v, x))
        )


def started_as(p: Prospect, offer: Estimate, devices: Sequence[Device]) -> Start:
    """The start of a job so."""
    where = seat(p.job, offer, devices)
    reason = (
        f"{offer.plan} on {_names(devices)}{shared_by(offer)}: {duration(p.left_s(offer))} to go, by what is known of "
        "its speed"
    )
    return Start(p.job.id, offer.plan, where.ranks, where.cores, where.memory_bytes, reason)


def _yields(victim: Job, job: Job) -> bool:
    """Whether the one has a right to what the other has, beyond what its guarantee says."""
    return job.priority > victim.priority or (
        job.spec.guaranteed and not victim.spec.guaranteed and job.priority >= victim.priority
    )


def _claim(job: Job) -> str:
    return "is guaranteed" if job.spec.guaranteed else f"has priority {job.priority}"


def _names(devices: Sequence[Device]) -> str:
    return ", ".join(dict.fromkeys(str(d.host) for d in devices))
