"""Accounts of the use of devices: by lease and sample, bounded, and summed for the report."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from clusterd.daemon.api.usage import UsageVerbs
from clusterd.daemon.forecasts.outcomes import OutcomeStore
from clusterd.daemon.hosts.facts import OutsideProcess
from clusterd.daemon.storage.archived_jobs import ArchivedJobs
from clusterd.daemon.storage.usage import RETENTION_DAYS, UsageStore
from clusterd.errors import UsageError
from clusterd.protocol.agent import AttemptUse, DeviceUse, Usage
from clusterd.types import DeviceId, HostId
from tests.core.conftest import Lab

pytestmark = pytest.mark.anyio

PEER = None

NONE_ARCHIVED = ArchivedJobs(SimpleNamespace(state=None), 1.0)  # type: ignore[arg-type]
NO_OUTCOMES = cast(OutcomeStore, None)


class Clock:
    """Wall clock of a test."""

    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def anyio_backend() -> str:
    """The daemon's."""
    return "asyncio"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lab() -> Lab:
    """A host with two GPUs, one of which runs a job of ann's."""
    lab = Lab()
    lab.now_s = 1_700_000_000.0
    lab.host("gpu01", gpus=2)
    job, _ = lab.submit("gpt", devices=1, user="ann")
    lab.run(job)
    return lab


def uuids(lab: Lab) -> list[str]:
    return [device.uuid for device in lab.scheduler.state.hosts[HostId("gpu01")].devices]


async def minutes(store: UsageStore, lab: Lab, clock: Clock, busy: float, count: int) -> None:
    for _ in range(6 * count):
        clock.now_s += 10.0
        devices = tuple(DeviceUse(uuid, busy=busy, memory_used_bytes=1 << 30, power_w=250.0) for uuid in uuids(lab))
        store.on_usage(HostId("gpu01"), Usage(64, 1 << 40, 1 << 38, devices))
        store.count()
        if clock.now_s % 60.0 < 10.0:
            await store.flush()


async def test_the_report_tells_hours_utilisation_and_idle_devices(tmp_path: Path, lab: Lab, clock: Clock) -> None:
    store = UsageStore(tmp_path / "usage.db", lab.scheduler.state, clock)
    begin_s = clock.now_s - 100.0
    store.count()
    await minutes(store, lab, clock, 0.5, 60)
    verbs = UsageVerbs(store, lab.scheduler.state, NONE_ARCHIVED, NO_OUTCOMES)
    (ann,) = await verbs.report(PEER, begin_s, by="user")  # type: ignore[arg-type]
    assert (ann.group, ann.jobs) == ("ann", 1)
    assert ann.device_hours == pytest.approx(1.0)
    assert ann.utilisation == pytest.approx(0.5)
    (host,) = await verbs.report(PEER, begin_s, by="host")  # type: ignore[arg-type]
    assert (host.device_hours, host.idle_device_hours) == (pytest.approx(1.0), pytest.approx(1.0))
    with pytest.raises(UsageError, match="must be one of user, tenant"):
        await verbs.report(PEER, begin_s, by="colour")  # type: ignore[arg-type]
    usage = await verbs.usage(PEER, minutes=5)  # type: ignore[arg-type]
    assert usage.hosts["gpu01"]["memory_used_bytes"] == 1 << 38
    series = usage.devices["gpu01:gpu0"]
    assert 4 <= len(series) <= 6
    assert series[-1].busy == pytest.approx(0.5)
    assert series[-1].power_w == 250.0
    store.close()


async def test_a_host_that_reports_nothing_is_counted_without_a_utilisation(
    tmp_path: Path, lab: Lab, clock: Clock
) -> None:
    store = UsageStore(tmp_path / "usage.db", lab.scheduler.state, clock)
    store.count()
    for _ in range(60):
        clock.now_s += 10.0
        store.count()
    (ann,) = await UsageVerbs(store, lab.scheduler.state, NONE_ARCHIVED, NO_OUTCOMES).report(PEER, clock.now_s - 3600)  # type: ignore[arg-type]
    assert ann.device_hours == pytest.approx(1 / 6)
    assert ann.utilisation is None
    store.close()


