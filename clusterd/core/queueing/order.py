"""Second stage: order of the queue (after AITurbo's Borda-count multi-level feedback queue).

A job for which others were suspended comes first of all. Then comes priority, then guaranteed jobs that have started
before, as their time runs on; then the job to which a start was promised, then those who have waited out of proportion,
longest first, then those for which a person waits, then tenants and in a tenant users who have used less than their
share.
Inside, queues by attained service; in a queue, Borda scores: every job is ranked by the service it has got, least
first; predictable ones also by what a device-second brings, most first. Ranks are shares of their list's length, equals
share a rank, and the list is sorted the way that it is meant (the published code adds the age to each rank and puts the
least gain first). An unpredictable job's service counts twice.

What a device-second brings follows from the work that is expected of a job, and work of unknown length is expected to
be as much as was done already: so jobs with and without a known end are on one scale.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

from clusterd.core.estimates.attained_service import attained_s
from clusterd.core.estimates.job_forecast import JobForecast
from clusterd.core.state import Job
from clusterd.core.view import View
from clusterd.types import JobId

QUEUES_DEVICE_S = (3600.0, 36000.0)
"""Attained service at which a job drops to the next level."""

STARVED_TIMES = 4.0
"""A job that has waited this many times as long as it would run comes first..."""

STARVED_S = 1800.0
"""... but not before it has waited this long."""


class Key(NamedTuple):
    """Sort key of a queued job: its fields are criteria, most significant first, and what is less comes first."""

    handover: bool
    priority: int
    started_guaranteed: bool
    promised: bool
    starved: bool
    starved_longer: float
    interactive: bool
    tenant_share: bool
    user_share: bool
    service_level: int
    score: float
    arrival: tuple[float, int, JobId]


def order(
    view: View, forecasts: Mapping[JobId, JobForecast], handed_over: Container[JobId] = ()
) -> Mapping[JobId, Key]:
    """Queued jobs in the order in which they are considered, each with its key; a requeued job keeps its arrival.

    Args:
        handed_over: jobs for which others were suspended: what those leave goes to nobody else.
    """
    queued = view.queued
    known = {
        job.id: forecast for job in queued if (forecast := forecasts.get(job.id)) is not None and forecast.has_model
    }
    service = {job.id: attained_s(job, view.now_s) for job in queued}
    by_service = ranks(service)
    foreseeable = [job for job in queued if job.id in known and job.progress.predictable is not False]
    gains = {job.id: -1.0 / known[job.id].work_s for job in foreseeable}
    by_gain = ranks(gains)
    tenants, users = view.quotas.tenant_shares(queued), view.quotas.user_shares(queued)
    promise = view.reservation
    promised = promise.job if promise is not None and promise.latest_s is not None else None

    def key(job: Job) -> Key:
        starved = is_starved(job, forecasts, view.now_s)
        return Key(
            handover=job.id not in handed_over,
            priority=-job.priority,
            started_guaranteed=not (job.spec.guaranteed and job.started_s is not None),
            promised=job.id != promised,
            starved=not starved,
            starved_longer=job.queued_s if starved else 0.0,
            interactive=not job.spec.interactive,
            tenant_share=tenants.is_over(job.spec.tenant),
            user_share=job.spec.tenant in users and users[job.spec.tenant].is_over(job.spec.user),
            service_level=sum(service[job.id] >= limit for limit in QUEUES_DEVICE_S),
            score=by_service[job.id] + by_gain.get(job.id, by_service[job.id]),
            arrival=arrival(job),
        )

    keys = {job.id: key(job) for job in queued}
    return dict(sorted(keys.items(), key=lambda item: item[1]))


def arrival(job: Job) -> tuple[float, int, JobId]:
    """Sort key of the order of arrival."""
    return job.submitted_s, len(job.id), job.id


def is_starved(job: Job, forecasts: Mapping[JobId, JobForecast], now_s: float) -> bool:
    """True where a job has waited long, and long in relation to its run time."""
    waited_s = now_s - job.queued_s
    if waited_s <= STARVED_S:
        return False
    forecast = forecasts[job.id]
    expected_s = forecast.left_s(next(iter(forecast.curve.points.values())))
    return waited_s > max(STARVED_S, STARVED_TIMES * expected_s)


def ranks(values: Mapping[JobId, float]) -> dict[JobId, float]:
    """Ranks from 0 to 1, least value first; equals share the first rank among them."""
    ordered = sorted(values, key=lambda i: values[i])
    places: dict[JobId, float] = {}
    place = 0
    for index, job in enumerate(ordered):
        if index and values[job] > values[ordered[index - 1]]:
            place = index
        places[job] = place / max(len(ordered) - 1, 1)
    return places
