"""Watchers that connect together share their baseline, and none of them misses a change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from clusterd.core import events as e
from clusterd.daemon.api import watch
from clusterd.daemon.api.watch import Baselines, Feed
from clusterd.types import HostId
from tests.core.conftest import Lab


class Watched:
    """Jobs of a state, served as baselines that count how often an item is made."""

    def __init__(self, jobs: int) -> None:
        self.lab = Lab()
        for number in range(jobs):
            self.lab.submit(f"job-{number}")
        self.feed = Feed()
        self.change()
        self.made: list[int] = []
        self.baselines = Baselines(self.feed, self.listed, self.item)

    def change(self) -> None:
        self.feed.add([e.HostAdded(at_s=0.0, id=e.EventId(self.feed.number + 1), host=HostId("a"))], [])

    async def listed(self) -> list[Any]:
        await anyio.lowlevel.checkpoint()  # as while the archive is read
        return list(self.lab.scheduler.state.jobs.values())

    def item(self, jobs: list[Any], number: int, is_first: bool) -> dict[str, Any]:
        self.made.append(number)
        return {"jobs": [job.id for job in jobs], "number": number, "first": is_first}

    def run(self, *watchers: Callable[[], Any]) -> None:
        async def all_of_them() -> None:
            async with anyio.create_task_group() as tasks:
                for watcher in watchers:
                    tasks.start_soon(watcher)

        anyio.run(all_of_them)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(watch, "JOBS_PER_ITEM", 10)
    return Watched(35)


def test_twenty_watchers_cost_one_baseline(watched: Watched) -> None:
    found: list[list[dict[str, Any]]] = []
    taken = [0] * 4

    async def one() -> None:
        items: list[dict[str, Any]] = []
        async for item in watched.baselines.items():
            assert item.packed
            taken[len(items)] += 1
            while taken[len(items)] < 3:  # the item lives while it is sent to one of them
                await anyio.lowlevel.checkpoint()
            items.append(dict(item.row))
        found.append(items)

    watched.run(one, one, one)
    number = watched.feed.number
    assert watched.made == [0, 0, 0, number]
    assert found[0] == found[1] == found[2]
    assert [item["first"] for item in found[0]] == [True, False, False, False]
    assert [job for item in found[0] for job in item["jobs"]] == [str(n + 1) for n in range(35)]


def test_a_change_meanwhile_comes_after_the_shared_baseline(watched: Watched) -> None:
    numbers: list[int] = []

    async def early() -> None:
        async for item in watched.baselines.items():
            if item.row["first"]:
                watched.change()
                numbers.extend([late.number async for late in watched.baselines.items()][-1:])
        numbers.append(item.number)

    watched.run(early)
    assert max(numbers) < watched.feed.number, "its number is that of its beginning"
    assert all(len(watched.feed.after(number) or ()) == 1 for number in numbers)


def test_nobody_shares_an_old_baseline(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SHARED_S", 0.0)

    async def one() -> None:
        async for _ in watched.baselines.items():
            await anyio.wait_all_tasks_blocked()

    watched.run(one, one)
    assert len(watched.made) == 8
