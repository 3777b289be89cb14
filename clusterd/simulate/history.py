"""A journal as a simulation: its jobs, on its hosts, at their speeds.

Elastic jobs run at the speed that the performance model predicted last, and at the measured speed where they ran. Jobs
without a speed model (commands, checkpointable jobs) take as long as they took, on as many devices as they held.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from clusterd.core import events as e
from clusterd.core.estimates.attained_service import total_steps
from clusterd.core.ledger import of_ranks, shape_of
from clusterd.core.policies import POLICIES
from clusterd.core.queueing.dependencies import split
from clusterd.core.scheduler import Batch, Scheduler
from clusterd.core.state import Job, State
from clusterd.errors import ClusterError, InvalidTransition
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan
from clusterd.simulate.cluster import Cluster, Group
from clusterd.simulate.truth import Key, ModelTruth, Truth
from clusterd.simulate.workload import Arrival, Workload
from clusterd.types import Device, HostFacts, HostId, JobId, JobKind, JobState


@dataclass(slots=True)
class _Seen:
    """Data collected during a replay."""

    hosts: dict[HostId, HostFacts] = field(default_factory=dict)
    step_times_s: dict[str, dict[Key, list[float]]] = field(default_factory=dict)  # by model
    archived: dict[JobId, Job] = field(default_factory=dict)
    set_s: dict[JobId, float] = field(default_factory=dict)  # by how much the clock was set since these jobs were over


@dataclass(frozen=True, slots=True)
class History:
    """Jobs of a journal, ready to be simulated, and their outcome."""

    cluster: Cluster
    truth: Truth
    workload: Workload
    completion_s: tuple[float, ...]  # of the jobs that are over, as they were


def history(batches: Iterable[Batch], policy: str = "default") -> History:
    """Build a simulation from a journal's events.

    Args:
        batches: batches of a journal, from its first event on.
        policy: name of the policy that made its decisions.
    Raises:
        ClusterError: no job ran, or another policy made its decisions.
    """
    scheduler = Scheduler(POLICIES[policy]())
    state, seen = scheduler.state, _Seen()
    for batch in batches:
        for by_s in (event.by_s for event in batch.events if isinstance(event, e.ClockSet)):
            over = [job.id for job in state.jobs.values() if job.state.is_final]
            seen.set_s |= {job: seen.set_s.get(job, 0.0) + by_s for job in over}
        known = dict(state.jobs) if any(isinstance(event, e.JobsArchived) for event in batch.events) else {}
        try:
            scheduler.replay(batch)
        except InvalidTransition as error:
            raise ClusterError(
                f"the journal's event {batch.events[0].id} does not follow from what policy {policy!r} would have "
                f"decided ({error}): name the policy that was at work with --journal-policy"
            ) from None
        seen.archived |= {job_id: job for job_id, job in known.items() if job_id not in state.jobs}
        for event in batch.events:
            _see(event, state, seen)
    jobs = {**seen.archived, **state.jobs}
    ran = {job.id: job for job in jobs.values() if _has_run(job) and _held(job, seen)}
    if not ran or not any(facts.devices for facts in seen.hosts.values()):
        raise ClusterError("no job of this journal has run yet: there is nothing to simulate")
    models = _models(ran.values(), state, seen)
    at_s = {job.id: job.submitted_s + seen.set_s.get(job.id, 0.0) for job in ran.values()}
    first_s = min(at_s.values())
    arrivals = []
    for job in sorted(ran.values(), key=lambda job: at_s[job.id]):
        before = [ran[other] for other, _ in map(split, job.spec.after) if at_s.get(other, math.inf) <= at_s[job.id]]
        arrivals.append(_arrival(job, at_s[job.id] - first_s, models, before))
    left: dict[str, int] = {}
    for job in jobs.values():
        if job.id not in ran:
            why = "without devices" if _has_run(job) else job.state.value
            left[why] = left.get(why, 0) + 1
    finished = [job for job in ran.values() if job.state is JobState.FINISHED and job.ended_s is not None]
    completion = tuple(job.ended_s - job.submitted_s for job in finished if job.ended_s is not None)
    return History(_cluster(seen), Truth(models, "the journal"), Workload(tuple(arrivals), left), completion)


def _see(event: e.Event, state: State, seen: _Seen) -> None:
    match event:
        case e.HostConnected() | e.HostChanged():
            seen.hosts[event.host] = event.facts
        case e.AttemptProgressed(step_time_s=float(seconds)) if seconds > 0:
            job = state.jobs.get(event.job)
            attempt = state.attempt(event.job, event.attempt)
            if job is None or attempt is None or attempt.plan is None or not job.inspection.model or attempt.migration:
                return
            devices = of_ranks(state.hosts, attempt)
            if len(devices) == len(attempt.ranks) and len({d.name for d in devices}) == 1:
                key = (attempt.plan, devices[0].name, shape_of(devices))
                seen.step_times_s.setdefault(job.inspection.model, {}).setdefault(key, []).append(seconds)
        case _:
            pass


def _has_run(job: Job) -> bool:
    return job.started_s is not None and (job.ended_s is not None or job.progress.step > 0)


def _is_known(job: Job, state: State) -> bool:
    return (
        job.spec.kind is JobKind.ELASTIC
        and bool(job.inspection.model)
        and job.inspection.model in state.performance_tables
    )


def _models(jobs: Iterable[Job], state: State, seen: _Seen) -> dict[str, ModelTruth]:
    found: dict[str, ModelTruth] = {}
    for job in jobs:
        if not _is_known(job, state):
            found[_own_model(job)] = _as_it_was(job, seen)
        elif job.inspection.model not in found:
            table = state.performance_tables[job.inspection.model]
            times = {(x.plan, x.device_type, x.shape): x.step_time_s for x in table.estimates}
            times |= {
                key: statistics.median(some) for key, some in seen.step_times_s.get(job.inspection.model, {}).items()
            }
            shape = ModelShape.from_dict(job.inspection.shape or {})
            beyond = {(x.plan, x.device_type, x.shape): x.step_time_s for x in table.beyond}
            found[job.inspection.model] = ModelTruth(
                job.inspection.model, shape.global_batch, times, _elements(shape), known=times, beyond=beyond
            )
    return found


def _elements(shape: ModelShape) -> int:
    return sum(math.prod(p.shape) for p in shape.parameters)


def _own_model(job: Job) -> str:
    return f"{job.spec.name}-{job.id}"


def _held(job: Job, seen: _Seen) -> list[Device]:
    """Number of devices of a job's last attempt, also on hosts that were removed since."""
    places = [rank.place for rank in job.attempts[-1].ranks.values()]
    known = {d.id: d for place in places if place.host in seen.hosts for d in seen.hosts[place.host].devices}
    return [known[place.device] for place in places if place.device in known]


