"""Scheduling policy for other simulators and schedulers (docs/advise.md): one situation in, one answer out.

Stateless: each situation describes hosts, jobs and step times completely.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import msgspec

from clusterd.core.booked import Booked
from clusterd.core.host import Host
from clusterd.core.performance_table import Estimate, PerformanceTable
from clusterd.core.state import Attempt, Holder, Inspection, InspectionState, Job, Rank, State
from clusterd.core.view import Policy, View
from clusterd.errors import UsageError
from clusterd.plans.plan import Plan, PlanError
from clusterd.types import (
    AttemptState,
    Device,
    DeviceId,
    HostFacts,
    HostId,
    HostState,
    JobId,
    JobKind,
    JobSpec,
    JobState,
    RankPlace,
    Resources,
)

VERSION = 1


class DeviceIn(msgspec.Struct, forbid_unknown_fields=True):
    """One accelerator."""

    id: str
    type: str


class HostIn(msgspec.Struct, forbid_unknown_fields=True):
    """One host and its devices."""

    name: str
    devices: list[DeviceIn]
    cores: Annotated[int, msgspec.Meta(ge=0)] = 1 << 20
    memory_bytes: Annotated[int, msgspec.Meta(ge=0)] = 1 << 60


Seconds = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class ConfigurationIn(msgspec.Struct, forbid_unknown_fields=True):
    """Plan on a device type and shape of allocation, with its step time."""

    plan: str
    type: str
    shape: Annotated[list[Count], msgspec.Meta(min_length=1)]  # devices on each host
    step_time_s: Seconds
    lower_s: Seconds | None = None
    upper_s: Seconds | None = None


class CurrentIn(msgspec.Struct, forbid_unknown_fields=True):
    """Plan and devices that a job runs on now."""

    plan: str
    devices: list[str]  # by rank
    since_s: float


class JobIn(msgspec.Struct, forbid_unknown_fields=True):
    """Queued or running job."""

    id: str
    submitted_s: float
    steps_left: Count
    configurations: list[ConfigurationIn]
    steps_done: Annotated[int, msgspec.Meta(ge=0)] = 0
    asked_devices: Count = 1
    asked_plan: str | None = None
    guaranteed: bool = False
    priority: int = 0
    tenant: str = "default"
    current: CurrentIn | None = None


class Situation(msgspec.Struct, forbid_unknown_fields=True):
    """Input of one decision: hosts, jobs and the cost of a migration."""

    version: int
    time_s: Annotated[float, msgspec.Meta(ge=0)]
    hosts: list[HostIn]
    jobs: list[JobIn]
    move_cost_s: Annotated[float, msgspec.Meta(ge=0)] | None = None


_decoder = msgspec.json.Decoder(Situation)


def read(line: str | bytes) -> Situation:
    """Parse one line into a situation.

    Raises:
        UsageError: it is not valid; names the field.
    """
    try:
        situation = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"invalid situation: {error} (docs/advise.md has the schema)") from None
    if situation.version != VERSION:
        raise UsageError(f"version {situation.version} is not known: this is version {VERSION}")
    for kind, names in (("host", [h.name for h in situation.hosts]), ("job", [j.id for j in situation.jobs])):
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise UsageError(f"{kind} {twice[0]} is there twice: give each its own name")
    return situation


def advise(situation: Situation, policy: Policy) -> dict[str, Any]:
    """Decisions of the policy for one situation, one answer per job.

    Raises:
        UsageError: the situation contradicts itself.
    """
    state = _state(situation)
    proposal = policy.propose(View(state, situation.time_s))
    answers: dict[str, dict[str, Any]] = {}
    for start in proposal.starts:
        answers[start.job] = _answer("start", start.plan, start.ranks, start.reason)
    for move in proposal.moves:
        answers[move.job] = _answer("move", move.plan, move.ranks, move.reason)
    for preempt in proposal.preempts:
        answers[preempt.job] = {"action": "stop", "plan": None, "devices": [], "reason": preempt.reason}
    for refusal in proposal.refusals:
        answers.setdefault(refusal.job, {"action": "wait", "plan": None, "devices": [], "reason": refusal.reason})
    for job in situation.jobs:
        if job.current is not None and job.id not in answers:
            answers[job.id] = {
                "action": "keep",
                "plan": job.current.plan,
                "devices": job.current.devices,
                "reason": "nothing is worth a move",
            }
    jobs = [{"job": job.id, **answers.get(job.id, _NOTHING)} for job in situation.jobs]
    return {"version": VERSION, "time_s": situation.time_s, "policy": policy.name, "jobs": jobs}


_NOTHING: dict[str, Any] = {"action": "wait", "plan": None, "devices": [], "reason": "not considered"}


def _answer(action: str, plan: Plan | None, ranks: tuple[RankPlace, ...], reason: str) -> dict[str, Any]:
    return {"action": action, "plan": str(plan), "devices": [place.device for place in ranks], "reason": reason}


def _state(situation: Situation) -> State:
    state = State()
    where: dict[str, HostId] = {}
    for given in situation.hosts:
        name = HostId(given.name)
        devices = tuple(
            Device(id=DeviceId(d.id), host=name, kind="cuda", uuid=d.id, name=d.type, memory_bytes=1 << 50)
            for d in given.devices
        )
        for device in devices:
            if device.id in where:
                raise UsageError(f"device {device.id} is on two hosts: give each its own id")
            where[device.id] = name
        facts = HostFacts(
            boot_id="", cpu_cores=given.cores, memory_bytes=given.memory_bytes, address="", devices=devices
        )
        state.hosts[name] = Host(name, state=HostState.UP, facts=facts)
    for one in situation.jobs:
        _add(state, situation, one, where)
    return state


def _add(state: State, situation: Situation, given: JobIn, where: dict[str, HostId]) -> None:
    job_id, model = JobId(given.id), f"job {given.id}"
    resources = Resources(
        devices=given.asked_devices,
        kind="cuda",
        plan=_plan(given.asked_plan, given.id) if given.asked_plan else None,
    )
    spec = JobSpec(
        name=given.id,
        kind=JobKind.ELASTIC,
        command=("advise",),
        resources=resources,
        priority=given.priority,
        guaranteed=given.guaranteed,
        tenant=given.tenant,
    )
    job = Job(job_id, spec, priority=given.priority, submitted_s=given.submitted_s, queued_s=given.submitted_s)
    done = max(given.steps_done, 1)
    job.progress.step = done
    shape = {"steps": done + given.steps_left, "global_batch": 1, "samples": 1, "parameters": [], "layers": []}
    job.inspection = Inspection(InspectionState.DONE, shape=shape, model=model)
    estimates = tuple(
        Estimate(
            plan=_plan(c.plan, given.id, sum(c.shape)),
            device_type=c.type,
            shape=tuple(sorted(c.shape, reverse=True)),
            step_time_s=c.step_time_s,
            lower_s=c.lower_s if c.lower_s is not None else c.step_time_s,
            upper_s=c.upper_s if c.upper_s is not None else c.step_time_s,
        )
        for c in given.configurations
    )
    if not estimates:
        raise UsageError(f"job {given.id} has no configurations: give at least one that can run")
    state.jobs[job_id] = job
    state.performance_tables[model] = PerformanceTable(estimates, 1, measured=len(estimates), is_whole=True)
    if situation.move_cost_s is not None:
        state.move_costs_s[model] = situation.move_cost_s
    if given.current is None:
        state.queue[job_id] = None
        return
    ranks: dict[int, Rank] = {}
    for number, device in enumerate(given.current.devices):
        if device not in where:
            raise UsageError(f"job {given.id} runs on {device}, which no host has")
        holder = state.holders.get(DeviceId(device))
        if holder is not None and holder.job == job_id:
            raise UsageError(f"job {given.id} names {device} twice: each of its ranks has a device of its own")
        if holder is not None:
            raise UsageError(f"{device} is used by job {holder.job} and by job {given.id}")
        host = where[device]
        ranks[number] = Rank(RankPlace(rank=number, host=host, device=DeviceId(device)))
        state.holders[DeviceId(device)] = Holder(host, job_id, 1, 1)
    plan = _plan(given.current.plan, given.id, len(given.current.devices))
    cores = Counter(rank.place.host for rank in ranks.values())
    attempt = Attempt(
        job_id, 1, 1, plan, ranks, given.current.since_s, booked=Booked(cores), state=AttemptState.RUNNING
    )
    for host, count in cores.items():
        state.hosts[host].cores_used += count
    job.state, job.started_s = JobState.RUNNING, given.current.since_s
    job.attempts.append(attempt)
    state.active[job_id] = None


def _plan(text: str, job: str, devices: int | None = None) -> Plan:
    try:
        plan = Plan.parse(text)
    except PlanError as error:
        raise UsageError(f"job {job}: {error}") from None
    if devices is not None and plan.ranks != devices:
        raise UsageError(f"job {job}: {plan} has {plan.ranks} ranks, and {devices} devices are given with it")
    return plan
