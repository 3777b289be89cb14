"""Sweeps: one job file, many jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterd.errors import UsageError
from clusterd.submission.sweep import parse_sweep, swept
from clusterd.types import JobSpec
from tests.conftest import RunningCluster


def test_every_combination_is_a_job(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, sys\nprint(*sys.argv[1:], os.environ['SEED'], os.environ['KEPT'])\n")
    file = tmp_path / "job.toml"
    file.write_text('name = "net"\ncommand = ["python3", "train.py", "--lr={LR}", "{other}"]\n[env]\nKEPT = "no"\n')
    sweep = ("--sweep", "LR=1e-3,3e-4", "--sweep", "SEED=1,2", "--env", "KEPT=yes")
    message = shared_cluster.run("submit", *sweep, "--dry-run", str(file)).stdout
    assert "net_LR3e-4_SEED2 would start now" in message
    answer = shared_cluster.run("submit", *sweep, "--wait", str(file))
    jobs = answer.stdout.split()
    assert len(jobs) == 4
    assert answer.stderr.count("sending") == 1, "the working directory is packed and sent once"
    assert "4 jobs are queued, net_LR1e-3_SEED1 to net_LR3e-4_SEED2" in answer.stderr
    printed = [shared_cluster.run("logs", job).stdout for job in jobs]
    assert printed == [f"--lr={lr} {{other}} {seed} yes\n" for lr in ("1e-3", "3e-4") for seed in (1, 2)]
    assert "env        KEPT=yes LR=3e-4 SEED=1" in shared_cluster.run("show", "net_LR3e-4_SEED1").stdout


def test_a_sweep_on_the_command_line(shared_cluster: RunningCluster) -> None:
    script = ("--", "sh", "-c", "exit {CODE}")
    jobs = shared_cluster.run("run", "-d", "--no-snapshot", "--sweep", "CODE=0,3", *script).stdout.split()
    assert shared_cluster.run("wait", *jobs, check=False).returncode == 3
    answer = shared_cluster.run("run", "--sweep", "CODE=0,3", *script, check=False)
    assert answer.returncode == 2
    assert "add --detach" in answer.stderr


@pytest.mark.slow
def test_a_sweep_is_whole_though_nobody_reads_on(local_cluster: RunningCluster, tmp_path: Path) -> None:
    """Regression: with ``| head -1``, two of eighty jobs were queued and no error was printed."""
    file = tmp_path / "job.toml"
    file.write_text('command = ["true"]\n')
    command = f"{sys.executable} -m clusterd submit --sweep N=1,2,3,4,5 {file}"
    environment = {**local_cluster.environment, "PYTHONPATH": str(Path(__file__).parents[2])}
    for reader, code in (("| true", 0), ("> /dev/full", 1)):
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", f"{command} {reader}"],
            env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
    assert "6, 7, 8, 9, 10 queued" in done.stderr
    assert len(json.loads(local_cluster.run("ls", "-a", "-o", "json").stdout)) == 10


@pytest.mark.slow
def test_the_first_failure_is_the_exit_code(local_cluster: RunningCluster, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('command = ["sh", "-c", "exit {CODE}"]\n')
    answer = local_cluster.run("submit", "--sweep", "CODE=0,4,3", "--wait", "-o", "json", str(file), check=False)
    assert answer.returncode == 4
    assert [row["name"] for row in json.loads(answer.stdout)] == ["job_CODE0", "job_CODE4", "job_CODE3"]


@pytest.mark.slow
def test_the_jobs_of_a_sweep_are_named_by_one_word(local_cluster: RunningCluster) -> None:
    script = ("--name", "net", "--", "sleep", "1000")
    other = local_cluster.run("run", "-d", "--no-snapshot", "--name", "other", *script[2:]).stdout.strip()
    jobs = local_cluster.run("run", "-d", "--no-snapshot", "--sweep", "LR=1,2,3", *script).stdout.split()
    listed = local_cluster.run("ls", "net_*", "-o", "json").stdout
    assert [row["id"] for row in json.loads(listed)] == jobs
    local_cluster.run("cancel", "--wait", "net_LR[12]", "net_LR1")
    assert [local_cluster.job(job)["state"] for job in jobs[:2]] == ["cancelled"] * 2
    local_cluster.run("cancel", "--wait", "net_*")
    assert [row["id"] for row in json.loads(local_cluster.run("ls", "-o", "json").stdout)] == [other]
    answer = local_cluster.run("cancel", "net_*", check=False)
    assert answer.returncode == 2
    assert "no active job of yours matches net_*" in answer.stderr
    assert "3 jobs forgotten" in local_cluster.run("forget", "net_*").stderr


@pytest.mark.parametrize(
    "given, report",
    [
        (["LR"], "write NAME=VALUE"),
        (["LR=1,,2"], "write NAME=VALUE"),
        (["1LR=1"], "write NAME=VALUE"),
        (["dp=1,2"], "choose another name"),
        (["LR=1", "LR=2"], "given twice"),
        (["LR=1,1"], "there twice"),
        (["LR=[1,2"], "']' is missing"),
        (["LR='1,2"], "is missing"),
        ([f"A={','.join(map(str, range(101)))}", f"B={','.join(map(str, range(10)))}"], "1010 jobs"),
    ],
)
def test_invalid_sweeps_are_refused(given: list[str], report: str) -> None:
    with pytest.raises(UsageError, match=report):
        parse_sweep(given)


def test_commas_within_brackets_and_quotes_belong_to_a_value() -> None:
    given = ['SHAPE=[1, 2],(3,4),{"a": [5,6]}', "NAME='a,b',c"]
    assert parse_sweep(given) == {"SHAPE": ["[1, 2]", "(3,4)", '{"a": [5,6]}'], "NAME": ["a,b", "c"]}


_VALUES = st.lists(st.text("ab/ .=0é", min_size=1, max_size=40), min_size=1, max_size=4, unique=True)


@given(st.dictionaries(st.sampled_from(["LR", "SEED", "DATA"]), _VALUES, max_size=3))
def test_jobs_of_a_sweep_have_names_of_their_own(values: dict[str, list[str]]) -> None:
    specs = swept(JobSpec(name="net", command=("train",)), values)
    names = [spec.name for spec in specs]
    assert len(set(names)) == len(names)
    assert all(
        len(name) <= 63 and name.isascii() and name.replace("_", "").replace("-", "").replace(".", "").isalnum()
        for name in names
    )
    assert len({tuple(spec.env.items()) for spec in specs}) == len(specs)
