"""Working directories on the head node: who may name one, how much may wait, and when one is removed."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from clusterd.core import events as e
from clusterd.daemon.access import Peer
from clusterd.daemon.api.workdirs import CHUNK_BYTES, KEPT_S, WAITING_PER_USER, WorkdirVerbs
from clusterd.errors import TryLater
from tests.core.conftest import Lab

LIMIT = 4 << 20


class Store:
    """Archive and journal, without files."""

    def __init__(self) -> None:
        self.stored: dict[str, float] = {}

    async def put_workdir(self, digest: str, offset: int, data: bytes, last: bool, sender: int) -> None:
        if last:
            self.stored[digest] = 0.0

    def has_workdir(self, digest: str) -> bool:
        return digest in self.stored

    def workdirs(self) -> list[tuple[str, float]]:
        return list(self.stored.items())

    def remove_workdir(self, digest: str) -> int:
        return int(self.stored.pop(digest, -1.0) >= 0.0)

    def drop_partial(self, sender: int) -> None: ...

    async def query(self, statement: str) -> list[Any]:
        return []


def ann(connection: int = 1) -> Peer:
    return Peer("ann", 1001, False, connection)


@pytest.fixture
def lab() -> Lab:
    return Lab()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def verbs(store: Store, lab: Lab) -> WorkdirVerbs:
    archive: Any = store
    return WorkdirVerbs(archive, archive, lab.scheduler.state, LIMIT)


def send(verbs: WorkdirVerbs, peer: Peer, digest: str, *, last: bool = True, data: bytes = bytes(1 << 20)) -> None:
    anyio.run(verbs.snapshot_put, peer, digest, LIMIT - len(data), data, last)


def test_parts_of_one_directory_over_many_connections_count(verbs: WorkdirVerbs) -> None:
    for connection in range(WAITING_PER_USER):
        send(verbs, ann(connection), "same", last=False)
    with pytest.raises(TryLater, match="which is the limit"):
        send(verbs, ann(99), "same", last=False)
    verbs.gone(0)
    send(verbs, ann(99), "same", last=False)


def test_parts_count_where_a_job_names_the_directory(verbs: WorkdirVerbs, lab: Lab) -> None:
    send(verbs, ann(), "same")
    lab.submit(user="ann", snapshot="same")
    for connection in range(WAITING_PER_USER):
        send(verbs, ann(connection), "same", last=False)
    with pytest.raises(TryLater):
        send(verbs, ann(99), "same", last=False)


def test_a_limit_below_one_chunk_is_refused_in_words(store: Store, lab: Lab) -> None:
    archive: Any = store
    small = WorkdirVerbs(archive, archive, lab.scheduler.state, 1000)
    anyio.run(small.snapshot_put, ann(), "a", 0, bytes(CHUNK_BYTES), True)
    with pytest.raises(TryLater, match="try again in"):
        anyio.run(small.snapshot_put, ann(), "b", 0, bytes(CHUNK_BYTES), True)


def test_a_directory_of_a_job_that_is_over_is_removed_however_recently_it_was_sent(
    verbs: WorkdirVerbs, store: Store, lab: Lab
) -> None:
    send(verbs, ann(), "mine")
    job, _ = lab.submit(user="ann", snapshot="mine")
    assert verbs.remove("mine") == 0
    lab.tell(e.JobCancelled(**lab.at(), job=job))
    send(verbs, Peer("bob", 1002, False, 2), "mine")
    assert verbs.remove("mine") == 0  # bob is about to submit
    lab.submit(user="bob", snapshot="mine")
    assert verbs.remove("mine") == 0
    for known in list(lab.scheduler.state.queue):
        lab.tell(e.JobCancelled(**lab.at(), job=known))
    assert verbs.remove("mine") == 1
    assert not verbs.may_name(ann(), "mine")


def test_what_no_job_names_is_removed_after_a_while(verbs: WorkdirVerbs, store: Store, lab: Lab) -> None:
    for digest in ("named", "unnamed"):
        send(verbs, ann(), digest)
    lab.submit(user="ann", snapshot="named")
    sent_s = verbs._sent["ann", "unnamed"].at_s
    anyio.run(verbs.remove_unnamed, sent_s + KEPT_S / 2)
    assert set(store.stored) == {"named", "unnamed"}
    anyio.run(verbs.remove_unnamed, sent_s + KEPT_S + 1.0)
    assert set(store.stored) == {"named"}
    assert verbs.may_name(ann(), "named")
