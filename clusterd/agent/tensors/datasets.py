"""Data sets by name: folders that this host serves to others, and remote folders for its ranks.

The daemon says which folder of which host a name stands for. The host with the folder serves it over the slice port to
peers that prove the job's token; a rank asks its own agent, which asks that host.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterd.agent.host.attempt_records import Attempt, Refused
from clusterd.agent.tensors.fabric import FetchFailed, ask, data_name
from clusterd.datasets import FREE_SHARE, UNREACHABLE, DataUnavailable, File, Folders, Found
from clusterd.protocol import FRAME_BYTES_MAX
from clusterd.protocol.control import LookUpData, ReadData
from clusterd.protocol.launch import DatasetSpec
from clusterd.protocol.messages import to_map

Message = dict[str, Any]

RANGE_BYTES_MAX = 16 << 20
ENTRY_BYTES = 48
"""Upper bound of a directory entry's encoded size, without the name."""
RETRY_S = 1.0
PATIENCE_S = 30.0
"""The agent of the host with the data may be restarting; the daemon then sends its new address."""


class Datasets:
    """Folders that this host serves, and the addresses of data sets on other hosts."""

    def __init__(self) -> None:
        # Name and folder by token: one for each data set of the cluster.
        self._served: dict[str, tuple[str, Folders]] = {}
        self._tokens: dict[str, str] = {}  # by public name
        self._elsewhere: dict[str, dict[str, DatasetSpec]] = {}  # by attempt, by data set
        self._lock = threading.Lock()

    # ---- for other hosts -----------------------------------------------------------------------------------------

    def serve(self, token: str, dataset: str, folder: str) -> None:
        """Let peers that prove `token` read this folder.

        Raises:
            Refused: there is no such folder on this host.
        """
        path = Path(folder).expanduser()
        if not path.is_dir():
            raise Refused("dataset", f"the data set {dataset!r} has no folder {path} on this host")
        with self._lock:
            self._served[token] = (dataset, Folders({dataset: path}))
            self._tokens[data_name(token)] = token

    def token_of(self, name: str) -> str | None:
        """Token of a served data set by the token's public name."""
        with self._lock:
            return self._tokens.get(name)

    def answer(self, token: str, request: Message) -> Message:
        """Answer another agent that proved this token."""
        with self._lock:
            dataset, folders = self._served[token]
        try:
            path = str(request["path"])
            if request["data"] == "look":
                return _to_message(f"{path or '.'} of data set {dataset!r}", folders.look(dataset, path))
            offset, length = int(request["offset"]), int(request["length"])
            if not 0 <= length <= RANGE_BYTES_MAX or offset < 0:
                return {"error": f"a range of {length} bytes at {offset} cannot be read at once"}
            return {"data": folders.read(dataset, path, File(*request["file"]), offset, length)}
        except DataUnavailable as error:
            return {"error": str(error)}

    # ---- for the ranks here --------------------------------------------------------------------------------------

    def know(self, attempt: str, datasets: Mapping[str, DatasetSpec]) -> None:
        """Store the addresses of an attempt's data sets by name."""
        with self._lock:
            self._elsewhere.setdefault(attempt, {}).update(datasets)

    def forget(self, attempt: str) -> None:
        """Drop the addresses of a removed attempt."""
        with self._lock:
            self._elsewhere.pop(attempt, None)

    def ask(self, attempt: Attempt, question: LookUpData | ReadData) -> Message:
        """Forward a rank's question about a remote data set to a host that has it; blocks.

        Raises:
            Refused: no host has it, or none that has it can be reached.
        """
        dataset = question.dataset
        request = {"data": question.verb.removeprefix("data_"), **to_map(question)}
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            known = self._where(attempt, dataset)
            answer, why = self._first(known, request)
            if answer is not None:
                if "error" in answer:
                    raise Refused("dataset", str(answer["error"]))
                return answer
            if time.monotonic() >= deadline_s:
                raise Refused(UNREACHABLE, f"no host that has the data set {dataset!r} answers: {why}")
            time.sleep(RETRY_S)

    def _where(self, attempt: Attempt, dataset: str) -> DatasetSpec:
        name = f"{attempt.job}.{attempt.attempt}"
        with self._lock:
            known = self._elsewhere.get(name, {}).get(dataset)
        if known is None:
            known = attempt.launch.datasets.get(dataset)
        if known is None or not known.from_:
            raise Refused(
                "dataset", f"job {attempt.job} names no data set {dataset!r}: [datasets] in its job file does"
            )
        return known

    @staticmethod
    def _first(known: DatasetSpec, request: Message) -> tuple[Message | None, str]:
        why = "none is named"
        for address in known.from_:
            try:
                return ask(address, known.token, request), ""
            except FetchFailed as failed:
                why = str(failed)
        return None, why


def evict_cached_files(cache: Path) -> None:
    """Evict the files fetched longest ago until twice the cache's required free share is free."""
    try:
        files = sorted((file for some in cache.iterdir() for file in some.iterdir()), key=lambda f: f.stat().st_mtime)
        for file in files:
            disk = shutil.disk_usage(cache)
            if disk.free >= 2 * FREE_SHARE * disk.total:
                return
            shutil.rmtree(file, ignore_errors=True)
    except OSError:
        return  # no cache yet, or a concurrent eviction: no reason to fail a launch


def _to_message(label: str, found: Found) -> Message:
    if found is None:
        return {}
    if isinstance(found, File):
        return {"file": [found.size, found.version]}
    try:
        count = sum(len(name.encode()) + ENTRY_BYTES for name in found)
    except UnicodeEncodeError as error:
        return {"error": f"{label} has a name that is not UTF-8: {error.object!r}"}
    if count > FRAME_BYTES_MAX:
        return {"error": f"{label} has {len(found)} entries, more than can be told at once: divide it into folders"}
    return {"folder": {name: [file.size, file.version] if file else None for name, file in found.items()}}
