"""Data sets as folders of a host: what is at a path, and what is in a range of a file. For reading only.

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
"""What an agent calls an error that is `DataUnreachable`."""

FREE_SHARE = 0.1
"""Of a host's disk, that its cache leaves free: checkpoints need it more."""


class DataUnavailable(OSError):
    """A data set, or a part of it, cannot be had; the message says which, from where, and why."""


class DataUnreachable(DataUnavailable):
    """No host that has it answers; later one may."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of a data set."""

    size: int
    version: str  # changes when the content does


Folder = Mapping[str, File | None]
"""What lies directly in a folder, by name; None: a folder."""

Found = File | Folder | None
"""What is at a path; None: nothing."""


class Source(Protocol):
    """Reads data sets by name. Data sets have millions of files: nobody is told all of them."""

    def look(self, dataset: str, path: str) -> Found:
        """At a path within the data set, ``train/part-0.bin``; the data set itself is ``""``.

        Raises:
            DataUnavailable: there is no such data set.
        """

    def read(self, dataset: str, path: str, file: File, offset: int, length: int) -> bytes:
        """Exactly these bytes of the file as it was found.

        Raises:
            DataUnavailable: they cannot be had, or not any more.
        """


class Folders:
    """Data sets that lie on this host, each in a folder of its own. Links are followed, out of the folder too."""

    def __init__(self, folders: Mapping[str, str | Path]) -> None:
        self._folders = {name: Path(folder) for name, folder in folders.items()}

    def __contains__(self, dataset: str) -> bool:
        return dataset in self._folders and self._folders[dataset].is_dir()

    def look(self, dataset: str, path: str) -> Found:
        """As it is now."""
        if dataset not in self:
            raise DataUnavailable(f"no data set {dataset!r} on this host ({self._folders.get(dataset, 'no folder')})")
        place = self._place(dataset, path)
        try:
            status = os.stat(place)
            return _listed(place) if stat.S_ISDIR(status.st_mode) else _file(status)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise DataUnavailable(f"{path or '.'} of data set {dataset!r} cannot be read: {error}") from error

    def read(self, dataset: str, path: str, file: File, offset: int, length: int) -> bytes:
        """From the file, unless it is another one by now."""
        place, parts = self._place(dataset, path), []
        try:
            descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
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

    def _place(self, dataset: str, path: str) -> str:
        if ".." in path.split("/") or "\0" in path:
            raise DataUnavailable(f"{path!r} is outside the data set {dataset!r}")
        return f"{self._folders[dataset]}/{path}"


def _file(status: os.stat_result) -> File | None:
    """None: a pipe, or another thing that has no size."""
    return File(status.st_size, f"{status.st_mtime_ns:x}") if stat.S_ISREG(status.st_mode) else None


def _listed(place: str) -> dict[str, File | None]:
    """Without links that lead back up: whoever walks the folders would go round for ever."""
    found: dict[str, File | None] = {}
    real = os.path.realpath(place)
    for entry in os.scandir(place):
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
