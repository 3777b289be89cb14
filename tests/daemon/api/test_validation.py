"""Jobs that no host could ever serve are refused at submit, and no others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusterd.core import events as e
from clusterd.core.scheduler import Scheduler
from clusterd.core.state import State
from clusterd.daemon.api.validation import refuse_malformed, refuse_unsatisfiable
from clusterd.errors import UsageError
from clusterd.types import HostId, JobSpec, Resources
from tests.core.conftest import facts


def lab_of(gpus: list[int]) -> State:
    """Hosts with so many GPUs each, all of them up."""
    scheduler = Scheduler()
    for number, count in enumerate(gpus):
        host = HostId(f"host{number}")
        scheduler.handle(e.HostAdded(at_s=1.0, host=host))
        scheduler.handle(e.HostConnected(at_s=2.0, host=host, facts=facts(host, gpus=count, cpus=1), attempts=()))
    return scheduler.state


def job(**wanted: object) -> JobSpec:
    return JobSpec(name="job", command=("true",), resources=Resources(**wanted))  # type: ignore[arg-type]


@pytest.mark.parametrize("place", range(9))
def test_one_large_host_among_small_ones_is_found(place: int) -> None:
    state = lab_of([8 if number == place else 1 for number in range(9)])
    refuse_unsatisfiable(job(devices=8), state, "")
    refuse_unsatisfiable(job(devices=8, hosts=(f"host{place}",)), state, "")


def test_devices_of_several_hosts_count_together() -> None:
    refuse_unsatisfiable(job(devices=14, nodes=7), lab_of([2] * 9), "")


def test_a_refusal_tells_of_the_whole_cluster() -> None:
    state = lab_of([1, 2, 3, 4, 5])
    with pytest.raises(UsageError, match="no host has more than 5"):
        refuse_unsatisfiable(job(devices=6), state, "")
    with pytest.raises(UsageError, match="the cluster has 15"):
        refuse_unsatisfiable(job(devices=16), state, "")
    with pytest.raises(UsageError, match="nobody, which is not in the cluster"):
        refuse_unsatisfiable(job(devices=1, hosts=("host1", "nobody")), state, "")


def test_a_signal_before_a_limit_needs_a_limit() -> None:
    """Regression: it was accepted, and never sent."""
    with_signal = replace(job(cpus=1), limit_signal="USR1@2m")
    with pytest.raises(UsageError, match=r"the job has none: give limits\.time"):
        refuse_malformed(with_signal)
    refuse_malformed(replace(with_signal, time_limit_s=600.0))
    refuse_malformed(replace(with_signal, booking="3"))
