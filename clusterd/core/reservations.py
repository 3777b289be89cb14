"""Promises of devices to queued jobs: the first blocked job's reservation, and claims on suspended jobs' devices."""

from __future__ import annotations

from dataclasses import dataclass

from clusterd.core.performance_table import Estimate
from clusterd.types import HostId, JobId


@dataclass(frozen=True, slots=True)
class Reservation:
    """Promise to the first queued job that cannot start: nothing of its order or below delays it beyond `at_s`."""

    job: JobId
    at_s: float  # expected start; never put off
    latest_s: float | None = None  # by the time limits of the jobs that it waits for; None: some have no limit
    after: tuple[JobId, ...] = ()  # jobs whose end it waits for


@dataclass(frozen=True, slots=True)
class Handover:
    """Devices that a queued job gets as soon as other jobs, suspended for it, have left them."""

    offer: Estimate
    hosts: dict[HostId, int]  # devices of each host
    suspended: tuple[JobId, ...]  # jobs; they wait until this one has started
    since_s: float
