"""Limits that a surrounding allocation sets by variables: GPUs, cores and memory that an agent in it may offer.

Affinity masks and cgroups count for every agent (`facts`). Where a batch system limits by variables alone, the agent of
a host that dialed in follows those too; the command that starts it reads them once, as an agent's own environment is
that of its first start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

VARIABLE = "CLUSTERD_AGENT_LIMITS"
"""Environment variable of an agent that has limits, as JSON."""

Limits = dict[str, Any]


def of_allocation(environ: Mapping[str, str]) -> Limits:
    """Limits that the variables of CUDA and Slurm set; only those that are there."""
    limits: Limits = {}
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        limits["gpus"] = [part.strip() for part in visible.split(",") if part.strip()]
    cores = _number(environ, "SLURM_CPUS_ON_NODE")
    if cores:
        limits["cores"] = cores
    megabytes = _number(environ, "SLURM_MEM_PER_NODE") or _number(environ, "SLURM_MEM_PER_CPU") * cores
    if megabytes:  # 0 stands for all of the node's
        limits["memory_bytes"] = megabytes << 20
    return limits


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0


def of_agent() -> Limits:
    """Limits of this agent; empty: it has none."""
    try:
        limits = json.loads(os.environ.get(VARIABLE, "{}"))
    except ValueError:
        return {}
    return limits if isinstance(limits, dict) else {}


def restrict(facts: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """Facts of the host as far as the limits go."""
    found = dict(facts)
    if "gpus" in limits:
        found["gpus"] = _visible(facts["gpus"], limits["gpus"])
    if limits.get("cores", found["cpu_cores"]) < found["cpu_cores"]:
        found["cpu_cores"] = limits["cores"]
        found["cpu_ids"] = []  # which ones are meant is not known: nothing may be pinned to those of others
    if "memory_bytes" in limits:
        for name in ("memory_bytes", "memory_available_bytes"):
            found[name] = min(found[name], limits["memory_bytes"])
    return found


def _visible(gpus: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """GPUs that a value of CUDA_VISIBLE_DEVICES names; CUDA ignores all from the first unknown one on."""
    chosen: list[dict[str, Any]] = []
    for name in names:
        of_name = [
            gpu
            for gpu in gpus
            if (name.isdigit() and gpu["index"] == int(name)) or (not name.isdigit() and gpu["uuid"].startswith(name))
        ]
        if not of_name:
            break
        chosen += [gpu for gpu in of_name if gpu not in chosen]
    return chosen
