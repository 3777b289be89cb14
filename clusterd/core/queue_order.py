"""Order in which the last scheduling pass considered the queued jobs, and the criterion that decided at each place.

A place names the job before it, so that two orders of ten thousand jobs differ in as many places as jobs moved.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple, Protocol

from clusterd.criterion import Criterion
from clusterd.types import JobId

_BY_NAME = {criterion.value: criterion for criterion in Criterion}
_SIGNIFICANCE = {criterion: at for at, criterion in enumerate(Criterion)}


class Key(Protocol):
    """Sort key of a job: a named tuple whose fields are named as criteria."""

    @property
    def _fields(self) -> tuple[str, ...]: ...

    def __iter__(self) -> Iterator[object]: ...


class QueuePlace(NamedTuple):
    """Place of a queued job."""

    after: JobId | None  # the job before it; None: it is the first
    criterion: Criterion | None  # that puts that one before it


Order = dict[JobId, QueuePlace]


def places(keys: Mapping[JobId, Key]) -> Order:
    """Places of jobs, which are given in order with the keys by which they were sorted."""
    order: Order = {}
    previous: tuple[JobId, Key] | None = None
    for job, key in keys.items():
        order[job] = QueuePlace(previous[0], _deciding(previous[1], key)) if previous else QueuePlace(None, None)
        previous = job, key
    return order


def _deciding(first: Key, second: Key) -> Criterion:
    """The first criterion in which two keys differ."""
    for name, one, other in zip(first._fields, first, second, strict=True):
        if one != other:
            return _BY_NAME[name]
    raise AssertionError("two jobs have one key")


def listed(order: Mapping[JobId, QueuePlace]) -> list[JobId]:
    """Jobs in order."""
    behind = {place.after: job for job, place in order.items()}
    jobs: list[JobId] = []
    job = behind.get(None)
    while job is not None:
        jobs.append(job)
        job = behind.get(job)
    return jobs


def only(order: Order, jobs: Container[JobId]) -> Order:
    """Order of those jobs alone; of the criteria between two of them the most significant decided."""
    if all(job in jobs for job in order):
        return order
    left: Order = {}
    after: JobId | None = None
    criterion: Criterion | None = None
    for job in listed(order):
        own = order[job].criterion
        criterion = min((c for c in (criterion, own) if c is not None), key=_SIGNIFICANCE.__getitem__, default=None)
        if job in jobs:
            left[job] = QueuePlace(after, criterion if after is not None else None)
            after, criterion = job, None
    return left


def difference(before: Order, now: Order) -> dict[JobId, QueuePlace | None]:
    """Places that are new or changed, and None for jobs without one any more."""
    gone: dict[JobId, QueuePlace | None] = {job: None for job in before if job not in now}
    return gone | {job: place for job, place in now.items() if before.get(job) != place}


def changed(before: Order, changes: Mapping[JobId, QueuePlace | None]) -> Order:
    """Order after changes as of `difference`."""
    return {job: place for job, place in {**before, **changes}.items() if place is not None}
