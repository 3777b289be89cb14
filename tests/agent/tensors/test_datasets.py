"""Data sets that an agent serves to others, and addresses of those on other hosts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from clusterd.agent.tensors.datasets import Datasets, evict_cached_files


def test_the_least_recently_fetched_entry_is_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age in range(4):
        (tmp_path / f"{age:02}" / f"file{age}").mkdir(parents=True)
        os.utime(tmp_path / f"{age:02}" / f"file{age}", (100 - age, 100 - age))

    def left() -> list[str]:
        return sorted(file.name for file in tmp_path.glob("*/*"))

    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=100, free=22 - len(left())))
    evict_cached_files(tmp_path)
    assert left() == ["file0", "file1"]
    evict_cached_files(tmp_path / "none")


def test_names_that_cannot_be_told_are_named(tmp_path: Path) -> None:
    """One such file made the whole data set unreadable elsewhere, and nobody said why."""
    (tmp_path / "good").mkdir()
    (tmp_path / "good/a.bin").write_bytes(b"a")
    os.mkdir(os.fsencode(tmp_path) + b"/bad")
    with open(os.fsencode(tmp_path) + b"/bad/\xff.bin", "wb"):
        pass
    served = Datasets()
    served.serve("token", "corpus", str(tmp_path))

    def look(path: str) -> dict[str, object]:
        return served.answer("token", {"data": "look", "path": path})

    assert look("good") == {"folder": {"a.bin": [1, f"{(tmp_path / 'good/a.bin').stat().st_mtime_ns:x}"]}}
    assert look("none") == {}
    refused = look("bad")
    assert "not UTF-8" in str(refused["error"])
    outside = look("../secret")
    assert "outside the data set" in str(outside["error"])
