"""``clusterd://DATASET/path``: data sets by name, for all code that opens files through fsspec.

Files on this host are read in place. Others come from the host that has them, in blocks, into this host's cache; so
when a plan gives other samples to a replica, their files follow. The rank file names the folders (``datasets``: folder
by name; ``data_cache``); without clusterd the environment does::

    CLUSTERD_DATASETS="corpus=/data/corpus:images=/data/images"
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile

from clusterd.datasets import DataUnavailable, File, Folder, Folders, Source
from clusterd.protocol.control import DataHello
from clusterd.train.data.dataset_sources import BLOCK_BYTES, AgentSource, CachedSource
from clusterd.train.process.context import rank_file

Entry = dict[str, Any]
"""fsspec's description of a file or a folder."""


class DatasetSources:
    """Sources of this process: local folders first, then the agent behind the host's cache."""

    def __init__(self, folders: Mapping[str, str], remote: Source | None = None) -> None:
        self._folders = Folders(folders)
        self._remote = remote

    def source(self, dataset: str) -> Source:
        """Source of a data set.

        Raises:
            DataUnavailable: there is none.
        """
        if dataset in self._folders:
            return self._folders
        if self._remote is None:
            raise DataUnavailable(
                f"no data set {dataset!r} here: name its folder in CLUSTERD_DATASETS ({dataset}=/path), "
                "or run under clusterd on a cluster that has it"
            )
        return self._remote

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> DatasetSources:
        """Sources of a process with this environment."""
        if path := environ.get("CLUSTERD_RANK_FILE"):
            file = rank_file(path)
            folders = {name: folder for name, folder in file.datasets.items() if folder}
            if not file.control_socket:
                return cls(folders)
            hello = DataHello(file.job, file.attempt, file.generation, file.rank, file.token)
            cache = file.data_cache or f"{environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'}/clusterd/data"
            return cls(folders, CachedSource(AgentSource(file.control_socket, hello), Path(cache)))
        pairs = [p.partition("=") for p in environ.get("CLUSTERD_DATASETS", "").split(":") if p]
        return cls({name: folder for name, _, folder in pairs})


_SOURCES: dict[tuple[str, ...], DatasetSources] = {}


def _process_sources() -> DatasetSources:
    """Sources of this process, created once: scripts open a file per sample, and lookups are cached."""
    key = tuple(os.environ.get(name, "") for name in ("CLUSTERD_RANK_FILE", "CLUSTERD_DATASETS"))
    if key not in _SOURCES:
        _SOURCES[key] = DatasetSources.of(os.environ)
    return _SOURCES[key]


class DatasetFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec is not typed
    """Read-only file system behind ``clusterd://``.

    Args:
        sources: default: those of this process.
    """

    protocol = "clusterd"
    root_marker = ""
    cachable = False  # sources have caches of their own

    def __init__(self, *args: Any, sources: DatasetSources | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sources = sources or _process_sources()

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """List a folder, or the file itself."""
        dataset, inner = self._parts(path)
        found = self._look(dataset, inner)
        if isinstance(found, File):
            entries = [_entry(dataset, inner, found)]
        else:
            entries = [_entry(dataset, f"{inner}/{name}".lstrip("/"), file) for name, file in found.items()]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **_: Any) -> Entry:
        """Describe a file or a folder."""
        dataset, inner = self._parts(path)
        found = self._look(dataset, inner)
        return _entry(dataset, inner, found if isinstance(found, File) else None)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Read a range of a file."""
        dataset, inner = self._parts(path)
        file = self._look(dataset, inner)
        if not isinstance(file, File):
            raise IsADirectoryError(f"clusterd://{dataset}/{inner} is a folder")
        return self.read_range(path, file, start, end)

    def read_range(self, path: str, file: File, start: int | None, end: int | None) -> bytes:
        """Read a range of exactly this version of the file."""
        dataset, inner = self._parts(path)
        low, high, _step = slice(start, end).indices(file.size)
        if high <= low:
            return b""
        return self._sources.source(dataset).read(dataset, inner, file, low, high - low)

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        if mode != "rb":
            raise OSError(f"{path}: data sets are read only")
        return _OpenFile(self, path, mode, block_size or BLOCK_BYTES, **options)

    def _look(self, dataset: str, inner: str) -> File | Folder:
        found = self._sources.source(dataset).look(dataset, inner)
        if found is None:
            raise FileNotFoundError(f"clusterd://{dataset}/{inner}: the data set has no such file")
        return found

    def _parts(self, path: str) -> tuple[str, str]:
        dataset, _, inner = str(self._strip_protocol(path)).strip("/").partition("/")
        if not dataset:
            raise FileNotFoundError("clusterd:// needs the name of a data set: clusterd://NAME/path")
        return dataset, inner


class _OpenFile(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        opened = File(self.details["size"], self.details["version"])  # not a newer version
        data: bytes = self.fs.read_range(self.path, opened, start, end)
        return data


def _entry(dataset: str, path: str, file: File | None) -> Entry:
    if file is None:
        return {"name": f"{dataset}/{path}".rstrip("/"), "size": 0, "type": "directory"}
    return {"name": f"{dataset}/{path}", "size": file.size, "type": "file", "version": file.version}
