"""Launch requests to agents."""

from __future__ import annotations

from clusterd.daemon.execution.launching import filled_in
from clusterd.plans.plan import Plan


def test_sizes_and_the_job_are_filled_in_and_other_braces_stay() -> None:
    command = ["train", "--tp={tp}", "{devices}x{hosts}", "/shared/{job}/{dp}", "awk '{print $1}'", "{}", "{jobs}"]
    filled = filled_in(command, "17", Plan.parse("dp=2,tp=4"), 2)
    assert filled == ["train", "--tp=4", "8x2", "/shared/17/2", "awk '{print $1}'", "{}", "{jobs}"]
    assert filled_in(command, "17", None, 1) == command
