"""A dry run answers what a submit would do, under every policy."""

from __future__ import annotations

import random
from collections import Counter
from copy import deepcopy
from typing import Any

import pytest

from clusterd import projection
from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.policies import POLICIES
from clusterd.core.scheduler import Scheduler
from clusterd.daemon.api.jobs import outcomes
from clusterd.daemon.journal import codec
from clusterd.rows import DryRun
from clusterd.types import JobId, JobKind, JobSpec
from tests.core.conftest import Lab
from tests.core.drawn_queue import DrawnQueue
from tests.core.policies.test_default import known, progress, submit


class TriedLab(Lab):
    """A lab in which each submit is tried as a dry run before, and the answers are compared."""

    def __init__(self, policy: str) -> None:
        super().__init__()
        self.scheduler = Scheduler(POLICIES[policy]())
        self.seen: Counter[str] = Counter()

    def tell(self, *events: e.Event) -> list[d.Decision]:
        """Handle events, after a dry run of a submitted job."""
        if not isinstance(events[0], e.JobSubmitted) or len(events) > 1:
            return super().tell(*events)
        state = codec.encode(self.scheduler.state)
        (answer,) = outcomes(state, deepcopy(self.scheduler.policy), [events[0]])
        assert codec.encode(self.scheduler.state) == state
        decided = super().tell(*events)
        self.compare(events[0].job, answer, decided)
        return decided

    def compare(self, name: Any, answer: DryRun, decided: list[d.Decision]) -> None:
        """Compare the answer of the dry run with what came of the submit."""
        job, start = self.scheduler.state.jobs[name], d.LaunchAttempt.match(decided, job=name)
        assert answer.starts == (start is not None)
        assert list(answer.ranks) == ([codec.plain(place) for place in start.ranks] if start is not None else [])
        assert answer.reason == (start.reason if start is not None else job.reason)
        place = projection.place_row(name, self.scheduler.state)
        assert (answer.state, answer.place, answer.after) == (job.state.value, place.place, place.after)
        assert answer.promise == projection.promise_row(name, self.scheduler.state)
        changes = [*answer.stops, *answer.migrates]
        changed = {one.job for one in decided if isinstance(one, d.StopAttempt | d.StartMigration)}
        assert {change.id for change in changes} == changed
        assert all(change.reason for change in changes)
        self.seen.update(starts=answer.starts, waits=not answer.starts, stops=len(answer.stops))


class TriedQueue(DrawnQueue):
    """Drawn jobs, some of which are stopped for others."""

    def _submit(self) -> None:
        self.lab.submit(
            f"job-{self.lab.jobs}",
            devices=self.choose([0, 1, 1, 2, 3, 4]),
            kind=self.choose([JobKind.COMMAND, JobKind.COMMAND, JobKind.CHECKPOINTABLE]),
            preemptible=self.choose([False, True]),
            priority=self.choose([0, 0, 0, 1, 2]),
            tenant=self.choose(["", "vision", "speech"]),
            interactive=self.choose([False, False, True]),
            guaranteed=self.choose([False, False, True]),
            time_limit_s=self.choose([None, 300.0, 3600.0]),
            after=self.choose([(), (), (), (str(self.lab.jobs),)]) if self.lab.jobs else (),
            grace_s=0.0,
        )

    def check(self, is_undisturbed: bool) -> None:
        """The lab compares."""


@pytest.mark.parametrize("policy", POLICIES)
def test_a_dry_run_answers_what_a_submit_does(policy: str) -> None:
    """Its start, or its place, the criterion and the reason; and the jobs that are stopped or migrated for it."""
    seen: Counter[str] = Counter()
    for seed in range(20 if policy == "default" else 4):
        lab = TriedLab(policy)
        queue = TriedQueue(random.Random(seed).choice, lab)
        for _ in range(25):
            queue.step()
        seen += lab.seen
    assert seen["starts"] > 10
    assert seen["waits"] > 10
    assert seen["stops"] > 0 or policy != "default"


def test_jobs_that_give_devices_back_are_named() -> None:
    """A job with all eight devices, seven of them on loan, shrinks for a command."""
    lab = Lab()
    lab.host("a", gpus=8)
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=known(), why="trial runs"))
    job, _ = submit(lab, "net-1", 1000)
    progress(lab, job, 5)
    spec = JobSpec(name="other", command=("x",), resources=lab.scheduler.state.jobs[job].spec.resources)
    event = e.JobSubmitted(**lab.at(), job=JobId("9"), spec=spec)
    (answer,) = outcomes(codec.encode(lab.scheduler.state), deepcopy(lab.scheduler.policy), [event])
    assert (answer.starts, answer.place, answer.reason) == (False, 1, "net-1 gives up devices for it")
    (change,) = answer.migrates
    assert (change.id, change.name) == (job, "net-1")
    assert lab.scheduler.state.jobs[job].attempt.migration is None  # type: ignore[union-attr]


def test_several_jobs_are_tried_together() -> None:
    """Regression: each task of an array was said to start on the same free device."""
    lab = Lab()
    lab.host("a", gpus=2)
    first, _ = lab.submit("first")
    spec = lab.scheduler.state.jobs[first].spec
    events = [e.JobSubmitted(**lab.at(), job=JobId(number), spec=spec) for number in ("7", "8")]
    answers = outcomes(codec.encode(lab.scheduler.state), deepcopy(lab.scheduler.policy), events)
    assert [(answer.starts, answer.place) for answer in answers] == [(True, None), (False, 1)]
