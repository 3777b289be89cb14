"""Grant for a job without a performance model: the requested devices and a plan for them, or the reason why not.

A job gets the devices that it requests, or none yet. Its plan is the requested one where that is legal and fits; else
the simplest legal plan that fits the memory of those devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from clusterd.core.estimates.first_fit import ChosenPlan, Impossible, choose
from clusterd.core.estimates.request_forecast import requested_plans
from clusterd.core.host import Host
from clusterd.core.ledger import HostFree, Ledger, Placement
from clusterd.core.placement.place import candidates, fitting, holds, kinds_for, per_device, place
from clusterd.core.state import Description, Job
from clusterd.core.view import Refusal, View
from clusterd.types import Device, JobKind, Resources
from clusterd.units import size
from plans.model_shape import ModelShape
from plans.plan import Plan


@dataclass(frozen=True, slots=True)
class Grant:
    """Plan and placement for a queued job."""

    plan: Plan | None
    placement: Placement
    reason: str


LEARNING = "its model is being learned, without devices"


def allocate(job: Job, view: View, free: Ledger | None = None) -> Grant | Refusal:
    """Grant devices and a plan to one queued job, or refuse with the reason.

    Args:
        free: resources out of which to grant; None: those that are free now.
    """
    free = free if free is not None else view.free
    wanted = job.spec.resources
    if job.not_before_s > view.now_s:
        return Refusal(job.id, job.reason)
    known = _admitted(job, view)
    impossible = _never(job, view, known)
    if impossible:
        return impossible
    beyond = view.quotas.why_not(job.spec.tenant, _least(job))
    if beyond is not None:
        return Refusal(job.id, beyond)
    if job.spec.kind is JobKind.CHECKPOINTABLE:
        some = at_some_size(job, free, view.quotas.left(job.spec.tenant))
        return some or _waits(job, view, _least(job))
    if job.spec.kind is not JobKind.ELASTIC:
        placement = place(job, free, wanted.devices, group=1, nodes=wanted.nodes)
        if placement is None:
            return _waits(job, view, wanted.devices)
        return Grant(None, placement, _started(job, placement, None))
    if job.description is not Description.DONE or job.shape is None:
        return Refusal(job.id, LEARNING)
    table = view.performance_tables.get(job.model)
    if table is not None and table.is_whole:
        return Refusal(job.id, "none of the ways in which it can run fits the hosts that are there for it")
    choice = _as_pinned(job, view) or _choice(job, max(wanted.devices, 1), known)
    if isinstance(choice, Impossible):
        return Refusal(job.id, choice.reason, is_permanent=True)
    beyond = view.quotas.why_not(job.spec.tenant, choice.plan.ranks)
    if beyond is not None:
        return Refusal(job.id, beyond)
    placement = place(job, free, choice.plan.ranks, group=choice.plan.tp, nodes=None)
    if placement is None:
        return _waits(job, view, choice.plan.ranks)
    return Grant(choice.plan, placement, _started(job, placement, choice))


def unsatisfiable(job: Job, view: View) -> str | None:
    """Reason why no host of the cluster could ever serve the job; None: some could, or not all have reported yet."""
    if not view.hosts or any(host.facts is None for host in view.hosts.values()):
        return None
    impossible = _never(job, view, _admitted(job, view))
    return impossible.reason if impossible else _beyond_every_host(job, view)


def _admitted(job: Job, view: View) -> list[Device]:
    """Devices of all hosts that serve the job's request."""
    wanted = job.spec.resources
    devices = (d for h in view.hosts.values() if job.admits(h) for d in h.devices)
    serve = (d for d in devices if wanted.admits(d.kind, d.name, d.memory_bytes, d.compute_capability))
    return [d for d in serve if not d.excluded]


def _least(job: Job) -> int:
    """Fewest devices with which the job starts."""
    if job.spec.kind is JobKind.CHECKPOINTABLE:
        return min(plan.ranks for plan in requested_plans(job))
    return max(job.spec.resources.devices, int(job.spec.kind is JobKind.ELASTIC))


