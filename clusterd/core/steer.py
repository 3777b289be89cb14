"""Third stage, second half: what of the desired sizes is worth doing now, moves not being free.

Five questions, in this order: who must leave a drained host; does a waiting job start now or do better to wait; do
others make room for it; for whom is a place kept; and who grows into what is left. A move is made only if what it saves
is more than what it costs, by a margin, and within a budget for the whole life of a job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from clusterd.core import elastic
from clusterd.core.clearing import Clearing, Making
from clusterd.core.forecast import Forecast, Opening
from clusterd.core.mobility import DEFAULT_HABITS, Habits, Mobility, fits_beside
from clusterd.core.outlook import Estimate
from clusterd.core.prospects import Prospect
from clusterd.core.room import Room, seat
from clusterd.core.state import Job
from clusterd.core.view import Move, Proposal, Refusal, Start, View
from clusterd.types import Device, HostId, JobId
from clusterd.units import duration

MOST_CONSIDERED = 12
"""Waiting jobs for which the future and other people's devices are looked at, in one pass."""


@dataclass(slots=True)
class Reservation:
    """The place that is kept for the first who must wait: others may have it until then, or what is left beside it."""

    at_s: float  # from now
    device_type: str
    spare: dict[HostId, int]  # devices of each host that will be left then


