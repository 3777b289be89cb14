"""The tensor store, and transfers between two of them."""

from __future__ import annotations

import mmap
import os
import queue
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from clusterd import page_tables, protocol
from clusterd.agent.host.attempt_records import Refused
from clusterd.agent.tensors import segments
from clusterd.agent.tensors.fabric import FetchFailed, fetch, receive_frame, server_proof
from clusterd.agent.tensors.segments import Segment, Store
from clusterd.agent.tensors.slice_server import SliceServer
from clusterd.trusted_paths import UnsafePath
from tests.agent.client import wait_until
from tests.conftest import HANG_S


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "shm", tmp_path / "files")
    yield made
    made.close()


@pytest.mark.parametrize("cores", [2, 16])
@pytest.mark.parametrize("kernel", ["new", "old"])
def test_a_segment_is_there_to_its_last_page_and_mapped_by_others(
    store: Store, cores: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No page is missing when its writer comes: that would be a SIGBUS in the middle of a move."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(page_tables, "CHUNK_BYTES", mmap.PAGESIZE)
    if kernel == "old":
        monkeypatch.setattr(segments, "POPULATE_WRITE", -1)
    segment = store.make("m.1.2.out0", 3 * mmap.PAGESIZE + 5, "m.1.2")
    stat = segment.path.stat()
    assert stat.st_size == segment.size
    assert stat.st_blocks * 512 >= segment.size
    assert store.make("m.1.2.out0", 3 * mmap.PAGESIZE + 5, "m.1.2") is segment


def test_several_threads_populate_a_mapping_and_leave_the_interpreter_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    mapped, seen = mmap.mmap(-1, 128 << 20), list[int]()
    before_bytes, pages = resident_bytes(), [(1 << 20, 127 << 20)]
    pool = page_tables.ThreadPoolExecutor
    monkeypatch.setattr(page_tables, "ThreadPoolExecutor", lambda count: (seen.append(count), pool(count))[1])
    assert page_tables.populate(mapped, pages, page_tables.POPULATE_WRITE)
    assert seen == [page_tables.THREADS_MAX]
    assert 126 << 20 <= resident_bytes() - before_bytes < 160 << 20
    assert not page_tables.populate(mapped, pages, -1)  # as an older kernel


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_stores_of_agents_that_were_killed_are_removed(tmp_path: Path) -> None:
    """Also where the agent's directory is still there: the next agent in it would empty its store first."""
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
    assert sorted(place.name for place in shared.iterdir()) == ["clusterd-0-lives", "clusterd-0-new"]
    lives.close()
    assert not (shared / "clusterd-0-lives").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="gives a directory to another account: needs root")
def test_a_store_of_another_account_is_neither_used_nor_removed(tmp_path: Path) -> None:
    """Everybody may make entries in /dev/shm, of any name."""
    shared = tmp_path / "shm"
    shared.mkdir()
    shared.chmod(0o1777)
    for name in ("clusterd-0-mine", "clusterd-0-old"):
        (shared / name).mkdir()
        (shared / name / "owner").touch()
        os.chown(shared / name, 4242, 4242)
    (shared / "clusterd-0-link").symlink_to(shared / "clusterd-0-old")
    Store(shared / "clusterd-0-new", tmp_path / "files").close()
    assert {"clusterd-0-mine", "clusterd-0-old", "clusterd-0-link"} == {place.name for place in shared.iterdir()}
    taken = shared / "clusterd-0-taken"
    taken.symlink_to(tmp_path)
    os.lchown(taken, 4242, 4242)
    with pytest.raises(UnsafePath, match="is a link made by 4242"):
        Store(taken, tmp_path / "files")


def test_dropped_segments_are_used_again(store: Store) -> None:
    """The same pages under another name."""
    first = store.make("m.1.2.out0", 1 << 20, "m.1.2")
    inode = first.path.stat().st_ino
    store.drop("m.1.2")
    second = store.make("m.1.3.out0", (1 << 20) - 4096, "m.1.3")
    assert second.path.stat().st_ino == inode
    assert second.path.name == "m.1.3.out0"


