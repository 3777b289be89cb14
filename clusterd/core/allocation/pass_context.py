"""What the second half of the third stage stands on: the books of one pass, and what seconds and devices are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from clusterd.core.allocation.migration_cost import DEFAULT_HABITS, Habits, Mobility, fits_beside
from clusterd.core.estimates.availability import Forecast, Reservation
from clusterd.core.estimates.job_forecast import Prospect
from clusterd.core.ledger import Room, per_host, seat
from clusterd.core.performance_table import Estimate
from clusterd.core.placement.heterogeneous_search import Found, Mixing, as_if_free
from clusterd.core.view import Move, Proposal, View
from clusterd.types import Device, JobId


@dataclass(slots=True)
class Seated:
    """A job that starts in this pass, and where."""

    p: Prospect
    offer: Estimate
    devices: list[Device]
    number: int  # among the proposal's starts


@dataclass(slots=True)
class Bargain:
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
    mixing: Mixing | None = None  # where devices of several types can serve one job
    spare: int = 0  # devices beyond all sizes
    started: list[Seated] = field(default_factory=list)  # in the order of the proposal's starts
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

    # --- what it is worth ---------------------------------------------------------------------------------------------

    def _burden_s(self, p: Prospect, offer: Estimate) -> float:
        """Seconds that running so costs: the job its own time, those behind it what its devices could do for them."""
        return p.left_s(offer) * (1.0 + self._price(p, self.habits.price) * offer.devices)

    def _price(self, p: Prospect, each: float) -> float:
        """Of a device, in shares of the time that it is held; `each`: for each of those behind the job."""
        return each * self.behind.get(p.job.id, 0) / self.total

    def _at_most(self, p: Prospect) -> int:
        may = len(p.devices) + self.view.quotas.left(p.job.spec.tenant)
        return min(max(self.sizes.get(p.job.id, 0), 1), may)

    def _gain_s(self, p: Prospect, offer: Estimate) -> float:
        """Seconds saved by running so, the move and what the further devices could do for others paid."""
        price = self._price(p, self.habits.thrift)
        cost_s = self.mobility.cost_s(p, offer)
        then_s = (p.left_s(offer) + cost_s) * (1.0 + price * offer.devices)
        return p.now_s * (1.0 + price * len(p.devices)) - then_s

    def _most_mixed(self, p: Prospect, most: int) -> int:
        """Devices of several types: beyond what one type gives, what nobody else is to have."""
        size = self.sizes.get(p.job.id, 0)
        more = max(self.spare, 0) if size >= max(p.curve.points) else 0
        return min(max(most, size + more), len(p.devices) + self.view.quotas.left(p.job.spec.tenant))

    # --- books and moves ----------------------------------------------------------------------------------------------

    def _may_pass(self, p: Prospect, offer: Estimate, devices: Sequence[Device]) -> bool:
        """The one who is kept a place starts no later for it (backfill)."""
        return self.reservation is None or self.reservation.admits(p.left_s(offer), devices)

    def _occupy(self, left_s: float, devices: Sequence[Device]) -> None:
        self.forecast.occupy(devices)
        if self.reservation is not None:
            self.reservation.take(left_s, devices)

    def _find_anew(self, p: Prospect, offers: Sequence[Estimate]) -> Found | None:
        """The first of these offers that a running job can have, with what it holds already."""
        own = {d.id for d in p.devices}

        def look() -> Found | None:
            for offer in offers:
                devices = self.room.find(p.job, offer, per_host(p.devices), own)
                if devices is not None and self._may_pass(p, offer, [d for d in devices if d.id not in own]):
                    return offer, devices
            return None

        return as_if_free(self.room, p, look)

    def _move(self, p: Prospect, offer: Estimate, devices: list[Device], why: str) -> None:
        where = seat(p.job, offer, devices)
        self.moved.add(p.job.id)
        reason, crowded = f"{offer.plan}: {why}", not fits_beside(p, offer)
        self.proposal.moves.append(
            Move(p.job.id, offer.plan, where.ranks, where.cores, where.memory_bytes, reason, may_restart=crowded)
        )

    def _may_move(self, p: Prospect) -> bool:
        return p.job.id not in self.moved and self.mobility.may_move(p)

    def _movable(self) -> list[Prospect]:
        """Those that may be moved now; asked for each who waits, so it is kept until somebody is moved."""
        if self._asked != len(self.moved):
            self._asked = len(self.moved)
            self._may = [v for v in self.running if self._may_move(v)]
        return self._may
