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

from clusterd.datasets import DataUnavailable, File, Folders, Source
from clusterd.train.dataset_sources import BLOCK_BYTES, AgentSource, Cached

Entry = dict[str, Any]
"""As fsspec describes a file or a folder."""


class Surroundings:
    """The sources of this process: folders first, then the agent behind the host's cache."""

    def __init__(self, folders: Mapping[str, str], elsewhere: Source | None = None) -> None:
        self._folders = Folders(folders)
        self._elsewhere = elsewhere

    def source(self, dataset: str) -> Source:
        """Where this data set is read from.

        Raises:
            DataUnavailable: nowhere.
        """
        if dataset in self._folders:
            return self._folders
        if self._elsewhere is None:
            raise DataUnavailable(
                f"no data set {dataset!r} here: name its folder in CLUSTERD_DATASETS ({dataset}=/path), "
                "or run under clusterd on a cluster that has it"
            )
        return self._elsewhere

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Surroundings:
        """Of a process with this environment."""
        if path := environ.get("CLUSTERD_RANK_FILE"):
            told = json.loads(Path(path).read_text(encoding="utf-8"))
            folders = {name: folder for name, folder in (told.get("datasets") or {}).items() if folder}
            if not told.get("control_socket"):
                return cls(folders)
            identity = {key: told.get(key) for key in ("job", "attempt", "generation", "rank", "token")}
            cache = told.get("data_cache") or f"{environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'}/clusterd/data"
            return cls(folders, Cached(AgentSource(told["control_socket"], identity), Path(cache)))
        pairs = [p.partition("=") for p in environ.get("CLUSTERD_DATASETS", "").split(":") if p]
        return cls({name: folder for name, _, folder in pairs})


class DatasetFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec is not typed
    """The file system behind ``clusterd://``; for reading.

    Args:
        surroundings: default: those of this process.
    """

    protocol = "clusterd"
    root_marker = ""
    cachable = False  # sources know what they know

    def __init__(self, *args: Any, surroundings: Surroundings | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._surroundings = surroundings or Surroundings.of(os.environ)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Files and folders in a folder, or the file itself."""
        dataset, inner = self._parts(path)
        files = self._surroundings.source(dataset).files(dataset)
        if inner in files:
            return self._listed([_entry(dataset, inner, files[inner])], detail)
        prefix = f"{inner}/" if inner else ""
        found: dict[str, Entry] = {}
        for name, file in files.items():
            if not name.startswith(prefix):
                continue
            first, deeper, _rest = name[len(prefix) :].partition("/")
            if deeper:
                found.setdefault(first, {"name": f"{dataset}/{prefix}{first}", "size": 0, "type": "directory"})
            else:
                found[first] = _entry(dataset, name, file)
        if not found:
            raise self._no_file(dataset, inner)
        return self._listed([found[name] for name in sorted(found)], detail)

    def info(self, path: str, **_: Any) -> Entry:
        """Of a file or a folder."""
        dataset, inner = self._parts(path)
        files = self._surroundings.source(dataset).files(dataset)
        if inner in files:
            return _entry(dataset, inner, files[inner])
        if inner and not any(name.startswith(f"{inner}/") for name in files):
            raise self._no_file(dataset, inner)
        return {"name": f"{dataset}/{inner}".rstrip("/"), "size": 0, "type": "directory"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """A range of a file."""
        dataset, inner = self._parts(path)
        low, high, _step = slice(start, end).indices(self._file(dataset, inner).size)
        if high <= low:
            return b""
        return self._surroundings.source(dataset).read(dataset, inner, low, high - low)

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        if mode != "rb":
            raise OSError(f"{path}: data sets are read only")
        return _OpenFile(self, path, mode, block_size or BLOCK_BYTES, **options)

    def _file(self, dataset: str, inner: str) -> File:
        file = self._surroundings.source(dataset).files(dataset).get(inner)
        if file is None:
            raise self._no_file(dataset, inner)
        return file

    @staticmethod
    def _no_file(dataset: str, inner: str) -> FileNotFoundError:
        return FileNotFoundError(f"clusterd://{dataset}/{inner}: the data set has no such file")

    def _parts(self, path: str) -> tuple[str, str]:
        dataset, _, inner = str(self._strip_protocol(path)).strip("/").partition("/")
        if not dataset:
            raise FileNotFoundError("clusterd:// needs the name of a data set: clusterd://NAME/path")
        return dataset, inner

    @staticmethod
    def _listed(entries: list[Entry], detail: bool) -> list[Any]:
        return entries if detail else [entry["name"] for entry in entries]


class _OpenFile(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        data: bytes = self.fs.cat_file(self.path, start, end)
        return data


def _entry(dataset: str, path: str, file: File) -> Entry:
    return {"name": f"{dataset}/{path}", "size": file.size, "type": "file", "version": file.version}