def test_a_segment_that_is_made_again_larger_leaves_the_dropped_one_whole(store: Store) -> None:
    """Both would have the same name; whoever gets the dropped one writes to its last page."""
    store.make("m.1.2.out0", 1 << 20, "m.1.2")
    store.drop("m.1.2")
    again = store.make("m.1.2.out0", 4 << 20, "m.1.2")
    other = store.make("m.1.3.out0", 1 << 20, "m.1.3")
    other.mapped[: 1 << 20] = b"\1" * (1 << 20)
    assert again.path.stat().st_size == 4 << 20
    assert other.path.read_bytes()[: 1 << 20] == b"\1" * (1 << 20)
    assert not any(again.path.read_bytes())


def test_segments_beyond_memory_go_to_files_and_beyond_both_are_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the move begins, with the numbers."""
    monkeypatch.setattr(
        "clusterd.agent.tensors.segments._free_bytes", lambda place: 1 << 20 if place.name == "shm" else 1 << 30
    )
    assert store.make("big", 2 << 20, "m").path.parent.name == "files"
    monkeypatch.setattr("clusterd.agent.tensors.segments._free_bytes", lambda place: 1 << 20)
    with pytest.raises(Refused, match=r"no room for a segment of 8 MiB .*1 MiB free"):
        store.make("bigger", 8 << 20, "m")


def test_shared_memory_is_left_for_others(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL fails for good where it finds none, as the very ranks would that a segment is made for."""
    monkeypatch.setattr("clusterd.agent.tensors.segments._free_bytes", lambda place: 217 << 20)
    monkeypatch.setattr("clusterd.agent.tensors.segments._total_bytes", lambda place: 2 << 30)
    assert store.make("first", 10 << 20, "m").path.parent.name == "shm"
    assert store.make("second", 12 << 20, "m").path.parent.name == "files"


def test_the_little_shared_memory_of_a_container_is_left_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clusterd.agent.tensors.segments._total_bytes", lambda place: 64 << 20)
    assert store.make("first", 1 << 20, "m").path.parent.name == "files"


def test_stores_of_killed_agents_are_removed_under_any_directory_name(tmp_path: Path) -> None:
    """Also where the directory is still there; one that is not UTF-8 kept every agent of its user from starting."""
    homes = [tmp_path / os.fsdecode(b"caf\xe9"), tmp_path / "gone", tmp_path / "lives", tmp_path / "mine"]
    left, gone, lives, mine = (tmp_path / "shm" / f"clusterd-0-{number}" for number in range(4))
    others = tmp_path / "shm" / "clusterd-1000-0" / "owner"
    for file in (left / "owner", gone / "owner", others):
        file.parent.mkdir(parents=True)
        file.touch()
    homes[0].mkdir()
    (left / "owner").write_bytes(os.fsencode(homes[0]))
    (gone / "owner").write_bytes(os.fsencode(homes[1]))
    running = Store(lives, homes[2] / "files")
    store = Store(mine, homes[3] / "files")
    try:
        assert (left.exists(), gone.exists(), lives.exists(), others.exists()) == (False, False, True, True)
    finally:
        running.close()
        store.close()


def test_agents_that_start_at_once_leave_each_other_their_stores(tmp_path: Path) -> None:
    """One sees the other's store before the other holds its lock."""
    shared = [tmp_path / "shm" / f"clusterd-0-{number}" for number in range(8)]
    with ThreadPoolExecutor(len(shared)) as pool:
        stores = list(pool.map(lambda place: Store(place, tmp_path / place.name / "files"), shared))
    try:
        for store, place in zip(stores, shared, strict=True):
            assert store.make("m.out0", 1 << 16, "m").path.parent == place
            assert (place / "owner").read_bytes()
    finally:
        for store in stores:
            store.close()


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


def test_dropped_segments_give_way_before_the_disk_is_used(tmp_path: Path) -> None:
    """None of them is of a size that could be used again, and together they are all that the store may take."""
    limits = tmp_path / "store.json"
    limits.write_text(f'{{"memory_bytes": {10 << 20}}}')
    store = Store(tmp_path / "shm", tmp_path / "files", limits)
    try:
        store.make("m1.out0", 8 << 20, "m1")
        store.drop("m1")
        assert store.make("m2.out0", 3 << 20, "m2").path.parent.name == "shm"
        assert [path.name for path in (tmp_path / "shm").iterdir() if path.name != "owner"] == ["m2.out0"]
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


