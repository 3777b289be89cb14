"""Handlers of events about accounts: agents of other people than the daemon's own on a host.

The scheduler books hosts, not agents. A host is left out for a job whose account has no agent connected there, with
the reason; the ranks of an account whose agent stays away are given up like those of a lost host.
"""

from __future__ import annotations

from collections.abc import Iterable

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.host import Host
from clusterd.core.lifecycle import attempt_events, jobs, stopping
from clusterd.core.lifecycle.adoption import adopt
from clusterd.core.lifecycle.context import HandlerContext
from clusterd.core.lifecycle.migration_events import resume
from clusterd.core.lifecycle.reconcile import attempts_of, reconcile
from clusterd.core.state import Attempt, Job, Migration, Outcome, State
from clusterd.core.timers import TimerKind, account_on
from clusterd.types import AttemptReport, AttemptState, HostId, JobId


def on_account_connected(ctx: HandlerContext, event: e.AccountConnected) -> None:
    host = ctx.state.hosts.get(event.host)
    if host is None:
        return
    host.logins[event.account] = ""
    host.lost_accounts.discard(event.account)
    ctx.cancel_timer(TimerKind.ACCOUNT_LOST, account_on(host.id, event.account))
    for job in _unfinished(ctx.state):
        if job.spec.account == event.account:
            job.failures.excluded_hosts.pop(host.id, None)
    host.withheld = {device: account for device, account in host.withheld.items() if account != event.account}
    adopt(ctx, host, event.account, event.adopted, event.attempts)
    apply_report(ctx, host, event.account, event.attempts)
    ctx.pass_due = True


def on_account_disconnected(ctx: HandlerContext, event: e.AccountDisconnected) -> None:
    host = ctx.state.hosts.get(event.host)
    if host is None:
        return
    was_connected = host.logins.get(event.account) == ""
    host.logins[event.account] = event.why
    for job in _unfinished(ctx.state):
        if why := host.without_login(job.spec.account):
            job.failures.excluded_hosts[host.id] = why
    if was_connected and any(attempts_of(ctx.state, host.id, event.account)):
        watch_account(ctx, host.id, event.account, event.at_s)
    ctx.pass_due = True


def watch_account(ctx: HandlerContext, host: HostId, account: str, since_s: float) -> None:
    """Give up an account's ranks on a host after a while, unless its agent connects before."""
    until_s = since_s + ctx.host_lost_after_s
    reason = f"the agent of {account} on {host} is not connected"
    ctx.set_timer(TimerKind.ACCOUNT_LOST, account_on(host, account), until_s, reason)


def account_lost(ctx: HandlerContext, about: str) -> None:
    """Give up the ranks of an account on a host; their devices are withheld, as the ranks may still run."""
    name, _, account = about.partition(" ")
    host = ctx.state.hosts.get(HostId(name))
    if host is None or not host.logins.get(account):
        return
    why = f"the agent of {account} on {host.id} is lost: {host.logins[account]}"
    host.lost_accounts.add(account)
    for attempt in attempts_of(ctx.state, host.id, account):
        host.withheld.update(dict.fromkeys(attempt.held_on(host.id), account))
        lose_attempt(ctx, attempt, host, why)
    ctx.pass_due = True


def apply_report(ctx: HandlerContext, host: Host, account: str, reports: Iterable[AttemptReport]) -> None:
    """Take in what an agent reports of its account's attempts, and order what follows from the differences."""
    found = reconcile(ctx.state, host, account, reports)
    for known, new in ((host.orphans, found.orphans), (host.unknown_attempts, found.unknown_attempts)):
        for key in [key for key, of in known.items() if of == account]:
            del known[key]
        known.update(dict.fromkeys(new, account))
    attempt_events.quarantine_devices(ctx, host.id)
    for key in found.orphans:
        job_id, number, generation = key
        reason = f"{host.id} still has generation {generation} of attempt {number} of job {job_id}, which is over"
        ctx.stop_ranks(host.id, key, 5.0, reason)
    for attempt in found.stopping:
        stopping.ask_to_stop(ctx, attempt, (host.id,))
    for attempt, generation in found.retired:
        reason = f"generation {generation} of attempt {attempt.number} is over"
        key = (attempt.job, attempt.number, generation)
        ctx.stop_ranks(host.id, key, jobs.grace_s(ctx, attempt), reason)
    for attempt in found.unlaunched:
        jobs.launch(ctx, attempt, f"{host.id} had not started attempt {attempt.number} when contact was lost")
    for attempt in found.ended:
        _repeat_outcome_of_migration(ctx, attempt, host)
        attempt_events.rank_ended(ctx, attempt)
    for attempt in attempts_of(ctx.state, host.id, account):
        runs_here = host.id in attempt.hosts and attempt.state is AttemptState.RUNNING
        if attempt.announced_cores is not None and runs_here:
            reason = f"{host.id} is back, and may have missed it"
            ctx.to_ranks(d.UseCores, attempt, (host.id,), reason, each=attempt.announced_cores)


def _repeat_outcome_of_migration(ctx: HandlerContext, attempt: Attempt, host: Host) -> None:
    """Send ranks on a returned host the outcome of the last migration again, in case they missed it."""
    job = ctx.state.jobs[attempt.job]
    last = job.last_plan_change
    if isinstance(last, Migration) and last.failure and attempt.migration is None:
        stopping.abort_migration(
            ctx, attempt, last.generation, (host.id,), f"{host.id} is back after a failed migration"
        )
    if job.resuming is not None and host.id in attempt.hosts:
        resume(ctx, attempt, f"{host.id} is back after the switch")


def lose_attempt(ctx: HandlerContext, attempt: Attempt, host: Host, why: str) -> None:
    """Give up an attempt's ranks on a host: it goes on from the others, or is stopped."""
    if host.id in attempt.hosts and attempt.state is not AttemptState.STOPPING:
        if not attempt_events.survives_host_loss(ctx, attempt, host):
            stopping.stop(ctx, attempt, Outcome.HOST_LOST, why)
    elif attempt.migration is not None and any(place.host == host.id for place in attempt.migration.places):
        stopping.abandon_migration(ctx, attempt, why)
    stopping.gone_from(ctx, attempt, host.id)
    for generation in list(attempt.retired):
        stopping.retired_gone(ctx, attempt, generation, host.id)


def _unfinished(state: State) -> list[Job]:
    return [state.jobs[JobId(job)] for job in (*state.queue, *state.active)]
