"""``clusterd run`` follows its job."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import RunningCluster
from tests.hang import HANG_S


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_job_outlives_the_command_that_watches_it(shared_cluster: RunningCluster, number: signal.Signals) -> None:
    """A session that ends is no wish that the job end; what is left running was left without a word."""
    command = [sys.executable, "-m", "clusterd", "run", "--no-snapshot", "--", "sh", "-c", "echo begun; sleep 600"]
    watching = subprocess.Popen(
        command,
        env=shared_cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # these tests may run under nohup
    )
    assert watching.stdout is not None
    assert watching.stdout.readline() == "begun\n"
    watching.send_signal(number)
    _, message = watching.communicate(timeout=HANG_S)
    job = shared_cluster.call("jobs")[0]
    assert message.splitlines()[-1] == (
        f"clusterd: ended by {number.name}; {job['name']} ({job['id']}) keeps running: clusterd cancel ends it"
    )
    assert watching.returncode == 128 + number
    assert job["state"] == "running"
    shared_cluster.run("cancel", "--wait", job["id"])


def test_a_command_may_have_modules_that_are_called_like_ours(
    shared_cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command imports its own modules, not clusterd's."""
    (tmp_path / "plans.py").write_text("print('my own plans')\n")
    # As the installed script, which does not look here.
    monkeypatch.setitem(shared_cluster.environment, "PYTHONSAFEPATH", "1")
    ran = shared_cluster.run("run", "--", "python3", "-c", "import plans", cwd=tmp_path)
    assert ran.stdout == "my own plans\n"


def test_a_repository_whose_packages_are_called_like_our_folders_trains(
    shared_cluster: RunningCluster, tmp_path: Path
) -> None:
    """Its own plans, profiling, tui and tests are imported, by the script and by a job that clusterd trains."""
    for name in ("plans", "profiling", "tui", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text('OWNER = "this repository"\n')
    (tmp_path / "train.py").write_text(OWN_PACKAGES)
    text = (
        f'kind = "elastic"\nworkdir = "{tmp_path}"\ncommand = ["python", "train.py"]\nresources = {{ devices = 2 }}\n'
    )
    job = shared_cluster.submit(f"{text}trials = false\n", "own-packages")
    row = shared_cluster.wait_for(job, lambda row: row["state"] in ("finished", "failed"))
    assert row["state"] == "finished", row["reason"]


OWN_PACKAGES = """
import plans, profiling, tests, tui
import torch
from torch.utils.data import TensorDataset
from clusterd import train

assert {m.OWNER for m in (plans, profiling, tests, tui)} == {"this repository"}
random = torch.Generator().manual_seed(1)
train.run(
    model=lambda: torch.nn.Linear(4, 2),
    loss=torch.nn.functional.cross_entropy,
    data=TensorDataset(torch.randn(32, 4, generator=random), torch.randint(2, (32,), generator=random)),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    global_batch=8,
    steps=6,
)
"""


def test_a_detached_job_is_json_and_one_string_gets_a_hint(shared_cluster: RunningCluster) -> None:
    cluster = shared_cluster
    answer = json.loads(cluster.run("run", "-d", "-o", "json", "--no-snapshot", "--", "true").stdout)
    cluster.run("wait", answer["id"])
    refused = cluster.run("run", "--", "echo $HOME && ls", check=False)
    assert refused.returncode == 2 and "sh -c 'echo $HOME && ls'" in refused.stderr


def test_waiting_input_is_not_dropped_in_silence(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    said = shared_cluster.run("run", "--no-snapshot", "--", "cat", input="hello\n")
    assert "standard input is not passed on" in said.stderr and "clusterd shell --devices 1 -- COMMAND" in said.stderr
    said = shared_cluster.run("run", "--no-snapshot", "--", "true", stdin=subprocess.DEVNULL)
    assert "standard input" not in said.stderr
