"""Bookkeeping of attempts: resources booked and freed, exit reports of ranks, and the verdict on the job at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from clusterd.core.booked import book, free
from clusterd.core.estimates.first_fit import ChosenPlan, below, choose, fewer
from clusterd.core.fair_share import beyond_quota
from clusterd.core.host import Fault, Host
from clusterd.core.lifecycle import device_holders
from clusterd.core.queueing.bookings import claim_against
from clusterd.core.state import Attempt, Job, Outcome, Rank, State
from clusterd.core.view import Start
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan
from clusterd.types import (
    AttemptState,
    DeviceId,
    HostId,
    JobId,
    JobKind,
    JobState,
    RankEnd,
    RankPlace,
    RankReport,
    Reason,
)

CONSECUTIVE_LOSSES_MAX = 5
SIGNALS_FROM_OUTSIDE = (1, 2, 9, 15)
"""SIGHUP, SIGINT, SIGKILL, SIGTERM: no fault of a script raises them."""
"""A job is requeued this often after faults that were not its own, without a step in between."""

PROGRESS_S = 600.0
"""An attempt that reports no steps counts as progress after this long: the next loss is the first again."""

RETRY_DELAY_S = 5.0
"""Back-off before the second retry, doubled for each further one. The first is at once: most faults are single."""

RETRY_DELAY_MOST_S = 300.0

FAULT_S = 300.0
"""A faulty device is left out for this long, and four times longer after each further fault."""

TIMED_OUT = 124
"""Exit code of a job that reached its time limit, as of `timeout`."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Consequence of an attempt's end for its job."""

    state: JobState
    reason: str
    exit_code: int | None = None
    is_infrastructure: bool = False
    memory_cap_bytes: int | None = None  # for the estimate of the next plan
    rejected: tuple[Plan, str] | None = None  # plan under which the job cannot train, with the reason


def running(state: State, job: JobId) -> Attempt:
    """The attempt of an active job."""
    attempt = state.jobs[job].attempt
    assert attempt is not None, f"job {job} is active without an attempt"
    return attempt


def is_away(state: State, attempt: Attempt) -> bool:
    """True while a host of the attempt does not answer: what was reported last may not be so any more."""
    return not all(state.hosts[host].reaches(attempt.account) for host in attempt.hosts)


def objection(state: State, job: Job, start: Start, now_s: float) -> str | None:
    """Reason why a start must not happen, whichever policy proposed it; None: it may."""
    if job.state is not JobState.QUEUED:
        return f"the job is {job.state.value}"
    seen = set()
    for place in start.ranks:
        host = state.hosts.get(place.host)
        if host is None or host.unusable is not None:
            return host.unusable if host else f"{place.host} is not a host of this cluster"
        if place.device is None:
            continue
        if place.device in seen or not _may_join(state, job, place.device):
            return f"{place.device} is in use"
        if claim := claim_against(state.device_claims, job.spec, host, place.device):
            return f"{place.device} is {claim}"
        if place.device not in {d.id for d in host.devices}:
            return f"{place.device} does not exist"
        seen.add(place.device)
    return beyond_quota(state, job.spec, len(seen), now_s)


def _may_join(state: State, job: Job, device: DeviceId) -> bool:
    """True where the device is free, or shared and has a place left for the job."""
    if device not in state.holders:
        return True
    return len(state.jobs_on(device)) < min(state.share_limit(device), job.spec.resources.share)


def begin(state: State, job: Job, start: Start, now_s: float) -> Attempt:
    """Make a new attempt the job's current one; books devices, cores and memory."""
    number = len(job.attempts) + 1
    attempt = Attempt(
        job=job.id,
        number=number,
        generation=1,
        plan=start.plan,
        ranks={place.rank: Rank(place) for place in start.ranks},
        started_s=now_s,
        reason=start.reason,
        account=job.spec.account,
        booked=start.booked,
    )
    for place in start.ranks:
        if place.device is not None:
            device_holders.give_device(state, attempt, place.device, place.host, attempt.generation)
    book(state.hosts, start.booked)
    job.attempts.append(attempt)
    state.index(attempt)
    job.go(JobState.STARTING, now_s)
    job.reason = start.reason
    job.progress.input_share = None
    job.started_s = job.started_s if job.started_s is not None else now_s
    state.queue.pop(job.id)
    state.handovers.pop(job.id, None)
    if state.reservation is not None and state.reservation.job == job.id:
        state.reservation = None
    state.active[job.id] = None
    return attempt


