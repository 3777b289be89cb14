"""Probability at submission: by prior weights first, then by what the cluster's own jobs did."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import anyio

from clusterd.core.state import Attempt, Job, Rank, State, Trial
from clusterd.core.transitions import TrialState
from clusterd.daemon.profiling.submission_classifier import SubmissionClassifier, ended_records
from clusterd.errors import ClusterError
from clusterd.plans.plan import Plan
from clusterd.types import AttemptState, DeviceId, HostId, JobId, JobKind, JobSpec, JobState, RankPlace, Resources


class Archived:
    """Stands in for the archived jobs."""

    def __init__(self, jobs: list[Job] | None) -> None:
        self.jobs = jobs  # None: damaged
        self.counts = Counter(finished=len(jobs) if jobs is not None else 1)
        self.reads = 0

    async def page(self, _before: str | None, limit: int) -> list[Job]:
        self.reads += 1
        if self.jobs is None:
            raise ClusterError("journal.db: archived job 7 does not match its checksum")
        return self.jobs[:limit]


def ended(number: int, state: JobState, user: str = "ada", run_s: float = 100.0, **spec: Any) -> Job:
    spec = {"kind": JobKind.ELASTIC, "command": ("train",), "resources": Resources(devices=1), **spec}
    job = Job(JobId(str(number)), JobSpec(name=f"job-{number}", user=user, **spec), 0, 1000.0 * number, 0.0)
    job.state, job.started_s, job.ended_s = state, job.submitted_s, job.submitted_s + run_s
    job.inspection.shape = {"steps": 1000, "global_batch": 8}
    ranks = {0: Rank(RankPlace(rank=0, host=HostId("a"), device=DeviceId("a/0")))}
    job.attempts = [Attempt(job.id, 1, 1, Plan(dp=1), ranks, job.started_s, state=AttemptState.ENDED)]
    job.attempts[0].ended_s = job.ended_s
    return job


def classifier(jobs: list[Job], archived: Archived) -> SubmissionClassifier:
    state = State(jobs={job.id: job for job in jobs})
    return SubmissionClassifier(SimpleNamespace(state=state), archived)  # type: ignore[arg-type]


def of_two_users(first: int, count: int) -> list[Job]:
    """Jobs of ada finish, those of bob fail."""
    finishes = {n: random.Random(n).random() < 0.5 for n in range(first, first + count)}
    return [
        ended(n, JobState.FINISHED if good else JobState.FAILED, "ada" if good else "bob")
        for n, good in finishes.items()
    ]


def test_the_ended_jobs_of_a_cluster_tell_whose_next_one_is_predictable() -> None:
    async def run() -> None:
        archived = Archived(of_two_users(1, 40))
        found = classifier(of_two_users(41, 40), archived)
        good = await found.at_submission(ended(200, JobState.QUEUED, "ada"), False)
        bad = await found.at_submission(ended(201, JobState.QUEUED, "bob"), False)
        assert good.predictable and not bad.predictable
        assert "by 80 ended jobs" in bad.reason
        assert archived.reads == 1, "it is trained again only when the number of jobs has grown"

    anyio.run(run)


def test_few_jobs_or_jobs_alike_leave_the_prior_weights() -> None:
    async def run() -> None:
        for jobs in (of_two_users(1, 20), [ended(n, JobState.FINISHED) for n in range(1, 90)]):
            state = await classifier(jobs, Archived([])).at_submission(ended(200, JobState.QUEUED, "eve"), False)
            assert "prior weights" in state.reason

    anyio.run(run)


def test_a_damaged_archive_leaves_the_jobs_of_the_state(caplog: Any) -> None:
    found = classifier(of_two_users(1, 80), Archived(None))
    state = anyio.run(found.at_submission, ended(200, JobState.QUEUED, "bob"), False)
    assert not state.predictable and "80 ended jobs" in state.reason
    assert "does not match its checksum" in caplog.text


def test_labels_follow_the_end_the_first_fit_and_the_limit() -> None:
    slow, quick = ended(1, JobState.FINISHED, run_s=100.0), ended(2, JobState.FINISHED, run_s=10.0)
    for job in (slow, quick):
        trial = Trial(Plan(dp=1), 5, "", TrialState.MEASURED)
        trial.step_time_s = 0.08  # 80 s in all
        job.trials.finished.append(trial)
    limited = ended(3, JobState.FINISHED, run_s=10.0, time_limit_s=100.0)
    never_ran, command = ended(5, JobState.CANCELLED), ended(6, JobState.FINISHED, kind=JobKind.COMMAND)
    never_ran.started_s = None
    jobs = [slow, quick, limited, ended(4, JobState.CANCELLED), never_ran, command]
    records = ended_records([*jobs, slow])
    assert [one.is_predictable for one in records] == [True, False, False, False]
    assert [one.further["resubmitted"] for one in records] == [0.0, 1.0, 1.0, 1.0]
