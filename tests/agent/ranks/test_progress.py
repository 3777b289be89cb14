"""Progress that an agent reports of the steps of its ranks."""

from __future__ import annotations

import json
from pathlib import Path

from clusterd.agent.host.attempt_records import Attempt, load
from clusterd.agent.ranks.reports import Progress
from clusterd.protocol.messages import Event
from tests.agent.client import accepted


def test_a_step_that_no_daemon_took_is_reported_to_the_next_one(tmp_path: Path) -> None:
    """A step may take an hour; the daemon, and the agent after it, restart meanwhile."""
    attempt = Attempt(tmp_path, accepted())
    attempt.store()
    attempt.steps.write_text(json.dumps({"step": 4, "loss": 1.0, "time_s": 3600.0}) + "\n")
    there, received = False, list[Event]()

    def emit(event: Event) -> bool:
        if there:
            received.append(event)
        return there

    progress = Progress(emit)
    progress.poll(attempt)
    there = True
    for _ in range(2):
        progress.poll(attempt)
    assert [event.step for event in received] == [4]  # type: ignore[attr-defined]
    adopted = load(tmp_path)
    assert adopted is not None
    Progress(emit).poll(adopted)
    assert [event.step for event in received] == [4, 4]  # type: ignore[attr-defined]
