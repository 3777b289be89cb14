"""Data sets as folders of a host: which files are there, and what is in a range of one. For reading only.

Runs on hosts: standard library only, Python 3.10.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class DataUnavailable(OSError):
    """A data set, or a part of it, cannot be had; the message says which, from where, and why."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of a data set."""

    size: int
    version: str  # changes when the content does


class Source(Protocol):
    """Reads data sets by name."""

    def files(self, dataset: str) -> Mapping[str, File]:
        """By path within the data set, ``train/part-0.bin``.

        Raises:
            DataUnavailable: there is no such data set.
        """

    def read(self, dataset: str, path: str, offset: int, length: int) -> bytes:
        """Exactly these bytes.

        Raises:
            DataUnavailable: they cannot be had.
        """


class Folders:
    """Data sets that lie on this host, each in a folder of its own."""

    def __init__(self, folders: Mapping[str, str | Path]) -> None:
        self._folders = {name: Path(folder) for name, folder in folders.items()}

    def __contains__(self, dataset: str) -> bool:
        return dataset in self._folders and self._folders[dataset].is_dir()

    def files(self, dataset: str) -> dict[str, File]:
        """Of the folder, subfolders included."""
        if dataset not in self:
            raise DataUnavailable(f"no data set {dataset!r} on this host ({self._folders.get(dataset, 'no folder')})")
        folder = self._folders[dataset]
        found = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                status = path.stat()
                found[path.relative_to(folder).as_posix()] = File(status.st_size, f"{status.st_mtime_ns:x}")
        return found

    def read(self, dataset: str, path: str, offset: int, length: int) -> bytes:
        """From the file."""
        folder = self._folders[dataset].resolve()
        target = (folder / path).resolve()
        if not target.is_relative_to(folder):
            raise DataUnavailable(f"{path} is outside the data set {dataset!r}")
        try:
            with target.open("rb") as file:
                data = os.pread(file.fileno(), length, offset)
        except OSError as error:
            raise DataUnavailable(f"{path} of data set {dataset!r} cannot be read: {error}") from error
        if len(data) != length:
            raise DataUnavailable(f"{path} of data set {dataset!r} ends before byte {offset + length}")
        return data