@dataclass(slots=True)
class Steering:
    """One pass over jobs whose speed is known."""

    view: View
    room: Room
    sizes: dict[JobId, int]
    running: Sequence[Prospect]  # that are not in the middle of anything
    proposal: Proposal
    habits: Habits = DEFAULT_HABITS
    total: int = 1  # devices that this pass may give
    behind: Mapping[JobId, int] = field(default_factory=dict)  # jobs with more work left
    leaving: int = 0  # devices that moves under way will free
    forecast: Forecast = field(init=False)
    mobility: Mobility = field(init=False)
    reservation: Reservation | None = None
    considered: int = 0
    moved: set[JobId] = field(default_factory=set)
    _may: list[Prospect] = field(default_factory=list)
    _asked: int = -1

    def __post_init__(self) -> None:
        self.forecast = Forecast(self.room, self.running)
        self.mobility = Mobility(self.view, self.habits)

    # --- those who must leave -----------------------------------------------------------------------------------------

    def evacuate(self) -> None:
        """Jobs on drained hosts: the fastest offer, no larger than what they have, that there is room for elsewhere."""
        for p in self.running:
            why = elastic.must_leave(p.job, self.view)
            if not why:
                continue
            offers = p.curve.upto(len(p.devices))
            if p.job.pinned:
                offers = tuple(x for x in offers if p.now is not None and x.plan == p.now.plan)
            found = self._find_anew(p, offers)
            if found is not None:
                offer, devices = found
                own = {d.id for d in p.devices}
                self.room.take(devices, {}, {})
                self._occupy(p.left_s(offer), offer, [d for d in devices if d.id not in own])
                self._move(p, offer, devices, why)

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
        found = self._seat(p, offers)
        if found is not None and found[0] == offers[0] and self._may_pass(p, *found):
            return self._start(p, *found)
        if self.considered >= MOST_CONSIDERED:
            if found is not None and self._may_pass(p, *found):
                return self._start(p, *found)
            return self._refuse(p, None)
        self.considered += 1
        opening = self.forecast.opening(offers, lambda x: self._burden_s(p, x))
        if found is not None and not self._may_pass(p, *found):
            found = None
        if found is not None and not self._better_later(p, found[0], opening):
            ends_s = self._burden_s(p, found[0])
        else:
            found, ends_s = None, float("inf")
            if opening is not None:
                ends_s = opening.at_s + self._burden_s(p, opening.offer)
        if self._make_room(p, offers, ends_s):
            return False
        return self._start(p, *found) if found is not None else self._refuse(p, opening)

    def _burden_s(self, p: Prospect, offer: Estimate) -> float:
        """Seconds that running so costs: the job its own time, those behind it what its devices could do for them."""
        price = self.habits.price * self.behind.get(p.job.id, 0) / self.total
        return p.left_s(offer) * (1.0 + price * offer.devices)

    def _seat(self, p: Prospect, offers: Sequence[Estimate]) -> tuple[Estimate, list[Device]] | None:
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
        now_s, best_s = self._burden_s(p, offer), self._burden_s(p, opening.offer)
        grown_s = opening.at_s + self.mobility.cost_s(p.job) + best_s * max(1.0 - opening.at_s / max(now_s, 1e-9), 0.0)
        return opening.at_s + best_s < min(now_s, grown_s)

    def _may_pass(self, p: Prospect, offer: Estimate, devices: Sequence[Device]) -> bool:
        """The one who is kept a place starts no later for it (backfill)."""
        kept = self.reservation
        if kept is None or offer.device_type != kept.device_type or p.left_s(offer) <= kept.at_s:
            return True
        return all(count <= kept.spare.get(host, 0) for host, count in _per_host(devices).items())

    def _start(self, p: Prospect, offer: Estimate, devices: list[Device]) -> bool:
        where = seat(p.job, offer, devices)
        self._occupy(p.left_s(offer), offer, devices)
        self.room.take(devices, where.cores, where.memory_bytes)
        self.view.free.take(where.ranks, where.cores, where.memory_bytes)
        self.view.quotas.take(p.job.spec.tenant, len(devices))
        reason = f"{offer.plan} on {_names(devices)}: {duration(p.left_s(offer))} to go, by what is known of its speed"
        self.proposal.starts.append(Start(p.job.id, offer.plan, where.ranks, where.cores, where.memory_bytes, reason))
        return True

    def _occupy(self, left_s: float, offer: Estimate, devices: Sequence[Device]) -> None:
        per_host = _per_host(devices)
        self.forecast.take(offer.device_type, per_host)
        kept = self.reservation
        if kept is not None and offer.device_type == kept.device_type and left_s > kept.at_s:
            for host, count in per_host.items():
                kept.spare[host] = kept.spare.get(host, 0) - count

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
        making = best[1]
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
            if x.devices >= least and fits_beside(v, x) and (by_right or self.mobility.within_budget(v, v.left_s(x)))
        )

    # --- those who grow -----------------------------------------------------------------------------------------------

    def grow(self) -> None:
        """Who is better off with what nobody waits for."""
        wishes: list[tuple[float, JobId, Prospect, list[Estimate]]] = []
        for p in self.running:
            if p.job.id in self.moved or not self._may_move(p):
                continue
            offers = sorted(
                ((self._gain_s(p, x), x) for x in p.curve.upto(self._at_most(p))),
                key=lambda item: -item[0],
            )
            least_s = self.habits.grow * self.mobility.cost_s(p.job)
            good = [
                x
                for gain_s, x in offers
                if gain_s > least_s and self.mobility.within_budget(p, p.left_s(x)) and fits_beside(p, x)
            ]
            if good:
                more = max(good[0].devices - len(p.devices), 1)
                wishes.append((offers[0][0] / more, p.job.id, p, good))
        for _, _, p, good in sorted(wishes, key=lambda w: (-w[0], w[1])):
            self._grow_one(p, good)

    def _at_most(self, p: Prospect) -> int:
        may = len(p.devices) + self.view.quotas.left(p.job.spec.tenant)
        return min(max(self.sizes.get(p.job.id, 0), 1), may)

    def _gain_s(self, p: Prospect, offer: Estimate) -> float:
        """Seconds saved by running so, the move and what the further devices could do for others paid."""
        price = self.habits.thrift * self.behind.get(p.job.id, 0) / self.total
        cost_s = self.mobility.cost_s(p.job)
        then_s = (p.left_s(offer) + cost_s) * (1.0 + price * offer.devices)
        return p.now_s * (1.0 + price * len(p.devices)) - then_s

    def _grow_one(self, p: Prospect, offers: Sequence[Estimate]) -> None:
        found = self._find_anew(p, offers)
        if found is None:
            return
        offer, devices = found
        own = {d.id for d in p.devices}
        more = [d for d in devices if d.id not in own]
        self.room.take(more, {}, {})
        self.view.quotas.take(p.job.spec.tenant, len(more))
        self._occupy(p.left_s(offer), offer, more)
        saved_s, cost_s = p.now_s - p.left_s(offer), self.mobility.cost_s(p.job)
        saved = f"saves {duration(saved_s)} of {duration(p.now_s)}, for {duration(cost_s)}"
        self._move(p, offer, devices, saved)

    def _find_anew(self, p: Prospect, offers: Sequence[Estimate]) -> tuple[Estimate, list[Device]] | None:
        """The first of these offers that a running job can have, with what it holds already."""
        attempt = p.job.attempt
        assert attempt is not None
        self.room.put(p.devices, attempt.cores, attempt.memory_bytes)
        own = {d.id for d in p.devices}
        found: tuple[Estimate, list[Device]] | None = None
        for offer in offers:
            devices = self.room.find(p.job, offer, _per_host(p.devices), own)
            if devices is not None and self._may_pass(p, offer, [d for d in devices if d.id not in own]):
                found = (offer, devices)
                break
        self.room.take(p.devices, attempt.cores, attempt.memory_bytes)
        return found

    # --- moves --------------------------------------------------------------------------------------------------------

    def _move(self, p: Prospect, offer: Estimate, devices: list[Device], why: str) -> None:
        where = seat(p.job, offer, devices)
        self.moved.add(p.job.id)
        self.proposal.moves.append(
            Move(p.job.id, offer.plan, where.ranks, where.cores, where.memory_bytes, f"{offer.plan}: {why}")
        )

    def _may_move(self, p: Prospect) -> bool:
        return p.job.id not in self.moved and self.mobility.may_move(p)

    def _movable(self) -> list[Prospect]:
        """Those that may be moved now; asked for each who waits, so it is kept until somebody is moved."""
        if self._asked != len(self.moved):
            self._asked = len(self.moved)
            self._may = [v for v in self.running if self._may_move(v)]
        return self._may


def _per_host(devices: Sequence[Device]) -> dict[HostId, int]:
    found: dict[HostId, int] = {}
    for device in devices:
        found[device.host] = found.get(device.host, 0) + 1
    return found


def _yields(victim: Job, job: Job) -> bool:
    """Whether the one has a right to what the other has, beyond what its guarantee says."""
    return job.priority > victim.priority or (
        job.spec.guaranteed and not victim.spec.guaranteed and job.priority >= victim.priority
    )


def _claim(job: Job) -> str:
    return "is guaranteed" if job.spec.guaranteed else f"has priority {job.priority}"


def _names(devices: Sequence[Device]) -> str:
    return ", ".join(dict.fromkeys(str(d.host) for d in devices))
