"""Jobs start from weights in files, whatever the files and the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from scenarios import Recorded, job
from torch.distributed import checkpoint as dcp

from clusterd.train.checkpoint.weight_files import open_weights, write_safetensors

TOLERANCE = 1e-4
RUN: dict[str, Any] = {"depth": 2, "steps": 4, "optimizer": "momentum"}


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Weights of models by format; "tables" has a buffer that no file contains, "tied" two names for one parameter."""
    folder = tmp_path_factory.mktemp("trained")
    places = {}
    for model, save_format in (("gpt", "torch"), ("tables", "safetensors"), ("tied", "hf")):
        places[model] = folder / f"{model}.safetensors" if save_format == "safetensors" else folder / model
        ranks.run(folder / f"{model}-run", "dp=1", model=model, save=str(places[model]), save_format=save_format, **RUN)
    return places


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("gpt", "tp=2"),
        ("tables", "dp=2,zero=3"),
        ("tied", "dp=2,zero=1"),
        ("tables", "pp=2,accumulation=2"),
        pytest.param("gpt", "dp=2,offload=optimizer", marks=pytest.mark.slow),
        pytest.param("gpt", "dp=2,tp=2,zero=3", marks=pytest.mark.slow),
    ],
)
def test_every_plan_starts_from_the_weights(
    model: str, plan: str, trained: dict[str, Path], ranks: RankPool, tmp_path: Path
) -> None:
    options = {**RUN, "model": model, "init_from": str(trained[model])}
    losses = {p: ranks.run(tmp_path / p, p, **options).checked().losses for p in ("dp=1", plan)}
    assert losses[plan] == pytest.approx(losses["dp=1"], rel=TOLERANCE)
    fresh = ranks.run(tmp_path / "fresh", "dp=1", **{**RUN, "model": model}).checked().losses
    assert losses["dp=1"][0] < fresh[0] - 0.01


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_all_formats_give_the_same_losses(trained: dict[str, Path], ranks: RankPool, tmp_path: Path) -> None:
    """Also those of a wrapped or compiled model, and of a script that saved more than the model."""
    state = torch.load(trained["gpt"], weights_only=True)
    torch.save({"model": {f"module._orig_mod.{k}": v for k, v in state.items()}, "epoch": 3}, tmp_path / "wrapped.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    write_safetensors(tmp_path / "one.safetensors", state)
    dcp.save({"model": state, "epoch": 3}, checkpoint_id=str(tmp_path / "distributed"), no_dist=True)
    shards = tmp_path / "sharded"
    shards.mkdir()
    names = sorted(state)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, mine in parts.items():
        write_safetensors(shards / file, {name: state[name] for name in mine})
    index = {"weight_map": {name: file for file, mine in parts.items() for name in mine}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    losses = {
        place.name: ranks.run(tmp_path / f"run-{place.name}", "dp=1", init_from=str(place), **RUN).checked().losses
        for place in (trained["gpt"], *(tmp_path / f for f in ("wrapped.pt", "old.pt", "one.safetensors")), shards)
    }
    distributed = tmp_path / "distributed"
    losses["distributed"] = ranks.run(tmp_path / "run", "dp=1", init_from=str(distributed), **RUN).checked().losses
    assert len({tuple(values) for values in losses.values()}) == 1, losses


@pytest.mark.slow
def test_differences_are_refused_with_names_or_left_as_made(
    trained: dict[str, Path], ranks: RankPool, tmp_path: Path
) -> None:
    state = torch.load(trained["gpt"], weights_only=True)
    missing = next(iter(state))
    torch.save({**{k: v for k, v in state.items() if k != missing}, "extra.bias": torch.ones(3)}, tmp_path / "other.pt")
    options = {**RUN, "init_from": str(tmp_path / "other.pt")}
    refused = ranks.run(tmp_path / "strict", "dp=1", **options).ranks[0]
    assert refused.exit_code == 92
    assert f"lacks {missing} and has extra.bias, unlike the model; init_strict=False" in refused.output
    lenient = ranks.run(tmp_path / "lenient", "dp=1", init_strict=False, **options).checked()
    assert f"lacks {missing} and has extra.bias, unlike the model; the rest" in lenient.ranks[0].output

    torch.save({**state, missing: torch.ones(2, 2)}, tmp_path / "shape.pt")
    refused = ranks.run(tmp_path / "shape", "dp=1", **{**options, "init_from": str(tmp_path / "shape.pt")}).ranks[0]
    assert (refused.exit_code, f"has {missing} of shape (2, 2), but the model needs" in refused.output) == (92, True)
    (tmp_path / "none.safetensors").write_bytes(b"no weights at all")
    for place in ("none.safetensors", "nowhere"):
        gone = ranks.run(tmp_path / f"run-{place}", "dp=1", **{**options, "init_from": str(tmp_path / place)}).ranks[0]
        assert (gone.exit_code, "init_from is" in gone.output) == (92, True), gone.output


@pytest.mark.slow
def test_saved_safetensors_hold_the_whole_model(trained: dict[str, Path]) -> None:
    """Loaded by name; a folder of Hugging Face's has shared weights once."""
    model = job(Recorded(32), model="tables", depth=2).model()
    weights = open_weights(str(trained["tables"]))
    fresh = {name: torch.empty_like(tensor) for name, tensor in model.state_dict().items()}
    weights.read({name: (tuple((0, n) for n in t.shape), t) for name, t in fresh.items()})
    model.load_state_dict(fresh)
    assert [f.name for f in trained["tied"].iterdir()] == ["model.safetensors"]
    assert "head.out.weight" not in open_weights(str(trained["tied"])).sizes
