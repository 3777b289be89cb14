"""Parameter sweeps and arrays: one job for each combination of values of some variables, or for each index."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from clusterd.errors import UsageError
from clusterd.keys import NAME_LENGTH_MAX
from clusterd.protocol.launch import STAGE_VARIABLE
from clusterd.types import TEMPLATE_NAMES, ArrayTask, JobId, JobSpec

_CLOSING = {"(": ")", "[": "]", "{": "}"}

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
        values = _split(listed)
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


def _split(listed: str) -> list[str]:
    """Values between commas; commas within brackets or quotes belong to a value, and quotes around one do not.

    Raises:
        UsageError: a bracket or quote is not closed.
    """
    values, quote = [""], ""
    open_brackets: list[str] = []
    for letter in listed:
        if letter == "," and not quote and not open_brackets:
            values.append("")
            continue
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in _CLOSING:
            open_brackets.append(_CLOSING[letter])
        elif open_brackets and letter == open_brackets[-1]:
            open_brackets.pop()
        values[-1] += letter
    if quote or open_brackets:
        raise UsageError(f"--sweep: {(quote or open_brackets[-1])!r} is missing in {listed!r}")
    quoted = [len(value) > 1 and value[0] == value[-1] and value[0] in ("'", '"') for value in values]
    return [value[1:-1] if is_quoted else value for value, is_quoted in zip(values, quoted, strict=True)]


def parse_array(text: str) -> tuple[list[int], int]:
    """Parse the indices of an array, and how many of its tasks may run at once: ``0-99%8``, ``1,3,10-20:5``.

    Returns:
        The indices in order, and the limit; 0: none.

    Raises:
        UsageError: invalid syntax, a duplicate, or too many tasks.
    """
    listed, percent, limit = text.partition("%")
    indices: list[int] = []
    for part in listed.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part.strip(), re.ASCII)
        if match is None or match[3] == "0" or (percent and not re.fullmatch(r"[1-9]\d*", limit, re.ASCII)):
            raise UsageError(f"array {text!r}: write it as in 0-99, 0-99%8 (at most 8 at once), 1,5,9 or 0-20:5")
        first, last = int(match[1]), int(match[2] or match[1])
        step = int(match[3] or 1)
        if last < first or (last - first) // step + 1 + len(indices) > JOBS_MAX:
            raise UsageError(f"array {text!r}: give 1 to {JOBS_MAX} indices, each range from low to high")
        indices += range(first, last + 1, step)
    if len(set(indices)) < len(indices):
        raise UsageError(f"array {text!r}: an index is there twice")
    return sorted(indices), int(limit or 0)


def array_tasks(spec: JobSpec, text: str) -> list[JobSpec]:
    """Jobs of an array, one for each index, which is in its environment and in place of ``{index}`` in its command.

    Raises:
        UsageError: the indices are wrong, or the name is too long.
    """
    indices, most = parse_array(text)
    if len(spec.name) + 1 + len(str(indices[-1])) > NAME_LENGTH_MAX:
        raise UsageError(f"name {spec.name!r} is too long for an array, whose tasks have the index at its end")
    counts = {"COUNT": len(indices), "MIN": min(indices), "MAX": max(indices)}
    about = {f"CLUSTERD_ARRAY_TASK_{name}": str(count) for name, count in counts.items()}
    return [
        replace(
            spec,
            name=f"{spec.name}_{index}",
            command=tuple(_filled(part, {"index": str(index)}) for part in spec.command),
            env={**spec.env, **about},
            array=ArrayTask(id=JobId(""), name=spec.name, index=index, most=most),
        )
        for index in indices
    ]


def in_array(spec: JobSpec, first: str) -> JobSpec:
    """The job as a task of the array whose first task was accepted as job `first`."""
    return replace(spec, array=replace(spec.array, id=JobId(first))) if spec.array is not None else spec


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
            array=ArrayTask(id=JobId(""), name=spec.name, index=number, values=each),
        )
        for number, (name, each) in enumerate(zip(names, chosen, strict=True), 1)
    ]


def parse_stages(text: str) -> tuple[str, ...]:
    """Parse the stages of a training script: ``pretrain,finetune``.

    Raises:
        UsageError: a name is empty, unusable or there twice.
    """
    stages = tuple(part.strip() for part in text.split(",")) if text else ()
    for stage in stages:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", stage) or stages.count(stage) > 1:
            raise UsageError(f"stages {text!r}: write different names between commas, as in pretrain,finetune")
    return stages


def staged(spec: JobSpec, stages: Iterable[str]) -> list[JobSpec]:
    """Job of each stage of a training script, with the stage in its name and environment; see `in_chain`.

    Raises:
        UsageError: a name is too long.
    """
    names = {stage: f"{spec.name}-{stage}" for stage in stages}
    if longest := next((name for name in names.values() if len(name) > NAME_LENGTH_MAX), ""):
        raise UsageError(f"name {longest!r} of a stage is longer than {NAME_LENGTH_MAX} characters")
    return [replace(spec, name=name, env={**spec.env, STAGE_VARIABLE: stage}) for stage, name in names.items()]


def in_chain(spec: JobSpec, previous: str) -> JobSpec:
    """The job of a stage, after that of the previous one, if there was one."""
    return replace(spec, after=(*spec.after, JobId(previous)), restore=None) if previous else spec


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)
