"""Kinds, plans and values of fields as text, for cells and for the detail pane."""

from __future__ import annotations

from typing import Any


def readable_kind(kind: str) -> str:
    """``launch attempt`` for ``LaunchAttempt``."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in kind).strip()


def short_plan(plan: str) -> str:
    """``pp=2,acc=4`` for ``pp=2,accumulation=4``."""
    return plan.replace("accumulation", "acc").replace("checkpointing", "ckpt").replace("micro_batch", "mb")


def full_value(value: Any) -> str:
    """A field's value with all nested fields that are set."""
    if isinstance(value, dict):
        return ", ".join(
            f"{name} {_bracketed(v)}" for name, v in value.items() if v not in (False, None, "", (), [], {})
        )
    if isinstance(value, list | tuple):
        return ", ".join(map(_bracketed, value)) or "none"
    return "none" if value is None else str(value)


def _bracketed(value: Any) -> str:
    return f"({full_value(value)})" if isinstance(value, dict | list | tuple) else str(value)
