"""Expected and longest remaining time of jobs whose speed is not known.

A job of which nothing is known is expected to run as long again as it has run: lifetimes of training jobs are
heavy-tailed (after Tiresias). Finished runs of the same name, else of the same user, tell more, and a time limit is
never exceeded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from clusterd.core.estimates.attained_service import time_left_s
from clusterd.core.state import Job

FIRST_GUESS_S = 600.0
"""Expected run time of a job of a user without any finished run, without a time limit."""

SAFETY = 2.0
"""Factor on the longest of earlier runs that a job is trusted not to exceed."""

RUNS_TO_TRUST = 3
"""Earlier runs of the same name from which the longest run of the next one is foreseen."""

RunTimes = Mapping[str, Sequence[float]]
"""Seconds of the newest finished runs, by `run_key` and by user."""


@dataclass(frozen=True, slots=True)
class Ends:
    """End of a job in seconds from now, by three measures."""

    expected_s: float  # a guess where nothing is known
    foreseen_s: float  # by its time limit, else by its like or its performance model; infinite: nothing tells
    latest_s: float  # by its time limit, the grace period included; infinite: it has none


UNKNOWN = Ends(inf, inf, inf)
"""End of which nothing is known."""


def run_key(job: Job) -> str:
    """Key of the run times of jobs like this one."""
    return f"{job.spec.user}/{job.spec.name}"


def ends_of_request(job: Job, run_times: RunTimes, now_s: float) -> Ends:
    """Ends of a job whose speed is not known, once it runs; the expected one is at least a second away."""
    elapsed_s = _elapsed_s(job, now_s)
    limit_s = _limit_left_s(job, elapsed_s)
    alike = run_times.get(run_key(job), ())
    if known := alike or run_times.get(job.spec.user, ()):
        total_s = median(known)
    else:
        total_s = limit_s + elapsed_s if limit_s < inf else FIRST_GUESS_S
    left_s = total_s - elapsed_s if elapsed_s < total_s else elapsed_s
    foreseen_s = limit_s
    if limit_s == inf and len(alike) >= RUNS_TO_TRUST:
        foreseen_s = max(SAFETY * max(alike) - elapsed_s, 0.0) or inf
    return Ends(max(min(left_s, limit_s), 1.0), foreseen_s, limit_s + job.spec.grace_s)


def ends_of_modelled(job: Job, left_s: float, now_s: float) -> Ends:
    """Ends of a job that needs `left_s` more seconds by its performance model."""
    limit_s = limit_left_s(job, now_s)
    return Ends(min(left_s, limit_s), min(left_s, limit_s), limit_s + job.spec.grace_s)


def limit_left_s(job: Job, now_s: float) -> float:
    """Seconds until the time limit ends the job; infinite without one."""
    return _limit_left_s(job, _elapsed_s(job, now_s))


def _limit_left_s(job: Job, elapsed_s: float) -> float:
    left_s = time_left_s(job)
    return inf if left_s is None else max(left_s - elapsed_s, 0.0)


def _elapsed_s(job: Job, now_s: float) -> float:
    attempt = job.attempt
    return now_s - attempt.started_s if attempt is not None else 0.0
