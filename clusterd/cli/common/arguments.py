"""Arguments of several commands: jobs by name, id or pattern, with their completion; and times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import click

from clusterd.cli.common.output import note
from clusterd.client import Client
from clusterd.errors import ClusterError, UsageError
from clusterd.units import is_match, is_pattern, parse_duration_s, parse_time_s


def is_selected(row: dict[str, Any], texts: Iterable[str]) -> bool:
    """One of the texts is the job's id or name, its array's name, or a pattern that matches its name.

    A task of an array is also selected by the array's id, by ``12_3``, ``12_*`` and ``12_[3,10-12]``.
    """
    names, ids, array = [row["name"]], [row["id"]], row.get("array")  # absent from the reply of an older daemon
    if array is not None:
        names += [f"{array['id']}_{array['index']}", array["name"]]
        ids.append(array["id"])
    return any(text in ids or any(is_match(name, text) for name in names) for text in texts)


def is_found(row: dict[str, Any], texts: Iterable[str]) -> bool:
    """True for a selected job, and for one with one of the texts in a field that is searched."""
    from clusterd.rows import SEARCHED  # rarely needed: the command line starts faster without

    found = [str(row.get(name, "")).lower() for name in SEARCHED]  # absent from the reply of an older daemon
    return is_selected(row, texts) or any(text.lower() in shown for text in texts for shown in found)


def own_jobs(
    cluster: Client, texts: Iterable[str], *, over: bool, accept: Callable[[dict[str, Any]], bool] = lambda _: True
) -> list[str]:
    """Jobs as named; a pattern or an array's name expands to the ids of the user's own jobs that are over (or not).

    An array's id, that of its first task, means all of its tasks.

    Args:
        accept: further condition on the jobs of a pattern or an array.
    Raises:
        UsageError: a pattern matches nothing, or no task of an array.
    """
    found: list[str] = []
    for text in texts:
        if text.isdecimal() and (tasks := _tasks(cluster, text)):
            ids = [row["id"] for row in tasks if (row["ended_s"] is not None) == over and accept(row)]
            if not ids:
                what = "that is over" if over else "for that"
                raise UsageError(f"array {text} has no task {what}: clusterd ls {text} lists them")
            found += ids
            continue
        if not is_pattern(text) and (text.isdecimal() or over):
            found.append(text)
            continue
        listed = cluster.all_jobs() if over else cluster.call("jobs")
        if not is_pattern(text) and (
            any(row["name"] == text for row in listed) or not any(map(_in_array(text), listed))
        ):
            found.append(text)
            continue
        me = cluster.call("hello")["user"]
        rows = [row for row in listed if row["user"] == me and is_selected(row, [text])]
        ids = [row["id"] for row in rows if (row["ended_s"] is not None) == over and accept(row)]
        if not ids:
            kind = "finished" if over else "active"
            raise UsageError(f"no {kind} job of yours matches {text}" if text != "*" else f"you have no {kind} job")
        found += ids
    return list(dict.fromkeys(found))


def job_or_tasks(cluster: Client, text: str) -> list[str]:
    """The id of a job, or those of the tasks of an array or sweep.

    Raises:
        ClusterError: neither is named so.
    """
    if text.isdecimal() and (tasks := _tasks(cluster, text)):
        return [row["id"] for row in tasks]
    try:
        return [cluster.call("job", job=text)["id"]]
    except ClusterError:
        if tasks := _tasks(cluster, text):
            return [row["id"] for row in tasks]
        raise


def shown_jobs(cluster: Client, texts: Iterable[str]) -> list[dict[str, Any]]:
    """Rows of jobs by id or name, and of all that a pattern matches, where a command shows each.

    Raises:
        ClusterError: there is none.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        ids = [row["id"] for row in cluster.all_jobs() if is_selected(row, [text])] if is_pattern(text) else []
        for row in [cluster.call("job", job=name) for name in ids or [text]]:
            note_array(row, text)
            found[row["id"]] = row
    return list(found.values())


def host_names(cluster: Client, texts: Iterable[str]) -> list[str]:
    """Names of hosts, those that match a pattern in its place.

    Raises:
        UsageError: a pattern matches none.
    """
    found: list[str] = []
    for text in texts:
        known = [row["name"] for row in cluster.call("hosts")] if is_pattern(text) else [text]
        names = [name for name in known if name == text or is_match(name, text)]
        if not names:
            raise UsageError(f"no host matches {text} (hosts: {', '.join(sorted(known)) or 'none yet'})")
        found += names
    return list(dict.fromkeys(found))


def note_array(row: dict[str, Any], text: str) -> None:
    """Say that the id of an array stands for its first task, where a command shows one job."""
    array = row.get("array")  # absent from the reply of an older daemon
    if array is not None and text == array["id"]:
        task = f"{text}_{array['index']}"
        note(f"{text} is the array {array['name']}; this is its task {task}: clusterd ls {text} lists all")


def _tasks(cluster: Client, array: str) -> list[dict[str, Any]]:
    """Rows of the tasks of an array, by its id or name; empty: it is none."""
    with suppress(ClusterError):
        rows: list[dict[str, Any]] = cluster.call("tasks", array=array)
        return rows
    return []


def _in_array(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda row: (row.get("array") or {}).get("name") == name


def time_s(option: str, text: str, hint: str = "") -> float:
    """Seconds given to a time option.

    Raises:
        UsageError: the text is not a time, or negative or infinite.
    """
    try:
        seconds = parse_duration_s(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"{option} {text}: give a time of at least 0, as in 90s{hint}")
    return seconds


def point_in_time_s(option: str, text: str) -> float:
    """Wall clock given to an option: see `parse_time_s`.

    Raises:
        UsageError: it is none.
    """
    try:
        return parse_time_s(text)
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}") from None


def since_s(option: str, text: str) -> float:
    """Wall clock of the begin of a time up to now: so long before now, or a date, ``yesterday 9:00``.

    Raises:
        UsageError: it is neither, or is to come.
    """
    with suppress(ValueError):
        if (at_s := parse_time_s(text)) <= time.time():
            return at_s
    return time.time() - time_s(option, text, " or 2026-12-24")


COMPLETION_TIMEOUT_S = 0.5
"""A slower completion is worse than none."""


def _names(verb: str, args: dict[str, Any]) -> list[str]:
    try:
        with Client(timeout_s=COMPLETION_TIMEOUT_S) as cluster:
            return [row["name"] for row in cluster.call(verb, **args)]
    except ClusterError:
        return []  # the shell cannot show a message


def _completer(verb: str, **args: Any) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        return sorted({name for name in _names(verb, args) if name.startswith(incomplete)})

    return complete


complete_job = _completer("jobs", all=True)
complete_host = _completer("hosts")
