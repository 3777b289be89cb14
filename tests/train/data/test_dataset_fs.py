"""Data sets by name: read in place if local, else fetched once, and never with wrong bytes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from torch.utils.data import DataLoader

import clusterd.train  # noqa: F401  # registers clusterd://
from clusterd import protocol
from clusterd.datasets import UNREACHABLE, DataUnavailable, DataUnreachable, File, Folders, Found
from clusterd.train.data import dataset_sources
from clusterd.train.data.dataset_fs import DatasetFileSystem, DatasetSources
from clusterd.train.data.dataset_sources import CachedSource
from clusterd.train.process import exits

RECORD_BYTES, RECORDS = 64, 100


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "train").mkdir(parents=True)
    (folder / "train/part-0.bin").write_bytes(random.Random(1).randbytes(RECORD_BYTES * RECORDS))
    (folder / "readme.txt").write_text("a corpus\n")
    return folder


class Counting:
    """Another host's data sets, with a record of the reads."""

    def __init__(self, folder: Path) -> None:
        self._folders = Folders({"corpus": folder})
        self.looks: list[str] = []
        self.reads: list[tuple[str, int, int]] = []

    def look(self, dataset: str, path: str) -> Found:
        self.looks.append(path)
        return self._folders.look(dataset, path)

    def read(self, dataset: str, path: str, file: File, offset: int, length: int) -> bytes:
        self.reads.append((path, offset, length))
        return self._folders.read(dataset, path, file, offset, length)


