"""Once the default policy has placed its jobs, further passes leave them alone while nothing changes."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import Phase, given, settings

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.types import HostId, JobId
from tests.core.conftest import Lab
from tests.core.policies.test_default import known, progress, submit

APART_S, LONGER = 120.0, 2.0
"""Between two passes, jobs may move again after the last move; each time longer, as some rights begin late: who has
waited for a share of its run time takes back loans."""

PASSES = 16
"""In which the jobs of a drawn queue must have found their places."""

JOBS = st.lists(
    st.fixed_dictionaries(
        {"steps": st.integers(100, 50_000), "devices": st.sampled_from([1, 2, 4, 8]), "priority": st.integers(0, 1)}
    ),
    min_size=1,
    max_size=7,
)


def carry_out(lab: Lab, decided: list[d.Decision]) -> int:
    """Do as decided until nothing is left to do; returns how many jobs were moved or stopped."""
    changes = 0
    todo = list(decided)
    while todo:
        match todo.pop(0):
            case d.LaunchAttempt() as launch:
                todo += lab.run(launch.job)
                progress(lab, launch.job, 10)
            case d.StartMigration() as start:
                changes += 1
                to = {"job": start.job, "attempt": start.attempt, "generation": start.new_generation}
                hosts = lab.attempt(start.job).hosts
                todo += lab.tell(e.MigrationVerified(**lab.at(), **to, step=10, network_bytes=1, local_bytes=1))
                todo += lab.tell(e.MigrationFinished(**lab.at(), **to, downtime_s=2.0))
                for host in hosts:
                    left = {"job": start.job, "attempt": start.attempt, "generation": start.generation, "host": host}
                    todo += lab.tell(e.AttemptStopped(**lab.at(), **left))
            case d.StopAttempt(job=job, attempt=attempt, generation=generation, host=host):
                changes += 1
                todo += lab.tell(
                    e.AttemptStopped(**lab.at(), job=job, attempt=attempt, generation=generation, host=HostId(host))
                )
    return changes


def one_pass(lab: Lab, number: int) -> int:
    lab.now_s += APART_S * LONGER**number
    return carry_out(lab, lab.tell(e.TimerFired(**lab.at(), timer=Timer(TimerKind.ROUND))))


def places(lab: Lab) -> dict[JobId, object]:
    jobs = lab.scheduler.state.jobs.values()
    return {job.id: (job.attempt.plan, sorted(job.attempt.devices)) for job in jobs if job.attempt is not None}


@settings(max_examples=30, phases=(Phase.generate,))
@given(jobs=JOBS, hosts=st.integers(1, 2))
def test_passes_without_news_change_nothing(jobs: list[dict[str, int]], hosts: int) -> None:
    lab = Lab()
    for name in "ab"[:hosts]:
        lab.host(name, gpus=8, cores=64)
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=known(), why="trials"))
    for number, job in enumerate(jobs):
        carry_out(lab, submit(lab, f"job{number}", **job)[1])
    history = [one_pass(lab, number) for number in range(PASSES)]
    assert history[-1] == 0, f"jobs moved in each of these passes: {history}"
    settled = places(lab)
    assert one_pass(lab, PASSES) == 0
    assert places(lab) == settled
