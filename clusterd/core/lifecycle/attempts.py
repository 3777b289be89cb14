"""The life of an attempt: what it books when it begins, frees when it is gone, and means for its job at its end."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from clusterd.core.allocation.first_fit import Choice, below, choose
from clusterd.core.fair_share import beyond_quota
from clusterd.core.lifecycle import migrations
from clusterd.core.state import Attempt, Fault, Host, Job, Outcome, Rank, State
from clusterd.core.view import Start
from clusterd.types import HostId, JobId, JobState, RankEnd, RankPlace, RankReport, Reason
from plans.model_shape import ModelShape
from plans.plan import Plan

LOST_IN_A_ROW_MAX = 5
"""Times a job is queued again after faults that were not its own, without a step in between."""

GOT_ON_S = 600.0
"""An attempt of a job that tells of no steps has got on when it has run so long: the next fault is the first again."""

RETRY_DELAY_S = 5.0
"""Before the second retry; doubled for each further one. The first is at once: most faults are single."""

RETRY_DELAY_MOST_S = 300.0

FAULT_S = 300.0
"""A device that failed is left out; four times as long after each further fault, until its host is seen to."""

TIMED_OUT = 124
"""Exit code of a job that reached its time limit, as of `timeout`."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an attempt's end means for its job."""

    state: JobState
    reason: str
    exit_code: int | None = None
    is_infrastructure: bool = False
    at_most_bytes: int | None = None  # that the next plan may be thought to need
    refused: tuple[Plan, str] | None = None  # under which the job cannot train, and why


def running(state: State, job: JobId) -> Attempt:
    """The attempt of a job that is known to have one."""
    attempt = state.jobs[job].attempt
    assert attempt is not None, f"job {job} is active without an attempt"
    return attempt


def objection(state: State, job: Job, start: Start) -> str | None:
    """Why a start must not happen, whoever proposed it; None: it may."""
    if job.state is not JobState.QUEUED:
        return f"the job is {job.state.value}"
    seen = set()
    for place in start.ranks:
        host = state.hosts.get(place.host)
        if host is None or host.unusable is not None:
            return host.unusable if host else f"{place.host} is no host of ours"
        if place.device is None:
            continue
        if place.device in state.leases or place.device in seen:
            return f"{place.device} is leased"
        if place.device not in {d.id for d in host.devices}:
            return f"{place.device} does not exist"
        seen.add(place.device)
    return beyond_quota(state, job.spec.tenant, len(seen))


def begin(state: State, job: Job, start: Start, now_s: float) -> Attempt:
    """Book devices, cores and memory, and make the attempt the job's running one."""
    number = len(job.attempts) + 1
    attempt = Attempt(
        job=job.id,
        number=number,
        generation=1,
        plan=start.plan,
        ranks={place.rank: Rank(place) for place in start.ranks},
        started_s=now_s,
        cores=dict(start.cores),
        memory_bytes=dict(start.memory_bytes),
    )
    for place in start.ranks:
        if place.device is not None:
            state.leases[place.device] = migrations.lease_of(
                state, attempt, place.device, place.host, attempt.generation
            )
    for host, cores in start.cores.items():
        state.hosts[host].cores_used += cores
        state.hosts[host].memory_used_bytes += start.memory_bytes.get(host, 0)
    job.attempts.append(attempt)
    job.go(JobState.STARTING)
    job.reason = start.reason
    job.started_s = job.started_s if job.started_s is not None else now_s
    state.queue.pop(job.id)
    state.active[job.id] = None
    return attempt


def release(state: State, attempt: Attempt, host_id: HostId) -> None:
    """Free what the attempt's ranks held on one host, which says that they are gone."""
    kept = migrations.held_on(attempt, host_id)
    for rank in attempt.ranks.values():
        device = rank.place.device
        lease = state.leases.get(device) if device is not None else None
        mine = lease is not None and rank.place.host == host_id and lease.job == attempt.job
        if mine and device is not None and device not in kept:
            del state.leases[device]
    host = state.hosts.get(host_id)
    if host is not None:
        host.cores_used -= attempt.cores.get(host_id, 0)
        host.memory_used_bytes -= attempt.memory_bytes.get(host_id, 0)


def take_reports(attempt: Attempt, reports: Iterable[RankReport], hosts: Mapping[HostId, Host]) -> None:
    """Keep how ranks ended, and which devices failed; the first word on a rank stands."""
    for report in reports:
        rank = attempt.ranks.get(report.rank)
        if rank is not None and rank.end is None and report.end is not None:
            rank.end = report.end
            note_fault(rank.place, report.end, hosts)
            if report.end.reason is Reason.DEVICE_OOM and _has_company(attempt, rank):
                rank.end = replace(report.end, reason=Reason.CROWDED)
            if attempt.plan is None and report.end.is_success:  # a command is one process, whatever it holds
                for other in attempt.ranks.values():
                    other.end = other.end or report.end


def note_fault(place: RankPlace, end: RankEnd, hosts: Mapping[HostId, Host]) -> None:
    """A device that failed under one job would fail under the next."""
    if end.reason is Reason.DEVICE_FAULT and place.device is not None and place.host in hosts:
        faults = hosts[place.host].faults
        times = faults[place.device].times if place.device in faults else 0
        faults[place.device] = Fault(str(end), times + 1)


