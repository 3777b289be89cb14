"""Embedded hosts, and the resources that ``clusterd start`` gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.host.fake_nvml import fake_driver, needs_gcc, set_state
from tests.conftest import RunningCluster


def offered(cluster: RunningCluster) -> dict[str, int]:
    return {row["name"]: len(row["devices"]) for row in cluster.call("hosts")}


@pytest.mark.slow
def test_hosts_of_an_earlier_start_get_the_devices_that_are_asked_for(cluster: RunningCluster) -> None:
    """They kept what they had, and nothing was said of it."""
    cluster.start(hosts=2, devices=1)
    cluster.run("stop")
    message = cluster.run("start", "--local", "1", "--devices", "3").stderr
    assert "local0: 3 CPU devices\n" in message
    assert "local1: 1 CPU devices as before, because it is beyond the number given with --local" in message
    assert offered(cluster) == {"local0": 3, "local1": 1}
    cluster.run("stop")
    cluster.run("start", "--local", "2")  # without a word about devices nothing changes
    assert offered(cluster) == {"local0": 3, "local1": 1}


@pytest.mark.slow
def test_a_host_that_runs_something_keeps_its_devices_and_says_so(cluster: RunningCluster) -> None:
    cluster.start(hosts=1, devices=2)
    job = cluster.run("run", "-d", "--devices", "2", "--name", "busy", "--", "sleep", "1000").stdout.strip()
    cluster.wait_for(job, lambda row: row["state"] == "running")
    cluster.run("stop")
    message = cluster.run("start", "--local", "1", "--devices", "1").stderr
    assert "local0: 2 CPU devices as before, because it runs busy: start again when it is idle" in message
    assert cluster.job(job)["state"] == "running"


def test_devices_of_no_hosts_are_refused(cluster: RunningCluster) -> None:
    """They were ignored."""
    refused = cluster.run("start", "--devices", "3", check=False)
    assert refused.returncode == 2
    assert "give their number with --local N" in refused.stderr


@needs_gcc
def test_gpus_of_this_machine_are_counted_apart(cluster: RunningCluster, tmp_path: Path) -> None:
    fake_driver(tmp_path, "libnvidia-ml.so.1", used_gib=0)
    set_state(tmp_path, used0=0)
    cluster.environment["LD_LIBRARY_PATH"] = str(tmp_path)
    assert "local0: 2 GPUs, 3 CPU devices\n" in cluster.run("start", "--local", "1", "--devices", "3").stderr
