"""Starts of the jobs of bookings that have begun, each on what it requests of its booking's free devices."""

from __future__ import annotations

from clusterd.core.allocation.request_grant import allocate
from clusterd.core.queueing.bookings import claim_against, ends_s
from clusterd.core.view import Proposal, Refusal, Start, View
from clusterd.types import DeviceId


def start_booked(view: View, proposal: Proposal) -> None:
    """Start jobs of bookings by priority, then arrival, or record what they wait for; the view's ledger is charged."""
    taken: set[DeviceId | None] = set()
    for job in sorted(view.of_bookings, key=lambda job: (-job.priority, job.submitted_s, len(job.id), job.id)):
        booking = view.claims.get(job.spec.booking)
        if booking is None or not booking.is_active(view.now_s):
            continue  # as in a view that is made for a question about other jobs
        view.free.withhold(view.calendar.kept(0.0, ends_s(view.claims, job) - view.now_s, but=booking.id))
        here = [host.id for host in view.free.hosts.values() if any(d.id in booking.devices for d in host.devices)]
        free = view.free.only(here)
        free.take([*free.all_devices()])
        free.shared.clear()
        for host in free.hosts.values():
            booked = [d for d in host.devices_beside_claims if d.id in booking.devices]
            there = [d for d in booked if not claim_against(view.claims, job.spec, host, d.id)]
            free.put(d for d in there if d.id not in view.calendar.held | taken)
        answer = allocate(job, view, free)
        if isinstance(answer, Refusal):
            reason = f"{answer.reason}, of booking {booking.id}" if answer.is_shortage else answer.reason
            proposal.refusals.append(Refusal(job.id, reason, is_permanent=answer.is_permanent))
            continue
        where = answer.placement
        taken |= {place.device for place in where.ranks}
        view.free.take((), where.booked)
        view.calendar.use(booking.id, where.booked)
        view.quotas.take(job.spec, sum(place.device is not None for place in where.ranks))
        reason = f"{answer.reason}, by booking {booking.id}"
        proposal.starts.append(Start(job.id, answer.plan, where.ranks, where.booked, reason))
    view.free.withhold(view.calendar.kept(0.0, 0.0))
