"""Options of commands that submit a job, made from the declarations of its keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import click

from clusterd.cli.common.arguments import complete_job
from clusterd.cli.common.output import note
from clusterd.errors import UsageError
from clusterd.keys import DURATION, JOBS, RESOURCES, Key, keys_of, read_values
from clusterd.types import JobSpec
from clusterd.units import counted

_LETTERS = {"--ntasks": ("-n",), "--nodes": ("-N",)}
"""Short options, those of Slurm."""


@cache
def _keys() -> tuple[Key, ...]:
    return tuple(key for key in keys_of(JobSpec) if key.option)


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of all keys that have one to a command."""
    return _with(_keys(), {}, command)


def reservation_options(*more: str, **defaults: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options that choose devices, and those of the keys `more`, with these defaults, to a command."""
    alone = ("nodes", "gpus_per_node", "devices_per_node", "tasks")
    keys = [key for key in _keys() if key.short in more or (key.section == RESOURCES and key.short not in alone)]
    return lambda command: _with(keys, defaults, command)


def _with(keys: Iterable[Key], defaults: Mapping[str, str], command: Callable[..., Any]) -> Callable[..., Any]:
    for key in reversed(tuple(keys)):
        command = _option(key, defaults.get(key.short))(command)
    return command


def _option(key: Key, default: str | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    value, more = key.value, " May be repeated." if key.value.separator else ""
    kind: dict[str, Any] = {"is_flag": True} if value.accepts is bool else {"metavar": value.metavar or None}
    if value is JOBS:
        kind["shell_complete"] = complete_job
    return click.option(
        *_LETTERS.get(key.option, ()), key.option, key.short, help=key.doc + more, default=default,
        show_default=default is not None, type=value.accepts if value.accepts in (int, bool) else str,
        multiple=bool(value.separator), **kind,
    )  # fmt: skip


def given_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the options that are given, by key.

    Raises:
        UsageError: names the option.
    """
    given = []
    for key in _keys():
        value = options.get(key.short)
        if value is not None and value is not False and value != ():
            given.append((key, key.value.separator.join(value) if key.value.separator else value))
    found = read_values(given, lambda key: key.option, texts=True)
    for key, value in given:
        if key.value is DURATION and value.isdecimal():
            note(f"{key.option} {value} is {counted(int(value), 'second')}; {value}m would be minutes")
        if isinstance(value, int) and (problem := key.value.problem(value)):
            raise UsageError(f"{key.option} {problem}")
    return found
