"""Data sets as folders of a host: list folders and read ranges of files, read-only.

Runs on hosts: standard library only, Python 3.10.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

UNREACHABLE = "data-away"
"""Kind of an agent's error reply that stands for `DataUnreachable`."""

FREE_SHARE = 0.1
"""Part of a host's disk that the data cache leaves free for checkpoints."""


class DataUnavailable(OSError):
    """A data set or a part of it cannot be read; the message names it, the host and the cause."""


class DataUnreachable(DataUnavailable):
    """No host that has the data answers now; one may answer later."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of a data set."""

    size: int
    version: str  # changes when the content does


Folder = Mapping[str, File | None]
"""Direct entries of a folder, by name; None marks a folder."""

Found = File | Folder | None
"""Entry at a path; None if nothing is there."""


class Source(Protocol):
    """Reader of data sets by name. Lists one folder at a time: a data set may have millions of files."""

    def look(self, dataset: str, path: str) -> Found:
        """Entry at a path within the data set, as ``train/part-0.bin``; ``""`` is the data set itself.

        Raises:
            DataUnavailable: there is no such data set.
        """

    def read(self, dataset: str, path: str, file: File, offset: int, length: int) -> bytes:
        """Exactly these bytes of the given version of the file.

        Raises:
            DataUnavailable: they cannot be read, or the file changed.
        """


class Folders:
    """Data sets in folders of this host. Symbolic links are followed, out of the folder too."""

    def __init__(self, folders: Mapping[str, str | Path]) -> None:
        self._folders = {name: Path(folder) for name, folder in folders.items()}

    def __contains__(self, dataset: str) -> bool:
        return dataset in self._folders and self._folders[dataset].is_dir()

    def look(self, dataset: str, path: str) -> Found:
        """Entry at a path now, see `Source.look`."""
        if dataset not in self:
            raise DataUnavailable(f"no data set {dataset!r} on this host ({self._folders.get(dataset, 'no folder')})")
        location = self._path(dataset, path)
        try:
            status = os.stat(location)
            return _entries(location) if stat.S_ISDIR(status.st_mode) else _file(status)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise DataUnavailable(f"{path or '.'} of data set {dataset!r} cannot be read: {error}") from error

    def read(self, dataset: str, path: str, file: File, offset: int, length: int) -> bytes:
        """Bytes of the file, see `Source.read`."""
        location, parts = self._path(dataset, path), []
        try:
            descriptor = os.open(location, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                if _file(os.fstat(descriptor)) != file:
                    raise DataUnavailable(f"{path} of data set {dataset!r} changed while it was read: open it again")
                while length and (data := os.pread(descriptor, length, offset)):  # at most 2 GiB at a time
                    parts.append(data)
                    offset, length = offset + len(data), length - len(data)
            finally:
                os.close(descriptor)
        except DataUnavailable:
            raise
        except OSError as error:
            raise DataUnavailable(f"{path} of data set {dataset!r} cannot be read: {error}") from error
        if length:
            raise DataUnavailable(f"{path} of data set {dataset!r} ends before byte {offset + length}")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _path(self, dataset: str, path: str) -> str:
        if ".." in path.split("/") or "\0" in path:
            raise DataUnavailable(f"{path!r} is outside the data set {dataset!r}")
        return f"{self._folders[dataset]}/{path}"


def _file(status: os.stat_result) -> File | None:
    """Size and version of a regular file; None for a pipe or device."""
    return File(status.st_size, f"{status.st_mtime_ns:x}") if stat.S_ISREG(status.st_mode) else None


def _entries(folder: str) -> dict[str, File | None]:
    """Entries of a folder, without links to its own parents: a walk would never end."""
    found: dict[str, File | None] = {}
    real = os.path.realpath(folder)
    for entry in os.scandir(folder):
        try:
            if not entry.is_dir():
                file = _file(entry.stat())
                if file is not None:
                    found[entry.name] = file
            elif not entry.is_symlink() or not f"{real}/".startswith(f"{os.path.realpath(entry.path)}/"):
                found[entry.name] = None
        except OSError:
            continue  # a link to nothing
    return dict(sorted(found.items()))