def objection_to_size(job: Job, view: View, plan: Plan) -> str | None:
    """Reason why a running checkpointable job could never continue at this size; None: it could."""
    text = Plan(**{name: getattr(plan, name) for name in ("dp", *_dimensions_in(job.spec.command))})
    if plan != text and plan not in requested_plans(replace(job, pinned=None)):
        return f"its command has no place for all of {plan}: it would be told of {text} alone"
    here = len(job.attempt.devices) if job.attempt is not None else 0
    beyond = view.quotas.why_not(job.spec.tenant, plan.ranks - here)
    if beyond is not None:
        return beyond
    at_size = replace(job, pinned=plan)
    known = [d for d in _admitted(job, view) if view.hosts[d.host].unusable is None]
    impossible = _never(at_size, view, known)
    return impossible.reason if impossible else _beyond_every_host(at_size, view)


def _dimensions_in(command: Iterable[str]) -> list[str]:
    """Dimensions of the plan that a templated command receives, besides dp, its number of processes."""
    text_of_command = " ".join(command)
    return [name for name in ("tp", "pp", "zero", "accumulation") if f"{{{name}}}" in text_of_command]


def at_some_size(job: Job, free: Ledger, most: int) -> Grant | None:
    """Best of a checkpointable job's plans that fits on at most `most` free devices; None: none fits."""
    for plan in requested_plans(job):
        placement = place(job, free, plan.ranks, group=plan.tp, nodes=None) if plan.ranks <= most else None
        if placement is not None:
            hosts = ", ".join(dict.fromkeys(str(p.host) for p in placement.ranks))
            return Grant(plan, placement, f"{plan} on {hosts}: the best of its plans that there is room for")
    return None


def _choice(job: Job, count: int, devices: Iterable[Device]) -> ChosenPlan | Impossible:
    """Plan for `count` devices of the available kinds; the same in every pass while the hosts stay the same."""
    shape = ModelShape.from_dict(job.shape or {})
    # "cuda" first: placement prefers it too.
    for kind in sorted({d.kind for d in devices}, reverse=True):
        memory_bytes = min(d.memory_bytes for d in devices if d.kind == kind)
        choice = choose(shape, count, kind, memory_bytes, job.spec.resources.plan, job.bounds)
        if isinstance(choice, ChosenPlan):
            return choice
    return choice


