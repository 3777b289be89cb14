"""Rights to devices: what a waiting job may take from running ones without asking whether it pays.

A job has a right to the devices that it requests; what it holds beyond them it has on loan, while nobody else wants
them. A loan goes back to any waiting job, whatever its priority. Below its request a job is shrunk only for a higher
priority, or for a guaranteed job of the same priority if it is not guaranteed itself; a guaranteed job keeps what its
guarantee needs. Nothing of this is ever done to a job of higher priority: guarantees do not count across priorities.
"""

from __future__ import annotations

from clusterd.core.estimates.job_forecast import JobForecast
from clusterd.core.state import Job


def may_preempt(victim: Job, job: Job) -> bool:
    """True where `job` may take devices to which `victim` has a right."""
    if job.priority != victim.priority:
        return job.priority > victim.priority
    return job.spec.guaranteed and not victim.spec.guaranteed


def requested_devices(job: Job) -> int:
    """Devices to which a job that uses any has a right."""
    plan = job.pinned or job.spec.resources.plan
    return max(job.spec.resources.devices, plan.ranks if plan is not None else 1, 1)


def on_loan(job: Job, devices: int) -> int:
    """Number of devices beyond the request of a running job that holds `devices` of them."""
    return max(devices - requested_devices(job), 0)


def least_by_right(victim: JobForecast, job: Job) -> int | None:
    """Devices down to which a running job may be shrunk for `job`; None: nothing may be taken from it."""
    if may_preempt(victim.job, job):
        return victim.curve.least
    if not on_loan(victim.job, len(victim.devices)):
        return None
    requested = requested_devices(victim.job)
    offers = victim.curve.offers
    # The fastest way to run within its request may use fewer devices still.
    within = [x.devices for x in offers if x.devices <= requested]
    return within[0] if within else min((x.devices for x in offers), default=None)


def right_over(victim: Job, job: Job) -> str:
    """Phrase for the right by which `job` takes devices from `victim`."""
    if not may_preempt(victim, job):
        return f"{victim.spec.name} holds more devices than the {requested_devices(victim)} that it asked for"
    return f"{job.spec.name} has priority {job.priority}" if job.priority > victim.priority else "it is guaranteed"
