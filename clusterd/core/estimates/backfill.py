"""Backfill: which jobs may start before the job with the reservation, since they do not delay it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import zip_longest

from clusterd.core.booked import Placement
from clusterd.core.estimates.availability import Hold
from clusterd.core.estimates.expected_time import Ends
from clusterd.core.ledger import Ledger
from clusterd.types import Device

HOSTS_TRIED = 4
"""Hosts of the reserved job without each of which another place is tried for it."""


class Backfill:
    """Limits that a reservation sets to the other jobs: they end before its start, or leave its job a place then.

    Attributes:
        at_s: expected start of the reserved job, from now: whoever ends before it by a time limit does not delay it.
        soonest_s: earliest start that was expected so far: likewise, for ends that are only foreseen.
        place: where the reserved job fits at its start; None: nowhere.
        bound: limits that the promised start sets, where one was promised.
    """

    def __init__(self, at_s: float, soonest_s: float, left: Ledger, find: Callable[[Ledger], Placement | None]) -> None:
        """Set the limits.

        Args:
            left: what will be free at the start, in a copy of its own.
            find: place of the reserved job in a ledger.
        """
        self.at_s = at_s
        self.soonest_s = soonest_s
        self.bound: Backfill | None = None
        self._left = left
        self._find = find
        self.place = find(left)

    def admits(self, hold: Hold, yields: bool) -> bool:
        """True where a grant does not delay the reserved job.

        Args:
            yields: its job gives the devices back when the promised start has come.
        """
        if not self._ends_before(hold.ends) and self._touches(hold) and self._find(self._without(hold)) is None:
            return False
        return self.bound is None or yields or self.bound.admits(hold, yields)

    def take(self, hold: Hold, yields: bool) -> None:
        """Record a grant."""
        if not self._ends_before(hold.ends):
            self._left = self._without(hold)
            self.place = self._find(self._left) or self.place
            self.__dict__.pop("_places", None)
        if self.bound is not None and not yields:
            self.bound.take(hold, yields)

    def needs(self, devices: Iterable[Device]) -> bool:
        """True where the reserved job's place is on one of these devices."""
        places = {rank.device for rank in self.place.ranks} if self.place is not None else set()
        return any(device.id in places for device in devices)

    def limited(self, ledger: Ledger, ends: Ends, yields: bool) -> Iterator[Ledger]:
        """Copies of the ledger without what the reserved job needs when a job with these ends still runs.

        One for each place of the reserved job that was tried.
        """
        mine = [] if self._ends_before(ends) else self._places
        bound = self.bound._places if self.bound is not None and not yields else []
        for place, promised in zip_longest(mine, bound, fillvalue=None) if mine or bound else [(None, None)]:
            found = ledger.copy()
            if mine:
                self._take_needed(place or mine[0], found)
            if bound and self.bound is not None:
                self.bound._take_needed(promised or bound[0], found)
            yield found

    @cached_property
    def _places(self) -> list[Placement]:
        """The place of the reserved job, and others without one of its hosts."""
        if self.place is None:
            return []
        hosts = list(self.place.booked.cores)[:HOSTS_TRIED]
        others = (self._find(self._left.only(self._left.hosts.keys() - {host})) for host in hosts)
        return [self.place, *(other for other in others if other is not None)]

    def _take_needed(self, place: Placement, found: Ledger) -> None:
        """Take out what the reserved job needs at a place."""
        needed = {rank.device for rank in place.ranks}
        for host in place.booked.cores:
            for name, left in self._left.devices[host].items():
                spare = len(left) - len(left.keys() & needed)
                here = [d for d in found.devices[host].get(name, {}).values() if d.id in left]
                found.take(here[max(spare, 0) :])
                if spare <= 0:  # whoever joins the jobs on a device keeps it longer
                    found.shared = {key: x for key, x in found.shared.items() if key not in left}
        for host, cores in place.booked.cores.items():
            memory_bytes = self._left.memory_bytes[host] - place.booked.memory_bytes.get(host, 0)
            found.cores[host] = min(found.cores[host], self._left.cores[host] - cores)
            found.memory_bytes[host] = min(found.memory_bytes[host], memory_bytes)

    def _ends_before(self, ends: Ends) -> bool:
        return ends.latest_s <= self.at_s or ends.foreseen_s <= self.soonest_s

    def _touches(self, hold: Hold) -> bool:
        """True where a grant takes something on the hosts of the reserved job."""
        hosts = self.place.booked.cores if self.place is not None else {}
        return any(device.host in hosts for device in hold.devices) or any(host in hosts for host in hold.booked.cores)

    def _without(self, hold: Hold) -> Ledger:
        found = self._left.copy()
        found.take(hold.devices, hold.booked)
        return found
