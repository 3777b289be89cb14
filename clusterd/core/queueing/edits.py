"""Changes of a submitted job's specification: which keys may change in which state, and the change in words."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from clusterd.core.state import Job
from clusterd.keys import RESOURCES, Edit, Key, keys_of
from clusterd.types import JobSpec, JobState

EDITABLE = {RESOURCES if key.section == RESOURCES else key.field for key in keys_of(JobSpec) if key.edit != Edit.NEVER}
"""Fields of a specification that may change after the submission."""


def _devices(spec: JobSpec) -> str:
    """Number and kind of devices, which several keys set."""
    wanted = spec.resources
    return f"{wanted.devices}{({'cuda': ' GPUs', 'cpu': ' CPU devices'}).get(wanted.kind or '', '')}"


def _changes(before: JobSpec, after: JobSpec) -> Iterator[tuple[Key, str, str]]:
    """Keys that differ, with both values in words; of the keys of one field, the first that has its name."""
    for field, keys in groupby(keys_of(JobSpec), lambda key: key.field):
        key = min(keys, key=lambda key: key.short != field)
        if field == "devices" and _devices(before) != _devices(after):
            yield key, _devices(before), _devices(after)
        elif field != "devices" and key.of(before) != key.of(after):
            yield key, key.words(key.of(before)), key.words(key.of(after))


def described(before: JobSpec, after: JobSpec) -> str:
    """The change in words: ``time 1h -> 2h, devices 1 -> 2``."""
    return ", ".join(f"{key.short} {was} -> {now}" for key, was, now in _changes(before, after))


def refused_now(job: Job, spec: JobSpec) -> list[str]:
    """Changed keys that the job's state does not allow."""
    if job.state is JobState.QUEUED:
        return []
    differ = (key for key, *_ in _changes(job.spec, spec))
    return [key.short for key in differ if job.state.is_final or key.edit is not Edit.RUNNING]
