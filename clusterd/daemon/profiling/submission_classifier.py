"""Probability at submission that a job is predictable, learned from the jobs of this cluster that are over."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import anyio.to_thread

from clusterd.core.estimates.attained_service import attained_s, executed_s
from clusterd.core.state import Job
from clusterd.daemon.journal.engine import Engine
from clusterd.errors import ClusterError
from clusterd.profiling.predictability import LEAST_JOBS, Classifier, JobRecord, is_within, train
from clusterd.profiling.progress import Predictability, Submission, probability_predictable
from clusterd.types import JobKind, JobState

log = logging.getLogger(__name__)

GROWTH = 1.2
"""Growth of the number of jobs that are over between two trainings."""

MOST_ARCHIVED = 2000
"""Archived jobs that are trained on, the newest ones."""


class ArchivedPages(Protocol):
    """Archived jobs, as `clusterd.daemon.storage.archived_jobs` has them."""

    @property
    def counts(self) -> Counter[str]:
        """Number of them by state."""

    async def page(self, before: str | None, limit: int) -> list[Job]:
        """Page of archived jobs, newest first."""


class SubmissionClassifier:
    """Classifier trained on ended elastic jobs; prior weights until there are enough of them."""

    def __init__(self, engine: Engine, archived: ArchivedPages) -> None:
        self._engine, self._archived = engine, archived
        self._classifier: Classifier | None = None
        self._jobs = 0  # that the classifier was trained on
        self._over = 0  # jobs of any kind that were over at the last attempt to train

    async def at_submission(self, job: Job, known_model: bool) -> Predictability:
        """Predictability of a job before its first step."""
        await self._train_if_due()
        others = self._engine.state.jobs.values()
        earlier = [j for j in others if j.id != job.id and _is_resubmission(job, j)]
        if self._classifier is not None:
            probability = float(self._classifier.probability([record(job, bool(earlier))])[0])
            return Predictability.at_submission(probability, f"{self._jobs} ended jobs")
        submission = Submission(
            submitted_before=any(j.progress.step > 0 for j in earlier),
            steps=int((job.inspection.shape or {}).get("steps") or 0),
            target_loss=job.spec.target_loss,
            devices=max(job.spec.resources.devices, 1),
            known_model=known_model,
        )
        return Predictability.at_submission(probability_predictable(submission), "prior weights")

    async def _train_if_due(self) -> None:
        ended = [job for job in self._engine.state.jobs.values() if job.state.is_final]
        over = len(ended) + sum(self._archived.counts.values())
        if over < max(LEAST_JOBS, GROWTH * self._over):
            return
        self._over = over
        try:
            ended += await self._archived.page(None, MOST_ARCHIVED)
        except ClusterError as error:  # a damaged row: the jobs of the state are trained on
            log.error("archived jobs are left out of the classifier of predictable jobs: %s", error)
        records = ended_records(ended)
        alike = len({one.is_predictable for one in records}) < 2
        if len(records) >= LEAST_JOBS and not alike:
            self._classifier = await anyio.to_thread.run_sync(lambda: train(records, online=False))
            self._jobs = len(records)


def ended_records(jobs: Iterable[Job]) -> list[JobRecord]:
    """Records of the elastic jobs that ran and are over, in the order of submission, with their labels."""
    unique = {job.id: job for job in jobs if job.spec.kind is JobKind.ELASTIC and job.started_s is not None}
    seen: set[tuple[str, tuple[str, ...]]] = set()
    found = []
    for job in sorted(unique.values(), key=lambda one: (one.submitted_s, len(one.id), one.id)):
        command = (job.spec.user, job.spec.command)
        found.append(replace(record(job, command in seen), label=_did_as_expected(job)))
        seen.add(command)
    return found


def record(job: Job, resubmitted: bool) -> JobRecord:
    """Record of a job: its features at submission, and when it was over if it is."""
    shape = job.inspection.shape or {}
    steps = shape.get("steps") or math.nan
    return JobRecord(
        name=job.spec.name,
        user=job.spec.user,
        model=job.inspection.model,
        size=float(job.spec.resources.devices),
        requested_s=job.spec.time_limit_s if job.spec.time_limit_s is not None else math.nan,
        actual_s=job.ended_s - job.submitted_s if job.ended_s is not None else math.nan,
        submitted_s=job.submitted_s,
        further={
            "steps": float(steps),
            "batch": float(shape.get("global_batch") or math.nan),
            "target_loss": math.nan if job.spec.target_loss is None else float(job.spec.target_loss),
            "resubmitted": float(resubmitted),
        },
    )


def _did_as_expected(job: Job) -> bool:
    """True if the job did all its work, in about the time of its first fit, else of its limit, where there is one."""
    if job.state is not JobState.FINISHED:
        return False
    end_s = job.ended_s if job.ended_s is not None else job.submitted_s
    steps = int((job.inspection.shape or {}).get("steps") or 0)
    first = next((trial for trial in job.trials.finished if trial.step_time_s is not None), None)
    if steps and first is not None and first.step_time_s is not None and job.spec.target_loss is None:
        # In device-seconds, as the scheduler changes the number of devices.
        return is_within(attained_s(job, end_s), steps * first.step_time_s * first.plan.ranks)
    limit_s = job.spec.time_limit_s
    return limit_s is None or is_within(executed_s(job, end_s), limit_s)


def _is_resubmission(job: Job, other: Job) -> bool:
    return (
        other.submitted_s <= job.submitted_s
        and other.spec.user == job.spec.user
        and other.spec.command == job.spec.command
    )
