"""Handlers of what happens to the daemon, its timers and its hosts."""

from __future__ import annotations

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.lifecycle import attempts, clock_shift
from clusterd.core.lifecycle.attempt_events import OnAttempts
from clusterd.core.lifecycle.reconcile import reconcile
from clusterd.core.state import Attempt, Description, Host, Outcome, Retired
from clusterd.types import AttemptState, DeviceId, HostId, HostState, JobId

HOST_LOST_AFTER_S = 120.0
"""An unreachable host's ranks are given up after this; until then they are presumed to go on."""

RECOVERY_S = 20.0
"""After a start of the daemon nothing is placed until each host in use has reported, or for this long."""


class OnHosts(OnAttempts):
    """Who is there, who is not, and what that means for what runs there."""

    def __init__(self, host_lost_after_s: float = HOST_LOST_AFTER_S) -> None:
        super().__init__()
        self.host_lost_after_s = host_lost_after_s

    def _on_daemon_started(self, event: e.DaemonStarted) -> None:
        self.state.epoch, self.state.tenants = event.epoch, event.tenants
        for host in self.state.hosts.values():
            if host.state is not HostState.LOST:
                host.go(HostState.CONNECTING, event.at_s, "the daemon has just started")
            host.orphans.clear()
            host.strangers.clear()
        for job_id in self.state.queue:
            job = self.state.jobs[job_id]
            if job.description is Description.ASKED:  # whoever was asked has no one to answer to
                job.description, job.described_on = Description.NEEDED, None
        for job_id in self.state.active:  # whoever led these moves is gone; the old ranks go on, or wait to be told
            attempt = attempts.running(self.state, job_id)
            if attempt.migration is not None:
                self._give_up_migration(attempt, "the daemon ended in the middle of it")
        busy = {host for job in self.state.active for host in attempts.running(self.state, job).all_hosts}
        for host_id in sorted(busy - set(self.state.hosts)):
            self._take_back(host_id)
        self.state.recovering = {h for h in busy if self.state.hosts[h].state is HostState.CONNECTING}
        if self.state.recovering:
            self._set_timer("recovery", event.at_s + RECOVERY_S, "hosts in use are heard first")
        for host_id in sorted(self.state.recovering):
            self._set_timer(f"host-lost:{host_id}", event.at_s + self.host_lost_after_s, f"{host_id} has ranks of ours")
        self._pass_due = True

    def _on_timer_fired(self, event: e.TimerFired) -> None:
        if self.state.timers.get(event.timer, event.at_s) > event.at_s:
            return  # it was due by a clock that has been set since
        self.state.timers.pop(event.timer, None)
        kind, _, about = event.timer.partition(":")
        if kind == "recovery":
            self.state.recovering.clear()
        elif kind == "host-lost":
            self._give_up(HostId(about))
        elif kind == "fault":
            for host in self.state.hosts.values():
                if (fault := host.faults.get(DeviceId(about))) is not None:
                    fault.is_left_out = False
        elif kind == "recover":
            job = self.state.jobs.get(JobId(about))
            if job is not None and job.attempt is not None and job.attempt.state is AttemptState.RUNNING:
                self._survivors_are_late(job.attempt)
        elif kind == "checkpoint":
            self._checkpoint_is_due(self.state.jobs.get(JobId(about)))
        elif kind == "trial":
            self._trial_is_late(JobId(about))
        elif kind == "stall":
            self._may_have_stalled(self.state.jobs.get(JobId(about)))
        elif kind == "limit":
            job = self.state.jobs.get(JobId(about))
            if job is not None and job.attempt is not None and job.attempt.state is not AttemptState.STOPPING:
                self._stop(job.attempt, Outcome.TIME_LIMIT, f"its time limit of {job.spec.time_limit_s:.0f} s is over")
        self._pass_due = True

    def _on_clock_set(self, event: e.ClockSet) -> None:
        clock_shift.shift(self.state, event.by_s)

    def _on_host_added(self, event: e.HostAdded) -> None:
        if event.host not in self.state.hosts:  # two may have asked at once; the first one's may have work by now
            self.state.hosts[event.host] = Host(event.host, since_s=event.at_s, why="not connected yet")

    def _on_host_removed(self, event: e.HostRemoved) -> None:
        if any(self.state.attempts_on(event.host)):
            return  # it was given work after it was looked at: it stays, as whoever asked will see
        self.state.hosts.pop(event.host, None)
        self.state.recovering.discard(event.host)
        self._describe_elsewhere(event.host)
        self._pass_due = True

    def _take_back(self, host_id: HostId) -> None:
        """Have a host that earlier versions removed under its ranks, until they are over."""
        host = Host(host_id, since_s=self._now_s, why="it was removed while ranks of ours were there")
        for attempt in self.state.attempts_on(host_id):
            booked: list[Attempt | Retired] = [r for r in attempt.retired.values() if host_id in r.pending]
            if host_id in attempt.hosts and (attempt.state is not AttemptState.STOPPING or host_id in attempt.pending):
                booked.append(attempt)
            host.cores_used += sum(b.cores.get(host_id, 0) for b in booked)
            host.memory_used_bytes += sum(b.memory_bytes.get(host_id, 0) for b in booked)
        self.state.hosts[host_id] = host

    def _on_host_drained(self, event: e.HostDrained) -> None:
        host = self.state.hosts.get(event.host)
        if host is None:
            return
        host.drained = ": ".join(filter(None, (event.by and f"by {event.by}", event.why))) or "drained"
        self._pass_due = True

    def _on_host_undrained(self, event: e.HostUndrained) -> None:
        host = self.state.hosts.get(event.host)
        if host is None:
            return
        was_drained, host.drained = host.drained is not None, None
        self._forget_faults(host)
        for job_id, number, generation in sorted(host.strangers):
            self._stop_on(host.id, job_id, number, generation, 5.0, f"{event.by or 'somebody'} wants {host.id} clean")
        host.orphans, host.strangers = host.orphans | host.strangers, set()
        for attempt in self.state.attempts_on(event.host):
            if was_drained and attempt.state is AttemptState.RUNNING:
                self._hold(self.state.jobs[attempt.job], f"{event.host} is in use again")
        self._is_fit_again(event.host)
        self._pass_due = True

    def _on_host_connected(self, event: e.HostConnected) -> None:
        host = self.state.hosts.get(event.host)
        if host is None:
            return
        host.go(HostState.UP, event.at_s)
        if host.facts is not None and host.facts.boot_id != event.facts.boot_id:
            self._forget_faults(host)
        host.facts, host.agent, host.agent_home = event.facts, event.agent, event.agent_home
        self.state.recovering.discard(host.id)
        self.state.timers.pop(f"host-lost:{host.id}", None)
        self._is_fit_again(host.id)
        found = reconcile(self.state, host, event.attempts)
        host.orphans, host.strangers = set(found.orphans), set(found.strangers)
        self._leave_out_faulty(host.id)
        for job_id, number, generation in found.orphans:
            reason = f"{host.id} still has generation {generation} of attempt {number} of job {job_id}, which is over"
            self._stop_on(host.id, job_id, number, generation, 5.0, reason)
        for attempt in found.stopping:
            self._stop_on(host.id, attempt.job, attempt.number, attempt.generation, self._grace_s(attempt), attempt.why)
        for attempt, generation in found.retired:
            reason = f"generation {generation} of attempt {attempt.number} is over"
            self._stop_on(host.id, attempt.job, attempt.number, generation, self._grace_s(attempt), reason)
        for attempt in found.unlaunched:
            self._launch(attempt, f"{host.id} had not started attempt {attempt.number} when contact was lost")
        for attempt in found.ended:
            job = self.state.jobs[attempt.job]
            if job.migrations and job.migrations[-1].failure and attempt.migration is None and not attempt.resuming:
                # Whoever was to tell its ranks that the move is off may have had no way to.
                self._abort(
                    attempt, job.migrations[-1].generation, (host.id,), f"{host.id} is back after a failed move"
                )
            if attempt.resuming and host.id in attempt.hosts:
                self._resume(attempt, f"{host.id} is back after the switch")
            self._after_end(attempt)
        for attempt in self.state.attempts_on(host.id):
            if attempt.told_cores is not None and host.id in attempt.hosts and attempt.state is AttemptState.RUNNING:
                said = f"{host.id} is back, and may not have been told"
                self._to_ranks(d.UseCores, attempt, (host.id,), said, each=attempt.told_cores)
        self._pass_due = True

    def _forget_faults(self, host: Host) -> None:
        """Its devices are offered again: it has been started anew, or somebody has seen to it."""
        for device in host.faults:
            self.state.timers.pop(f"fault:{device}", None)
        host.faults.clear()

    def _is_fit_again(self, host: HostId) -> None:
        """Who could not be started there may try once more: something has been done about the host."""
        for job in (*self.state.queue, *self.state.active):
            self.state.jobs[job].unfit.pop(host, None)

    def _on_host_disconnected(self, event: e.HostDisconnected) -> None:
        host = self.state.hosts.get(event.host)
        if host is None:
            return
        if host.state is not HostState.UP:
            host.why = event.why
            return
        host.go(HostState.UNREACHABLE, event.at_s, event.why)
        self._describe_elsewhere(host.id)
        if any(self.state.attempts_on(host.id)):
            until_s = event.at_s + self.host_lost_after_s
            self._set_timer(f"host-lost:{host.id}", until_s, f"{host.id} is unreachable: {event.why}")
        for attempt in list(self.state.attempts_on(host.id)):
            if attempt.orphaned:
                self._recover(attempt)
        self._pass_due = True

    def _describe_elsewhere(self, host: HostId) -> None:
        """Models that were to be told there are asked of another host."""
        for job_id in self.state.queue:
            job = self.state.jobs[job_id]
            if job.described_on == host and job.description is Description.ASKED:
                job.description, job.described_on = Description.NEEDED, None

    def _on_host_changed(self, event: e.HostChanged) -> None:
        if event.host in self.state.hosts:
            self.state.hosts[event.host].facts = event.facts
            self._pass_due = True

    def _give_up(self, host_id: HostId) -> None:
        host = self.state.hosts.get(host_id)
        if host is None or host.state is HostState.UP:
            return
        host.go(HostState.LOST, self._now_s, host.why)
        self.state.recovering.discard(host_id)
        for attempt in list(self.state.attempts_on(host_id)):
            if host_id in attempt.hosts and attempt.state is not AttemptState.STOPPING:
                if not self._outlives(attempt, host):
                    self._stop(attempt, Outcome.HOST_LOST, f"{host_id} is lost: {host.why}")
            elif attempt.migration is not None and any(p.host == host_id for p in attempt.migration.places):
                self._give_up_migration(attempt, f"{host_id} is lost: {host.why}")
            self._gone_from(attempt, host_id)
            for generation in list(attempt.retired):
                self._retired_gone(attempt, generation, host_id)
