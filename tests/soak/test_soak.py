"""A few seeds of the simulation; `make soak` runs as many as there is time for."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from clusterd.protocol import requests as r
from tests.hang import HANG_S
from tests.soak.host import Machine
from tests.soak.simulation import simulate
from tests.soak.users import Users


def soak(*arguments: str) -> str:
    """Run ``python -m tests.soak``; every promise is kept."""
    command = [sys.executable, "-m", "tests.soak", "--processes", "1", *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S + 120.0, env=environment)
    assert done.returncode == 0, f"{done.stdout}{done.stderr[-2000:]}"
    return done.stdout


def test_nothing_is_lost_under_faults() -> None:
    assert "1 seed" in soak("--seeds", "1-1")


def test_a_request_that_raises_is_a_broken_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: users read the answers of an older version, and went on as if no job had been accepted."""

    async def misread(_users: Users) -> None:
        raise TypeError("no such field")

    monkeypatch.setattr(Users, "_submit", misread)
    monkeypatch.setattr(logging.getLogger("clusterd"), "propagate", False)
    assert "no such field" in "\n".join(simulate(1, faults_s=180.0).wrong)


@pytest.mark.slow
def test_a_seed_has_one_trace() -> None:
    assert "twice with trace" in soak("--seed", "3")


@pytest.mark.slow
def test_a_broken_promise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that answer a stop at once and leave the processes: their devices count as free and are not."""
    monkeypatch.setattr(logging.getLogger("clusterd"), "propagate", False)  # thousands of lines about full disks

    async def lie(_machine: Machine, _request: r.StopRanks) -> r.Stopped:
        return r.Stopped(())

    monkeypatch.setitem(Machine._verbs, r.StopRanks.verb, lie)
    wrong = "\n".join(what for seed in (2, 3) for what in simulate(seed).wrong)
    assert "counts as free" in wrong
    assert "are given to" in wrong


@pytest.mark.slow
def test_nothing_is_lost_in_a_minute_of_seeds() -> None:
    soak("--seeds", "1000-", "--seconds", "60")
