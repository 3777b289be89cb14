"""Changes of a submitted job's specification: which keys may change in which state, and the change in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from clusterd.core.state import Job
from clusterd.types import JobSpec, JobState
from clusterd.units import duration, size

EDITABLE = frozenset(
    {
        "name", "priority", "guaranteed", "after", "time_limit_s", "stall_s", "grace_s", "retries", "retry_on",
        "resources",
    }
)  # fmt: skip
"""Fields of a specification that may change after the submission."""

WHILE_RUNNING = frozenset(
    {"priority", "time", "stall", "grace", "retries", "retry_on", "min_devices", "max_devices"}
)  # fmt: skip
"""Keys that may change while the job has an attempt: they are read again at each decision."""


def _time(value_s: float | None) -> str:
    return duration(value_s) if value_s is not None else "none"


def _names(values: Sequence[object]) -> str:
    return " ".join(map(str, values)) or "none"


def _devices(asked: tuple[int, str | None]) -> str:
    count, kind = asked
    return f"{count}{({'cuda': ' GPUs', 'cpu': ' CPU devices'}).get(kind or '', '')}"


_KEYS: dict[str, tuple[Callable[[JobSpec], Any], Callable[[Any], str]]] = {
    "name": (lambda spec: spec.name, str),
    "priority": (lambda spec: spec.priority, str),
    "guaranteed": (lambda spec: spec.guaranteed, str),
    "after": (lambda spec: spec.after, _names),
    "time": (lambda spec: spec.time_limit_s, _time),
    "stall": (lambda spec: spec.stall_s, _time),
    "grace": (lambda spec: spec.grace_s, _time),
    "retries": (lambda spec: spec.retries, str),
    "retry_on": (lambda spec: spec.retry_on, _names),
    "devices": (lambda spec: (spec.resources.devices, spec.resources.kind), _devices),
    "nodes": (lambda spec: spec.resources.nodes, str),
    "gpu_type": (lambda spec: spec.resources.device_name, lambda name: name or "any"),
    "gpu_memory": (lambda spec: spec.resources.device_memory_bytes, size),
    "compute_capability": (lambda spec: spec.resources.compute_capability, lambda text: text or "any"),
    "constraint": (lambda spec: spec.resources.constraint, _names),
    "cpus": (lambda spec: spec.resources.cpus, str),
    "memory": (lambda spec: spec.resources.memory_bytes, size),
    "hosts": (lambda spec: spec.resources.hosts, lambda hosts: _names(hosts) if hosts else "any"),
    "min_devices": (lambda spec: spec.resources.min_devices, lambda count: str(count or "any")),
    "max_devices": (lambda spec: spec.resources.max_devices, lambda count: str(count or "any")),
    "plan": (lambda spec: spec.resources.plan, str),
}
"""Value of each key of a job file in a specification, and that value in words."""


def changed(before: JobSpec, after: JobSpec) -> list[str]:
    """Keys of a job file that differ."""
    return [key for key, (value, _) in _KEYS.items() if value(before) != value(after)]


def described(before: JobSpec, after: JobSpec) -> str:
    """The change in words: ``time 1h -> 2h, devices 1 -> 2``."""
    differ = ((key, *_KEYS[key]) for key in changed(before, after))
    return ", ".join(f"{key} {text(value(before))} -> {text(value(after))}" for key, value, text in differ)


def refused_now(job: Job, spec: JobSpec) -> list[str]:
    """Changed keys that the job's state does not allow."""
    if job.state is JobState.QUEUED:
        return []
    return [key for key in changed(job.spec, spec) if job.state.is_final or key not in WHILE_RUNNING]
