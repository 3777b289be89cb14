"""Carry proof: a move whose target ranks do not go on as the source ranks do is refused while these train."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clusterd.train.migration import carry_proof
from clusterd.train.state.next_steps import NextSteps, difference
from clusterd.train.state.segments import Segment
from tests.agent.client import wait_until
from tests.conftest import HANG_S
from tests.foreign import registry
from tests.foreign.runs import REFUSED, RIGHT, Runner

GROUPS = "hidden_state", "own_loops", "settings"

numbers = st.floats(1e-3, 1e3)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    registry.load()
    made = Runner(tmp_path_factory.mktemp("moves"), [f"tests.foreign.{group}" for group in GROUPS])
    yield made
    made.close()


@pytest.mark.slow_after(1)
def test_state_that_is_not_carried_keeps_the_job_where_it_is(runner: Runner) -> None:
    verdict = runner.verdicts(registry.SCRIPTS["average_by_a_hook"], ["move"])["move"]
    assert verdict.verdict == REFUSED, verdict
    assert "does not go on under dp=2,zero=3 as under dp=1: the " in verdict.reason
    variable = r"tests\.foreign\.hidden_state\.average \(6 tensors of norm "
    assert re.search(rf"Variables of the script that differ: .*{variable}", verdict.reason)


def test_a_mask_that_the_loop_adds_is_named_where_a_move_lacks_it(runner: Runner) -> None:
    """The reason was that the plan "assigns it to other ranks", of which there are none."""
    verdict = runner.verdicts(registry.SCRIPTS["pruned_by_loop"], ["move"])["move"]
    assert verdict.verdict == REFUSED, verdict
    assert "the buffer 2.weight_mask is of shape (16, 16), but was none when the model was made" in verdict.reason


@pytest.mark.slow
def test_a_schedule_and_clipping_are_carried(runner: Runner) -> None:
    assert runner.verdicts(registry.SCRIPTS["clipped_one_cycle"], ["move"])["move"].verdict == RIGHT


def test_a_migration_that_ends_while_the_state_begins_to_be_copied_harms_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: its segment was unmapped between the steps, and the rank, and with it the job, failed."""
    control = Mock(requested=lambda flag: False)
    (tmp_path / "segment").write_bytes(bytes(4096))
    control.ask.return_value.path = str(tmp_path / "segment")
    training = Mock(step=3, schedule=None, device=torch.device("cpu"))
    migration = Mock(proof_s=HANG_S)
    migration.packing.outbox.return_value = Mock(size_bytes=4096, parts=())
    proof, is_over, began = carry_proof.CarryProof(training, control), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: proof.run(migration, is_over.is_set))

    def wait_for_its_end(*_: Any) -> dict[str, Any]:
        is_over.set()
        thread.join(5 * carry_proof.POLL_S)  # it waits for the copy, or unmaps the segment
        began.set()
        return {}

    def touch(segment: Segment, places: Any) -> Any:
        segment.view(torch.uint8, (1,), 0).zero_()
        return Mock(run=lambda after: [])

    for name, stand_in in (
        ("scalars", Mock()), ("script_variables", dict), ("local_shards", wait_for_its_end),
        ("clone_changing", Mock()), ("copies_to_segment", touch), ("lower_priority", Mock()),
    ):  # fmt: skip
        monkeypatch.setattr(carry_proof, name, stand_in)
    thread.start()
    while not began.is_set():
        proof.begin("")
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert proof._why_not == ""


def test_a_proof_that_is_over_leaves_the_next_one_alone() -> None:
    """Regression: two migrations within a tenth of a second, and the second one waited for its proof in vain."""
    control = Mock(requested=lambda flag: False)
    proof, is_over = carry_proof.CarryProof(Mock(step=3), control), threading.Event()
    of_first, of_next = Mock(proof_s=HANG_S), Mock(proof_s=HANG_S)
    for migration in (of_first, of_next):
        migration.packing.outbox.return_value = Mock(size_bytes=0)
    threads = [threading.Thread(target=lambda m=m: proof.run(m, is_over.is_set)) for m in (of_first, of_next)]
    threads[0].start()
    wait_until(lambda: proof._wanted is not None, "the first proof waits")
    first_is_over, is_over = is_over, threading.Event()
    threads[1].start()
    wait_until(lambda: proof._wanted is not None and proof._wanted[0] is of_next, "the next one does")
    first_is_over.set()
    threads[0].join(HANG_S)
    assert proof._wanted is not None and proof._wanted[0] is of_next
    is_over.set()
    threads[1].join(HANG_S)
    assert proof._wanted is None


def test_a_state_that_cannot_be_copied_ends_the_proof_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    control, training = Mock(), Mock(step=3, schedule=None, device=torch.device("cpu"))
    proof = carry_proof.CarryProof(training, control)
    proof._wanted = (Mock(), Mock())
    monkeypatch.setattr(carry_proof, "scalars", Mock())
    monkeypatch.setattr(carry_proof, "script_variables", dict)
    monkeypatch.setattr(carry_proof, "local_shards", Mock(side_effect=RuntimeError("out of memory")))
    proof.begin("")
    proof.copied()
    assert (proof._taken, proof._why_not) == (None, "RuntimeError: out of memory")


def steps(*losses: float, norms: dict[str, float] | None = None, rates: dict[str, float] | None = None) -> NextSteps:
    return NextSteps(list(losses), norms or {}, rates or {})


@given(numbers, numbers, st.floats(-1e-5, 1e-5))
def test_rounding_is_no_difference(loss: float, norm: float, off: float) -> None:
    one = steps(loss, loss, norms={"w": norm, "b": norm / 1e6}, rates={"w": loss})
    other = steps(loss * (1 + off), loss, norms={"w": norm * (1 + off), "b": norm / 2e6}, rates={"w": loss})
    assert difference(one, other, "fp32").excess <= 1


@given(numbers, st.floats(1.01, 100))
def test_the_largest_difference_is_named(value: float, times: float) -> None:
    same = steps(value, value, norms={"w": value}, rates={"w": value})
    assert "2 steps later" in str(difference(same, steps(value, value * times), "fp32"))
    assert "gradient of w" in str(difference(same, steps(value, norms={"w": value * times}), "fp32"))
    rates = difference(same, steps(value * times, rates={"w": value * times}), "fp32")
    assert ("learning rate of w" in str(rates), rates.random) == (True, False)


@pytest.mark.slow
def test_what_is_not_finite_differs_from_what_is() -> None:
    assert difference(steps(math.nan), steps(1.0), "fp32").excess > 1
    assert difference(steps(math.nan), steps(math.inf), "fp32").excess <= 1
