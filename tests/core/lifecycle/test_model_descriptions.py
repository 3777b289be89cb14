"""Models are described before the first launch, on hosts that train meanwhile."""

from __future__ import annotations

from collections import Counter

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.lifecycle.job_events import DESCRIPTIONS_PER_HOST
from clusterd.types import HostId, JobId, JobKind
from tests.core.conftest import Lab

SHAPE = {"parameters": [], "layers": [], "samples": 16, "global_batch": 16, "steps": 1000}


def asked_of(decided: list[d.Decision]) -> list[tuple[JobId, HostId]]:
    return [(x.job, x.host) for x in decided if isinstance(x, d.DescribeModel)]


def test_a_sweep_of_many_does_not_fill_the_hosts_with_processes(lab: Lab) -> None:
    """Each loads its script and its libraries into the memory that those who train have left."""
    for host in "ab":
        lab.host(host, gpus=1)
    asked = [pair for number in range(40) for pair in asked_of(lab.submit(f"net{number}", kind=JobKind.ELASTIC)[1])]
    assert Counter(host for _, host in asked) == dict.fromkeys("ab", DESCRIPTIONS_PER_HOST)
    told = 0
    while asked:
        job, host = asked.pop(0)
        told += 1
        following = asked_of(lab.tell(e.ModelDescribed(**lab.at(), job=job, shape=SHAPE)))
        assert [at for _, at in following] in ([host], []), "the place that is free now, and no other"
        asked += following
    assert told == 40


def test_the_first_in_the_queue_tells_its_model_first(lab: Lab) -> None:
    lab.host("a", gpus=1)
    first, *_ = [lab.submit(f"net{number}", kind=JobKind.ELASTIC)[0] for number in range(4)]
    urgent, decided = lab.submit("urgent", kind=JobKind.ELASTIC, priority=9)
    assert asked_of(decided) == []
    assert lab.why(urgent).startswith("its model is being learned: its script runs up to clusterd.train.run, without")
    assert asked_of(lab.tell(e.JobCancelled(**lab.at(), job=first, by="ann"))) == [(urgent, "a")]
