"""A daemon's journal simulated again: its jobs, hosts and speeds, and the outcome of another policy."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import anyio
import pytest
from click.testing import CliRunner

from clusterd.cli.simulate import simulate as command
from clusterd.core import events as e
from clusterd.core.scheduler import Batch
from clusterd.daemon.journal.journal import Journal
from clusterd.simulate import run
from clusterd.simulate.history import history
from tests.core.conftest import Lab
from tests.simulate.test_simulate import files, setting

__all__ = ["files"]


def written(directory: Path, batches: Sequence[Sequence[e.Event]]) -> None:
    """A journal with these batches, in a state directory."""

    async def write() -> None:
        journal = Journal(directory / "journal.db")
        numbers = itertools.count(1)  # in the order of handling, as a daemon gives them
        for batch in batches:
            await journal.append([replace(event, id=e.EventId(next(numbers))) for event in batch])
        journal.close()

    anyio.run(write)


@pytest.fixture
def past(files: tuple[Path, Path], tmp_path: Path) -> tuple[Path, list[float]]:
    """The state directory of a cluster that ran three jobs, and their completion times."""
    batches: list[Sequence[e.Event]] = []

    def keep(state: Any, events: Sequence[e.Event], decisions: Any) -> None:
        batches.append(events)

    result = run.simulate(setting(files, move_s=2.0), "default", keep)
    directory = tmp_path / "state"
    directory.mkdir()
    written(directory, batches)
    return directory, [(r.end_s or 0.0) - r.arrival.at_s for r in result.runs]


def report(*arguments: str) -> dict[str, Any]:
    answer = CliRunner().invoke(command, [*arguments, "--json", "--processes", "1"], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    found: dict[str, Any] = json.loads(answer.output)
    return found


def test_the_same_policy_on_the_same_past_gives_the_same_present(past: tuple[Path, list[float]]) -> None:
    directory, times_s = past
    found = report("--from-journal", str(directory), "--policy", "default", "--policy", "fifo", "--move-cost", "2")
    assert found["cluster"] == "1x8:g"
    assert found["jobs"] == found["recorded_finished"] == 3
    assert found["recorded_average_completion_s"] == pytest.approx(fmean(times_s), rel=1e-6)
    policies = found["policies"]
    assert policies["default"]["average_completion_s"] == pytest.approx(fmean(times_s), rel=0.02)
    assert policies["fifo"]["average_completion_s"] > policies["default"]["average_completion_s"]


def test_a_journal_needs_nothing_else_and_has_to_be_one(past: tuple[Path, list[float]], tmp_path: Path) -> None:
    from clusterd.errors import ClusterError, UsageError

    with pytest.raises(UsageError, match="leave --workload and --truth out"):
        report("--from-journal", str(past[0]), "--truth", "x.csv")
    with pytest.raises(ClusterError, match="cannot be read as a journal"):
        report("--from-journal", str(tmp_path / "nowhere"))
    empty = tmp_path / "empty"
    empty.mkdir()
    written(empty, [[e.HostAdded(at_s=1.0, id=e.EventId(1), host="a")]])  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match="no job of this journal has run yet"):
        report("--from-journal", str(empty))


def test_dependencies_between_jobs_are_kept(tmp_path: Path) -> None:
    lab = Lab()
    lab.host("a", gpus=2)
    first, _ = lab.submit("first")
    second, _ = lab.submit("second", after=(first,))
    for job in (first, second):
        lab.run(job)
        lab.now_s += 100.0
        lab.finish(job)
    written(tmp_path, [[event] for event in lab.log])
    found = report("--from-journal", str(tmp_path), "--policy", "fifo", "--move-cost", "0")
    assert found["policies"]["fifo"]["makespan_s"] == pytest.approx(200.0, abs=20.0), (
        "on two devices, one after another"
    )


@pytest.mark.parametrize("by_s", [3600.0, -3600.0])
def test_a_clock_that_was_set_between_two_jobs_is_no_gap_between_them(by_s: float) -> None:
    """Regression: finished jobs kept their displayed times and were sorted an hour too early or too late."""
    lab = Lab()
    lab.now_s = 1e6
    lab.host("a", gpus=1)
    first, _ = lab.submit("first")
    lab.run(first)
    lab.finish(first)
    lab.now_s += by_s
    lab.tell(e.ClockSet(**lab.at(), by_s=by_s))
    second, _ = lab.submit("second")
    lab.run(second)
    lab.finish(second)
    arrivals = history(Batch([event]) for event in lab.log).workload.arrivals
    assert [one.name for one in arrivals] == ["first-1", "second-2"]
    assert 0 < arrivals[1].at_s < 60
