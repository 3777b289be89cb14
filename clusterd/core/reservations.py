"""Promises of devices to queued jobs: the first blocked job's reservation, and claims on suspended jobs' devices."""

from __future__ import annotations

from dataclasses import dataclass

from clusterd.core.performance_table import Estimate
from clusterd.types import HostId, JobId


@dataclass(frozen=True, slots=True)
class Reservation:
    """Devices kept for the first queued job that cannot start, and the promise that may be made of its start."""

    job: JobId
    at_s: float  # earliest start that was expected so far: jobs behind it that end later leave it a place
    latest_s: float | None = None  # promised start, by time limits and claims; None: none can be promised
    after: tuple[JobId, ...] = ()  # jobs whose end it waits for
    is_foreseen: bool = True  # False: `at_s` is a guess, since nothing tells the end of some of these jobs


@dataclass(frozen=True, slots=True)
class Handover:
    """Devices that a queued job gets as soon as other jobs, suspended for it, have left them."""

    offer: Estimate
    hosts: dict[HostId, int]  # devices of each host
    suspended: tuple[JobId, ...]  # jobs; they wait until this one has started
    since_s: float