def booked_on(attempt: Attempt, host: HostId) -> tuple[int, int]:
    """CPU cores and bytes of memory that are booked on a host for the attempt's ranks of all generations."""
    booked = [retired.booked for retired in attempt.retired.values() if host in retired.pending]
    if host in attempt.hosts and (attempt.state is not AttemptState.STOPPING or host in attempt.stop.pending):
        booked.append(attempt.booked)
    if attempt.migration is not None:  # its ranks share what the source ranks have
        booked.append(attempt.migration.booked.beyond(attempt.booked))
    here = [each.on(host) for each in booked]
    return sum(cores for cores, _ in here), sum(memory_bytes for _, memory_bytes in here)


def release(state: State, attempt: Attempt, host_id: HostId) -> None:
    """Free what the attempt's ranks held on a host that reported them gone."""
    held = attempt.held_on(host_id)
    for rank in attempt.ranks.values():
        device = rank.place.device
        holder = state.holders.get(device) if device is not None else None
        if device is None or rank.place.host != host_id or device in held:
            continue
        if holder is not None and holder.job == attempt.job:
            device_holders.free_device(state, device)
        elif attempt.job in state.sharers.get(device, ()):
            device_holders.stop_sharing(state, device, attempt.job)
    host = state.hosts.get(host_id)
    if host is not None:
        free(host, attempt.booked)


def take_reports(attempt: Attempt, reports: Iterable[RankReport], hosts: Mapping[HostId, Host]) -> None:
    """Record exit reports of ranks and failures of devices; the first report on a rank stands."""
    for report in reports:
        rank = attempt.ranks.get(report.rank)
        if rank is not None and rank.end is None and report.end is not None:
            rank.end = report.end
            note_fault(rank.place, report.end, hosts)
            if report.end.reason is Reason.DEVICE_OOM and _shares_device(attempt, rank):
                rank.end = replace(report.end, reason=Reason.CROWDED)
            if attempt.plan is None and report.end.is_success:  # a command is one process on all its devices of a host
                for other in attempt.ranks.values():
                    if other.place.host == rank.place.host:
                        other.end = other.end or report.end


def note_fault(place: RankPlace, end: RankEnd, hosts: Mapping[HostId, Host]) -> None:
    """Record a device failure: the device would fail under the next job, too."""
    if end.reason is Reason.DEVICE_FAULT and place.device is not None and place.host in hosts:
        faults = hosts[place.host].faults
        times = faults[place.device].times if place.device in faults else 0
        faults[place.device] = Fault(str(end), times + 1)


def _shares_device(attempt: Attempt, rank: Rank) -> bool:
    """True while a target rank of a migration may take memory of the rank's device."""
    migration = attempt.migration
    return migration is not None and any(place.device == rank.place.device for place in migration.places)


def made_progress(attempt: Attempt, now_s: float) -> bool:
    """True where an attempt ran long enough to have done something, though its job reports no steps."""
    return now_s - attempt.started_s > PROGRESS_S


# Most explanatory first: when a host is lost, ranks elsewhere fail because of it.
_CAUSES = (
    Reason.LOST,
    Reason.DEVICE_FAULT,
    Reason.CROWDED,
    Reason.PORT,
    Reason.DATA,
    Reason.OOM,
    Reason.DEVICE_OOM,
    Reason.NO_TORCH,
    Reason.SCRIPT,
    Reason.PLAN,
    Reason.SIGNAL,
    Reason.EXIT,
)


