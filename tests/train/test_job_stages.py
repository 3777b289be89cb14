"""Scripts that train several times: each job trains its stage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rank_pool import ENVIRONMENT

SCRIPT = """
import torch
from clusterd import train

data = [(torch.randn(4), torch.randn(2)) for _ in range(16)]
common = dict(
    model=lambda: torch.nn.Linear(4, 2),
    loss=torch.nn.functional.mse_loss,
    data=data,
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    global_batch=4,
)
first = train.run(**common, steps=3, stage="pretrain", save="first.pt")
with train.session(**common, steps=2, stage="finetune", init_from="first.pt") as run:
    run.register("nothing", torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.zeros(1)])))
    for step, batch in run:
        run.step(batch)
    run.log(val=run.evaluate(data))
print("outcomes", first.step, first.skipped, run.outcome.step, run.outcome.skipped)
"""


def run(folder: Path, stage: str, *, under_clusterd: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**ENVIRONMENT, "CLUSTERD_STAGE": stage}
    if under_clusterd:
        rank = {"job": "7", "attempt": 1, "generation": 1, "rank": 0, "world_size": 1, "directory": str(folder)}
        (folder / "rank.json").write_text(json.dumps({**rank, "steps_file": str(folder / "steps.jsonl")}))
        environment["CLUSTERD_RANK_FILE"] = str(folder / "rank.json")
    return subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_each_job_trains_its_stage_and_passes_over_the_others(tmp_path: Path) -> None:
    first = run(tmp_path, "pretrain", under_clusterd=True)
    assert "outcomes 3 False 0 True" in first.stdout, first.stderr
    assert "stage finetune is left out: this job trains the stage pretrain" in first.stdout
    steps = [json.loads(line).get("step") for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    (tmp_path / "steps.jsonl").unlink()
    second = run(tmp_path, "finetune", under_clusterd=True)
    assert "outcomes 0 True 2 False" in second.stdout, second.stderr
    assert [json.loads(line).get("step") for line in (tmp_path / "steps.jsonl").read_text().splitlines()][:2] == [1, 2]


@pytest.mark.slow
def test_one_process_trains_all_stages(tmp_path: Path) -> None:
    ended = run(tmp_path, "")
    assert "outcomes 3 False 2 False" in ended.stdout, ended.stderr


@pytest.mark.slow
def test_a_job_that_names_no_stage_is_refused_before_training(tmp_path: Path) -> None:
    ended = run(tmp_path, "", under_clusterd=True)
    assert ended.returncode == 92
    assert "the script trains the stage 'pretrain', but the job names none" in ended.stderr
    assert "submit --stages" in ended.stderr
    assert not (tmp_path / "steps.jsonl").exists()
