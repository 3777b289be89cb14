"""A rank that cannot train prints one line and exits with the code that the agent expects."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rank_pool import ROOT, RankPool, Run, free_port

from clusterd.plans.plan import Plan
from clusterd.train.parallel import mesh
from clusterd.train.process import exits
from clusterd.train.process.context import Context


def assert_ends(run: Run, code: int, *says: str) -> None:
    for rank in run.ranks:
        assert rank.exit_code == code, rank.output
        lines = [line for line in rank.output.splitlines() if line.startswith("clusterd: ")]
        assert len(lines) == 1
        for text in says:
            assert text in lines[0]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("plan", "options", "says"),
    [
        ("tp=2", {"tp_plan": False}, "tp=2 needs to know how to cut the model's tensors: pass `tp_plan`"),
        ("tp=3", {}, "tp=3 does not divide this model"),
        ("pp=2,accumulation=2", {"layers": False}, "pass `layers`"),
        ("pp=2", {}, "needs at least 2 micro-batches"),
        ("pp=2,accumulation=2", {"model": "stray"}, "scale is in none"),
        ("pp=2,accumulation=2", {"model": "tied"}, "are one parameter"),
        ("dp=2,zero=3", {"optimizer": "rows"}, "RowNormalised does not treat every element alike"),
        ("dp=3", {}, "cannot be cut into 3 equal shares"),
        ("dp=2", {"samples": 10}, "10 samples, fewer than the global batch of 16"),
        ("dp=2", {"unseeded": True}, "different weights or buffers on different ranks"),
    ],
)
def test_a_plan_that_cannot_run_ends_every_rank_with_96(
    plan: str, options: dict[str, object], says: str, ranks: RankPool, tmp_path: Path
) -> None:
    assert_ends(ranks.run(tmp_path, plan, **options), 96, says)


def test_a_script_without_a_legal_plan_exits_with_92(ranks: RankPool, tmp_path: Path) -> None:
    run = ranks.run(tmp_path, "dp=1", precision="fp8")
    assert_ends(run, 92, "precision is 'fp8'; it must be fp32 or bf16")


def test_a_plan_of_another_size_ends_with_96(ranks: RankPool, tmp_path: Path) -> None:
    run = ranks.run_each(tmp_path, "dp=4", [{}], world_size=2)[0]
    assert_ends(run, 96, "the plan dp=4 has 4 ranks, but 2 were started")


@pytest.mark.slow
def test_a_taken_port_ends_with_98(ranks: RankPool, tmp_path: Path) -> None:
    """The daemon then retries with another port; rank 0 listens on it."""
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", port))
        taken.listen()
        run = ranks.run_each(tmp_path, "dp=2", [{}], port=port)[0]
    assert run.ranks[0].exit_code == 98, run.ranks[0].output
    assert "the rendezvous port is taken, rank 0 of 2 (dp=2)" in run.ranks[0].output


def test_out_of_memory_ends_with_95(ranks: RankPool, tmp_path: Path) -> None:
    for number, rank in enumerate(ranks.run(tmp_path, "dp=2", model="huge").ranks):
        *before, last = [line for line in rank.output.splitlines() if line.startswith("clusterd: ")]
        assert rank.exit_code == 95
        assert "out of device memory" in last and "of 2 (dp=2)" in last
        assert len(before) == (number == 0)  # the comparison before the first step met the same
        assert all("it is not shown that dp=2 trains as one process: out of device memory" in line for line in before)


def test_an_error_of_the_script_is_shown_whole(ranks: RankPool, tmp_path: Path) -> None:
    run = ranks.run(tmp_path, "dp=1", model="broken")
    assert run.ranks[0].exit_code == 1
    assert "Traceback" in run.ranks[0].output
    assert "RuntimeError: a mistake of the script's own" in run.ranks[0].output


def test_an_environment_without_torch_ends_with_97() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from clusterd import train\n"
        "train.run(model=None, loss=None, data=[], optimizer=None, global_batch=1, steps=1)"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 97
    assert "cannot import torch" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_torch_that_is_too_old_is_one_line() -> None:
    """Some plans hang with it, and some train something else."""
    script = "import torch; torch.__version__ = '2.7.1+cu126'; from clusterd import train; train.run(**dict.fromkeys("
    script += "('model', 'loss', 'data', 'optimizer', 'global_batch', 'steps')))"
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 97
    assert "torch 2.7.1+cu126 is too old, 2.8 or newer is needed" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_rendezvous_that_nobody_comes_to_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of rank 0 is down; the search for the cause of the error must terminate."""
    monkeypatch.setattr(mesh, "RENDEZVOUS_TIMEOUT_S", 0.3)
    context = Context(
        launcher="clusterd", rank=1, world_size=2, plan=Plan(dp=2), master_addr="127.0.0.1", master_port=free_port()
    )
    with pytest.raises(Exception, match="timed out") as raised, mesh.process_groups(context, torch.device("cpu")):
        pass
    assert raised.value.__cause__ is not raised.value
    assert exits.classify_error(raised.value, where="") is None


def test_a_port_of_the_scripts_own_is_not_taken_for_the_rendezvous() -> None:
    assert exits.classify_error(OSError(98, "Address already in use"), where="") is None


def test_a_gpu_that_failed_is_told_from_a_script_that_did() -> None:
    try:
        try:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might ...")
        except RuntimeError as error:
            raise RuntimeError("in a pipeline stage") from error
    except RuntimeError as error:
        found = exits.classify_error(error, where="rank 3")
    assert isinstance(found, exits.DeviceFault)
    assert (found.exit_code, found.reason) == (93, "device-fault")
    assert str(found) == "the GPU failed, rank 3: CUDA error: uncorrectable ECC error encountered"
    assert exits.classify_error(RuntimeError("CUDA error: device-side assert triggered"), where="") is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("CUDA error: no kernel image is available for execution on the device\nCompile with ...", exits.NoTorch),
        ("CUDA error: uncorrectable ECC error encountered", RuntimeError),
        ("CUDA error: out of memory", exits.DeviceFault),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", RuntimeError),
        ("", exits.NoTorch),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_the_hosts_fault(
    monkeypatch: pytest.MonkeyPatch, error: str, expected: type[Exception]
) -> None:
    """Another host's driver or GPU may work; a full GPU is a different error."""

    def take(_: torch.device) -> None:
        raise RuntimeError(error)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(error))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", take)
    with pytest.raises(expected) as raised:
        mesh.device_of(Context(device_kind="cuda"))
    if expected is exits.NoTorch:
        assert raised.value.exit_code == 97
        assert len(str(raised.value).splitlines()) == 1


def test_a_gpu_that_takes_no_further_process_is_no_missing_torch() -> None:
    """In exclusive mode, say: the device is left out for a time, and the job starts on another."""
    found = exits.classify_error(
        RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA ..."), where="rank 0"
    )
    assert isinstance(found, exits.DeviceFault)
    assert found.exit_code == 93