def judge(job: Job, attempt: Attempt, kind: str) -> Verdict:
    """Decide what becomes of the job after its attempt.

    An attempt whose ranks all finished counts as finished even if it was being cancelled: its results are there.
    Running out of device memory, or failing to train, under a plan that the user did not choose is not the job's
    failure: it gets a smaller plan, or another, while there is one.

    Args:
        kind: kind of the attempt's devices.
    """
    ends = {r: rank.end for r, rank in attempt.ranks.items()}
    if all(end is not None and end.is_success for end in ends.values()):
        return Verdict(JobState.FINISHED, "finished", exit_code=0)
    outcome, why = attempt.stop.outcome, attempt.stop.why
    if outcome is Outcome.TARGET_REACHED:
        return Verdict(JobState.FINISHED, why, exit_code=0)
    if outcome is Outcome.CANCELLED:
        return Verdict(JobState.CANCELLED, why, exit_code=130)
    if outcome is Outcome.TIME_LIMIT:
        return Verdict(JobState.FAILED, why, exit_code=TIMED_OUT)
    if outcome in (Outcome.LAUNCH_FAILED, Outcome.NOT_A_NUMBER, Outcome.OVER_SHARE):
        return Verdict(JobState.FAILED, why, exit_code=1)
    if outcome in (Outcome.PREEMPTED, Outcome.REFUSED):
        return Verdict(JobState.QUEUED, why)
    if outcome in (Outcome.HOST_LOST, Outcome.HOST_FULL):
        return Verdict(JobState.QUEUED, f"attempt {attempt.number} was lost: {why}", is_infrastructure=True)
    cause = root_cause(attempt)
    if cause is None:
        return Verdict(JobState.QUEUED, f"attempt {attempt.number} was stopped: {why}", is_infrastructure=True)
    rank, end = cause
    cause_text = _cause_text(attempt, rank, end)
    # Its snapshot goes on: whatever sent the signal, neither the script nor clusterd did.
    was_killed = job.spec.kind is JobKind.ELASTIC and end.reason is Reason.SIGNAL and end.signal in SIGNALS_FROM_OUTSIDE
    if end.reason.is_infrastructure or was_killed:
        return Verdict(JobState.QUEUED, f"attempt {attempt.number} was lost, {cause_text}", is_infrastructure=True)
    chosen = attempt.plan if attempt.plan != job.spec.resources.plan else None
    if end.reason is Reason.DEVICE_OOM and chosen is not None and job.inspection.shape is not None:
        smaller = below(ModelShape.from_dict(job.inspection.shape), chosen, kind, job.failures.bounds)
        if smaller is not None:
            memory_cap_bytes, plan = smaller
            reason = f"attempt {attempt.number} ran out of memory under {attempt.plan}, {cause_text}; {plan} needs less"
            return Verdict(JobState.QUEUED, reason, memory_cap_bytes=memory_cap_bytes)
    if end.reason is Reason.PLAN and chosen is not None and _has_another(job, chosen, str(end), kind):
        reason = f"attempt {attempt.number} could not train under {chosen}, {cause_text}; it gets another plan"
        return Verdict(JobState.QUEUED, reason, rejected=(chosen, str(end)))
    if job.failures.of_job < job.spec.retries or end.exit_code in job.spec.retry_on:
        return Verdict(JobState.QUEUED, f"attempt {attempt.number} failed, {cause_text}")
    exit_code = end.exit_code if end.exit_code else (128 + end.signal if end.signal else 1)
    return Verdict(JobState.FAILED, cause_text, exit_code=exit_code)


def _cause_text(attempt: Attempt, rank: int, end: RankEnd) -> str:
    """End of the rank and its host: ``exit code 3 on gpu01``, ``rank 2 on gpu01: exit code 3``."""
    host = attempt.ranks[rank].place.host
    if len(attempt.ranks) > 1:
        return f"rank {rank} on {host}: {end}"
    if end.reason not in (Reason.EXIT, Reason.SIGNAL):
        return f"on {host}: {end}"
    code, colon, message = str(end).partition(": ")
    return f"{code} on {host}{colon}{message}"


def _has_another(job: Job, plan: Plan, why: str, kind: str) -> bool:
    """True if a plan is left for the job on as many devices, on as many as it asked for, or on fewer, of any memory."""
    if job.inspection.shape is None:
        return False
    shape, known = ModelShape.from_dict(job.inspection.shape), job.failures.bounds
    bounds = replace(known, rejected=(*known.rejected, (plan, why)))
    counts = {plan.ranks, *fewer(max(job.spec.resources.devices, 1))}
    return any(isinstance(choose(shape, n, kind, sys.maxsize, bounds=bounds), ChosenPlan) for n in counts)


def root_cause(attempt: Attempt) -> tuple[int, RankEnd] | None:
    """The rank whose exit explains the others; None: each succeeded or was stopped by request."""
    bad = [
        (_CAUSES.index(rank.end.reason), number, rank.end)
        for number, rank in attempt.ranks.items()
        if rank.end is not None and rank.end.reason in _CAUSES and not rank.end.is_success
    ]
    if not bad:
        return None
    _, number, end = min(bad, key=lambda item: item[:2])
    return number, end


def faulty_environment(attempt: Attempt) -> tuple[HostId, str] | None:
    """Host whose Python environment made the attempt fail, with the message; another host's may work."""
    cause = root_cause(attempt) if attempt.stop.outcome is None else None
    if cause is None or cause[1].reason is not Reason.NO_TORCH:
        return None
    return attempt.ranks[cause[0]].place.host, str(cause[1])


def fault_s(times: int) -> float:
    """Seconds that a device is left out after failing this often: some faults pass at once, others stay."""
    return FAULT_S * 4.0 ** min(times - 1, 5)


def retry_delay_s(times: int) -> float:
    """Seconds of back-off after `times` consecutive losses or failures."""
    return 0.0 if times <= 1 else min(RETRY_DELAY_S * 2.0 ** min(times - 2, 30), RETRY_DELAY_MOST_S)
