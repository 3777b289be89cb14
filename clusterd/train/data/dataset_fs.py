"""``clusterd://DATASET/path``: data sets by name, for everything that opens files through fsspec.

What lies on this host is read where it lies. The rest comes from the host that has it, in blocks, and stays in this
host's cache; so as a plan hands other samples to a replica, the files behind them follow. Which host is which is told
by the rank file (``datasets``: folder by name; ``data_cache``); without clusterd by the environment::

    CLUSTERD_DATASETS="corpus=/data/corpus:images=/data/images"
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile

from clusterd.datasets import DataUnavailable, File, Folder, Folders, Source
from clusterd.train.data.dataset_sources import BLOCK_BYTES, AgentSource, CachedSource

Entry = dict[str, Any]
"""As fsspec describes a file or a folder."""


class DatasetSources:
    """The sources of this process: folders first, then the agent behind the host's cache."""

    def __init__(self, folders: Mapping[str, str], remote: Source | None = None) -> None:
        self._folders = Folders(folders)
        self._remote = remote

    def source(self, dataset: str) -> Source:
        """Where this data set is read from.

        Raises:
            DataUnavailable: nowhere.
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
        """Of a process with this environment."""
        if path := environ.get("CLUSTERD_RANK_FILE"):
            rank_file = json.loads(Path(path).read_text(encoding="utf-8"))
            folders = {name: folder for name, folder in (rank_file.get("datasets") or {}).items() if folder}
            if not rank_file.get("control_socket"):
                return cls(folders)
            identity = {key: rank_file.get(key) for key in ("job", "attempt", "generation", "rank", "token")}
            cache = (
                rank_file.get("data_cache")
                or f"{environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'}/clusterd/data"
            )
            return cls(folders, CachedSource(AgentSource(rank_file["control_socket"], identity), Path(cache)))
        pairs = [p.partition("=") for p in environ.get("CLUSTERD_DATASETS", "").split(":") if p]
        return cls({name: folder for name, _, folder in pairs})


_SOURCES: dict[tuple[str, ...], DatasetSources] = {}


def _process_sources() -> DatasetSources:
    """Of this process, made once: scripts open a file for each sample, and the agent need not hear of every one."""
    key = tuple(os.environ.get(name, "") for name in ("CLUSTERD_RANK_FILE", "CLUSTERD_DATASETS"))
    if key not in _SOURCES:
        _SOURCES[key] = DatasetSources.of(os.environ)
    return _SOURCES[key]


class DatasetFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec is not typed
    """The file system behind ``clusterd://``; for reading.

    Args:
        surroundings: default: those of this process.
    """

    protocol = "clusterd"
    root_marker = ""
    cachable = False  # sources know what they know

    def __init__(self, *args: Any, sources: DatasetSources | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sources = sources or _process_sources()

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Files and folders in a folder, or the file itself."""
        dataset, inner = self._parts(path)
        found = self._look(dataset, inner)
        if isinstance(found, File):
            entries = [_entry(dataset, inner, found)]
        else:
            entries = [_entry(dataset, f"{inner}/{name}".lstrip("/"), file) for name, file in found.items()]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **_: Any) -> Entry:
        """Of a file or a folder."""
        dataset, inner = self._parts(path)
        found = self._look(dataset, inner)
        return _entry(dataset, inner, found if isinstance(found, File) else None)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """A range of a file."""
        dataset, inner = self._parts(path)
        file = self._look(dataset, inner)
        if not isinstance(file, File):
            raise IsADirectoryError(f"clusterd://{dataset}/{inner} is a folder")
        return self.read_range(path, file, start, end)

    def read_range(self, path: str, file: File, start: int | None, end: int | None) -> bytes:
        """A range of the file as it was found."""
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
        opened = File(self.details["size"], self.details["version"])  # and no other one that came in its place
        data: bytes = self.fs.read_range(self.path, opened, start, end)
        return data


def _entry(dataset: str, path: str, file: File | None) -> Entry:
    if file is None:
        return {"name": f"{dataset}/{path}".rstrip("/"), "size": 0, "type": "directory"}
    return {"name": f"{dataset}/{path}", "size": file.size, "type": "file", "version": file.version}
