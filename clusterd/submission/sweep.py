"""Parameter sweeps: one job for each combination of the values of some variables."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from clusterd.errors import UsageError
from clusterd.submission.job_file import NAME_LENGTH_MAX
from clusterd.types import TEMPLATE_NAMES, JobSpec

JOBS_MAX = 1000
"""Limit of one sweep, so that a typing error does not fill the queue."""


def parse_sweep(given: Iterable[str]) -> dict[str, list[str]]:
    """Parse values by variable: ``LR=1e-3,3e-4``.

    Raises:
        UsageError: invalid syntax, a duplicate, or too many jobs.
    """
    found: dict[str, list[str]] = {}
    for text in given:
        name, _, listed = text.partition("=")
        values = listed.split(",")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not all(values):
            raise UsageError(f"--sweep {text}: write NAME=VALUE,VALUE,... as in LR=1e-3,3e-4")
        if name in TEMPLATE_NAMES:
            raise UsageError(f"--sweep {text}: {{{name}}} in a command is what clusterd fills in; choose another name")
        if name in found:
            raise UsageError(f"--sweep {text}: {name} is given twice; write all its values in one")
        if len(set(values)) < len(values):
            raise UsageError(f"--sweep {text}: a value is there twice")
        found[name] = values
    if (count := math.prod(map(len, found.values()))) > JOBS_MAX:
        raise UsageError(f"--sweep makes {count} jobs; {JOBS_MAX} at a time are the most")
    return found


def swept(spec: JobSpec, values: Mapping[str, Sequence[str]]) -> list[JobSpec]:
    """Jobs of all combinations, with the values in environment, name and ``{NAME}`` of the command."""
    if not values:
        return [spec]
    chosen = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    suffixes = ("".join(f"_{name}{value}" for name, value in each.items()) for each in chosen)
    names = [spec.name + re.sub(r"[^A-Za-z0-9._-]+", "-", suffix) for suffix in suffixes]
    if len(set(names)) < len(names) or max(map(len, names)) > NAME_LENGTH_MAX:
        names = [f"{spec.name}_{number}" for number in range(1, len(chosen) + 1)]
    return [
        replace(
            spec,
            name=name,
            command=tuple(_filled(part, each) for part in spec.command),
            env={**spec.env, **each},
        )
        for name, each in zip(names, chosen, strict=True)
    ]


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)
