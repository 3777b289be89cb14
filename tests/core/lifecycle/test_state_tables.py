"""Every change of state goes through the table of its kind, and every state of a table is reached."""

from __future__ import annotations

from typing import Any

import pytest

from clusterd.core import transitions
from clusterd.core.invariants import violations
from clusterd.core.transitions import MigrationState, TrialState
from clusterd.plans.plan import Plan
from clusterd.types import AttemptState, HostState, JobState
from tests.core.conftest import Lab
from tests.core.lifecycle.test_trials import move, propose, running


@pytest.mark.parametrize("name", transitions.TABLES)
def test_every_state_is_reached_from_the_first(name: str) -> None:
    """Regression: of migrations, the diagram showed two states into which no step led."""
    table = transitions.TABLES[name]
    reached = {next(iter(table))}
    while more := {after for state in reached for after in table[state]} - reached:
        reached |= more
    assert reached == set(table)
    assert {after for nexts in table.values() for after in nexts} <= set(table)


@pytest.mark.parametrize(
    "kind,state",
    [
        ("host", HostState.CONNECTING),
        ("job", JobState.QUEUED),
        ("attempt", AttemptState.LAUNCHING),
        ("migration", MigrationState.FAILED),
        ("trial", TrialState.PROPOSED),
    ],
)
def test_a_state_that_was_set_beside_its_table_is_a_violation(lab_with_two_hosts: Lab, kind: str, state: Any) -> None:
    lab = lab_with_two_hosts
    job = running(lab)
    propose(lab, job, Plan(dp=2))
    move(lab, job)
    known = lab.scheduler.state.jobs[job]
    machine: Any = {
        "host": next(iter(lab.scheduler.state.hosts.values())),
        "job": known,
        "attempt": known.attempt,
        "migration": known.migrations[-1],
        "trial": known.trials.current,
    }[kind]
    assert violations(lab.scheduler.state) == []
    machine.state = state
    assert any("which is not in its table" in wrong for wrong in violations(lab.scheduler.state))
