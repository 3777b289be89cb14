"""Metrics in Prometheus's text format."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.conftest import RunningCluster
from tests.hang import HANG_S

LABEL = r'[a-z_]+="(?:[^"\\\n]|\\[\\"n])*"'
SAMPLE = re.compile(rf"(clusterd_[a-z_]+)((?:\{{{LABEL}(?:,{LABEL})*\}})?) (-?[0-9.]+(?:e[+-][0-9]+)?)")


def read(text: str) -> dict[str, float]:
    """Values by name and labels; every line is a sample, or the help or type of the family that follows."""
    found: dict[str, float] = {}
    family = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split()[2]
        elif line.startswith("# TYPE "):
            assert line == f"# TYPE {family} gauge"
        else:
            sample = SAMPLE.fullmatch(line)
            assert sample is not None, line
            assert sample[1] == family
            assert sample[1] + sample[2] not in found
            found[sample[1] + sample[2]] = float(sample[3])
    return found


def test_metrics_describe_the_cluster(local_cluster: RunningCluster, tmp_path: Path) -> None:
    command = ("run", "-d", "--devices", "1", "--host", "local1", "--", "sleep", "1000")
    job = local_cluster.run(*command, cwd=tmp_path).stdout.strip()
    local_cluster.wait_for(job, lambda row: row["state"] == "running")
    local_cluster.run("host", "drain", "local0")
    found = read(local_cluster.run("metrics").stdout)
    assert found['clusterd_jobs{state="running"}'] == 1
    assert found['clusterd_jobs{state="failed"}'] == 0
    assert found['clusterd_devices{host="local1",kind="cpu",use="leased"}'] == 1
    assert found['clusterd_devices{host="local1",kind="cpu",use="free"}'] == 1
    assert found['clusterd_host_state{host="local0",state="up"}'] == 1
    assert found['clusterd_host_state{host="local0",state="lost"}'] == 0
    assert (found['clusterd_host_drained{host="local0"}'], found['clusterd_host_drained{host="local1"}']) == (1, 0)
    assert found['clusterd_memory_bytes{host="local0"}'] > 1e8


def test_measurements_go_to_standard_output(cluster: RunningCluster) -> None:
    """There was a file named - afterwards."""
    cluster.start()
    answer = cluster.run("measurements", "export", "-")
    assert answer.stdout.startswith("signature,")
    assert not (cluster.directory / "-").exists()


def test_names_are_escaped() -> None:
    from clusterd.daemon.web.metrics import labels_text

    labels = labels_text({"name": '\\\n"'})
    (found,) = read(f"# HELP clusterd_x x\n# TYPE clusterd_x gauge\nclusterd_x{labels} 1")
    assert found == r'clusterd_x{name="\\\n\""}'


def test_they_are_served_on_this_machine(local_cluster: RunningCluster) -> None:
    """The same text over HTTP; an error while the daemon is away, and again the text when it is back."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "clusterd", "metrics", "--serve", str(port)]
    serving = subprocess.Popen(command, env=local_cluster.environment, stderr=subprocess.PIPE, text=True)
    try:
        assert serving.stderr is not None
        assert f"http://127.0.0.1:{port}/metrics" in serving.stderr.readline()
        address = f"http://127.0.0.1:{port}/metrics"
        with urlopen(address) as answer:
            assert read(answer.read().decode())['clusterd_jobs{state="failed"}'] == 0
        with pytest.raises(HTTPError) as absent:
            urlopen(f"http://127.0.0.1:{port}/other")
        assert absent.value.code == 404
        absent.value.close()
        local_cluster.run("stop")
        with pytest.raises(HTTPError) as away:
            urlopen(address)
        assert away.value.code == 503
        away.value.close()
        again = subprocess.run(command, env=local_cluster.environment, capture_output=True, text=True, check=False)
        assert (again.returncode, "cannot serve on port" in again.stderr) == (1, True)
    finally:
        serving.terminate()
        serving.wait(HANG_S)
        serving.stderr.close()