def _as_it_was(job: Job, seen: _Seen) -> ModelTruth:
    """One step that takes the job's run time on the devices that it held last."""
    attempt = job.attempts[-1]
    devices = _held(job, seen)
    shape, kind = shape_of(devices), devices[0].name
    ended_s = job.ended_s if job.ended_s is not None else attempt.started_s + 1.0
    plan = attempt.plan or Plan(dp=sum(shape))
    times = {(plan, kind, shape): max(ended_s - attempt.started_s, 1e-3)}
    return ModelTruth(_own_model(job), 1, times, known=times)


def _arrival(job: Job, at_s: float, models: dict[str, ModelTruth], before: Iterable[Job]) -> Arrival:
    wanted = job.spec.resources
    own = _own_model(job)
    one = Arrival(
        name=own,
        at_s=at_s,
        model=own if own in models else job.inspection.model,
        steps=1,
        devices=max(wanted.devices, 1),
        plan=wanted.plan,
        guaranteed=job.spec.guaranteed,
        priority=job.priority,
        tenant=job.spec.tenant,
        after=tuple(map(_own_model, before)),
        predictable=job.progress.predictable is not False,
    )
    if own in models:
        ((plan, _, shape),) = models[own].step_times_s
        return replace(one, devices=sum(shape), plan=plan)
    # A job that was stopped early is simulated up to the step that it reached.
    steps = job.progress.step if job.state is not JobState.FINISHED else max(total_steps(job) or 0, job.progress.step)
    held = {sum(shape) for _, _, shape in models[job.inspection.model].step_times_s}
    devices = next((n for n in sorted(held) if n >= one.devices), max(held))
    plans = {plan for plan, _, shape in models[job.inspection.model].step_times_s if sum(shape) == devices}
    return replace(one, steps=max(steps, 1), devices=devices, plan=wanted.plan if wanted.plan in plans else None)


def _cluster(seen: _Seen) -> Cluster:
    """All hosts that the journal names, by device type: a host with two types becomes two."""
    groups: Counter[Group] = Counter()
    for facts in seen.hosts.values():
        for name in dict.fromkeys(d.name for d in facts.devices):
            count = sum(d.name == name for d in facts.devices)
            each_cores = max(facts.cpu_cores // max(len(facts.devices), 1), 1)
            each_bytes = facts.memory_bytes // max(len(facts.devices), 1)
            groups[Group(1, count, name, each_cores, each_bytes)] += 1
    return Cluster(tuple(replace(group, hosts=hosts) for group, hosts in groups.items()))
