"""Workdirs come from the daemon, and are unpacked as if they came from an attacker."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from clusterd.agent.host import workdirs
from clusterd.agent.host.attempt_records import Refused
from clusterd.agent.host.workdirs import Workdirs


def tar_of(*members: dict[str, bytes] | tarfile.TarInfo) -> tuple[str, bytes]:
    """Digest and bytes of a tar: dicts are files by name, the rest are members as given."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
                continue
            for name, data in member.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    return hashlib.sha256(buffer.getvalue()).hexdigest(), buffer.getvalue()


def special(name: str, kind: bytes, to: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type = kind
    entry.linkname = to
    return entry


def put(store: Workdirs, *members: Any) -> Path:
    digest, data = tar_of(*members)
    store.put(digest, 0, data, last=True)
    return store.path(digest)


@pytest.fixture
def store(tmp_path: Path) -> Workdirs:
    (tmp_path / "snapshots").mkdir()
    return Workdirs(tmp_path / "snapshots")


def nothing_is_left(store: Workdirs, tmp_path: Path) -> bool:
    return list((tmp_path / "snapshots").iterdir()) == [] and [p.name for p in tmp_path.iterdir()] == ["snapshots"]


@pytest.mark.parametrize(
    "members",
    [
        [{"../outside": b"x"}],
        [{"a/../../outside": b"x"}],
        [{"/tmp/outside": b"x"}],
        [special("null", tarfile.CHRTYPE)],
        [special("pipe", tarfile.FIFOTYPE)],
        [{"a": b"x"}, special("b", tarfile.LNKTYPE, "a")],
        [special("out", tarfile.SYMTYPE, ".."), {"out/file": b"x"}],
        [{"twice": b"x"}, {"twice": b"y"}],
        [special("nowhere", tarfile.SYMTYPE)],
    ],
    ids=["parent", "hidden parent", "absolute", "device", "fifo", "hard link", "through a link", "twice", "nowhere"],
)
def test_a_tar_that_is_no_workdir_is_refused_and_leaves_nothing(
    store: Workdirs, tmp_path: Path, members: list[Any]
) -> None:
    with pytest.raises(Refused, match="the workdir has"):
        put(store, *members)
    assert nothing_is_left(store, tmp_path)


def test_files_modes_and_links_arrive(store: Workdirs) -> None:
    script = tarfile.TarInfo("bin/run")
    script.mode = 0o755
    place = put(
        store,
        {"a/b/data": b"123"},
        script,
        special("latest", tarfile.SYMTYPE, "a/b/data"),
        special("empty", tarfile.DIRTYPE),
    )
    assert (place / "latest").read_bytes() == b"123"
    assert os.access(place / "bin/run", os.X_OK)
    assert (place / "empty").is_dir()
    assert (place / "a/b/data").stat().st_mode & 0o777 == 0o444
    assert place.stat().st_mode & 0o777 == 0o555


def test_a_removed_folder_is_made_again(store: Workdirs, tmp_path: Path) -> None:
    """No job with files of its own started on that host any more."""
    (tmp_path / "snapshots").rmdir()
    assert (put(store, {"a": b"x"}) / "a").read_bytes() == b"x"


def test_a_damaged_snapshot_is_refused(store: Workdirs, tmp_path: Path) -> None:
    digest, data = tar_of({"a": b"x"})
    with pytest.raises(Refused, match="arrived damaged"):
        store.put(digest, 0, data[:-1] + b"!", last=True)
    assert nothing_is_left(store, tmp_path)


def test_chunks_after_a_gap_are_refused_and_may_begin_anew(store: Workdirs) -> None:
    digest, data = tar_of({"a": b"x"})
    store.put(digest, 0, data[:100], last=False)
    with pytest.raises(Refused, match="received a chunk at byte 200, but expected byte 100"):
        store.put(digest, 200, data[200:], last=True)
    store.put(digest, 0, data[:50], last=False)
    store.put(digest, 50, data[50:], last=True)
    assert store.has(digest)


def test_a_digest_cannot_name_another_directory(store: Workdirs) -> None:
    with pytest.raises(Refused, match="is not a sha256"):
        store.has("../attempts")


@pytest.mark.parametrize("what_fails", ["_write", "_unpack"])
def test_a_full_disk_is_reported_and_nothing_is_kept(
    store: Workdirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what_fails: str
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if what_fails == "_write":
        monkeypatch.setattr(workdirs, "_write", full)
    else:
        monkeypatch.setattr(Workdirs, "_unpack", full)
    with pytest.raises(Refused, match=r"no space for workdir .* MB are free; the partial copy is removed") as refused:
        put(store, {"a": b"x"})
    assert refused.value.kind == "disk-full"
    assert nothing_is_left(store, tmp_path)


def test_old_snapshots_that_nobody_uses_are_removed(store: Workdirs) -> None:
    used, unused = put(store, {"a": b"1"}), put(store, {"a": b"2"})
    young = put(store, {"a": b"3"})
    for place in (used, unused):
        os.utime(place, (0, 0))
    store.clean({used.name})
    assert (used.exists(), unused.exists(), young.exists()) == (True, False, True)
