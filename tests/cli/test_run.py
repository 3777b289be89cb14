"""``clusterd run`` follows its job."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from clusterd.cli import submit
from clusterd.cli.main import cli
from clusterd.submission.submit import hand_over
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
        stdin=subprocess.DEVNULL,
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


def newest(cluster: RunningCluster) -> dict[str, Any]:
    return max(cluster.call("jobs", all=True), key=lambda row: int(row["id"]))


def test_run_is_a_part_of_a_pipe(shared_cluster: RunningCluster) -> None:
    """Input arrives whole, binary and more than pipes hold; stdout and stderr come out apart, and the exit code."""
    given = random.Random(1).randbytes(3 << 20)
    script = "import sys; data = sys.stdin.buffer.read(); print(len(data), file=sys.stderr)"
    script += "; sys.stdout.buffer.write(data); sys.exit(7)"
    command = [sys.executable, "-m", "clusterd", "run", "--no-snapshot", "--", "python3", "-c", script]
    done = subprocess.run(
        command, env=shared_cluster.environment, input=given, capture_output=True, timeout=HANG_S, check=False
    )
    assert done.stdout == given
    assert str(len(given)) in done.stderr.decode().splitlines()
    assert done.returncode == 7
    job = newest(shared_cluster)["id"]
    with shared_cluster.client() as client:
        again = list(client.stream("logs", job=job, rank=0, apart=True))  # as fetched after its end
    assert b"".join(piece["data"] for piece in again if not piece.get("stderr")) == given


def test_a_command_need_not_read_its_input(shared_cluster: RunningCluster) -> None:
    some = shared_cluster.run("run", "--no-snapshot", "--", "head", "-c", "5", input="hello world" * 100_000)
    assert some.stdout == "hello"
    assert shared_cluster.run("run", "--no-snapshot", "--", "true", input="x" * 1_000_000).returncode == 0
    assert shared_cluster.run("run", "--no-snapshot", "--", "cat", stdin=subprocess.DEVNULL).stdout == ""


def watched(cluster: RunningCluster, *argv: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "clusterd", "run", "--no-snapshot", "--", *argv]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=cluster.environment, text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def test_input_goes_on_after_a_restart_of_the_daemon(shared_cluster: RunningCluster) -> None:
    running = watched(shared_cluster, "sh", "-c", "head -n 1; cat")
    running.stdin.write("one\n")
    running.stdin.flush()
    assert running.stdout.readline() == "one\n"
    shared_cluster.run("stop")
    shared_cluster.run("start")
    assert running.communicate("two\n", timeout=HANG_S)[0] == "two\n"
    assert running.returncode == 0


def test_input_that_is_cut_off_is_not_taken_for_all_of_it(shared_cluster: RunningCluster) -> None:
    running = watched(shared_cluster, "sh", "-c", "head -n 1; cat > /dev/null; echo done")
    running.stdin.write("one\n")
    running.stdin.flush()
    assert running.stdout.readline() == "one\n"
    running.terminate()
    running.wait(HANG_S)
    assert "before the end of the input" in running.communicate(timeout=HANG_S)[1]
    job = newest(shared_cluster)
    assert (job["state"], "its input was cut off" in job["reason"]) == ("cancelled", True)


def test_a_second_attempt_does_not_start_without_its_input(shared_cluster: RunningCluster) -> None:
    running = watched(shared_cluster, "sh", "-c", "head -n 1; cat > /dev/null; echo done")
    running.stdin.write("one\n")
    running.stdin.flush()
    assert running.stdout.readline() == "one\n"
    job = newest(shared_cluster)["id"]
    shared_cluster.run("requeue", job)
    out, said = running.communicate("two\n", timeout=HANG_S)
    assert (out, running.returncode) == ("", 1)
    assert "its input" in said
    again = shared_cluster.run("rerun", job).stdout.strip()
    assert shared_cluster.run("wait", again).returncode == 0, "nobody attends to it, and it has no input"


def test_signals_reach_the_command(shared_cluster: RunningCluster) -> None:
    running = watched(
        shared_cluster, "sh", "-c", "trap 'echo saved; exit 3' USR1; echo ready; while :; do sleep 1; done"
    )
    assert running.stdout.readline() == "ready\n"
    running.send_signal(signal.SIGUSR1)
    assert running.communicate(timeout=HANG_S)[0].splitlines()[0] in ("saved", "User defined signal 1")
    assert running.returncode == 3


def test_tasks_have_their_places_and_their_lines_a_prefix(shared_cluster: RunningCluster) -> None:
    show = "echo $RANK.$LOCAL_RANK of $WORLD_SIZE; echo at $MASTER_ADDR >&2"
    done = shared_cluster.run(
        "run", "--no-snapshot", "-n", "3", "--cpus", "1", "--", "sh", "-c", show, stdin=subprocess.DEVNULL
    )
    assert sorted(done.stdout.splitlines()) == [f"{rank}: {rank}.{rank} of 3" for rank in range(3)]
    assert {f"{rank}: at 127.0.0.1" for rank in range(3)} <= set(done.stderr.splitlines())
    one_fails = "test $RANK = 1 && exit 5; sleep 600"
    failed = shared_cluster.run(
        "run", "--no-snapshot", "-n", "3", "--cpus", "1", "--", "sh", "-c", one_fails, check=False
    )
    assert failed.returncode == 5


@pytest.mark.parametrize("detached", [False, True])
def test_an_interrupt_during_the_submission_leaves_no_unknown_job(
    shared_cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, detached: bool
) -> None:
    """Regression: Ctrl-C while the daemon answered ended `run` without a word, and its job ran on."""

    def interrupted(*arguments: Any) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGINT)
        return hand_over(*arguments)

    for name, value in shared_cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(submit, "hand_over", interrupted)
    words = ["run", "--no-snapshot", "--name", "asked", *(["-d"] if detached else []), "--", "sleep", "1000"]
    done = CliRunner().invoke(cli, words)
    job = shared_cluster.job("asked")
    if detached:
        assert done.stdout == f"{job['id']}\n"
    else:
        assert f"cancelling asked ({job['id']})" in done.output
        assert job["state"] == "cancelled"
