"""Requests that the cluster cannot serve, now or ever: the reason, as users read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from clusterd.core.estimates.request_forecast import requested_plans
from clusterd.core.host import Host
from clusterd.core.ledger import HostFree
from clusterd.core.placement.place import fitting, holds, kinds_for, per_device
from clusterd.core.state import Job
from clusterd.core.view import Refusal, View
from clusterd.types import Device, JobKind, Resources
from clusterd.units import counted, size

Answer = TypeVar("Answer")


def unsatisfiable(job: Job, view: View) -> str | None:
    """Reason why no host of the cluster could ever serve the job; None: some could, or not all have reported yet."""
    if not view.hosts or any(host.facts is None for host in view.hosts.values()):
        return None
    impossible = never(job, view, admitted_devices(job, view))
    return impossible.reason if impossible else beyond_every_host(job, view)


def _remembered(job: Job, view: View, make: Callable[[Job, View], Answer]) -> Answer:
    """Answer that follows from the hosts and the request alone, made once for all jobs that ask alike."""
    spec = job.spec
    key = (make, spec.resources, spec.kind, spec.runtime, job.pinned, tuple(job.failures.excluded_hosts))
    if key not in view.of_request:
        view.of_request[key] = make(job, view)
    answer: Answer = view.of_request[key]
    return answer


def serving(job: Job, view: View) -> tuple[list[Device], str | None]:
    """Devices of all hosts that serve the job's request, and the reason why only another host could; None: none."""
    return _remembered(job, view, _serving)


def _serving(job: Job, view: View) -> tuple[list[Device], str | None]:
    known = admitted_devices(job, view)
    impossible = never(job, view, known)
    return known, impossible.reason if impossible is not None else None


def admitted_devices(job: Job, view: View) -> list[Device]:
    """Devices of all hosts that serve the job's request."""
    wanted = job.spec.resources
    devices = (d for h in view.hosts.values() if job.admits(h) for d in h.devices)
    serve = (d for d in devices if wanted.admits(d.kind, d.name, d.memory_bytes, d.compute_capability))
    return [d for d in serve if not d.excluded]


def least_devices(job: Job) -> int:
    """Fewest devices with which the job starts."""
    if job.spec.kind is JobKind.CHECKPOINTABLE:
        return min(plan.ranks for plan in requested_plans(job))
    return max(job.spec.resources.devices, int(job.spec.kind is JobKind.ELASTIC))


def never(job: Job, view: View, known: list[Device]) -> Refusal | None:
    """Refusal that only another host could lift; None: the end of other jobs may suffice."""
    wanted = job.spec.resources
    if not any(h.facts for h in view.hosts.values()):
        return Refusal(job.id, _no_host(job, view) if view.hosts else "no host is connected: clusterd host add")
    missing = [h for h in wanted.hosts if h not in view.hosts]
    if missing:
        return Refusal(
            job.id, f"asks for host {missing[0]}, which is not in the cluster: clusterd host add {missing[0]}"
        )
    if job.spec.container and all(h.why_no_container(job.spec.runtime) for h in view.hosts.values()):
        why = "; ".join(h.why_no_container(job.spec.runtime) for h in list(view.hosts.values())[:HOSTS_NAMED])
        return Refusal(job.id, f"asks for a container of {job.spec.runtime}, which no host can run ({why})")
    if wanted.constraint and not any(job.admits(h) for h in view.hosts.values()):
        return Refusal(job.id, f"asks for {_labelled(wanted)}; {_labels_there(view)}")
    there = Counter(d.kind for d in known)
    count = max(there[kind] for kind in kinds_for(job))
    least = least_devices(job)
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
        owner = f"{_its_hosts(wanted)} have" if wanted.hosts or wanted.exclude else "the cluster has"
        if job.failures.excluded_hosts:
            owner = "the hosts that it may use have"
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
    each = f" for each of {wanted.share} jobs" if wanted.share > 1 else ""
    least = [f"{size(wanted.device_memory_bytes)} or more{each}"] if wanted.device_memory_bytes else []
    least += [f"compute capability {wanted.compute_capability}"] if wanted.compute_capability else []
    kind = _KINDS[wanted.kind] if count != 1 else _KINDS[wanted.kind].removesuffix("s")
    return f"{kind}{named}{' with ' if least else ''}{' and '.join(least)}"


