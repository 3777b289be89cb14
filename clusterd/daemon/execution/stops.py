"""Stop of attempts: requests to hosts until no process is left, and collection of logs and steps."""

from __future__ import annotations

import asyncio
import logging
import time

import anyio

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.daemon.hosts import facts
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.storage.archive import Archive
from clusterd.errors import AgentLost, ClusterError
from clusterd.protocol.requests import Stopped, StopRanks
from clusterd.types import HostId

log = logging.getLogger(__name__)

AGAIN_S, AGAIN_MOST_S = 1.0, 60.0
"""Back-off between two tries to stop an attempt, as with a full disk; doubled each time."""

LATE_S = 60.0
"""Time after the grace period until a late stop is logged."""


class Stops:
    """Stops attempts on hosts and reports each stopped one as an event."""

    def __init__(self, engine: Engine, hosts: HostRegistry, archive: Archive) -> None:
        self._engine, self._hosts, self._archive = engine, hosts, archive
        self._state = engine.state

    async def stop(self, decision: d.StopAttempt) -> None:
        """Stop an attempt on one host; returns once nothing is left there, or the host is away."""
        answer = await self._stopped(decision)
        if answer is None:
            return
        if answer.swept:
            log.info("%s: swept %d stragglers of %s", decision.host, len(answer.swept), decision.job)
        try:
            await self._collect(decision, [row.rank for row in answer.ranks])
        except Exception:
            # Its devices are free all the same: nothing of it is left there but files.
            log.exception("logs and steps of attempt %s.%d stay on %s", decision.job, decision.attempt, decision.host)
        await self._engine.report(
            e.AttemptStopped(
                at_s=time.time(),
                job=decision.job,
                attempt=decision.attempt,
                generation=decision.generation,
                host=decision.host,
                ranks=tuple(facts.rank_report(row) for row in answer.ranks),
            )
        )

    async def _stopped(self, decision: d.StopAttempt) -> Stopped | None:
        """Reply of the host that nothing is left; None: it is no longer awaited here."""
        pause_s = AGAIN_S
        while True:
            late_timer = asyncio.get_running_loop().call_later(decision.grace_s + LATE_S, _log_late_stop, decision)
            try:
                request = StopRanks(
                    decision.job,
                    decision.attempt,
                    decision.generation,
                    decision.grace_s,
                    decision.reason,
                    decision.keep,
                    decision.done,
                    decision.save,
                )
                # No time-out: what does not end, as in a read from a dead file server, holds its devices.
                return await self._hosts.request(decision.host, request, timeout_s=None)
            except AgentLost:
                return None  # asked again when the host is back
            except ClusterError as error:
                which = f"attempt {decision.job}.{decision.attempt}"
                log.error(
                    "%s could not stop %s, and is asked again in %.0f s: %s", decision.host, which, pause_s, error
                )
            finally:
                late_timer.cancel()
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, AGAIN_MOST_S)
            if not self._is_pending(decision):
                return None

    def _is_pending(self, decision: d.StopAttempt) -> bool:
        """True while the host is up and its reply is still awaited."""
        host = self._state.hosts.get(decision.host)
        if host is None or not host.reaches(self._state.account_of(decision.job)):
            return False
        attempt = self._state.attempt(decision.job, decision.attempt)
        pending: set[HostId] = set()
        if attempt is not None and attempt.generation == decision.generation:
            pending = attempt.stop.pending
        elif attempt is not None and decision.generation in attempt.retired:
            pending = attempt.retired[decision.generation].pending
        return decision.host in pending or (decision.job, decision.attempt, decision.generation) in host.orphans

    async def _collect(self, decision: d.StopAttempt, ranks: list[int]) -> None:
        """Fetch logs and steps of the attempt, and report the newest step."""
        which = (decision.job, decision.attempt, decision.generation)
        job = self._state.jobs.get(decision.job)
        streams = job is not None and (job.spec.is_attached or job.spec.resources.tasks > 1)
        await self._archive.fetch_attempt(self._hosts, decision.host, *which, ranks, streams=streams)
        last = await self._archive.last_step(*which) if 0 in ranks else None
        if last is not None:
            await self._engine.report(
                e.AttemptProgressed(
                    at_s=time.time(),
                    job=decision.job,
                    attempt=decision.attempt,
                    step=last["step"],
                    loss=last.get("loss"),
                    is_nan="loss" in last and last["loss"] is None,
                    step_time_s=last["time_s"],
                    first_loss=last["first_loss"],
                )
            )


def _log_late_stop(decision: d.StopAttempt) -> None:
    which = f"attempt {decision.job}.{decision.attempt}"
    log.warning("%s has not ended %s yet: until it does, its devices are not free", decision.host, which)
