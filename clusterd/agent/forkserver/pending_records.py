"""Records of ends that the disk did not take: kept in memory, and written as soon as there is room."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterd.agent.host.home import write_json
from clusterd.agent.log import say

AGAIN_S = 1.0

Record = Mapping[str, Any]


class Unwritten:
    """Of one fork server. Its children are told apart by the path of their record."""

    def __init__(self) -> None:
        self._records: dict[Path, Record] = {}
        self._tried_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._records)

    def write(self, path: Path, record: Record) -> None:
        """Write it now, or keep it."""
        try:
            write_json(path, record)
        except FileNotFoundError:
            say(f"spawner: nobody wants {path} any more")  # its attempt was forgotten meanwhile
        except OSError as error:
            say(f"spawner: cannot write {path}, and will try again: {error}")
            self._records[path] = record

    def try_again(self) -> None:
        """Write what can be written by now; looks once a second."""
        if not self._records or time.monotonic() - self._tried_at < AGAIN_S:
            return
        self._tried_at = time.monotonic()
        for path, record in list(self._records.items()):
            try:
                write_json(path, record)
            except FileNotFoundError:
                pass
            except OSError:
                continue  # was said once
            del self._records[path]

    def drop(self, path: Path) -> None:
        """Another rank is about to have this record."""
        self._records.pop(path, None)

    def all(self) -> list[list[Any]]:
        """Path and record of each, for an agent that may not have heard of them."""
        return [[str(path), record] for path, record in self._records.items()]
