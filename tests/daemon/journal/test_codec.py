"""Jobs and states of the journal are read, also as another version wrote them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from clusterd.core import events as e
from clusterd.core.state import Job
from clusterd.daemon.journal import codec
from clusterd.types import HostId
from tests.core.conftest import Lab
from tests.core.lifecycle.test_resizes import stopped_in_good_order, submit


def resized() -> Job:
    """A job that was restarted on another host."""
    lab = Lab()
    lab.host("a", gpus=4)
    job, _ = submit(lab)
    lab.run(job)
    lab.host("b", gpus=2)
    lab.tell(e.HostDrained(**lab.at(), host=HostId("a"), by="ann"))
    stopped_in_good_order(lab, job)
    lab.run(job)
    return lab.scheduler.state.jobs[job]


def as_written_before(job: Job) -> dict[str, Any]:
    """A job whose restarts are among its migrations, under a flag."""
    row: dict[str, Any] = msgspec.to_builtins(job)
    restarts = [{**restart, "restarts": True, "generation": 1, "network_bytes": 0} for restart in row.pop("restarts")]
    return {**row, "migrations": [{**m, "restarts": False} for m in row["migrations"]] + restarts}


def test_restarts_of_jobs_are_found_where_they_were_written_before() -> None:
    job = resized()
    assert [restart.failure for restart in job.restarts] == [""]
    body = codec.encode(as_written_before(job))
    assert codec.job(body) == codec.job(codec.encode(job)) == job
    recalled = e.JobRecalled(at_s=1.0, id=e.EventId(1), job=job.id, record=job)
    row = {**msgspec.to_builtins(recalled), "record": as_written_before(job)}
    assert codec.event("JobRecalled", codec.encode(row)) == recalled


def test_a_state_with_other_fields_is_read_where_their_default_tells_the_truth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: fields that the state of another version lacks were empty, as that of the devices in use."""
    lab = Lab()
    lab.host("a", gpus=1)
    lab.submit()
    state = lab.scheduler.state
    assert codec.of_snapshot(codec.snapshot(state)) == state
    row = msgspec.to_builtins(state, str_keys=False)
    fewer = b"another " + codec.encode({name: value for name, value in row.items() if name != "holders"})
    with pytest.raises(ValueError, match=r"differs in State\.holders$"):
        codec.of_snapshot(fewer)
    monkeypatch.setattr(codec, "ADDED", frozenset({"State.holders"}))
    assert codec.of_snapshot(fewer) == replace(state, holders={})
    (job,) = row["jobs"].values()
    job["spec"]["of_a_later_version"] = 1
    with pytest.raises(ValueError, match=r"differs in JobSpec\.of_a_later_version$"):
        codec.of_snapshot(b"another " + codec.encode(row))