def _as_pinned(job: Job, view: View) -> ChosenPlan | None:
    """The plan to which the job is pinned; None: it would not fit even if nothing else ran."""
    plan = job.pinned
    if plan is None or plan.ranks > view.quotas.most(job.spec.tenant):
        return None
    for kind in kinds_for(job):
        there = [fitting(job, host, kind) for host in _empty(job, view) if host.host.unusable is None]
        devices = [d for here in there for d in here]
        if sum(len(here) // plan.tp * plan.tp for here in there) < plan.ranks:
            continue
        shape, memory_bytes = ModelShape.from_dict(job.shape or {}), min(d.memory_bytes for d in devices)
        choice = choose(shape, plan.ranks, kind, memory_bytes, plan, job.bounds)
        if isinstance(choice, ChosenPlan):
            return choice
    return None


def _never(job: Job, view: View, known: list[Device]) -> Refusal | None:
    """Refusal that only another host could lift; None: the end of other jobs may suffice."""
    wanted = job.spec.resources
    if not any(h.facts for h in view.hosts.values()):
        return Refusal(job.id, _no_host(job, view) if view.hosts else "no host is connected: clusterd host add")
    missing = [h for h in wanted.hosts if h not in view.hosts]
    if missing:
        return Refusal(
            job.id, f"asks for host {missing[0]}, which is not in the cluster: clusterd host add {missing[0]}"
        )
    if wanted.constraint and not any(job.admits(h) for h in view.hosts.values()):
        return Refusal(job.id, f"asks for {_labelled(wanted)}; {_labels_there(view)}")
    there = Counter(d.kind for d in known)
    count = max(there[kind] for kind in kinds_for(job))
    least = _least(job)
    if least > count:
        noun = _noun(wanted, least)
        has = " and ".join(f"{there[kind]} {_KINDS[kind]}" for kind in kinds_for(job)) if wanted.kind is None else count
        hint = ""
        cpus = sum(d.kind == "cpu" for h in view.hosts.values() if job.admits(h) for d in h.devices)
        if wanted.kind == "cuda" and count == 0 and cpus:
            hint = f"; there are {cpus} CPU devices: submit with --devices {min(least, cpus)}"
        elif wanted.compute_capability:
            devices = (d for h in view.hosts.values() for d in h.devices)
            hint = f"; there are {', '.join(sorted({f'{d.name} ({_capability(d)})' for d in devices}))}"
        elif wanted.device_name and (names := sorted({d.name for h in view.hosts.values() for d in h.devices})):
            hint = f"; there are {', '.join(names)}"
        owner = f"{_its_hosts(wanted)} have" if wanted.hosts else "the cluster has"
        if wanted.constraint:
            noun, owner = f"{noun} on {_labelled(wanted)}", "these have"
        return Refusal(job.id, f"asks for {least} {noun}, {owner} {has}{hint}")
    if job.spec.kind is JobKind.COMMAND and least > 1:
        per_host = Counter((d.host, d.kind) for d in known)
        if not any(holds(job, [n for (_, k), n in per_host.items() if k == kind]) for kind in kinds_for(job)):
            most = max(n for (_, kind), n in per_host.items() if kind in kinds_for(job))
            if wanted.nodes > 1:
                each = f"{wanted.per_node} {_noun(wanted)} on each of {wanted.nodes} hosts"
                return Refusal(job.id, f"asks for {each}; so many hosts with so many devices do not exist")
            text = f"asks for {least} {_noun(wanted)} on one host (see --nodes)"
            return Refusal(job.id, f"{text}; {_none(wanted)} more than {most}")
    return None


def _noun(wanted: Resources, count: int = 2) -> str:
    """Name of so many of the requested devices, as in "GPUs of type a100 with 40 GiB or more"."""
    named = f" of type {wanted.device_name}" if wanted.device_name else ""
    least = [f"{size(wanted.device_memory_bytes)} or more"] if wanted.device_memory_bytes else []
    least += [f"compute capability {wanted.compute_capability}"] if wanted.compute_capability else []
    kind = _KINDS[wanted.kind] if count != 1 else _KINDS[wanted.kind].removesuffix("s")
    return f"{kind}{named}{' with ' if least else ''}{' and '.join(least)}"


def misfit(job: Job, host: Host) -> str | None:
    """Reason why a host could not serve the job even if nothing else ran there; None: it could, or is not meant."""
    wanted = job.spec.resources
    if host.facts is None or (wanted.hosts and host.id not in wanted.hosts):
        return None
    if missing := host.missing_labels(wanted.constraint):
        has = f"it has {', '.join(host.facts.labels)}" if host.facts.labels else "it has none"
        return f"{host.id} lacks the label{'s' * (len(missing) > 1)} {', '.join(missing)}: {has}"
    if wanted.devices == 0:
        return None
    serve = [d for d in host.devices if wanted.admits(d.kind, d.name, d.memory_bytes, d.compute_capability)]
    each = wanted.per_node if job.spec.kind is JobKind.COMMAND else 1
    if len(serve) >= each:
        return None
    counts = Counter(_model(d) for d in host.devices)
    has = ", ".join(f"{count} x {model}" for model, count in counts.items()) or "no devices"
    return f"{host.id} has {has}: {each} {_noun(wanted, each)} are asked for"


def _capability(device: Device) -> str:
    return device.compute_capability or ("not reported" if device.kind == "cuda" else "no GPU")


def _model(device: Device) -> str:
    """Name of a device with its memory and compute capability."""
    capability = f", {device.compute_capability}" if device.compute_capability else ""
    return f"{device.name} ({size(device.memory_bytes)}{capability})"


def _labelled(wanted: Resources) -> str:
    return f"hosts labelled {' and '.join(wanted.constraint)}"


def _labels_there(view: View) -> str:
    """Phrase for the labels of all hosts."""
    labels = [f"{h.id} ({', '.join(h.facts.labels)})" for h in view.hosts.values() if h.facts and h.facts.labels]
    return f"there are {', '.join(labels)}" if labels else "no host has a label: labels = [...] under [hosts.NAME]"


def _waits(job: Job, view: View, devices: int) -> Refusal:
    """Refusal of a job for which too little is free now, or would be even if nothing else ran."""
    beyond = _beyond_every_host(job, view)
    if beyond:
        return Refusal(job.id, beyond)
    if not candidates(job, view.free):
        return Refusal(job.id, _no_host(job, view), devices=devices)
    return Refusal(job.id, _short_of(job), devices=devices, is_shortage=True)


def _beyond_every_host(job: Job, view: View) -> str | None:
    """Message about cores or memory that no host has even if nothing else ran; None: the job would fit."""
    wanted = job.spec.resources
    least = _least(job)
    empty = _empty(job, view)
    if least == 0:
        fits = any(h.cores >= wanted.cpus and h.memory_bytes >= wanted.memory_bytes for h in empty)
    else:
        usable = ([len(fitting(job, h, kind)) for h in empty] for kind in kinds_for(job))
        fits = any(holds(job, counts) if least == wanted.devices else sum(counts) >= least for counts in usable)
    if fits or not empty:
        return None
    cores, memory_bytes = per_device(job)
    needs = f"needs {max(cores, 1)} CPU core{'s' * (cores > 1)}"
    needs += f" and {size(memory_bytes)} of memory" if memory_bytes else ""
    needs += f" beside each of {least} {_KINDS[wanted.kind]}" if least else ""
    has = _none(wanted) if least == 0 or job.spec.kind is JobKind.COMMAND else "the hosts have not"
    largest = f"{max(h.cores for h in empty)} CPU cores and {size(max(h.memory_bytes for h in empty))} of memory"
    return f"{needs}; {has} that much: at most {largest}"


def _none(wanted: Resources) -> str:
    return f"none of {_its_hosts(wanted)} has" if wanted.hosts else "no host has"


def _its_hosts(wanted: Resources) -> str:
    """Phrase for the hosts to which a job is restricted."""
    return f"its hosts ({', '.join(dict.fromkeys(wanted.hosts))})"


def _empty(job: Job, view: View) -> list[HostFree]:
    """Hosts that the job may use, as if nothing ran there."""
    hosts = [h for h in view.hosts.values() if h.facts is not None and job.admits(h)]
    return [
        HostFree(h, [d for d in h.devices if not d.excluded], h.facts.cpu_cores, h.facts.memory_bytes)
        for h in hosts
        if h.facts
    ]


HOSTS_NAMED = 3
"""Hosts named in the message of a waiting job."""

_KINDS = {"cuda": "GPUs", "cpu": "CPU devices", None: "devices"}


def _no_host(job: Job, view: View) -> str:
    """Message why no admitted host is usable; stable while that is so, as every new reason is recorded."""
    why = [text for host in view.hosts.values() if job.admits(host) and (text := host.unusable)]
    if not why:
        return f"every host is left out for it: clusterd why {job.id}"
    more = f" and {len(why) - HOSTS_NAMED} more are no better" if len(why) > HOSTS_NAMED else ""
    return f"waits for a host: {', '.join(why[:HOSTS_NAMED])}{more}"


def _short_of(job: Job) -> str:
    """Message naming the resources that the job waits for; stable while it waits, so that it is recorded once."""
    wanted = job.spec.resources
    count = _least(job)
    if count == 0:
        memory = f" and {size(wanted.memory_bytes)} of memory" if wanted.memory_bytes else ""
        return f"waits for {max(wanted.cpus, 1)} free CPU cores{memory} on one host"
    where = "on one host " if job.spec.kind is JobKind.COMMAND else ""
    where = f"on each of {wanted.nodes} hosts " if wanted.nodes > 1 else where
    count = wanted.per_node if wanted.nodes > 1 else count
    noun = _noun(wanted, count)
    return f"waits for {count} free {noun} {where}(with {'their' if count > 1 else 'its'} cores and memory)"


def _started(job: Job, placement: Placement, choice: ChosenPlan | None) -> str:
    hosts = ", ".join(dict.fromkeys(str(p.host) for p in placement.ranks))
    if choice is None:
        return f"started on {hosts}"
    return f"{choice.plan} on {hosts}: {choice.reason}"
