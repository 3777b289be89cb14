"""Labels of hosts, and jobs that ask for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import RunningCluster


@pytest.mark.slow
def test_a_job_asks_for_labels_of_hosts(cluster: RunningCluster, tmp_path: Path) -> None:
    configuration = tmp_path / "clusterd.toml"
    configuration.write_text('[hosts.local1]\ncpu_devices = 2\nlabels = ["nvlink", "rack=a"]\n')
    cluster.environment["CLUSTERD_CONFIG"] = str(configuration)
    cluster.start(hosts=2)
    cluster.wait_until_up(2)
    rows = {row["name"]: row["labels"] for row in json.loads(cluster.run("host", "ls", "-o", "json").stdout)}
    assert rows == {"local0": [], "local1": ["nvlink", "rack=a"]}
    table = cluster.run("host", "ls").stdout.splitlines()
    assert "LABELS" in table[0]
    assert "nvlink rack=a" in table[2]
    there = ("--devices", "1", "--constraint", "nvlink", "--constraint", "rack=a", "--name")
    for name in ("one", "two"):
        job = cluster.run("run", "-d", "--no-snapshot", *there, name, "--", "sleep", "1000").stdout.strip()
        assert cluster.wait_for(job, lambda row: row["hosts"] != [])["hosts"] == ["local1"]
    file = tmp_path / "job.toml"
    file.write_text('command = ["true"]\n[resources]\ndevices = 1\nconstraint = ["nvlink"]\n')
    cluster.run("submit", "--name", "third", str(file))
    why = cluster.run("why", "third").stdout
    assert "local0 lacks the label nvlink: it has none" in why
    refused = cluster.run("run", "--constraint", "gold", "--no-snapshot", "--", "true", check=False)
    assert refused.returncode == 2
    assert "asks for hosts labelled gold; there are local1 (nvlink, rack=a)" in refused.stderr
    refused = cluster.run("run", "--gpus", "1", "--compute-capability", ">=8.0", "--", "true", check=False)
    assert refused.returncode == 2
    assert "1 GPU with compute capability >=8.0" in refused.stderr
    wrong = cluster.run("run", "--compute-capability", "sm_80", "--", "true", check=False)
    assert wrong.returncode == 2
    assert "write it as in >=8.0" in wrong.stderr
    cluster.run("edit", "third", "constraint=none")
    assert cluster.run("wait", "third").returncode == 0
