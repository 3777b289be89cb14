"""The tensor store and the way between two of them."""

from __future__ import annotations

import mmap
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterd.agent.fabric import FetchFailed, SliceServer, fetch
from clusterd.agent.records import Refused
from clusterd.agent.segments import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "shm", tmp_path / "files")
    yield made
    made.close()


def test_a_segment_is_there_to_its_last_page_and_mapped_by_others(store: Store) -> None:
    """No page is missing when its writer comes: that would be a SIGBUS in the middle of a move."""
    segment = store.make("m.1.2.out0", 3 * mmap.PAGESIZE + 5, "m.1.2")
    stat = segment.path.stat()
    assert stat.st_size == segment.size
    assert stat.st_blocks * 512 >= segment.size
    assert store.make("m.1.2.out0", 3 * mmap.PAGESIZE + 5, "m.1.2") is segment


def test_stores_of_agents_that_are_gone_for_good_are_removed(tmp_path: Path) -> None:
    """Not those of agents that live, or whose directory is there for the next agent."""
    shared = tmp_path / "shm"
    for name in ("gone", "lives", "comes back"):
        (tmp_path / name).mkdir()
    left = {name: Store(shared / f"clusterd-0-{name}", tmp_path / name / "files") for name in ("gone", "comes back")}
    lives = Store(shared / "clusterd-0-lives", tmp_path / "lives" / "files")
    for store in left.values():
        os.close(store._owned)  # as by SIGKILL
    shutil.rmtree(tmp_path / "gone")
    shutil.rmtree(tmp_path / "lives")  # from where this one looks
    Store(shared / "clusterd-0-new", tmp_path / "files")
    assert sorted(place.name for place in shared.iterdir()) == [
        "clusterd-0-comes back", "clusterd-0-lives", "clusterd-0-new",
    ]  # fmt: skip
    lives.close()
    assert not (shared / "clusterd-0-lives").exists()


def test_dropped_segments_are_used_again(store: Store) -> None:
    """The same pages under another name."""
    first = store.make("m.1.2.out0", 1 << 20, "m.1.2")
    inode = first.path.stat().st_ino
    store.drop("m.1.2")
    second = store.make("m.1.3.out0", (1 << 20) - 4096, "m.1.3")
    assert second.path.stat().st_ino == inode
    assert second.path.name == "m.1.3.out0"


def test_what_does_not_fit_memory_goes_to_a_file_and_what_fits_nowhere_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the move begins, with the numbers."""
    monkeypatch.setattr(
        "clusterd.agent.segments._free_bytes", lambda place: 1 << 20 if place.name == "shm" else 1 << 30
    )
    assert store.make("big", 2 << 20, "m").path.parent.name == "files"
    monkeypatch.setattr("clusterd.agent.segments._free_bytes", lambda place: 1 << 20)
    with pytest.raises(Refused, match=r"no room for a segment of 8 MiB .*1 MiB free"):
        store.make("bigger", 8 << 20, "m")


def test_a_store_takes_no_more_than_it_may(tmp_path: Path) -> None:
    """A host whose memory others need too: what is beyond the limit goes to disk, then nowhere; read as it changes."""
    limits = tmp_path / "store.json"
    limits.write_text(f'{{"memory_bytes": {3 << 20}}}')
    store = Store(tmp_path / "shm", tmp_path / "files", limits)
    try:
        assert [store.make(f"m.out{n}", 1 << 20, "m").path.parent.name for n in range(3)] == ["shm", "shm", "files"]
        limits.write_text('{"memory_bytes": 0, "disk_bytes": 0}')
        with pytest.raises(Refused, match=r"shm \(0 MiB free\) nor .*files \(0 MiB free\)"):
            store.make("m.out3", 1 << 20, "m")
    finally:
        store.close()


@pytest.mark.parametrize("name", ["../out", "a/b", "", "x" * 300])
def test_names_stay_inside_the_store(store: Store, name: str) -> None:
    """A rank gone wrong cannot write elsewhere."""
    with pytest.raises(Refused):
        store.make(name, 10, "m")


def pair(tmp_path: Path) -> tuple[Store, Store, SliceServer]:
    here, there = Store(tmp_path / "a", tmp_path / "af"), Store(tmp_path / "b", tmp_path / "bf")
    return here, there, SliceServer(there, {"m": "secret"}.get)


def test_ranges_arrive_as_they_were_published(tmp_path: Path) -> None:
    """Asked for before they are there, several at once."""
    here, there, server = pair(tmp_path)
    source = there.make("out0", 10 << 20, "m")
    data = bytes(range(256)) * (10 << 12)
    source.path.write_bytes(data)
    inbox = here.make("in", 6 << 20, "m")
    ranges = [(5, 1 << 20), (3 << 20, (4 << 20) + 3)]
    metas: list[dict[str, object]] = []

    def bring() -> None:
        got = fetch(("127.0.0.1", server.port), "secret", "m", "out0", ranges, inbox, 7, lambda: False)
        metas.append(got)

    thread = threading.Thread(target=bring)
    thread.start()
    there.publish("out0", {"step": 3})
    thread.join(20)
    server.close()
    assert metas == [{"step": 3}]
    wanted = b"".join(data[o : o + n] for o, n in ranges)
    assert inbox.path.read_bytes()[7 : 7 + len(wanted)] == wanted


@pytest.mark.parametrize(("token", "move", "segment"), [("wrong", "m", "out0"), ("secret", "other", "out0")])
def test_without_the_token_there_is_no_answer(tmp_path: Path, token: str, move: str, segment: str) -> None:
    """Another user of the cluster finds the port."""
    here, there, server = pair(tmp_path)
    there.make("out0", 100, "m")
    there.publish("out0", {})
    inbox = here.make("in", 100, "m")
    with pytest.raises(FetchFailed):
        fetch(("127.0.0.1", server.port), token, move, segment, [(0, 10)], inbox, 0, lambda: False)
    server.close()


def test_ranges_outside_the_segment_and_dropped_segments_are_errors(tmp_path: Path) -> None:
    """In words, at the side that asked."""
    here, there, server = pair(tmp_path)
    there.make("out0", 4096, "m")
    there.publish("out0", {})
    inbox = here.make("in", 4096, "m")
    at = ("127.0.0.1", server.port)
    with pytest.raises(FetchFailed, match="no such range"):
        fetch(at, "secret", "m", "out0", [(0, 1 << 30)], inbox, 0, lambda: False)
    there.make("out1", 4096, "m")
    waiting = threading.Timer(0.1, there.drop, ("m",))
    waiting.start()
    with pytest.raises(FetchFailed, match="was dropped"):
        fetch(at, "secret", "m", "out1", [(0, 10)], inbox, 0, lambda: False)
    server.close()