def test_a_folder_of_this_host_by_name(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERD_DATASETS", f"corpus={corpus}:other=/nowhere")
    with fsspec.open("clusterd://corpus/readme.txt", "rt") as file:
        assert file.read() == "a corpus\n"
    files = fsspec.filesystem("clusterd")
    assert sorted(files.find("clusterd://corpus")) == ["corpus/readme.txt", "corpus/train/part-0.bin"]
    assert files.ls("clusterd://corpus", detail=False) == ["corpus/readme.txt", "corpus/train"]
    assert files.info("clusterd://corpus/train/part-0.bin")["size"] == RECORD_BYTES * RECORDS
    assert files.glob("clusterd://corpus/*/*.bin") == ["corpus/train/part-0.bin"]
    with fsspec.open("clusterd://corpus/train/part-0.bin", "rb") as file:
        file.seek(-RECORD_BYTES, os.SEEK_END)
        assert file.read() == (corpus / "train/part-0.bin").read_bytes()[-RECORD_BYTES:]


@pytest.mark.parametrize(
    "path, says",
    [
        ("clusterd://other/x", "name its folder in CLUSTERD_DATASETS"),
        ("clusterd://corpus/none", "clusterd://corpus/none"),
        ("clusterd://corpus/../secret", "outside the data set 'corpus'"),
    ],
)
def test_missing_files_are_reported(path: str, says: str, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (corpus.parent / "secret").write_text("not part of it")
    monkeypatch.setenv("CLUSTERD_DATASETS", f"corpus={corpus}")
    with pytest.raises(OSError, match=says), fsspec.open(path, "rb") as file:
        file.read()


def test_nothing_is_written(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERD_DATASETS", f"corpus={corpus}")
    with pytest.raises(OSError, match="read only"), fsspec.open("clusterd://corpus/new", "wb") as file:
        file.write(b"x")


def test_missing_ranges_are_fetched_once_and_only_they(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_sources, "BLOCK_BYTES", 1024)
    there = Counting(corpus)
    whole = (corpus / "train/part-0.bin").read_bytes()
    for _ in range(2):  # a second process of the same host
        files = DatasetFileSystem(sources=DatasetSources({}, CachedSource(there, tmp_path / "cache")))
        assert files.cat_file("corpus/train/part-0.bin", 1000, 1100) == whole[1000:1100]
        assert files.cat_file("corpus/train/part-0.bin", 6300) == whole[6300:]
    assert there.reads == [
        ("train/part-0.bin", 0, 1024),
        ("train/part-0.bin", 1024, 1024),
        ("train/part-0.bin", 6144, 256),
    ]


def read_anew(there: Counting, cache: Path, start: int, end: int, name: str = "readme.txt") -> bytes:
    """Read as in a new process."""
    files = DatasetFileSystem(sources=DatasetSources({}, CachedSource(there, cache)))
    data: bytes = files.cat_file(f"corpus/{name}", start, end)
    return data


def test_a_torn_block_is_fetched_again_and_a_new_version_is_another_file(corpus: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    there = Counting(corpus)
    assert read_anew(there, cache, 0, 9) == b"a corpus\n"
    block = next(p for p in cache.rglob("*") if p.is_file())
    block.write_bytes(b"a co")
    assert read_anew(there, cache, 0, 9) == b"a corpus\n"
    (corpus / "readme.txt").write_text("a CORPUS\n")
    os.utime(corpus / "readme.txt", (1, 1))
    assert read_anew(there, cache, 2, 8) == b"CORPUS"
    assert len(there.reads) == 3


def test_a_file_that_changes_while_it_is_read_is_refused_not_mixed(corpus: Path, tmp_path: Path) -> None:
    """Blocks of the new content were cached under the old version, for every later reader."""
    there = Counting(corpus)
    files = DatasetFileSystem(sources=DatasetSources({}, CachedSource(there, tmp_path / "cache")))
    assert files.info("corpus/readme.txt")["size"] == 9
    (corpus / "readme.txt").write_text("a CORPUS\n")
    os.utime(corpus / "readme.txt", (1, 1))
    with pytest.raises(DataUnavailable, match="changed while it was read"):
        files.cat_file("corpus/readme.txt")
    assert files.cat_file("corpus/readme.txt") == b"a CORPUS\n"


def test_an_open_file_keeps_its_version_and_a_new_one_is_seen(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookups were cached for the life of the process, and a replaced file was not noticed."""
    files = DatasetFileSystem(sources=DatasetSources({}, CachedSource(Counting(corpus), tmp_path / "cache")))
    reader = files.open("corpus/readme.txt", cache_type="none")
    assert reader.read(2) == b"a "
    (corpus / "readme.txt").write_text("THE OTHER CORPUS\n")
    assert files.info("corpus/readme.txt")["size"] == 9
    monkeypatch.setattr(dataset_sources, "LOOKUP_TTL_S", 0.0)
    assert files.cat_file("corpus/readme.txt") == b"THE OTHER CORPUS\n"
    assert reader.read() == b"corpus\n"  # from the cache; blocks of the old version that it lacks are refused


def test_a_folder_of_many_files_is_not_listed_for_one_of_them(corpus: Path, tmp_path: Path) -> None:
    there = Counting(corpus)
    files = DatasetFileSystem(sources=DatasetSources({}, CachedSource(there, tmp_path / "cache")))
    assert files.cat_file("corpus/train/part-0.bin", 0, 1) == files.cat_file("corpus/train/part-0.bin", 0, 1)
    assert there.looks == ["train/part-0.bin"]
    there.looks.clear()
    for name in files.find("corpus"):
        files.cat_file(name)
    assert sorted(there.looks) == ["", "train"]


def test_links_are_followed_but_not_in_circles(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of models and data sets often consist of symlinks."""
    (corpus.parent / "blob").write_text("a blob")
    (corpus.parent / "more").mkdir()
    (corpus.parent / "more/x").write_text("x")
    (corpus / "linked").symlink_to("../blob")
    (corpus / "more").symlink_to("../more")
    (corpus / "train/latest").symlink_to(".")
    (corpus / "train/top").symlink_to("..")
    (corpus / "gone").symlink_to("nowhere")
    monkeypatch.setenv("CLUSTERD_DATASETS", f"corpus={corpus}")
    files = fsspec.filesystem("clusterd", skip_instance_cache=True)
    assert sorted(files.find("corpus")) == [
        "corpus/linked",
        "corpus/more/x",
        "corpus/readme.txt",
        "corpus/train/part-0.bin",
    ]
    assert files.cat_file("corpus/linked") == b"a blob"


def test_more_than_one_system_call_reads(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reads at most 2 GiB per call; here seven bytes."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, length, offset: pread(file, min(length, 7), offset))
    monkeypatch.setenv("CLUSTERD_DATASETS", f"corpus={corpus}")
    assert fsspec.filesystem("clusterd", skip_instance_cache=True).cat_file("corpus/readme.txt") == b"a corpus\n"


def test_a_full_disk_costs_the_cache_not_the_data(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder can be made here")
    assert read_anew(Counting(corpus), tmp_path / "cache", 0, 8) == b"a corpus"


def test_a_disk_that_is_almost_full_is_left_to_others(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 110
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1000, free=free))
    there = Counting(corpus)
    assert read_anew(there, tmp_path / "cache", 0, 9) == b"a corpus\n"
    free = 108
    (corpus / "more.txt").write_text("a corpus\n")
    for _ in range(2):
        assert read_anew(there, tmp_path / "cache", 0, 9, "more.txt") == b"a corpus\n"
    assert [path for path, _, _ in there.reads] == ["readme.txt", "more.txt", "more.txt"]


class Agent:
    """The agent's side of the data verbs."""

    def __init__(self, path: Path, source: Counting) -> None:
        self.hellos: list[dict[str, Any]] = []
        self._source = source
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):  # the client has disconnected
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            self._threads.append(threading.Thread(target=self._serve, args=[connection], daemon=True))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        decoder = protocol.Decoder()
        with connection, contextlib.suppress(ConnectionError):  # of a worker that is killed
            while data := connection.recv(65536):
                for message in decoder.feed(data):
                    if message["verb"] == "data_hello":
                        self.hellos.append(message)
                        continue
                    connection.sendall(protocol.encode({"id": message["id"], **self._answer(message)}))

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            dataset, path = message["dataset"], message["path"]
            if message["verb"] == "data_look":
                found = self._source.look(dataset, path)
                return {"ok": {"file": [found.size, found.version]} if isinstance(found, File) else {}}
            file = File(*message["file"])
            read = self._source.read(dataset, path, file, message["offset"], message["length"])
            return {"ok": {"data": read}}
        except DataUnavailable as error:
            kind = UNREACHABLE if isinstance(error, DataUnreachable) else "dataset"
            return {"error": {"kind": kind, "message": str(error)}}


@pytest.fixture
def remote(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Agent, Counting]]:
    """A rank whose host does not have the data set."""
    there = Counting(corpus)
    agent = Agent(tmp_path / "agent.sock", there)
    rank_file = {
        "job": "j",
        "attempt": 1,
        "generation": 2,
        "rank": 0,
        "token": "secret",
        "control_socket": str(tmp_path / "agent.sock"),
        "data_cache": str(tmp_path / "cache"),
        "datasets": {"corpus": None},
    }
    (tmp_path / "rank-0.json").write_text(json.dumps(rank_file))
    monkeypatch.setenv("CLUSTERD_RANK_FILE", str(tmp_path / "rank-0.json"))
    yield agent, there
    agent.close()


class Records(torch.utils.data.Dataset[torch.Tensor]):
    """A script that knows nothing of clusterd but the name."""

    def __init__(self) -> None:
        self._file = fsspec.open("clusterd://corpus/train/part-0.bin", "rb").open()

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> torch.Tensor:
        self._file.seek(index * RECORD_BYTES)
        return torch.tensor(list(self._file.read(RECORD_BYTES)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_torch_data_set_reads_files_of_another_host(
    workers: int, remote: tuple[Agent, Counting], corpus: Path
) -> None:
    agent, there = remote
    # Forked, as in training: each worker inherits the parent's open file, and needs its own connection.
    loader = DataLoader(
        Records(), batch_size=10, num_workers=workers, multiprocessing_context="fork" if workers else None
    )
    whole = torch.cat([batch.reshape(-1) for batch in loader])
    assert bytes(whole.tolist()) == (corpus / "train/part-0.bin").read_bytes()
    assert len(there.reads) <= max(1, workers)
    assert {(h["job"], h["token"]) for h in agent.hellos} == {("j", "secret")}
    assert (
        1 + (workers > 0) <= len(agent.hellos) <= 1 + workers
    )  # a worker that finds all blocks in the cache does not connect


def test_a_file_opened_for_each_sample_is_asked_for_once(remote: tuple[Agent, Counting]) -> None:
    agent, there = remote
    for index in range(5):
        with fsspec.open("clusterd://corpus/train/part-0.bin", "rb") as file:
            file.seek(index)
            file.read(1)
    assert (len(agent.hellos), there.looks, len(there.reads)) == (1, ["train/part-0.bin"], 1)


def test_a_host_that_does_not_answer_is_no_fault_of_the_job(
    remote: tuple[Agent, Counting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from a data-loader worker, which passes its error as text."""

    def away(self: Counting, dataset: str, path: str, file: File, offset: int, length: int) -> bytes:
        raise DataUnreachable("no host that has the data set 'corpus' answers: gpu03:7000: timed out")

    monkeypatch.setattr(Counting, "read", away)
    loader = DataLoader(Records(), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(OSError) as raised:
        next(iter(loader))
    refusal = exits.classify_error(raised.value, where="rank 0")
    assert refusal is not None and (refusal.exit_code, refusal.reason) == (94, "data")
    assert "gpu03:7000: timed out" in str(refusal)


def test_a_request_that_no_host_can_meet_is_refused(remote: tuple[Agent, Counting]) -> None:
    with pytest.raises(OSError, match="no data set 'images'"):
        fsspec.open("clusterd://images/a.png", "rb").open()
