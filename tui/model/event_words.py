"""Events as text: a one-line summary for cells, full values for the detail pane."""

from __future__ import annotations

from typing import Any

from tui.model import rows

NESTED_CELLS = 60
"""Limit of a nested value in a summary; the detail pane shows all of it."""


def readable_kind(kind: str) -> str:
    """``launch attempt`` for ``LaunchAttempt``."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in kind).strip()


def short_plan(plan: str) -> str:
    """``pp=2,acc=4`` for ``pp=2,accumulation=4``."""
    return plan.replace("accumulation", "acc").replace("checkpointing", "ckpt").replace("micro_batch", "mb")


def summary(event: rows.EventRow) -> str:
    """One line with the fields of an event, without its job and host."""
    skipped = {"id", "at_s", "job", "host"}
    if event.kind == "JobEdited":  # its specification is the whole of it, not the change
        skipped.add("spec")
    shown = {name: value for name, value in event.fields.items() if name not in skipped and _is_set(value)}
    if isinstance(spec := shown.get("spec"), dict):  # of a submission: the request, not the execution details
        return _request(spec)
    return ", ".join(f"{name} {_short(value)}" for name, value in shown.items())


def _is_set(value: Any) -> bool:
    """The value is neither empty nor False; zero counts as set."""
    return value is not False and value not in (None, "", (), [], {})


def _request(spec: dict[str, Any]) -> str:
    """Summary of a submitted job: kind, devices, plan, priority and command."""
    parts = [str(spec.get("kind", ""))]
    if isinstance(asked := spec.get("resources"), dict):
        count, kind = asked.get("devices"), asked.get("kind")
        devices = "device" if count == 1 else "devices"
        parts.append(" ".join(filter(None, (str(count), str(kind or ""), devices))) if count else "CPU cores")
        parts.append(_short_plan_of(asked["plan"]) if isinstance(asked.get("plan"), dict) else "")
    parts.append(f"priority {spec['priority']}" if spec.get("priority") else "")
    parts.append("guaranteed" if spec.get("guaranteed") else "")
    command = spec.get("command")
    parts.append(" ".join(map(str, command)) if isinstance(command, list | tuple) else "")
    return ", ".join(filter(None, parts))


def _short_plan_of(plan: dict[str, Any]) -> str:
    """Non-default fields of a plan, as in ``dp=4,zero=1``."""
    usual = {
        "dp": 1,
        "tp": 1,
        "pp": 1,
        "accumulation": 1,
        "zero": 0,
        "offload": "none",
        "schedule": plan.get("schedule"),
    }
    given = {name: value for name, value in plan.items() if _is_set(value) and value != usual.get(name)}
    return short_plan(",".join(f"{name}={value}" for name, value in given.items()))


def full_value(value: Any) -> str:
    """A field's value with all nested fields that are set."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_bracketed(v)}" for name, v in value.items() if _is_set(v))
    if isinstance(value, list | tuple):
        return ", ".join(map(_bracketed, value)) or "none"
    return "none" if value is None else str(value)


def _bracketed(value: Any) -> str:
    return f"({full_value(value)})" if isinstance(value, dict | list | tuple) else str(value)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        inner = ", ".join(f"{name} {_short(v)}" for name, v in value.items() if _is_set(v))
        return f"({inner})" if len(inner) <= NESTED_CELLS else f"({inner[:NESTED_CELLS]}...)"
    if isinstance(value, list | tuple):
        return f"{len(value)} items" if len(value) > 3 else "[" + ", ".join(map(_short, value)) + "]"
    return str(value)
