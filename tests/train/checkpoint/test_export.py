"""The trained model is exported to one file under every plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from migration_driver import Mover
from rank_pool import RankPool
from scenarios import Recorded, job

from clusterd.plans.plan import Plan
from clusterd.train.checkpoint import export
from clusterd.train.loop.rank_training import Training
from clusterd.train.process.context import Context

TOLERANCE = 1e-3


def loaded(file: Path, model: str = "gpt") -> dict[str, torch.Tensor]:
    """Load the file as a user would: into the model's own class, with no missing or unexpected key."""
    fresh = job(Recorded(32), model=model, depth=2).model()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    state: dict[str, torch.Tensor] = fresh.state_dict()
    return state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "model"),
    [
        ("dp=2,zero=3", "tied"),
        ("tp=2", "gpt"),
        ("pp=2,accumulation=2", "tables"),
        ("pp=2,accumulation=2", "hollow"),
        pytest.param("dp=2,zero=1", "tables", marks=pytest.mark.slow),
        pytest.param("dp=2,tp=2,zero=3,checkpointing", "gpt", marks=pytest.mark.slow),
        pytest.param("dp=2,zero=3,offload=parameters", "frozen", marks=pytest.mark.slow),
        pytest.param("dp=2,pp=2,accumulation=2", "gpt", marks=pytest.mark.slow),
    ],
)
def test_the_trained_model_is_that_of_one_process(plan: str, model: str, ranks: RankPool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": model, "depth": 2, "steps": 5, "optimizer": "momentum"}
    saved = {}
    for name, under in (("alone", "dp=1"), ("spread", plan)):
        file = tmp_path / "results" / f"{name}.pt"
        ranks.run(tmp_path / name, under, **options, save=str(file)).checked()
        saved[name] = loaded(file, model)
        assert [f.name for f in file.parent.glob(f"{name}*")] == [file.name], "nothing half written beside it"
    before = job(Recorded(32), model=model, depth=2).model().state_dict()
    assert any(not torch.allclose(saved["spread"][n], before[n], rtol=TOLERANCE) for n in before)
    for name, tensor in saved["alone"].items():
        if not tensor.is_floating_point():
            continue  # "tables" counts its calls, one per micro-batch
        torch.testing.assert_close(saved["spread"][name], tensor, rtol=TOLERANCE, atol=1e-5)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("plan", ["dp=1", "pp=2,accumulation=2", "dp=2", "dp=2,zero=3", "tp=2"])
def test_a_model_saves_itself_in_its_own_way(plan: str, ranks: RankPool, tmp_path: Path) -> None:
    """Raw parameters under other names than the class's own did not load into it."""
    file = tmp_path / "model.pt"
    options: dict[str, Any] = {"model": "own way", "depth": 2, "steps": 4, "save": str(file)}
    ranks.run(tmp_path / "run", plan, **options).checked()
    state = torch.load(file, weights_only=True)
    assert all(name.startswith(("net.", "saved by")) for name in state)
    assert state._metadata["blocks.0"]["version"] == 7
    fresh = job(Recorded(32), model="own way", depth=2).model()
    fresh.load_state_dict(state)
    assert fresh.blocks[0].steps == 4 * Plan.parse(plan).accumulation  # it counts forward passes
    assert fresh.loaded_version == 7


@pytest.mark.slow
def test_a_full_disk_is_given_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Training(job(Recorded(32), depth=1), Context(), torch.device("cpu"), None)
    really, failed = torch.save, []

    def save(whole: Any, file: Path) -> None:
        file.write_bytes(b"half")
        if not failed:
            failed.append(file)
            raise OSError(28, "No space left on device")
        really(whole, file)

    monkeypatch.setattr(torch, "save", save)
    monkeypatch.setattr(export, "RETRY_S", 0.0)
    export.save(made, str(tmp_path / "model.pt"))
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]
    monkeypatch.setattr(export, "PATIENCE_S", 0.0)
    failed.clear()
    with pytest.raises(OSError, match="No space left"):
        export.save(made, str(tmp_path / "another.pt"))
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


@pytest.mark.slow
def test_a_run_that_is_stopped_leaves_no_model(moving: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    mover: Mover = moving(save=str(file))
    mover.start("dp=2")
    mover.train(2)
    mover.stop()
    assert not file.exists()


@pytest.mark.slow
def test_a_run_that_is_stopped_at_its_target_leaves_its_model(moving: Any, tmp_path: Path) -> None:
    file, final = tmp_path / "model.pt", tmp_path / "final"
    mover: Mover = moving(save=str(file), rank_file={"final": str(final)})
    mover.start("dp=2,zero=3")
    mover.train(2)
    steps = mover.stop(done=True)
    assert set(loaded(file)) and (final / ".metadata").exists()
    assert f"saved the model after step {steps[-1]['step']} to {file}" in mover.now.run.result()[0].ranks[0].output


def test_a_place_where_nothing_can_be_written_is_found_out_before_the_first_step(
    ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("a file")
    run = ranks.run(tmp_path / "run", "dp=1", depth=2, steps=5, save=str(tmp_path / "taken" / "model.pt"))
    assert run.ranks[0].exit_code == 92
    assert "cannot be created: " in run.ranks[0].output
    assert run.steps == []
