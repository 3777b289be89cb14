"""Checkpoints are in torch's own format: other plans resume from them, and so does plain torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import slow
from migration_driver import Mover
from rank_pool import HERE, ROOT, RankPool

from clusterd.plans.plan import Plan

TOLERANCE = 1e-4
MORE = 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan, others",
    [
        ("dp=2,zero=1", ["tp=2", "dp=1"]),
        pytest.param(
            "dp=2,tp=2,zero=3", ["dp=2,pp=2,accumulation=2", "dp=3,zero=3,shares=4:4:8"], marks=pytest.mark.slow
        ),
        pytest.param(
            "pp=2,accumulation=2", ["dp=2,offload=optimizer", "dp=2,zero=3,offload=parameters"], marks=pytest.mark.slow
        ),
    ],
)
def test_any_plan_goes_on_from_a_checkpoint_and_so_does_plain_torch(
    plan: str,
    others: list[str],
    moving: Callable[..., Mover],
    undisturbed: Callable[..., list[float]],
    pools: tuple[RankPool, RankPool],
    tmp_path: Path,
) -> None:
    expected = undisturbed(warmup=True)
    mover = moving(warmup=True)
    mover.start(plan)
    mover.train(3)
    directory = tmp_path / "checkpoint"
    said = mover.checkpoint(directory)
    mover.train(3)  # and the training was not disturbed
    assert [s["loss"] for s in mover.stop()] == pytest.approx(expected[: mover.last_step], rel=TOLERANCE)

    step = said["step"]
    for other in others:
        run = (
            pools[0]
            .run_each(
                tmp_path / other,
                other,
                [{"depth": 2, "warmup": True, "steps": step + MORE}],
                more=lambda _: {"restore": str(directory)},
            )[0]
            .checked()
        )
        assert [s["step"] for s in run.steps] == list(range(step + 1, step + MORE + 1))
        assert run.losses == pytest.approx(expected[step : step + MORE], rel=TOLERANCE)

    loaded = plainly(directory)
    assert loaded["step"] == loaded["counter"] == step
    assert loaded["lr"] == pytest.approx(3e-3 * min(1.0, (step + 1) / 10))
    here = pools[0].run(tmp_path / "there", "dp=1", depth=2, warmup=True, steps=step).checked().ranks[0].result
    for name in here["parameters"]:
        if not name.endswith(
            "qkv.bias"
        ):  # the gradient of the keys' bias is rounding noise, which Adam turns into steps
            assert loaded["parameters"][name] == pytest.approx(here["sums"][name], abs=1e-4), name
        assert loaded["exp_avg_sq"][name] > 0


def plainly(directory: Path) -> Any:
    """Content of the checkpoint as read by a process without clusterd."""
    path = os.pathsep.join([str(ROOT / "examples/gpt")])
    script = [sys.executable, "-P", "-W", "ignore", str(HERE.parent / "load_with_torch.py"), str(directory), "32", "2"]
    done = subprocess.run(script, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_checkpoint_of_another_job_is_refused(pools: tuple[RankPool, RankPool], tmp_path: Path) -> None:
    run = pools[0].run_each(tmp_path, "dp=1", [{"steps": 1}], more=lambda _: {"restore": str(tmp_path / "none")})[0]
    assert run.ranks[0].exit_code == 92
    assert "no checkpoint in" in run.ranks[0].output


def test_a_checkpoint_that_cannot_be_written_keeps_no_rank_waiting(
    moving: Callable[..., Mover], ranks: RankPool, tmp_path: Path
) -> None:
    """A file is in the place of the directory: rank 0 fails, and all the others wait for its result."""
    mover = moving()
    mover.start("dp=2")
    mover.train(3)
    (tmp_path / "taken").write_text("somebody else's")
    assert all("Not a directory" in why for why in mover.checkpoint_fails(tmp_path / "taken"))
    assert not (tmp_path / "taken.part").exists()
    # Failures inside torch, on one rank or on all.
    assert all("Not a directory" in why for why in mover.checkpoint_fails(tmp_path / "taken" / "below"))
    (tmp_path / "half.part").mkdir()
    (tmp_path / "half.part" / "__1_0.distcp").mkdir()
    assert all("Is a directory" in why for why in mover.checkpoint_fails(tmp_path / "half"))
    assert not (tmp_path / "half.part").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years")
    assert all(
        "holds thesis.tex, which is not a checkpoint" in why for why in mover.checkpoint_fails(tmp_path / "mine")
    )
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years"
    mover.checkpoint(tmp_path / "free")
    mover.checkpoint(tmp_path / "free")  # replaces the first one
    assert sorted(p.name for p in tmp_path.glob("free*")) == ["free"]
    mover.stop()


def test_a_last_checkpoint_that_nobody_could_write_is_refused_before_the_first_step(
    ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("somebody else's")
    to_leave_one = {"final": str(tmp_path / "taken" / "below" / "final")}
    run = ranks.run_each(tmp_path / "asked", "dp=2", [{}], more=lambda _: to_leave_one)[0]
    assert [rank.exit_code for rank in run.ranks] == [92, 92]
    assert run.losses == []
    assert f"cannot create {tmp_path}/taken/below for checkpoints: Not a directory" in run.ranks[0].output


@pytest.mark.slow
def test_the_last_checkpoint_is_tried_again(ranks: RankPool, tmp_path: Path) -> None:
    """Only the ranks have the state; the obstacle on one of them may go away."""
    (tmp_path / "final.part" / "__1_0.distcp").mkdir(parents=True)  # makes the first attempt fail, which removes it
    to_leave_one = {"final": str(tmp_path / "final")}
    run = ranks.run_each(tmp_path / "asked", "dp=2", [{}], more=lambda _: to_leave_one)[0].checked()
    for rank in run.ranks:
        assert "the final checkpoint cannot be written: [Errno 21] Is a directory" in rank.output
    assert (tmp_path / "final" / ".metadata").exists()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("options", "plan", "says"),
    [
        ({"optimizer": "slow weights"}, "dp=1", "SlowWeights keeps tensors of its own in its attribute kept"),
        ({"model": "remembering", "layers": False}, "dp=2", "the buffer embed.before is of shape"),
        ({"schedule": "drawn"}, "dp=2", "scheduler.shape is a function"),
        ({"schedule": "by hand"}, "dp=1", "has no state_dict"),
        ({"model": "growing", "layers": False, "optimizer": "momentum"}, "dp=1", "the buffer embed.before is of shape"),
    ],
    ids=str,
)
def test_state_that_no_rule_cuts_is_saved_for_the_same_plan(
    ranks: RankPool, tmp_path: Path, options: dict[str, Any], plan: str, says: str
) -> None:
    """Such a job lost all its work when it was cancelled."""
    whole = ranks.run(tmp_path / "whole", plan, **options, steps=10).checked()
    left = {"final": str(tmp_path / "left")}
    first = ranks.run_each(tmp_path / "first", plan, [{**options, "steps": 5}], more=lambda _: left)[0].checked()
    assert f"the checkpoint of step 5 is for {Plan.parse(plan)} only: " in first.ranks[0].output
    assert says in first.ranks[0].output
    goes_on, rest = {"restore": left["final"]}, [{**options, "steps": 10}]
    run = ranks.run_each(tmp_path / "then", plan, rest, more=lambda _: goes_on)[0].checked()
    if "schedule" not in options:  # what could not be stored begins anew
        assert first.losses + run.losses == whole.losses
    other = ranks.run_each(tmp_path / "other", "dp=1,checkpointing", rest, more=lambda _: goes_on)[0]
    assert [rank.exit_code for rank in other.ranks] == [96]
    assert f"is for {Plan.parse(plan)} only: " in other.ranks[0].output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "other"),
    [
        ("dp=1", "dp=2,zero=3"),
        ("dp=2,zero=3", "tp=2"),
        slow("dp=2,zero=1", "dp=2,offload=optimizer"),
        ("tp=2", "dp=1"),
        slow("dp=2,offload=optimizer", "dp=2,zero=1"),
    ],
)
def test_optimizer_state_that_begins_late_is_in_the_last_checkpoint(
    ranks: RankPool, tmp_path: Path, plan: str, other: str
) -> None:
    """The failure came after the last step, and the training was lost."""
    options = {"optimizer": "late average", "depth": 2}
    expected = ranks.run(tmp_path / "whole", "dp=1", steps=12, **options).checked().losses
    left = {"final": str(tmp_path / "final")}
    ranks.run_each(tmp_path / "first", plan, [{"steps": 7, **options}], more=lambda _: left)[0].checked()
    goes_on = {"restore": left["final"]}
    run = ranks.run_each(tmp_path / "then", other, [{"steps": 12, **options}], more=lambda _: goes_on)[0].checked()
    assert run.losses == pytest.approx(expected[7:], rel=1e-5)


@pytest.mark.slow
def test_what_the_last_checkpoint_cannot_hold_is_named(ranks: RankPool, tmp_path: Path) -> None:
    """The optimizer keeps an object that needs pickle only later; nothing shows it before the first step."""
    file = tmp_path / "model.pt"
    options = {"optimizer": "late function", "steps": 5, "save": str(file)}
    left = {"final": str(tmp_path / "final")}
    run = ranks.run_each(tmp_path / "run", "dp=2", [options], more=lambda _: left)[0].checked()
    assert len(run.losses) == 5
    assert file.exists()
    assert "optimizer.state.0.shape, a function, is not in the checkpoint of step 5, and will begin anew" in (
        run.ranks[0].output
    )
    assert "the checkpoint of step 5 is for dp=2 only: " in run.ranks[0].output


@pytest.mark.slow
def test_state_that_begins_late_fails_a_move_and_not_the_training(moving: Callable[..., Mover]) -> None:
    mover = moving(optimizer="late average")
    mover.start("dp=1")
    mover.train(6)
    with pytest.raises(AssertionError, match="average is no state that a trial update of the optimizer creates"):
        mover.move("dp=2")
    mover.undo()
    mover.train(3)
    mover.stop()


@pytest.mark.slow
def test_the_word_of_one_agent_is_enough(moving: Callable[..., Mover], tmp_path: Path) -> None:
    """The other agent's request may be lost, and its ranks would wait forever; or it comes late, for no second one."""
    mover = moving("ab")
    mover.start("dp=2", "ab")
    mover.train(3)
    for host in "ab":
        assert mover.checkpoint(tmp_path / host, host)["path"] == str(tmp_path / host)
    taken = mover.checkpoints()
    mover.ask_for_checkpoint(tmp_path / "b", "a")
    mover.train(3)
    assert mover.checkpoints() == taken
    mover.checkpoint(tmp_path / "b", "a")
    mover.stop()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("options", "rates", "says"),
    [
        ({"optimizer": "sgd, schedule of the script", "schedule": "warmup"}, [0.07, 0.08, 0.09], ""),
        ({"optimizer": "sgd", "schedule": "warmup"}, [], "the schedule of the checkpoint is no LambdaLR"),
        (
            {"optimizer": "momentum", "schedule": "sequential"},
            None,
            "weight_decay of parameter group 0 0.0001 (script: 0)",
        ),
    ],
)
def test_a_new_script_says_which_rates_it_goes_on_with(
    ranks: RankPool, tmp_path: Path, options: dict[str, Any], rates: list[float] | None, says: str
) -> None:
    """The old run's were kept over those of the new script, and nothing was said."""
    left, old = {"final": str(tmp_path / "left")}, [{"steps": 6, "schedule": "sequential", "optimizer": "nesterov"}]
    ranks.run_each(tmp_path / "old", "dp=1", old, more=lambda _: left)[0].checked()
    goes_on = {"restore": left["final"], "job": "another"}
    run = ranks.run_each(tmp_path / "new", "dp=1", [{"steps": 9, **options}], more=lambda _: goes_on)[0]
    assert says in run.ranks[0].output
    if rates is not None:
        assert [step["lr"] for step in run.steps] == pytest.approx(rates)
