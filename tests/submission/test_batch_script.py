"""Batch scripts: what their #SBATCH and #CLUSTERD lines ask for, and refusals by line and option."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterd.errors import ConfigError
from clusterd.submission.batch_script import is_script, read_batch_script
from clusterd.types import HostId
from tests.conftest import RunningCluster

COMMON = """#!/bin/bash
#SBATCH --job-name=finetune     # a comment
#SBATCH -N 2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:a100:4
#SBATCH -c 8
#SBATCH --mem=64G
#SBATCH --time=1-12:30:00
#SBATCH --partition=long
#SBATCH --output=%x-%j.out
#SBATCH --mail-type=END

module_dir=$HOME
#SBATCH --nodes=9
srun torchrun train.py
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def script(text: str, name: str = "train.sh") -> Path:
    file = Path.cwd() / name
    file.write_text(text)
    return file


def test_a_script_of_a_common_shape_says_what_it_needs() -> None:
    request, ignored = read_batch_script(script(COMMON))
    spec = request.spec
    assert (spec.name, spec.time_limit_s, spec.workdir) == ("finetune", 131400.0, str(Path.cwd()))
    wanted = spec.resources
    assert (wanted.nodes, wanted.devices, wanted.per_node, wanted.kind) == (2, 8, 4, "cuda")
    assert (wanted.device_name, wanted.cpus, wanted.memory_bytes) == ("a100", 16, 128 << 30)
    assert spec.command[-1] == "train.sh"
    assert ignored == ["--partition", "--output", "--mail-type"]


@pytest.mark.parametrize(("line", "seconds"), [("30", 1800.0), ("5:30", 330.0), ("2:00:00", 7200.0), ("1-6", 108000.0)])
def test_times_are_read_as_slurm_reads_them(line: str, seconds: float) -> None:
    request, _ = read_batch_script(script(f"#!/bin/bash\n#SBATCH -t {line}\ntrue\n"))
    assert request.spec.time_limit_s == seconds


def test_own_lines_take_every_key_of_a_job_file() -> None:
    text = "#!/bin/bash\n#SBATCH --gpus=a100:2\n#CLUSTERD priority = 5\n#CLUSTERD resources.hosts = ['a']\ntrue\n"
    spec = read_batch_script(script(text))[0].spec
    assert (spec.priority, spec.resources.devices, spec.resources.device_name) == (5, 2, "a100")
    assert spec.resources.hosts == (HostId("a"),)


def test_constraints_are_labels_that_all_hold() -> None:
    text = "#!/bin/bash\n#SBATCH -C nvlink&rack=a\ntrue\n"
    assert read_batch_script(script(text))[0].spec.resources.constraint == ("nvlink", "rack=a")
    with pytest.raises(ConfigError, match="joined by & or a comma"):
        read_batch_script(script("#!/bin/bash\n#SBATCH --constraint=a|b\ntrue\n"))


def test_dependencies_keep_their_conditions() -> None:
    text = "#!/bin/bash\n#SBATCH -d afterok:1:2,afterany:3,afternotok:4\ntrue\n"
    assert read_batch_script(script(text))[0].spec.after == ("1:ok", "2:ok", "3:any", "4:failed")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("#SBATCH --hint=none", "line 2: --hint of Slurm is not understood here"),
        ("#SBATCH --ntasks=4", "4 tasks on 1 nodes: one task per node is started"),
        ("#SBATCH --gres=shard:2", "line 2: --gres=shard:2: only gpu is known"),
        ("#SBATCH --time=soon", "line 2: --time=soon: write it as in 30"),
        ("#SBATCH --mem=lots", "line 2: --mem=lots: write it as in 64G"),
        ("#SBATCH --nodes=2-4", "line 2: --nodes=2-4: it must be a whole number"),
        ("#SBATCH --nodes=2", "--nodes=2 without GPUs"),
        ("#SBATCH -y gpu3", "line 2: -y is not understood"),
        ("#SBATCH --job-name='a", "line 2: No closing quotation"),
        ("#CLUSTERD priorty = 1", "did you mean 'priority'?"),
        ("#CLUSTERD priority: 1", "#CLUSTERD lines"),
    ],
)
def test_lines_without_a_meaning_are_refused_by_name(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_batch_script(script(f"#!/bin/bash\n{line}\ntrue\n"))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value).strip()


def test_all_lines_that_are_refused_are_named_at_once() -> None:
    text = "#!/bin/bash\n#SBATCH --hint=none\n#SBATCH --mem=lots\n#SBATCH -W\ntrue\n"
    with pytest.raises(ConfigError) as refused:
        read_batch_script(script(text))
    for part in (
        "line 2: --hint",
        "line 3: --mem=lots",
        "line 4: --wait of Slurm is not understood here: clusterd submit",
    ):
        assert part in str(refused.value)


def test_common_options_of_memory_gpus_and_time_have_their_meaning() -> None:
    text = "#!/bin/bash\n#SBATCH --time=0 --nice=50 -c 4 --mem-per-cpu=2G --gpus-per-task=a100:2\ntrue\n"
    spec = read_batch_script(script(text))[0].spec
    assert (spec.time_limit_s, spec.priority, spec.resources.devices) == (None, -50, 2)
    assert spec.resources.memory_bytes == 8 << 30
    text = "#!/bin/bash\n#SBATCH --gpus=2 --mem-per-gpu=3G\ntrue\n"
    assert read_batch_script(script(text))[0].spec.resources.memory_bytes == 6 << 30


def test_a_job_file_is_no_script(tmp_path: Path) -> None:
    assert not is_script(script('command = ["true"]\n', "job.toml"))
    assert is_script(script("#!/bin/sh\ntrue\n"))
    assert not is_script(tmp_path / "absent")


def test_an_sbatch_script_runs_unchanged(local_cluster: RunningCluster) -> None:
    """With Slurm's variables, srun, and its exit code."""
    text = (
        "#!/bin/bash\n#SBATCH --job-name=unchanged\n#SBATCH --time=10\n#SBATCH --cpus-per-task=1\n"
        'echo "job $SLURM_JOB_NAME on $(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"\n'
        'srun --unbuffered -K1 echo "task $SLURM_PROCID of $SLURM_NTASKS"\nexit 5\n'
    )
    directory = local_cluster.directory / "scripts"
    directory.mkdir()
    (directory / "run.sh").write_text(text)
    done = local_cluster.run("submit", "--wait", "run.sh", cwd=directory, check=False)
    job = done.stdout.split()[0]
    log = local_cluster.run("logs", job).stdout
    assert "job unchanged on localhost" in log and "task 0 of 1" in log
    assert done.returncode == 5
