"""Exit reason of a rank whose wait status is ambiguous."""

from __future__ import annotations

import signal
from pathlib import Path

from clusterd.agent.forkserver.server import OomWatch, reason_of


def test_a_sigkill_counts_as_out_of_memory_only_where_the_kernel_counted_one(tmp_path: Path) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 3\noom_kill 2\n")
    watch = OomWatch(((counter, b"oom_kill"),))
    assert not watch.killed_lately()
    counter.write_text("low 0\noom 4\noom_kill 3\n")
    assert watch.killed_lately()
    assert not watch.killed_lately()  # the same kill explains no second death


def test_a_host_without_a_counter_never_claims_to_know(tmp_path: Path) -> None:
    assert not OomWatch(((tmp_path / "absent", b"oom_kill"),)).killed_lately()


def test_the_reason_is_the_nearest_cause() -> None:
    killed = {"exit_code": -9, "number": int(signal.SIGKILL), "kind": "elastic"}
    assert reason_of(**killed, stopped=False, out_of_memory=True) == "oom"
    assert reason_of(**killed, stopped=False, out_of_memory=False) == "signal"
    assert reason_of(**killed, stopped=True, out_of_memory=True) == "stopped"
    assert reason_of(exit_code=98, number=None, kind="command", stopped=False, out_of_memory=False) == "exit"
