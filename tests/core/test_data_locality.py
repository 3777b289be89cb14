"""A job whose data sets are on hosts that are away waits and does not fail."""

from __future__ import annotations

import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.data_locality import CHECKPOINT, data_of
from clusterd.types import HostId, JobId, JobKind, JobSpec, RankEnd, Reason
from tests.core.conftest import Lab
from tests.core.lifecycle.test_trials import running

NO_DATA = RankEnd(reason=Reason.DATA, exit_code=94)


def leave(lab: Lab, host: str) -> None:
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId(host), why="no route"))


def reader(lab: Lab, where: str) -> JobId:
    return running(lab, devices=1, hosts=(HostId("a"),), datasets={"corpus": where})


def test_a_job_whose_data_went_away_starts_again_when_it_is_back(lab: Lab) -> None:
    """Regression: the job failed permanently, with an exit code and no mention of the data."""
    lab.host("a", gpus=2)
    lab.host("b", gpus=1)
    job = reader(lab, "b:/data")
    leave(lab, "b")
    lab.exit(job, end=NO_DATA)
    lab.stopped(job)
    assert lab.state(job) == "queued"
    assert lab.why(job) == "waits for the data set 'corpus' on b, which is unreachable"
    other, _ = lab.submit(devices=2, hosts=(HostId("a"),))
    assert lab.state(other) == "starting"
    lab.run(other)
    lab.finish(other)
    assert lab.state(job) == "queued"
    decided = lab.connect("b")
    assert d.LaunchAttempt.match(decided, job=job)


def test_one_host_that_has_the_data_is_enough(lab: Lab) -> None:
    lab.host("a", gpus=2)
    lab.host("b", gpus=1)
    leave(lab, "b")
    assert lab.state(reader(lab, "b:/data, a:/copy")) == "running"
    assert lab.state(reader(lab, "/data")) == "running"


def test_a_model_is_not_described_without_the_data_of_its_script(lab: Lab) -> None:
    lab.host("a", gpus=1)
    lab.host("b", gpus=1)
    leave(lab, "b")
    job, decided = lab.submit(kind=JobKind.ELASTIC, datasets={"corpus": "b:/data"})
    assert d.DescribeModel.match(decided, job=job) is None
    assert "waits for the data set" in lab.why(job)
    assert d.DescribeModel.match(lab.connect("b"), job=job)


@pytest.mark.parametrize(
    ("restore", "served"), [(None, {}), ("/shared/gpt@120", {}), ("b:/gpt@120", {CHECKPOINT: "b:/gpt"})]
)
def test_a_checkpoint_is_served_by_name_where_one_host_alone_has_it(
    restore: str | None, served: dict[str, str]
) -> None:
    spec = JobSpec(name="job", command=("x",), restore=restore, datasets={"corpus": "/data"})
    assert data_of(spec) == {"corpus": "/data", **served}
