"""Changes of a submitted job as ``KEY=VALUE``, with the keys of a job file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from clusterd.errors import UsageError
from clusterd.plans.plan import Plan
from clusterd.submission.job_file import checked_name
from clusterd.types import JobSpec
from clusterd.units import parse_capability, parse_duration_s, parse_gpus, parse_size

NONE = ("", "none", "any")
"""Values that take a limit, a list or a choice away."""


def parse_changes(given: Iterable[str]) -> dict[str, Any]:
    """Changes for the verb ``edit``: ``time=2h``, ``gpus=a100:2``, ``after=12:any,prepare``.

    Raises:
        UsageError: names the invalid item.
    """
    changes: dict[str, Any] = {}
    for item in given:
        key, assigned, value = item.partition("=")
        if not assigned or key not in _KEYS:
            raise UsageError(f"{item}: write KEY=VALUE with one of the keys {', '.join(_KEYS)}")
        try:
            fields = _KEYS[key](value)
        except (ValueError, OverflowError) as error:
            raise UsageError(f"{item}: {error}") from None
        resources = {**changes.get("resources", {}), **fields.pop("resources", {})}
        changes.update(fields, **({"resources": resources} if resources else {}))
    if not changes:
        raise UsageError(f"nothing to change: give KEY=VALUE with one of the keys {', '.join(_KEYS)}")
    return changes


def with_changes(spec: JobSpec, changes: dict[str, Any]) -> JobSpec:
    """The specification with these fields changed; `resources` names only the fields that change.

    Raises:
        UsageError: a value of the wrong type.
    """
    import msgspec

    before = msgspec.to_builtins(spec)
    resources = {**before["resources"], **changes.get("resources", {})}
    try:
        return msgspec.convert({**before, **changes, "resources": resources}, JobSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"the change is not well-formed: {error}") from None


Fields = dict[str, Any]


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("it must be a whole number") from None


def _count(text: str) -> int:
    count = 0 if text in NONE else _number(text)
    if count < 0:
        raise ValueError("it must not be negative")
    return count


def _time(field: str) -> Callable[[str], Fields]:
    return lambda text: {field: None if text in NONE else parse_duration_s(text)}


def _listed(text: str) -> list[str]:
    return [] if text in NONE else text.split(",")


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("it must be true or false")
    return text == "true"


def _gpus(text: str) -> Fields:
    named, count = parse_gpus(text)
    return _resources(devices=count, kind="cuda", **({"device_name": named} if named else {}))


def _capability(text: str) -> str:
    parse_capability(text)
    return text


def _plan(text: str) -> Fields:
    return _resources(plan=None if text in NONE else Plan.parse(text).to_dict())


def _resources(**fields: Any) -> Fields:
    return {"resources": fields}


_KEYS: dict[str, Callable[[str], Fields]] = {
    "name": lambda text: {"name": checked_name(text, "name")},
    "priority": lambda text: {"priority": _number(text)},
    "guaranteed": lambda text: {"guaranteed": _boolean(text)},
    "preemptible": lambda text: {"preemptible": _boolean(text)},
    "after": lambda text: {"after": _listed(text)},
    "time": _time("time_limit_s"),
    "stall": _time("stall_s"),
    "grace": lambda text: {"grace_s": parse_duration_s(text)},
    "retries": lambda text: {"retries": _count(text)},
    "retry_on": lambda text: {"retry_on": [_count(code) for code in _listed(text)]},
    "gpus": _gpus,
    "devices": lambda text: _resources(devices=_count(text), kind=None),
    "nodes": lambda text: _resources(nodes=_number(text)),
    "gpu_type": lambda text: _resources(device_name="" if text in NONE else text),
    "gpu_memory": lambda text: _resources(device_memory_bytes=0 if text in NONE else parse_size(text)),
    "compute_capability": lambda text: _resources(compute_capability="" if text in NONE else _capability(text)),
    "constraint": lambda text: _resources(constraint=_listed(text)),
    "cpus": lambda text: _resources(cpus=_count(text)),
    "memory": lambda text: _resources(memory_bytes=0 if text in NONE else parse_size(text)),
    "hosts": lambda text: _resources(hosts=_listed(text)),
    "min_devices": lambda text: _resources(min_devices=_count(text)),
    "max_devices": lambda text: _resources(max_devices=_count(text)),
    "share": lambda text: _resources(share=_number(text)),
    "plan": _plan,
}
"""Fields of a specification by key of a job file."""
