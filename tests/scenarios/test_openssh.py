"""Training across a jump host and a host behind it, over Debian's sshd."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterd.daemon.hosts.links import REASONS_MAX
from clusterd.outside_text import LINE_LETTERS_MAX
from tests.agent.client import end_all
from tests.conftest import GPT, RunningCluster, until
from tests.hang import HANG_S
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


def test_adding_a_host_whose_login_hangs_tells_what_it_waits_for(cluster: RunningCluster, tmp_path: Path) -> None:
    server = OpenSshServer("node", tmp_path / "node", make_key(tmp_path / "id_ed25519"))
    server.start(forced="exec cat > /dev/null")  # answers nothing, and ends with the connection
    try:
        config = tmp_path / "ssh_config"
        config.write_text(server.config(tmp_path / "known_hosts"))
        settings = cluster.directory / "clusterd.toml"
        settings.write_text(f'[daemon]\nssh_config = "{config}"\n')
        cluster.environment["CLUSTERD_CONFIG"] = str(settings)
        cluster.start()
        command = [sys.executable, "-m", "clusterd", "host", "add", "--yes", "node"]
        adding = subprocess.Popen(command, env=cluster.environment, stderr=subprocess.PIPE, text=True)
        assert adding.stderr is not None
        told = next(line for line in adding.stderr if "not up yet" in line)
        assert told == "node is not up yet: bootstrapping (waits for its login shell to start Python, 90 s at most)\n"
        adding.send_signal(signal.SIGINT)
        assert (adding.wait(HANG_S), adding.stderr.close()) == (130, None)
        assert "waits for its login shell" in cluster.run("host", "show", "node").stdout
    finally:
        server.stop()


@pytest.mark.parametrize(
    "forced",
    [
        "yes",  # lines without end
        "tr '\\0' x </dev/zero",  # a line without end
        "head -c 3000000 /dev/zero | tr '\\0' x",
        "date +%N; exit 1",  # another reason each time
        "printf 'clusterd-attached {}\\n'; yes",  # a reply without its fields
    ],
)
def test_a_login_that_prints_anything_costs_one_row(cluster: RunningCluster, tmp_path: Path, forced: str) -> None:
    """Regression: each try was journaled with megabytes of output, and all of it was in everybody's history."""
    server = OpenSshServer("node", tmp_path / "node", make_key(tmp_path / "id_ed25519"))
    server.start(forced=forced)
    try:
        config = tmp_path / "ssh_config"
        config.write_text(server.config(tmp_path / "known_hosts"))
        settings = cluster.directory / "clusterd.toml"
        settings.write_text(f'[daemon]\nssh_config = "{config}"\n')
        cluster.environment["CLUSTERD_CONFIG"] = str(settings)
        cluster.start()
        refused = cluster.run("host", "add", "--yes", "node", check=False)
        assert "node is added but not up" in refused.stderr

        def has_failed_often() -> bool:
            cluster.call("host_trust", host="node", accept=[])  # dials at once
            times = re.search(r"\((\d+) times since [\d:]+\)$", cluster.call("host", host="node")["why"])
            return times is not None and int(times[1]) > REASONS_MAX

        until(has_failed_often, explain=cluster.log)
        why = cluster.call("host", host="node")["why"]
        assert why.isprintable()
        assert len(why) < LINE_LETTERS_MAX + 40
        history = cluster.call("history")
        failures = [event for event in history["events"] if event["kind"] == "HostDisconnected"]
        assert 1 <= len(failures) <= (REASONS_MAX if "date" in forced else 2)
        assert len(json.dumps(history)) < 100_000
    finally:
        server.stop()


def test_a_key_that_is_in_no_file_any_more_is_shown_before_it_is_trusted(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    """Regression: once the old line was removed, as the message said, any key was trusted without a look at it."""
    server = OpenSshServer("node", tmp_path / "node", make_key(tmp_path / "id_ed25519"))
    server.start()
    known_hosts, config, settings = (
        tmp_path / "known_hosts",
        tmp_path / "ssh_config",
        cluster.directory / "clusterd.toml",
    )
    try:
        kind_and_key = (server.directory / "host_key.pub").read_text().rsplit(" ", 1)[0]
        known_hosts.write_text(f"[127.0.0.1]:{server.port} {kind_and_key}\n")
        config.write_text(server.config(known_hosts))
        settings.write_text(f'[daemon]\nssh_config = "{config}"\n')
        cluster.environment["CLUSTERD_CONFIG"] = str(settings)
        cluster.start()
        cluster.run("host", "add", "--cpu-devices", "1", "node")
        server.stop()
        known_hosts.unlink()
        for file in ("host_key", "host_key.pub"):
            (server.directory / file).unlink()
        server.start()
        refused = cluster.run("host", "trust", "node", check=False)
        assert refused.returncode == 1
        assert "node: its key is in no known_hosts file, is ed25519 SHA256:" in refused.stderr
        assert "its new key was not accepted" in refused.stderr
        cluster.run("host", "trust", "--yes", "node")
        cluster.wait_until_up(1)
        assert cluster.run("host", "remove", "node").returncode == 0
    finally:
        server.stop()
        end_all(server.agent_home)
