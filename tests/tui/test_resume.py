"""A client that returns with its last number gets the missed changes or a snapshot; never a gap."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from clusterd.core.events import Timer, TimerFired, TimerKind
from clusterd.daemon.api.jobs import JOBS_PER_PAGE
from clusterd.daemon.api.watch import WINDOW, Feed
from clusterd.tui.model.model import Model
from clusterd.tui.model.view import Link, LinkState
from clusterd.tui.source.sources import DaemonSource
from clusterd.tui.source.wire import Wire
from tests.conftest import RunningCluster
from tests.hang import HANG_S


@pytest.fixture
def running(cluster: RunningCluster) -> RunningCluster:
    """A daemon with one job that waits."""
    cluster.start()
    file = cluster.directory / "waits.toml"
    file.write_text('name = "waits"\ncommand = ["true"]\nresources = { gpus = 4 }\n')
    cluster.run("submit", str(file))
    return cluster


async def watch(path: Path, after: int | None) -> AsyncIterator[dict[str, Any]]:
    """Items that `watch` sends to a new connection, without keep-alives."""
    wire = await Wire.open(path)
    try:
        async for item in wire.stream("watch", after=after):
            if "alive_s" not in item:
                yield item
    finally:
        wire.close()


async def take(path: Path, after: int | None, until_priority: int) -> list[dict[str, Any]]:
    """Items up to the one that tells of this priority; a change's rows are as the jobs are by now."""
    found = []
    async with asyncio.timeout(20), aclosing(watch(path, after)) as items:  # type: ignore[type-var]
        async for item in items:
            found.append(item)
            answer = item["snapshot"]["jobs"] if "snapshot" in item else item["events"]
            if any(row.get("priority") == until_priority for row in answer):
                return found
    raise AssertionError("the stream ended")


def test_missed_changes_arrive_exactly_once(running: RunningCluster) -> None:
    """Three changes while it was away, one after it is back: four items, numbered without a gap."""

    async def run() -> None:
        await asyncio.to_thread(running.call, "priority", job="1", priority=1)
        first = await take(running.socket, None, 1)
        assert "snapshot" in first[0]
        seen = Model()
        for item in first:
            seen.apply(item)
        for priority in (2, 3, 4):
            await asyncio.to_thread(running.call, "priority", job="1", priority=priority)
        missed = await take(running.socket, seen.number, 4)
        assert all("snapshot" not in item for item in missed)
        events = [event for item in missed for event in item["events"]]
        assert [event["priority"] for event in events if "priority" in event] == [2, 3, 4]
        assert [event["id"] for event in events] == list(range(seen.number + 1, seen.number + 1 + len(events)))
        for item in missed:
            seen.apply(item)
        anew = Model()
        for item in await take(running.socket, None, 4):
            anew.apply(item)
        assert (seen.jobs, seen.hosts, seen.number) == (anew.jobs, anew.hosts, anew.number)

    asyncio.run(run())


def test_changes_that_the_daemon_dropped_are_replaced_by_a_full_copy(running: RunningCluster) -> None:
    """A new daemon on the old journal: it keeps none of the changes that the last one sent."""
    for priority in (1, 2):
        running.call("priority", job="1", priority=priority)
    running.kill()
    running.start()
    running.call("priority", job="1", priority=3)
    items = asyncio.run(take(running.socket, 1, 3))
    assert "snapshot" in items[0]
    assert [job["priority"] for job in items[0]["snapshot"]["jobs"]] == [3]


def test_many_jobs_come_in_several_items_and_none_is_missed(running: RunningCluster) -> None:
    """A connection that breaks between the items of a baseline goes on with a new baseline."""
    spec = {"name": "many", "command": ["true"], "waits_for_hosts": True, "resources": {"devices": 4}}
    with running.client() as client:
        jobs = {"1", *(row["id"] for row in client.call_many("submit", [{"spec": spec}] * (2 * JOBS_PER_PAGE)))}
    running.kill()
    running.start()

    async def run() -> None:
        async with asyncio.timeout(HANG_S), aclosing(watch(running.socket, None)) as items:  # type: ignore[type-var]
            broken = Model()
            broken.apply(await anext(items))
        assert len(broken.jobs) == JOBS_PER_PAGE
        async with asyncio.timeout(HANG_S), aclosing(watch(running.socket, broken.number)) as items:  # type: ignore[type-var]
            while not broken.jobs.keys() >= jobs:
                broken.apply(await anext(items))
        assert broken.jobs.keys() == jobs
        assert broken.number == running.call("status")["events"]

    asyncio.run(run())


def test_changes_are_kept_for_a_while_and_then_no_more() -> None:
    """Just inside the window everything missed is there; one change further back it is not."""
    feed = Feed()
    for number in range(1, WINDOW + 11):
        feed.add([TimerFired(id=number, at_s=float(number), timer=Timer(TimerKind.SETTLE, "t"))], [])
    inside = feed.after(10)
    assert inside is not None
    assert [change.number for change in inside] == list(range(11, WINDOW + 11))
    assert feed.after(9) is None


def test_the_interface_goes_on_where_its_connection_broke(running: RunningCluster) -> None:
    """The same daemon, another connection: no snapshot, nothing twice, nothing left out."""

    async def run(monkeypatch: pytest.MonkeyPatch) -> None:
        opened: list[Wire] = []
        dial = Wire.open

        async def remember(path: Path) -> Wire:
            opened.append(await dial(path))
            return opened[-1]

        monkeypatch.setattr("clusterd.tui.source.sources.Wire.open", remember)
        source = DaemonSource(running.socket)
        links: list[LinkState] = []
        answer: list[dict[str, Any]] = []
        async with asyncio.timeout(30):
            async for item in source.items():
                if isinstance(item, Link):
                    links.append(item.state)
                    continue
                answer.append(item)
                if "snapshot" in item:
                    await asyncio.to_thread(running.call, "priority", job="1", priority=5)
                elif [event["priority"] for event in item.get("events", ()) if "priority" in event] == [5]:
                    for wire in opened:  # as when a network breaks: nobody said goodbye
                        wire.close()
                    await asyncio.to_thread(running.call, "priority", job="1", priority=6)
                elif item.get("events"):
                    break
        await source.close()
        assert links == [LinkState.LIVE, LinkState.LOST, LinkState.LIVE]
        assert ["snapshot" in item for item in answer] == [True, False, False]
        priorities = [event.get("priority") for item in answer[1:] for event in item["events"]]
        assert priorities == [5, 6]

    with pytest.MonkeyPatch.context() as patched:
        asyncio.run(run(patched))
