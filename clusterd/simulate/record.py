"""Recording of a simulated run, one JSON object per line, which the terminal UI replays like a journal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from clusterd.core.decisions import Decision
from clusterd.core.events import AttemptProgressed, Event
from clusterd.core.scheduler import Scheduler
from clusterd.errors import ClusterError
from clusterd.projection import change_row, host_row, job_row
from clusterd.rows import plain


class Recording:
    """Writer of a recording: the first batch as a full snapshot, later batches as changes."""

    def __init__(self, path: Path) -> None:
        """Raises ClusterError: the file cannot be written."""
        self._path = path
        self._number = 0
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ClusterError(f"--record {path}: cannot be written ({error.strerror}); name another file") from None

    def batch(self, scheduler: Scheduler, events: Sequence[Event], decisions: Sequence[Decision]) -> None:
        """Write one handled batch."""
        state = scheduler.state
        if self._number == 0:
            snapshot = {
                "status": {"at_s": events[-1].at_s, "epoch": state.epoch, "simulated": True},
                "jobs": [plain(job_row(job, state)) for job in state.jobs.values()],
                "hosts": [plain(host_row(state, host)) for host in state.hosts.values()],
                "order": state.order,
            }
            self._write({"snapshot": snapshot, "number": 0, "at_s": events[-1].at_s})
        else:
            row = plain(change_row(state, self._number, events, decisions, side_effects=scheduler.side_effects))
            # Progress is in the jobs' rows; its events would be most of the file.
            row["events"] = [
                shown
                for shown, event in zip(row["events"], events, strict=True)
                if not isinstance(event, AttemptProgressed)
            ]
            row["jobs"] = [_with_all_steps(job) for job in row["jobs"]]
            self._write(row)
        self._number += 1

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, separators=(",", ":"), default=str) + "\n")

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _with_all_steps(job: dict[str, Any]) -> dict[str, Any]:
    """The row of a simulated job at completion, with all its steps done."""
    return {**job, "step": job["steps"]} if job["state"] == "finished" and job["steps"] else job
