"""The step log is correct when steps are lost and repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clusterd.train.process.steps_log import StepsLog, last_step


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def log(path: Path, first: int, last: int) -> None:
    steps = StepsLog(path, first_step=first, steps=last, plan="dp=2", samples=16)
    for step in range(first, last + 1):
        steps.step(step, 4.0 / step, 0.25)
    steps.close()


def test_a_step_has_all_that_progress_needs(tmp_path: Path) -> None:
    log(tmp_path / "steps.jsonl", 1, 1)
    (record,) = written(tmp_path / "steps.jsonl")
    assert record.pop("at_s") > 1.6e9
    assert record == {"step": 1, "loss": 4.0, "time_s": 0.25, "samples": 16, "plan": "dp=2"}


def test_an_attempt_that_goes_on_appends(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    log(path, 1, 3)
    log(path, 4, 5)
    assert [r["step"] for r in written(path)] == [1, 2, 3, 4, 5]


def test_steps_that_are_done_again_are_announced(tmp_path: Path) -> None:
    """A host died at step 3; the newest state snapshot was of step 1."""
    path = tmp_path / "steps.jsonl"
    log(path, 1, 3)
    log(path, 2, 3)
    assert [r.get("step", r.get("restart_from")) for r in written(path)] == [1, 2, 3, 1, 2, 3]
    assert written(path)[3] == {"restart_from": 1}


def test_a_line_torn_by_a_crash_is_closed_and_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    log(path, 1, 2)
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert last_step(path) == 2
    log(path, 3, 4)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines() if line.endswith("}")] == [
        1,
        2,
        3,
        4,
    ]


def test_a_loss_that_is_no_number_is_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    steps = StepsLog(path, first_step=1, steps=1, plan="dp=1", samples=1)
    steps.step(1, float("nan"), 0.1)
    steps.close()
    assert "NaN" not in path.read_text()
    assert written(path)[0]["loss"] is None
