"""`clusterd advise` as a filter: one situation per line in, one answer per line out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from clusterd.cli.simulate import advise
from clusterd.errors import UsageError


def situation(**changes: Any) -> dict[str, Any]:
    """One host of four; one job runs on two, one waits that would use two."""
    ways = [
        {"plan": f"dp={n}" if n > 1 else "dp=1", "type": "g", "shape": [n], "step_time_s": 4.0 / n**0.9}
        for n in (1, 2, 4)
    ]
    return {
        "version": 1,
        "time_s": 100.0,
        "move_cost_s": 5.0,
        "hosts": [{"name": "h", "devices": [{"id": f"h{i}", "type": "g"} for i in range(4)]}],
        "jobs": [
            {
                "id": "a", "submitted_s": 0.0, "steps_left": 5000, "steps_done": 10, "configurations": ways,
                "current": {"plan": "dp=2", "devices": ["h0", "h1"], "since_s": 0.0},
            },
            {"id": "b", "submitted_s": 90.0, "steps_left": 100, "configurations": ways},
        ],
        **changes,
    }  # fmt: skip


def ask(*lines: str, policy: str = "default") -> Any:
    return CliRunner().invoke(advise, ["--stdio", "--policy", policy], input="\n".join(lines) + "\n")


def test_a_waiting_job_is_given_what_is_free_and_the_other_is_left_alone() -> None:
    """Two devices are free, and the short job wants them."""
    answer = json.loads(ask(json.dumps(situation())).output)
    a, b = answer["jobs"]
    assert answer["version"] == 1
    assert (b["action"], sorted(b["devices"])) == ("start", ["h2", "h3"])
    assert b["plan"] == "dp=2"
    assert "to go" in b["reason"]
    assert a["action"] == "keep"


def test_a_job_that_is_alone_grows() -> None:
    """The queue is empty: 5,000 steps on two devices are worth a migration of five seconds."""
    given = situation()
    given["jobs"] = given["jobs"][:1]
    (a,) = json.loads(ask(json.dumps(given)).output)["jobs"]
    assert (a["action"], a["plan"], len(a["devices"])) == ("move", "dp=4", 4)


@pytest.mark.parametrize("policy", ["default", "fifo", "tiresias", "gavel"])
def test_a_job_is_started_in_ways_that_the_caller_gave_or_not_at_all(policy: str) -> None:
    """The caller gave no speed for one device, nor for another type."""
    given = situation()
    wide = {"plan": "dp=8", "type": "g", "shape": [8], "step_time_s": 1.0}
    other = {"plan": "dp=2", "type": "other", "shape": [2], "step_time_s": 1.0}
    given["jobs"] = [{"id": "a", "submitted_s": 0.0, "steps_left": 100, "configurations": [wide, other]}]
    (a,) = json.loads(ask(json.dumps(given), policy=policy).output)["jobs"]
    assert a["action"] == "wait"
    assert "none of the ways in which it can run fits" in a["reason"]


def test_what_is_wrong_is_told_with_its_line() -> None:
    """Another version; a device that two jobs use."""
    answer = ask(json.dumps(situation()), json.dumps(situation(version=2)))
    assert isinstance(answer.exception, UsageError)
    assert "line 2: version 2 is not known" in str(answer.exception)
    given = situation()
    given["jobs"][1]["current"] = {"plan": "dp=1", "devices": ["h0"], "since_s": 0.0}
    answer = ask(json.dumps(given))
    assert "h0 is used by job a and by job b" in str(answer.exception)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["jobs"][0]["configurations"][0].update(step_time_s=0), "> 0.0 - at `$.jobs[0].configurations[0]"),
        (lambda s: s["jobs"][0]["configurations"][0].update(shape=[]), "length >= 1 - at `$.jobs[0].configurations[0]"),
        (lambda s: s["jobs"][0]["configurations"][0].update(shape=[0]), ">= 1 - at `$.jobs[0].configurations[0].shape"),
        (lambda s: s["jobs"][0]["configurations"][0].update(plan="dp=4"), "dp=4 has 4 ranks, and 1 devices are given"),
        (lambda s: s["jobs"][0]["current"].update(devices=["h0"]), "dp=2 has 2 ranks, and 1 devices are given"),
        (lambda s: s["jobs"][1].update(steps_left=0), ">= 1 - at `$.jobs[1].steps_left`"),
        (lambda s: s.update(move_cost_s=-1.0), ">= 0.0 - at `$.move_cost_s`"),
        (lambda s: s.update(time_s=-1.0), ">= 0.0 - at `$.time_s`"),
        (lambda s: s["jobs"][0]["current"].update(devices=["h0", "h0"]), "job a names h0 twice"),
        (lambda s: s["hosts"].append(s["hosts"][0]), "host h is there twice"),
        (lambda s: s["jobs"].append(s["jobs"][0]), "job a is there twice"),
    ],
)
def test_figures_that_cannot_be_are_refused(change: Callable[[dict[str, Any]], None], message: str) -> None:
    given = situation()
    change(given)
    answer = ask(json.dumps(given))
    assert isinstance(answer.exception, UsageError)
    assert message in str(answer.exception)
