"""The scheduler: events in, decisions out, and nothing else.

`handle` is the only way to change the state. It never looks at a clock, a socket or a file: time comes with the events.
Handlers are found by name, ``RankExited`` goes to ``_on_rank_exited``, and stand with what they are about:
`on_hosts`, `on_attempts`, `on_migrations`; jobs and the scheduling pass are here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.lifecycle.host_events import HOST_LOST_AFTER_S, OnHosts
from clusterd.core.policies import POLICIES
from clusterd.core.queueing.dependencies import in_vain, waits_for
from clusterd.core.state import Description, Job, Outcome
from clusterd.core.view import Policy, Proposal, Refusal, View
from clusterd.types import AttemptState, JobKind, JobState

__all__ = ["HOST_LOST_AFTER_S", "Batch", "Scheduler"]

DESCRIPTIONS_AT_ONCE = 2
"""On one host: they share the memory and the few cores that its jobs leave, and a sweep has hundreds."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Events that were handled together, and what the policy wanted after the last of them."""

    events: Sequence[e.Event]
    proposal: Proposal | None = None  # None: it was not asked, or nobody wrote it down


class Scheduler(OnHosts):
    """Holds the state and decides; deterministic, so that replaying the journal gives the same decisions.

    Attributes:
        proposed: what the policy wanted in the last batch, without what it had said before; None: it was not asked.
    """

    def __init__(self, policy: Policy | None = None, host_lost_after_s: float = HOST_LOST_AFTER_S) -> None:
        super().__init__(host_lost_after_s)
        self.policy = policy or POLICIES["default"]()
        self.proposed: Proposal | None = None

    def handle(self, *events: e.Event) -> list[d.Decision]:
        """Take in what happened at one instant, and decide once about all of it.

        Events given together are one batch: a single scheduling pass follows the last of them.
        """
        return self.replay(Batch(events))

    def replay(self, batch: Batch) -> list[d.Decision]:
        """The same for what has been decided before: whatever the policy would want today, that is what happened."""
        self._out = []
        self.proposed = None
        for event in batch.events:
            self._cause, self._now_s = event.id, event.at_s
            _HANDLERS[type(event)](self, event)
        if self._pass_due or batch.proposal is not None:  # an earlier version may have had reasons of its own
            self._pass_due = False
            self._pass(batch.proposal)
        return self._out

    # --- the pass -----------------------------------------------------------------------------------------------------

    def _pass(self, proposal: Proposal | None) -> None:
        """`proposal`: what was wanted at that time; None: the policy is asked."""
        if not self.state.queue and not self.state.active:
            return
        self._next_round()
        self._end_what_waits_in_vain()
        for job in map(self.state.jobs.__getitem__, self.state.queue):
            if (awaited := waits_for(job.spec, self.state)) is not None:
                self._hold(job, awaited)
        self._describe_models()
        self._try_plans()
        if self.state.recovering:
            names = ", ".join(sorted(self.state.recovering))
            for job_id in self.state.queue:
                self._hold(self.state.jobs[job_id], f"the daemon has just started and waits to hear from {names}")
            return
        if proposal is None:
            proposal = self.policy.propose(View(self.state, self._now_s))
        news: list[Refusal] = []
        for preempt in proposal.preempts:
            attempt = self.state.jobs[preempt.job].attempt
            if attempt is not None and attempt.state is not AttemptState.STOPPING:
                self._stop(attempt, Outcome.PREEMPTED, preempt.reason)
        for grant in proposal.grants:
            self._grant(grant)
        for move in proposal.moves:
            if not self._yields_to_trial(move):
                self._move(move)
        for start in proposal.starts:
            stale = self._start(start)
            if stale:
                self._hold(self.state.jobs[start.job], f"the policy's proposal was refused: {stale}")
        for refusal in proposal.refusals:
            job = self.state.jobs[refusal.job]
            if refusal.forever or refusal.reason != job.reason:
                news.append(refusal)
            if refusal.forever:
                self._end_job(job, JobState.FAILED, refusal.reason, exit_code=None)
            else:
                self._hold(job, refusal.reason)
        self.proposed = replace(proposal, refusals=news)
        self._say_who_stays()

    def _end_what_waits_in_vain(self) -> None:
        """Jobs that were to start after one that failed, and those that were to start after these."""
        dependents = [self.state.jobs[job] for job in self.state.queue if self.state.jobs[job].spec.after]
        ended = True
        while ended:
            ended = False
            for job in dependents:
                if job.state is JobState.QUEUED and (why := in_vain(job.spec, self.state.jobs)) is not None:
                    self._end_job(job, JobState.FAILED, why, exit_code=None)
                    ended = True

    def _say_who_stays(self) -> None:
        """Whoever waits for a drained host is told what keeps it busy."""
        drained = {host.id for host in self.state.hosts.values() if host.drained is not None}
        for job in map(self.state.jobs.__getitem__, self.state.active if drained else ()):
            attempt = job.attempt
            if attempt is None or attempt.state is not AttemptState.RUNNING or attempt.migration or attempt.resuming:
                continue
            if leaving := sorted(drained.intersection(attempt.hosts)):
                until = "its end" if job.spec.kind is JobKind.COMMAND else "there is room elsewhere, or its end"
                self._hold(job, f"{', '.join(leaving)} is drained: it stays there until {until}")

    def _next_round(self) -> None:
        """Keep a round timer for policies that want one, while there is work."""
        interval_s = self.policy.interval_s
        if interval_s is not None and "round" not in self.state.timers:
            # On a grid: rounds do not drift, whenever work comes.
            at_s = (self._now_s // interval_s + 1.0) * interval_s
            self._set_timer("round", at_s, f"{self.policy.name} thinks again every {interval_s:g} s")

    def _describe_models(self) -> None:
        queued = [self.state.jobs[job] for job in self.state.queue]
        new = [job for job in queued if job.description is Description.NEEDED and job.not_before_s <= self._now_s]
        new = [job for job in new if waits_for(job.spec, self.state) is None]
        if not new:
            return
        usable = [host for host in self.state.hosts.values() if host.unusable is None]
        asked = Counter(job.described_on for job in queued if job.described_on is not None)
        room = [host for host in usable if asked[host.id] < DESCRIPTIONS_AT_ONCE]
        for job in sorted(new, key=lambda job: -job.priority):
            host = min(
                (h for h in room if job.admits(h.id)), key=lambda h: (asked[h.id], h.cores_used, h.id), default=None
            )
            if host is None:
                if not any(job.admits(h.id) for h in usable):
                    self._hold(job, "waits for a host to tell its model on")
                continue
            job.description, job.described_on = Description.ASKED, host.id
            asked[host.id] += 1
            room = [h for h in room if asked[h.id] < DESCRIPTIONS_AT_ONCE]
            reason = f"{job.spec.name} is new here: its model is built without storage to learn its shape"
            self._decide(d.DescribeModel(cause=self._cause, reason=reason, job=job.id, host=host.id))

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def _on_job_submitted(self, event: e.JobSubmitted) -> None:
        spec = event.spec
        job = Job(
            event.job, spec, priority=spec.priority, submitted_s=event.at_s, queued_s=event.at_s, born_s=event.at_s
        )
        if spec.kind is JobKind.ELASTIC:
            job.description = Description.NEEDED
        self.state.jobs[job.id] = job
        self.state.queue[job.id] = None
        self._pass_due = True

    def _on_job_cancelled(self, event: e.JobCancelled) -> None:
        job = self.state.jobs[event.job]
        reason = f"cancelled{f' by {event.by}' if event.by else ''}{', at once' if event.now else ''}"
        if event.now and job.attempt is not None:
            self._cut_short(job.attempt, reason)
        if job.state is JobState.QUEUED:
            self._end_job(job, JobState.CANCELLED, reason, exit_code=None)
        elif job.attempt is not None and job.attempt.state is not AttemptState.STOPPING:
            self._stop(job.attempt, Outcome.CANCELLED, reason)
        elif job.attempt is not None and job.attempt.outcome is not Outcome.TIME_LIMIT:  # which ends it as surely
            job.attempt.outcome, job.attempt.why = Outcome.CANCELLED, reason
        self._pass_due = True

    def _on_job_reprioritised(self, event: e.JobReprioritised) -> None:
        self.state.jobs[event.job].priority = event.priority
        self._pass_due = True

    def _on_model_described(self, event: e.ModelDescribed) -> None:
        job = self.state.jobs[event.job]
        if not job.state.is_final:
            job.shape, job.description, job.described_on = event.shape, Description.DONE, None
            job.model = event.model
            self._pass_due = True

    def _on_model_not_described(self, event: e.ModelNotDescribed) -> None:
        job = self.state.jobs[event.job]
        if job.state is not JobState.QUEUED:
            return
        host, job.description, job.described_on = job.described_on, Description.NEEDED, None
        if event.is_infrastructure and host is not None and self._try_elsewhere(job, host, event.why):
            job.reason = event.why
        elif event.is_infrastructure and not event.lasts:
            self._lost_once_more(job, event.why)
        else:
            self._end_job(job, JobState.FAILED, event.why, exit_code=1)
        self._pass_due = True


def _handlers() -> dict[type[e.Event], Callable[[Scheduler, e.Event], None]]:
    """Every event kind with its method; a kind without one fails at import, not in the night."""
    return {
        kind: getattr(Scheduler, "_on_" + re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower())
        for name, kind in e.EVENTS.items()
    }


_HANDLERS = _handlers()