def misfit(job: Job, host: Host) -> str | None:
    """Reason why a host could not serve the job even if nothing else ran there; None: it could, or is not meant."""
    wanted = job.spec.resources
    if host.facts is None or (wanted.hosts and host.id not in wanted.hosts) or host.id in wanted.exclude:
        return None
    if missing := host.missing_labels(wanted.constraint):
        has = f"it has {', '.join(host.facts.labels)}" if host.facts.labels else "it has none"
        return f"{host.id} lacks the label{'s' * (len(missing) > 1)} {', '.join(missing)}: {has}"
    if lacks := host.why_no_container(job.spec.runtime):
        return lacks
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


def shortage(job: Job, view: View, devices: int) -> Refusal:
    """Refusal of a job for which too little is free now, or would be even if nothing else ran."""
    beyond = _remembered(job, view, beyond_every_host)
    if beyond:
        return Refusal(job.id, beyond)
    if not any(job.admits(host) for host in view.free.hosts.values()):
        return Refusal(job.id, _no_host(job, view), devices=devices)
    return Refusal(job.id, _short_of(job), devices=devices, is_shortage=True)


def beyond_every_host(job: Job, view: View) -> str | None:
    """Message about cores or memory that no host has even if nothing else ran; None: the job would fit."""
    wanted = job.spec.resources
    least = least_devices(job)
    empty = empty_hosts(job, view)
    cores, memory_bytes = per_device(job)
    if least == 0:
        fits = sum(h.cores >= cores and h.memory_bytes >= memory_bytes for h in empty) >= wanted.nodes
    else:
        usable = ([len(fitting(job, h, kind)) for h in empty] for kind in kinds_for(job))
        fits = any(holds(job, counts) if least == wanted.devices else sum(counts) >= least for counts in usable)
    if fits or not empty:
        return None
    needs = f"needs {counted(max(cores, 1), 'CPU core')}"
    needs += f" and {size(memory_bytes)} of memory" if memory_bytes else ""
    needs += f" beside each of {least} {_KINDS[wanted.kind]}" if least else ""
    has = _none(wanted) if least == 0 or job.spec.kind is JobKind.COMMAND else "the hosts have not"
    has = f"fewer than {wanted.nodes} hosts have" if wanted.nodes > 1 else has
    largest = f"{max(h.cores for h in empty)} CPU cores and {size(max(h.memory_bytes for h in empty))} of memory"
    return f"{needs}; {has} that much: at most {largest}"


def _none(wanted: Resources) -> str:
    return f"none of {_its_hosts(wanted)} has" if wanted.hosts or wanted.exclude else "no host has"


def _its_hosts(wanted: Resources) -> str:
    """Phrase for the hosts to which a job is restricted."""
    excluded = f"all but {', '.join(wanted.exclude)}" if wanted.exclude else ""
    return f"its hosts ({', '.join(dict.fromkeys(wanted.hosts)) or excluded})"


def empty_hosts(job: Job, view: View) -> list[HostFree]:
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
        return "every host is left out for it: clusterd why tells the reasons"  # one answer for all that ask alike
    more = f" and {len(why) - HOSTS_NAMED} more are no better" if len(why) > HOSTS_NAMED else ""
    return f"waits for a host: {', '.join(why[:HOSTS_NAMED])}{more}"


def _short_of(job: Job) -> str:
    """Message naming the resources that the job waits for; stable while it waits, so that it is recorded once."""
    wanted = job.spec.resources
    count = least_devices(job)
    where = f"on each of {wanted.nodes} hosts" if wanted.nodes > 1 else "on one host"
    if count == 0:
        cores, memory_bytes = per_device(job)
        memory = f" and {size(memory_bytes)} of memory" if memory_bytes else ""
        return f"waits for {counted(max(cores, 1), 'free CPU core')}{memory} {where}"
    where = f"{where} " if job.spec.kind is JobKind.COMMAND else ""
    count = wanted.per_node if wanted.nodes > 1 else count
    noun = _noun(wanted, count)
    return f"waits for {count} free {noun} {where}(with {'their' if count > 1 else 'its'} cores and memory)"