def test_who_asks_before_a_segment_is_made_waits_for_it_until_its_move_is_over(tmp_path: Path) -> None:
    """Regression: target ranks that were ready first failed their move."""
    here, there = Store(tmp_path / "a", tmp_path / "af"), Store(tmp_path / "b", tmp_path / "bf")
    tokens = {"m": "secret", "j.1.g1.snaps": "secret"}
    server = SliceServer(there, tokens.get)
    at, inbox, found = ("127.0.0.1", server.port), here.make("in", 100, "m"), queue.Queue[object]()

    def bring(name: str) -> None:
        try:
            found.put(fetch(at, "secret", "m", name, [(0, 10)], inbox, 0, lambda: False))
        except FetchFailed as failed:
            found.put(str(failed))

    with pytest.raises(FetchFailed, match="is not here"):  # a snapshot is there, or it is gone
        fetch(at, "secret", "j.1.g1.snaps", "j.1.g1.snap0.0", [(0, 10)], inbox, 0, lambda: False)
    for name in ("out0", "out1"):
        threading.Thread(target=bring, args=[name]).start()
    with pytest.raises(queue.Empty):
        found.get(timeout=0.2)
    there.make("out0", 100, "m")
    there.publish("out0", {"step": 3})
    assert found.get(timeout=HANG_S) == {"step": 3}
    del tokens["m"]
    there.drop("m")
    assert "was dropped" in str(found.get(timeout=HANG_S))
    server.close()


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


class SlowSource:
    """Another host's agent, whose bytes come when the test says so."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()

    def accept(self) -> None:
        self._connection, _ = self._listener.accept()
        self._connection.sendall(protocol.encode({"nonce": "n"}))
        shown = receive_frame(self._connection, 4096)
        proof = server_proof("t", "n", shown["nonce"], "m.1.2")
        receive_frame(self._connection, 4096)
        self._connection.sendall(protocol.encode({"proof": proof}))
        self._connection.sendall(protocol.encode({"meta": {}, "bytes": self._count}))

    def send(self, count: int) -> None:
        self._connection.sendall(b"\xaa" * count)

    def close(self) -> None:
        self._connection.close()
        self._listener.close()


@pytest.fixture
def slow() -> Iterator[SlowSource]:
    source = SlowSource(2 << 20)
    yield source
    source.close()


def bring(slow: SlowSource, inbox: Segment, stopped: Callable[[], bool]) -> tuple[threading.Thread, list[str]]:
    """A fetch of 2 MiB on a thread, and why it failed; half of its bytes have come."""
    failed: list[str] = []

    def work() -> None:
        try:
            fetch(slow.address, "t", "m.1.2", "x", [(0, 2 << 20)], inbox, 0, stopped)
        except FetchFailed as error:
            failed.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    slow.accept()
    slow.send(1 << 20)
    wait_until(lambda: inbox.mapped[(1 << 20) - 1] == 0xAA, "half of the bytes")
    return thread, failed


def test_bytes_of_an_aborted_move_do_not_land_in_anothers_segment(store: Store, slow: SlowSource) -> None:
    """The abort comes while they are on their way."""
    thread, _ = bring(slow, store.make("m.1.2.in", 2 << 20, "m.1.2"), lambda: False)
    store.drop("m.1.2")
    other = store.make("other.1.3.out0", 2 << 20, "other.1.3")
    other.mapped[:] = b"\x11" * (2 << 20)
    slow.send(1 << 20)
    thread.join(20)
    assert bytes(other.mapped) == b"\x11" * (2 << 20)


def test_a_fetch_of_an_aborted_move_ends_in_the_middle_of_its_bytes(store: Store, slow: SlowSource) -> None:
    """The fetch must not go on to the last byte, which may be gigabytes later."""
    over = threading.Event()
    thread, failed = bring(slow, store.make("m.1.2.in", 2 << 20, "m.1.2"), over.is_set)
    over.set()
    slow.send(1)
    thread.join(20)
    assert len(failed) == 1 and "the move is over" in failed[0]


def test_nothing_is_fetched_into_a_segment_that_was_dropped(store: Store, slow: SlowSource) -> None:
    """By then it may be another's."""
    inbox = store.make("m.1.2.in", 2 << 20, "m.1.2")
    store.drop("m.1.2")
    accepting = threading.Thread(target=slow.accept)
    accepting.start()
    with pytest.raises(FetchFailed, match="was dropped"):
        fetch(slow.address, "t", "m.1.2", "x", [(0, 2 << 20)], inbox, 0, lambda: False)
    accepting.join(20)
