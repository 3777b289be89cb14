"""Training across a jump host and a host behind it, over Debian's sshd."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.client import end_all
from tests.conftest import GPT, RunningCluster
from tests.ssh.openssh import OpenSshServer, make_key, needs_sshd

pytestmark = [pytest.mark.slow, needs_sshd]


@pytest.fixture
def cluster_over_openssh(cluster: RunningCluster, tmp_path: Path) -> Iterator[RunningCluster]:
    """A daemon whose SSH configuration has two hosts, the second behind the first."""
    key = make_key(tmp_path / "id_ed25519")
    known_hosts = tmp_path / "known_hosts"
    servers = [OpenSshServer(name, tmp_path / name, key) for name in ("bastion", "inner")]
    for server in servers:
        server.start()
    config = tmp_path / "ssh_config"
    jump = {"bastion": {}, "inner": {"ProxyJump": "bastion"}}
    config.write_text("".join(server.config(known_hosts, **jump[server.name]) for server in servers))
    settings = cluster.directory / "clusterd.toml"
    settings.write_text(f'[daemon]\nssh_config = "{config}"\n')
    cluster.environment["CLUSTERD_CONFIG"] = str(settings)
    cluster.start()
    yield cluster
    for server in reversed(servers):
        server.stop()
        end_all(server.agent_home)
    assert not known_hosts.exists(), "the user's known_hosts is never edited"


def test_two_hosts_are_added_through_each_other_and_train_together(cluster_over_openssh: RunningCluster) -> None:
    """Fingerprints are shown once; the ranks connect across both hosts; a cut connection costs no step."""
    cluster = cluster_over_openssh
    refused = cluster.run("host", "add", "inner", check=False)
    assert refused.returncode == 1
    assert "bastion is not in any known_hosts file. Its key is ed25519 SHA256:" in refused.stderr
    message = cluster.run("host", "add", "--yes", "--cpu-devices", "1", "bastion", "inner").stderr
    assert message.count("SHA256:") == 2
    assert "inner is up: 1 x CPU device" in message
    file = cluster.directory / "across.toml"
    file.write_text(
        f'name = "across"\nkind = "elastic"\nworkdir = "{GPT}"\npython = "{sys.executable}"\n'
        'command = ["python", "train.py", "--steps", "40"]\nresources = { devices = 2, plan = { dp = 2 } }\n'
    )
    job = cluster.run("submit", str(file)).stdout.strip()
    cluster.wait_for(job, lambda row: row["step"] >= 3)
    cluster.kill()  # its connections close too
    cluster.start()
    row = cluster.wait_for(job, lambda row: row["state"] == "finished")
    assert (row["attempt"], row["step"]) == (1, 40)
    assert sorted(row["hosts"]) == ["bastion", "inner"]
    steps = [json.loads(line)["step"] for line in cluster.call("steps", job=job)["data"].splitlines()]
    assert steps == list(range(1, 41))
    assert cluster.run("host", "remove", "inner", "bastion").returncode == 0