async def test_time_in_which_the_daemon_did_not_run_is_not_counted(tmp_path: Path, lab: Lab, clock: Clock) -> None:
    store = UsageStore(tmp_path / "usage.db", lab.scheduler.state, clock)
    store.count()
    clock.now_s += 86400.0  # as of a suspended machine, or a clock that was set
    store.count()
    clock.now_s -= 3600.0
    store.count()
    (ann,) = await UsageVerbs(store, lab.scheduler.state, NONE_ARCHIVED, NO_OUTCOMES).report(PEER, clock.now_s - 7200)  # type: ignore[arg-type]
    assert ann.device_hours <= 1 / 60
    store.close()


async def test_old_rows_are_removed(tmp_path: Path, lab: Lab, clock: Clock) -> None:
    store = UsageStore(tmp_path / "usage.db", lab.scheduler.state, clock)
    store.count()
    await minutes(store, lab, clock, 1.0, 3)
    clock.now_s += (RETENTION_DAYS + 2) * 86400.0
    store.count()
    await store.flush()
    with sqlite3.connect(tmp_path / "usage.db") as database:
        ((left,),) = database.execute("SELECT count(*) FROM minutes").fetchall()
        ((days,),) = database.execute("SELECT count(DISTINCT day) FROM days").fetchall()
    assert left == 0
    assert days == 1
    store.close()


async def test_a_persons_agent_tells_of_attempts_only(tmp_path: Path, lab: Lab, clock: Clock) -> None:
    store = UsageStore(tmp_path / "usage.db", lab.scheduler.state, clock)
    gpu01 = HostId("gpu01")
    store.on_usage(gpu01, Usage(64, 1 << 40, 1 << 38, (DeviceUse("uuid", busy=0.5),), (AttemptUse("1", 1, 2.0, 5),)))
    store.on_usage(gpu01, Usage(0, 0, 0, attempts=(AttemptUse("2", 1, 3.0, 7),)))
    latest = store.latest(gpu01)
    assert latest is not None
    assert (latest.cpu_cores, len(latest.devices)) == (64, 1)
    assert {use.job for use in latest.attempts} == {"1", "2"}
    # Regression: the host's next sample left none of the others', so that what they do was seen by chance, if at all.
    store.on_usage(gpu01, Usage(64, 1 << 40, 1 << 38, attempts=(AttemptUse("1", 1, 1.0, 5),)))
    latest = store.latest(gpu01)
    assert latest is not None
    assert {use.job: use.cores for use in latest.attempts} == {"1": 1.0, "2": 3.0}
    clock.now_s += 120.0
    assert store.latest(gpu01) is None
    store.close()


async def test_hours_outside_the_queue_are_those_of_their_user_and_not_idle(
    tmp_path: Path, lab: Lab, clock: Clock
) -> None:
    """The second GPU is in use by bob, past the queue, with two processes."""
    host, device = HostId("gpu01"), DeviceId("gpu01:gpu1")
    processes = [OutsideProcess(host, device, pid, "bob", 1 << 33) for pid in (11, 12)]
    store = UsageStore(tmp_path / "usage.db", lab.scheduler.state, clock, lambda: processes)
    store.count()
    await minutes(store, lab, clock, 0.5, 60)
    verbs = UsageVerbs(store, lab.scheduler.state, NONE_ARCHIVED, NO_OUTCOMES)
    users = await verbs.report(PEER, clock.now_s - 3600.0, by="user")  # type: ignore[arg-type]
    assert [(row.group, row.device_hours, row.outside_device_hours) for row in users] == [
        ("ann", pytest.approx(1.0), 0.0),
        ("bob", 0.0, pytest.approx(1.0)),
    ]
    (row,) = await verbs.report(PEER, clock.now_s - 3600.0, by="host")  # type: ignore[arg-type]
    assert (row.idle_device_hours, row.outside_device_hours) == (0.0, pytest.approx(1.0))
    store.close()
