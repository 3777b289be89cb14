"""Handlers of claims on devices, their start, end and removal, and of notices to users."""

from __future__ import annotations

from clusterd.core import events as e
from clusterd.core.events import TimerKind
from clusterd.core.lifecycle import stopping
from clusterd.core.lifecycle.context import HandlerContext
from clusterd.core.state import Outcome
from clusterd.types import AttemptState, DeviceClaim, DeviceId, JobKind


def on_devices_claimed(ctx: HandlerContext, event: e.DevicesClaimed) -> None:
    claim = event.claim
    ctx.state.device_claims[claim.id] = claim
    ctx.state.last_device_claim = max(ctx.state.last_device_claim, int(claim.id))
    ctx.state.reservation = None  # it may count on these devices; the pass gives a new one
    update_claims(ctx)


def on_device_claim_removed(ctx: HandlerContext, event: e.DeviceClaimRemoved) -> None:
    if ctx.state.device_claims.pop(event.claim, None) is not None:
        ctx.cancel_timer(TimerKind.CLAIM, event.claim)
        update_claims(ctx)


def on_notice_posted(ctx: HandlerContext, event: e.NoticePosted) -> None:
    ctx.state.notice = f"{event.by}: {event.text}" if event.text and event.by else event.text


def update_claims(ctx: HandlerContext) -> None:
    """Mark the devices of active claims, and set the timers of starts and ends; claims that are over are forgotten.

    Claims are by the wall clock: they are not shifted when it is set.
    """
    state, now_s = ctx.state, ctx.now_s
    claims = state.device_claims
    for claim in [c for c in claims.values() if c.until_s is not None and c.until_s <= now_s]:
        del claims[claim.id]
        ctx.cancel_timer(TimerKind.CLAIM, claim.id)
    active: dict[DeviceId, DeviceClaim] = {}
    for claim in claims.values():
        if claim.is_active(now_s):
            active |= {device: claim for device in claim.devices if device not in active}
        at_s = claim.from_s if claim.from_s > now_s else claim.until_s
        if at_s is None:
            ctx.cancel_timer(TimerKind.CLAIM, claim.id)
        elif state.timers.get(e.Timer(TimerKind.CLAIM, claim.id)) != at_s:
            ends = "begins" if at_s == claim.from_s else "ends"
            ctx.set_timer(TimerKind.CLAIM, claim.id, at_s, f"claim {claim.id} {ends}: {claim.reason}")
    before = {device for host in state.hosts.values() for device in host.claimed}
    for host in state.hosts.values():
        host.claimed = {device: str(claim) for device, claim in active.items() if device.startswith(f"{host.id}:")}
    for device, claim in active.items():
        if claim.drain and device not in before:
            _requeue_holders(ctx, device, claim)
    ctx.pass_due = True


def _requeue_holders(ctx: HandlerContext, device: DeviceId, claim: DeviceClaim) -> None:
    """Stop the jobs on a device of a claim that drains, unless they can be migrated while they run."""
    for job in map(ctx.state.jobs.__getitem__, ctx.state.jobs_on(device)):
        attempt = job.attempt
        if attempt is not None and attempt.state is not AttemptState.STOPPING and job.spec.kind is not JobKind.ELASTIC:
            stopping.stop(ctx, attempt, Outcome.PREEMPTED, f"queued again: {device} is {claim}")
