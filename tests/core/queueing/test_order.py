"""Every face shows the order of the queue that the last scheduling pass used."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterd import projection, protocol
from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.policies import POLICIES, base, default
from clusterd.core.queue_order import changed, difference, listed, only, places
from clusterd.core.scheduler import Batch, Scheduler
from clusterd.criterion import Criterion
from clusterd.rows import Place, plain
from clusterd.tui.model.model import Model
from clusterd.types import ArrayTask, JobId
from tests.core.conftest import Lab
from tests.core.drawn_queue import Choose, DrawnQueue

Keys = Mapping[JobId, Any]


class WatchedLab(Lab):
    """A lab whose changes go to a terminal UI, and whose batches are recorded with the proposals."""

    def __init__(self, policy: str = "default") -> None:
        super().__init__()
        self.scheduler = Scheduler(POLICIES[policy]())
        self.model = Model()
        self.batches: list[Batch] = []
        self.model.apply(_sent({"snapshot": {"jobs": [], "hosts": []}, "number": 0}))

    def tell(self, *events: e.Event) -> list[d.Decision]:
        """Handle events and send the change."""
        decided = super().tell(*events)
        self.batches.append(Batch(events, self.scheduler.proposed))
        state, also = self.scheduler.state, self.scheduler.side_effects
        self.model.apply(_sent(projection.change_row(state, len(self.log), events, decided, side_effects=also)))
        return decided


def _sent(item: Any) -> Any:
    """An item as it comes out of the socket."""
    return next(iter(protocol.Decoder().feed(protocol.encode(plain(item)))))


class OrderedQueue(DrawnQueue):
    """Drawn jobs with all that the order depends on; each face is compared with the pass after each event."""

    def __init__(self, choose: Choose[Any], policy: str = "default") -> None:
        self.keys: Keys = {}
        self.lab: WatchedLab
        self.compared = 0
        self.criteria: set[Criterion] = set()
        super().__init__(choose, WatchedLab(policy))

    def _submit(self) -> None:
        index = self.lab.jobs
        self.lab.submit(
            f"job-{index}",
            devices=self.choose([0, 1, 1, 2, 3, 4]),
            priority=self.choose([0, 0, 0, 1]),
            user=self.choose(["ann", "bob"]),
            tenant=self.choose(["", "vision", "speech"]),
            interactive=self.choose([False, False, True]),
            guaranteed=self.choose([False, False, True]),
            time_limit_s=self.choose([None, 300.0, 3600.0]),
            array=self.choose([None, None, ArrayTask(id="1", name="many", index=index, most=1)]),
            after=self.choose([(), (), (str(index),)]) if index else (),
            grace_s=0.0,
        )
        if self.choose([False, False, False, True]):
            self.lab.tell(e.JobHeld(**self.lab.at(), job=JobId(str(self.lab.jobs)), by="ann"))
        elif self.choose([False, False, True]) and (running := self._running()):
            self.lab.tell(e.JobRequeued(**self.lab.at(), job=self.choose(running).id, by="ann", hold=False))

    def check(self, is_undisturbed: bool) -> None:
        """Compare each face with the keys by which the last pass sorted."""
        state, model = self.lab.scheduler.state, self.lab.model
        waiting = [job for job in self.keys if job in state.queue]
        model.place_jobs()
        assert [job.id for job in model.queue()] == waiting
        assert {id: row.place for id, row in model.jobs.items() if row.place is not None} == projection.places(state)
        assert listed(projection.order(state)) == waiting
        for place, job in enumerate(waiting, 1):
            row = projection.place_row(job, state)
            assert (row.place, row.ahead) == (place, tuple(state.jobs[j].spec.name for j in waiting[: place - 1]))
            assert projection.places(state)[job] == place
        for first, second in pairwise(waiting):
            after = projection.place_row(second, state).after
            fields = zip(self.keys[first]._fields, self.keys[first], self.keys[second], strict=True)
            decided = next(name for name, one, other in fields if one != other)
            assert (after.job, after.criterion) == (first, decided)
            assert after.why and model.order[second].criterion == decided
            self.criteria.add(Criterion(decided))
            self.compared += 1
        for job in state.queue:
            if job not in self.keys:
                assert projection.place_row(job, state) == Place()
        assert all(job.promise == _promise(state, job.id) for job in model.jobs.values())


def _promise(state: Any, job: str) -> Any:
    return projection.promise_row(JobId(job), state)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[str, Keys]:
    """Keys by which the last pass of any policy sorted."""
    found: dict[str, Keys] = {"keys": {}}

    def seen(keys: Keys) -> Any:
        found["keys"] = keys
        return places(keys)

    monkeypatch.setattr(default, "places", seen)
    monkeypatch.setattr(base, "places", seen)
    return found


def run_case(choose: Choose[Any], used: dict[str, Keys], policy: str = "default") -> OrderedQueue:
    queue = OrderedQueue(choose, policy)
    for _ in range(25):
        check, queue.check = queue.check, lambda is_undisturbed: None  # type: ignore[method-assign]
        queue.step()
        queue.check, queue.keys = check, used["keys"]  # type: ignore[method-assign]
        queue.check(is_undisturbed=False)
    again = Scheduler(POLICIES[policy]())
    for batch in queue.lab.batches:
        again.replay(batch)
    assert again.state == queue.lab.scheduler.state
    assert listed(again.state.order) == listed(queue.lab.scheduler.state.order)
    return queue


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("seeds", [range(60), range(60, 3000)], ids=["few", "many"])
def test_every_face_shows_the_order_of_the_last_pass(seeds: range, used: dict[str, Keys]) -> None:
    """`why`, rows of jobs and the terminal UI; and each names the criterion that decided."""
    cases = [run_case(random.Random(seed).choice, used) for seed in seeds]
    assert sum(case.compared for case in cases) > 10 * len(seeds)
    assert set().union(*(case.criteria for case in cases)) >= {
        Criterion.PRIORITY, Criterion.STARTED_GUARANTEED, Criterion.STARVED, Criterion.INTERACTIVE,
        Criterion.STARVED_LONGER, Criterion.TENANT_SHARE, Criterion.ARRIVAL,
    }  # fmt: skip


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"default"}))
def test_the_order_shown_is_that_of_the_configured_policy(policy: str, used: dict[str, Keys]) -> None:
    for seed in range(3):
        run_case(random.Random(seed).choice, used, policy)


ORDERS = st.lists(st.integers(0, 12).map(lambda n: JobId(str(n))), unique=True)


@settings(max_examples=200, deadline=None)
@given(ORDERS, ORDERS, st.data())
def test_a_difference_between_two_orders_gives_the_second(
    before: list[JobId], now: list[JobId], data: st.DataObject
) -> None:
    """Also where jobs have left in between; the criterion between two jobs is the most significant one between them."""

    class Key(tuple[int, int]):
        _fields = ("priority", "arrival")

    ranks = {job: Key((data.draw(st.integers(0, 2)), int(job))) for job in {*before, *now}}
    make = partial(sorted, key=lambda job: ranks[job])
    old, new = (places({job: ranks[job] for job in make(jobs)}) for jobs in (before, now))
    assert changed(old, difference(old, new)) == new
    assert listed(new) == make(now)
    both = {*before, *now[: len(now) // 2]}
    assert only(new, both) == places({job: ranks[job] for job in make(now) if job in both})