def _has_company(attempt: Attempt, rank: Rank) -> bool:
    """Whether a rank of a move may take memory of its device."""
    onward = attempt.migration
    return onward is not None and any(place.device == rank.place.device for place in onward.places)


def got_on(attempt: Attempt, now_s: float) -> bool:
    """Whether it must have done something, though its job tells of no steps."""
    return now_s - attempt.started_s > GOT_ON_S


# What explains the other ends comes first: when a host is lost, the ranks elsewhere fail for lack of it.
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
    """What becomes of the job now that the attempt is over.

    An attempt whose ranks all finished counts as finished even when it was being cancelled at that moment: its results
    are there. One that ran out of device memory, or cannot train, under a plan that its user did not ask for is no
    failure of the job's: it gets a plan that needs less, or another, as long as there is one.

    Args:
        kind: of the attempt's devices.
    """
    ends = {r: rank.end for r, rank in attempt.ranks.items()}
    if all(end is not None and end.is_success for end in ends.values()):
        return Verdict(JobState.FINISHED, "finished", exit_code=0)
    if attempt.outcome is Outcome.TARGET_REACHED:
        return Verdict(JobState.FINISHED, attempt.why, exit_code=0)
    if attempt.outcome is Outcome.CANCELLED:
        return Verdict(JobState.CANCELLED, attempt.why, exit_code=130)
    if attempt.outcome is Outcome.TIME_LIMIT:
        return Verdict(JobState.FAILED, attempt.why, exit_code=TIMED_OUT)
    if attempt.outcome is Outcome.LAUNCH_FAILED:
        return Verdict(JobState.FAILED, attempt.why, exit_code=1)
    if attempt.outcome in (Outcome.PREEMPTED, Outcome.REFUSED):
        return Verdict(JobState.QUEUED, attempt.why)
    if attempt.outcome is Outcome.HOST_LOST:
        return Verdict(JobState.QUEUED, f"attempt {attempt.number} was lost: {attempt.why}", is_infrastructure=True)
    cause = root_cause(attempt)
    if cause is None:
        return Verdict(JobState.QUEUED, f"attempt {attempt.number} was stopped: {attempt.why}", is_infrastructure=True)
    rank, end = cause
    place = attempt.ranks[rank].place
    said = f"rank {rank} on {place.host}: {end}" if len(attempt.ranks) > 1 else f"on {place.host}: {end}"
    if end.reason.is_infrastructure:
        return Verdict(JobState.QUEUED, f"attempt {attempt.number} was lost, {said}", is_infrastructure=True)
    chosen = attempt.plan if attempt.plan != job.spec.resources.plan else None
    if end.reason is Reason.DEVICE_OOM and chosen is not None and job.shape is not None:
        smaller = below(ModelShape.from_dict(job.shape), chosen, kind, job.bounds)
        if smaller is not None:
            at_most_bytes, plan = smaller
            said = f"attempt {attempt.number} ran out of memory under {attempt.plan}, {said}; {plan} needs less"
            return Verdict(JobState.QUEUED, said, at_most_bytes=at_most_bytes)
    if end.reason is Reason.PLAN and chosen is not None and _has_another(job, chosen, str(end), kind):
        said = f"attempt {attempt.number} could not train under {chosen}, {said}; it gets another plan"
        return Verdict(JobState.QUEUED, said, refused=(chosen, str(end)))
    if job.own_failures < job.spec.retries:
        return Verdict(JobState.QUEUED, f"attempt {attempt.number} failed, {said}")
    exit_code = end.exit_code if end.exit_code else (128 + end.signal if end.signal else 1)
    return Verdict(JobState.FAILED, said, exit_code=exit_code)


def _has_another(job: Job, plan: Plan, why: str, kind: str) -> bool:
    """Whether some plan is left for the job, on as many devices or on as many as it asked for, whatever they have."""
    if job.shape is None:
        return False
    shape, bounds = ModelShape.from_dict(job.shape), replace(job.bounds, refused=(*job.refused, (plan, why)))
    counts = {plan.ranks, max(job.spec.resources.devices, 1)}
    return any(isinstance(choose(shape, n, kind, sys.maxsize, bounds=bounds), Choice) for n in counts)


def root_cause(attempt: Attempt) -> tuple[int, RankEnd] | None:
    """The rank whose end explains the others'; None when each ended well or was stopped by us."""
    bad = [
        (_CAUSES.index(rank.end.reason), number, rank.end)
        for number, rank in attempt.ranks.items()
        if rank.end is not None and rank.end.reason in _CAUSES and not rank.end.is_success
    ]
    if not bad:
        return None
    _, number, end = min(bad, key=lambda item: item[:2])
    return number, end


def at_fault(attempt: Attempt) -> tuple[HostId, str] | None:
    """The host whose environment made the attempt end, and what was said; another's may be whole."""
    cause = root_cause(attempt) if attempt.outcome is None else None
    if cause is None or cause[1].reason is not Reason.NO_TORCH:
        return None
    return attempt.ranks[cause[0]].place.host, str(cause[1])


def fault_s(times: int) -> float:
    """Seconds that a device is left out after it has failed so often: many faults are over at once, others stay."""
    return FAULT_S * 4.0 ** min(times - 1, 5)


def retry_delay_s(times: int) -> float:
    """Seconds to wait before the next try after `times` losses in a row, or failures."""
    return 0.0 if times <= 1 else min(RETRY_DELAY_S * 2.0 ** min(times - 2, 30), RETRY_DELAY_MOST_S)
