"""Handlers of claims on devices and bookings, their start, end and removal, and of notices to users."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import TimerKind
from clusterd.core.lifecycle import stopping
from clusterd.core.lifecycle.context import HandlerContext
from clusterd.core.queueing import bookings
from clusterd.core.state import Outcome
from clusterd.types import AttemptState, DeviceClaim, DeviceId, JobKind
from clusterd.units import counted, duration


def on_devices_claimed(ctx: HandlerContext, event: e.DevicesClaimed) -> None:
    claim = event.claim
    ctx.state.device_claims[claim.id] = replace(claim, unused=dict.fromkeys(claim.devices if claim.owner else ()))
    ctx.state.last_device_claim = max(ctx.state.last_device_claim, int(claim.id))
    ctx.state.reservation = None  # it may count on these devices; the pass gives a new one
    update_claims(ctx)


def on_device_claim_removed(ctx: HandlerContext, event: e.DeviceClaimRemoved) -> None:
    if (claim := ctx.state.device_claims.get(event.claim)) is not None:
        _end(ctx, claim)
        update_claims(ctx)


def on_notice_posted(ctx: HandlerContext, event: e.NoticePosted) -> None:
    ctx.state.notice = f"{event.by}: {event.text}" if event.text and event.by else event.text


def update_claims(ctx: HandlerContext) -> None:
    """`refresh`, with a pass after it."""
    refresh(ctx)
    ctx.pass_due = True


def refresh(ctx: HandlerContext) -> None:
    """Mark the devices of active claims, and set the timers of starts and ends; claims that are over are forgotten.

    Claims are by the wall clock: they are not shifted when it is set. Devices that a booking does not use are released.
    """
    state, now_s = ctx.state, ctx.now_s
    claims = state.device_claims
    for claim in [c for c in claims.values() if c.until_s is not None and c.until_s <= now_s]:
        _end(ctx, claim)
    for claim in [c for c in claims.values() if c.unused and c.is_active(now_s)]:
        _release_unused(ctx, claim)
    active: dict[DeviceId, DeviceClaim] = {}
    # An operator's claim counts before a booking of the same device.
    for claim in sorted(claims.values(), key=lambda claim: bool(claim.owner)):
        if claim.is_active(now_s):
            active |= {device: claim for device in claim.devices if device not in active}
        _set_timer(ctx, claim)
    before = {device for host in state.hosts.values() for device in host.claimed}
    for host in state.hosts.values():
        host.claimed = {device: str(claim) for device, claim in active.items() if device.startswith(f"{host.id}:")}
    for device, claim in active.items():
        if claim.drain and device not in before:
            _requeue_holders(ctx, device, claim)
    for job in [state.jobs[job] for job in state.active]:
        attempt, own = job.attempt, job.spec.booking
        if own and own not in claims and attempt is not None and attempt.state is not AttemptState.STOPPING:
            stopping.stop(ctx, attempt, Outcome.TIME_LIMIT, f"its booking {own} is over")


def _end(ctx: HandlerContext, claim: DeviceClaim) -> None:
    """Forget a claim that is over, or is removed."""
    del ctx.state.device_claims[claim.id]
    ctx.cancel_timer(TimerKind.CLAIM, claim.id)
    if claim.owner:
        bookings.note_over(ctx.state, claim, len(claim.devices), ctx.now_s)


def _set_timer(ctx: HandlerContext, claim: DeviceClaim) -> None:
    """Set the timer of a claim's start, else of its end, or of the release of what it has not used."""
    times = {"begins": claim.from_s}
    if claim.from_s <= ctx.now_s:
        since_s = min((s for s in claim.unused.values() if s is not None), default=inf)
        times = {"releases what it has not used": since_s + bookings.UNUSED_S}
        times["ends"] = claim.until_s if claim.until_s is not None else inf
    what, next_s = min(times.items(), key=lambda each: each[1])
    if next_s == inf:
        ctx.cancel_timer(TimerKind.CLAIM, claim.id)
    elif ctx.state.timers.get(e.Timer(TimerKind.CLAIM, claim.id)) != next_s:
        noun = "booking" if claim.owner else "claim"
        reason = f"{noun} {claim.id} {what}{f': {claim.reason}' if claim.reason else ''}"
        ctx.set_timer(TimerKind.CLAIM, claim.id, next_s, reason)


def _release_unused(ctx: HandlerContext, booking: DeviceClaim) -> None:
    """Release the devices of a booking that no job of it has used for too long; others' jobs may still be on some."""
    state, unused = ctx.state, dict[DeviceId, float | None]()
    for device, since_s in booking.unused.items():
        jobs = state.jobs_on(device)
        if not any(state.jobs[job].spec.booking == booking.id for job in jobs):  # one that moved there, else
            unused[device] = None if jobs else ctx.now_s if since_s is None else since_s
    due = {device for device, s in unused.items() if s is not None and s + bookings.UNUSED_S <= ctx.now_s}
    left = tuple(device for device in booking.devices if device not in due)
    if due:
        few = f"{', '.join(sorted(due))} {'is' if len(due) == 1 else 'are'} free for others: no job of booking"
        reason = f"{few} {booking.id} used {'it' if len(due) == 1 else 'them'} for {duration(bookings.UNUSED_S)}"
        more = f"; it keeps {counted(len(left), 'device')}" if left else "; it is over"
        ctx.decide(
            d.ReleaseBooked(
                cause=ctx.cause, reason=reason + more, claim=booking.id, user=booking.owner, devices=tuple(sorted(due))
            )
        )
    if not left:
        _end(ctx, booking)
        return
    if due:
        bookings.note_over(state, booking, len(due), ctx.now_s)
    kept = {device: since_s for device, since_s in unused.items() if device not in due}
    if (left, kept) != (booking.devices, booking.unused):
        state.device_claims[booking.id] = replace(booking, devices=left, unused=kept)


def _requeue_holders(ctx: HandlerContext, device: DeviceId, claim: DeviceClaim) -> None:
    """Stop the jobs on a device of a claim that drains, unless they can be migrated while they run."""
    for job in map(ctx.state.jobs.__getitem__, ctx.state.jobs_on(device)):
        attempt = job.attempt
        if attempt is not None and attempt.state is not AttemptState.STOPPING and job.spec.kind is not JobKind.ELASTIC:
            stopping.stop(ctx, attempt, Outcome.PREEMPTED, f"queued again: {device} is {claim}")
