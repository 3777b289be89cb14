"""Errors of a GPU from its driver to the user: the list of hosts, their checks, metrics, and the scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.host.fake_nvml import fake_driver, needs_gcc, set_state
from tests.conftest import RunningCluster

pytestmark = [needs_gcc, pytest.mark.slow]


def test_a_gpu_with_ecc_errors_is_left_out_and_its_errors_are_shown(cluster: RunningCluster, tmp_path: Path) -> None:
    fake_driver(tmp_path, "libnvidia-ml.so.1", used_gib=0)
    set_state(tmp_path, used0=0, ecc0=3, corrected0=9)
    cluster.environment["LD_LIBRARY_PATH"] = str(tmp_path)
    cluster.start(1)
    checked = cluster.run("host", "check", check=False).stdout
    assert "local0:gpu0 is not given to jobs: 3 uncorrectable ECC errors; reset or replace it" in checked
    assert "gpu1 is not given" not in checked
    assert "3 uncorrectable ECC errors" in cluster.run("host", "show", "local0").stdout
    metrics = cluster.run("metrics").stdout
    assert 'clusterd_gpu_ecc_errors{host="local0",gpu="GPU-1",corrected="false"} 3' in metrics
    assert 'clusterd_gpu_ecc_errors{host="local0",gpu="GPU-1",corrected="true"} 9' in metrics
    command = ("--", "sh", "-c", "echo on $CUDA_VISIBLE_DEVICES")
    assert "on 1" in cluster.run("run", "--gpus", "1", *command, cwd=tmp_path).stdout
    cluster.run("host", "undrain", "local0")
    assert "free" in cluster.run("host", "show", "local0").stdout
    assert "on 0,1" in cluster.run("run", "--gpus", "2", *command, cwd=tmp_path).stdout
