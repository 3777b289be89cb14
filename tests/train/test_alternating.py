"""Several losses and optimizers, as of a GAN: under replicas and through moves as in a loop of plain torch."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow
from migration_driver import Mover
from rank_pool import ENVIRONMENT, RankPool

from clusterd.plans.sample_order import step_indices
from clusterd.train.parallel import build
from clusterd.train.parallel.alternating import joined_factory
from tests.foreign import networks

STEPS = 12
GAN = {"script": "gan", "steps": STEPS}


def plain_torch(steps: int, generator_every: int = 1) -> list[dict[str, float]]:
    """Losses of a loop as every tutorial has it, on the same batches."""
    arguments = networks.gan()
    model, data = build.build_model(networks.Adversaries, 0), arguments["data"]
    optimizers = {part: make(list(getattr(model, part).parameters())) for part, make in arguments["optimizer"].items()}
    found = []
    for step in range(steps):
        batch = [tensor[step_indices(len(data), 8, 0, step)] for tensor in data.tensors]
        losses = {}
        for part, loss_function in arguments["loss"].items():
            if part == "generator" and (step + 1) % generator_every:
                continue
            model.zero_grad()
            loss = loss_function(model, batch)
            loss.backward()
            optimizers[part].step()
            losses[part] = loss.item()
        found.append(losses)
    return found


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", slow("dp=2,accumulation=2"), slow("dp=3,shares=1:3:4")])
def test_losses_are_those_of_a_plain_loop(plan: str, ranks: RankPool, tmp_path: Path) -> None:
    run = ranks.run(tmp_path, plan, **GAN, own_loop={"reads": plan != "dp=2"}).checked()
    for step, expected in zip(run.steps, plain_torch(STEPS), strict=True):
        assert step["metrics"] == pytest.approx(expected, rel=1e-4)
        assert step["loss"] == pytest.approx(sum(expected.values()), rel=1e-4)


def test_parts_go_on_with_the_state_that_is_loaded() -> None:
    """They kept that of before, and a checkpoint for the same plan went on with other moments."""

    def made() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
        parameters = [torch.nn.Parameter(torch.full((n,), 2.0)) for n in (2, 3)]
        return parameters, joined_factory(lambda p: [torch.optim.Adam([one], lr=0.1) for one in p])(parameters)

    def step(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> list[float]:
        for parameter in parameters:
            parameter.grad = parameter.detach().square()
        optimizer.step()
        return [parameter[0].item() for parameter in parameters]

    (before, first), (after, second) = made(), made()
    step(before, first)
    for parameter, other in zip(after, before, strict=True):
        parameter.data.copy_(other)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert step(before, first) == step(after, second)
    assert step(before, first) == step(after, second)


def made(step: dict[str, Any]) -> dict[str, float]:
    """Losses that a step had."""
    return {name: loss for name, loss in step["metrics"].items() if loss is not None}


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", slow("dp=2,accumulation=2")])
def test_a_loop_may_leave_out_updates_as_a_plain_one_does(plan: str, ranks: RankPool, tmp_path: Path) -> None:
    run = ranks.run(tmp_path, plan, script="critic_more_often", steps=STEPS).checked()
    for step, expected in zip(run.steps, plain_torch(STEPS, generator_every=3), strict=True):
        assert made(step) == pytest.approx(expected, rel=1e-4)
        assert step["loss"] == pytest.approx(sum(expected.values()), rel=1e-4)


def test_updates_that_a_loop_leaves_out_move(moving: Callable[..., Mover], tmp_path: Path) -> None:
    mover = moving(script="critic_more_often")
    mover.start("dp=1")
    mover.train(3)
    mover.move("dp=2")
    mover.train(4)
    steps = mover.stop()
    for step, expected in zip(steps, plain_torch(len(steps), generator_every=3), strict=True):
        assert made(step) == pytest.approx(expected, rel=1e-3)


CRITIC = """
from clusterd import train
from tests.foreign import networks

with train.session(**networks.gan()) as run:
    for step, batch in run:
        run.step(batch, only="critic")
"""


def test_a_loss_that_the_job_does_not_have_is_refused() -> None:
    ended = subprocess.run([sys.executable, "-c", CRITIC], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert ended.returncode == 92
    assert "names 'critic', and the losses of this job are discriminator, generator" in ended.stderr


def test_plans_that_cut_the_model_are_refused_with_the_reason(ranks: RankPool, tmp_path: Path) -> None:
    for rank in (run := ranks.run(tmp_path, "dp=2,zero=1", **GAN)).ranks:
        assert rank.exit_code == 96
        assert "not supported with several losses and optimizers (of discriminator and generator)" in rank.output
    assert run.steps == []


@pytest.mark.slow
def test_they_move_and_restart_with_the_state_of_all_optimizers(
    moving: Callable[..., Mover], ranks: RankPool, tmp_path: Path
) -> None:
    mover = moving(script="gan")
    mover.start("dp=1")
    for plan in ("dp=2", "dp=3,shares=1:3:4", "dp=1"):
        mover.train(3)
        mover.move(plan)
    mover.train(2)
    saved: dict[str, Any] = mover.checkpoint(tmp_path / "saved")
    steps = mover.stop()
    expected = plain_torch(len(steps) + 5)
    assert [s["metrics"] for s in steps] == [pytest.approx(losses, rel=1e-3) for losses in expected[: len(steps)]]
    more = {"restore": str(tmp_path / "saved")}
    options = {"script": "gan", "steps": saved["step"] + 5}
    again = ranks.run_each(tmp_path / "again", "dp=2", [options], more=lambda _: more)[0].checked()
    for step, losses in zip(again.steps, expected[saved["step"] :], strict=False):
        assert step["metrics"] == pytest.approx(losses, rel=1e-3)


@pytest.mark.slow
def test_they_go_on_from_a_state_snapshot(
    moving: Callable[..., Mover],
) -> None:
    """Each copy is complete before the first of the updates of the next step."""
    mover = moving(script="gan", rank_file={"snapshot_every": 1})
    mover.start("dp=2")
    mover.train(6)
    mover.wait(lambda: mover.newest_snapshot()[1] > 0)
    step = mover.recover("dp=1")
    mover.train(step + 5)
    mover.stop()
    steps = mover.now.steps()
    expected = plain_torch(steps[-1]["step"])
    assert [s["metrics"] for s in steps] == [pytest.approx(losses, rel=1e-3) for losses in expected[step:]]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optimizer": {"generator": torch.optim.Adam}}, "'discriminator' and 'generator', optimizer of 'generator'"),
        ({"optimizer": torch.optim.Adam}, "optimizer of the whole model"),
        (
            {
                "optimizer": dict.fromkeys(["discriminator", "net"], torch.optim.Adam),
                "loss": dict.fromkeys(["discriminator", "net"]),
            },
            "is in none of the optimizer's parts, 'discriminator' and 'net'",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    changes: dict[str, Any], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from clusterd import train

    with pytest.raises(SystemExit) as ended:
        train.run(**{**networks.gan(), **changes})
    assert ended.value.code == 92
    assert says in capfd.readouterr().err
