"""A slow answer is told apart from a stopped daemon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import RunningCluster


def impatiently(cluster: RunningCluster, *arguments: str, still_there_s: float) -> subprocess.Popen[str]:
    """The command, which remarks upon silence sooner than others do."""
    code = (
        "import clusterd.client\n"
        f"clusterd.client.SILENCE_S, clusterd.client.STILL_THERE_S = 0.2, {still_there_s}\n"
        "from clusterd.__main__ import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(
        command, env=cluster.environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_an_estimate_says_that_its_model_is_being_learned(local_cluster: RunningCluster, tmp_path: Path) -> None:
    """Regression: the message said that the daemon might be stopped, while a host inspected the job's script."""
    answer = tmp_path / "told"
    (tmp_path / "train.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(answer)!r}):\n    time.sleep(0.02)\n"
    )
    file = tmp_path / "job.toml"
    file.write_text(
        f'name = "slow"\nkind = "elastic"\npython = "{sys.executable}"\ncommand = ["python", "train.py"]\n'
        "resources = { devices = 2 }\n"
    )
    with impatiently(local_cluster, "estimate", str(file), still_there_s=30.0) as estimate:
        assert estimate.stderr is not None
        lines = iter(estimate.stderr)
        while (line := next(lines)).startswith("sending "):
            pass
        answer.touch()
        message = line + estimate.stderr.read()
    assert "inspecting the model of slow: its script runs on a host" in message
    assert "is it stopped" not in message
    assert estimate.returncode == 1, "the script ended without a word about its model"


def test_a_daemon_that_is_stopped_is_remarked_upon(cluster: RunningCluster) -> None:
    """The command also completes once the daemon continues."""
    cluster.start()
    pid = cluster.pid
    os.kill(pid, signal.SIGSTOP)
    with impatiently(cluster, "ls", still_there_s=0.2) as asking:
        assert asking.stderr is not None
        message = asking.stderr.readline()
        os.kill(pid, signal.SIGCONT)
    assert "has not answered yet; is it stopped, or very busy?" in message
    assert asking.returncode == 0
