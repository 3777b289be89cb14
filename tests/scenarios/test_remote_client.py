"""Commands on a laptop, for a daemon that is reached by the user's own ssh."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import RunningCluster
from tests.hang import HANG_S
from tests.ssh.openssh import OpenSshServer, make_key, needs_sshd, run

pytestmark = [pytest.mark.slow, needs_sshd]


@pytest.fixture
def laptop(local_cluster: RunningCluster, tmp_path: Path) -> Iterator[RunningCluster]:
    """A user with a home, an SSH configuration and nothing else, beside the head node and a jump host before it."""
    key = make_key(tmp_path / "id_ed25519")
    servers = [OpenSshServer(name, tmp_path / name, key) for name in ("bastion", "head")]
    known = tmp_path / "known_hosts"
    for server in servers:
        server.start()
        public = (server.directory / "host_key.pub").read_text().split()
        with open(known, "a") as file:
            file.write(f"[127.0.0.1]:{server.port} {public[0]} {public[1]}\n")
    bastion, head = servers
    config = tmp_path / "ssh_config"
    config.write_text(bastion.config(known) + head.config(known, ProxyJump="bastion"))
    wrapper = tmp_path / "bin" / "ssh"
    wrapper.parent.mkdir()
    real = run("which", "ssh").strip()
    wrapper.write_text(f'#!/bin/sh\nexec {real} -F {config} "$@"\n')
    wrapper.chmod(0o755)
    far = RunningCluster(tmp_path)
    for name in ("CLUSTERD_STATE_DIR", "CLUSTERD_SOCKET", "CLUSTERD_CONFIG"):
        far.environment.pop(name, None)
    runtime = local_cluster.directory / "laptop"  # a short path, as that of a socket must be
    runtime.mkdir(mode=0o700)
    far.environment |= {
        "CLUSTERD_HOST": f"ssh://head{local_cluster.socket}", "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(runtime),
        "PATH": f"{wrapper.parent}:{os.environ['PATH']}",
    }  # fmt: skip
    yield far
    for pid in _forwarders(runtime):
        os.kill(pid, signal.SIGTERM)
    for server in reversed(servers):
        server.stop()


def _forwarders(runtime: Path) -> list[int]:
    found = subprocess.run(["pgrep", "-f", f"L {runtime}"], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def test_a_laptop_has_every_command_over_ssh(laptop: RunningCluster, local_cluster: RunningCluster) -> None:
    runtime = Path(laptop.environment["XDG_RUNTIME_DIR"])
    assert f"pid {local_cluster.pid}" in laptop.run("status").stdout
    work = laptop.directory / "work"
    work.mkdir()
    (work / "hello.py").write_text("print(input())\nopen('result', 'w').write('42')\n")
    done = laptop.run("run", "--name", "far", "--", sys.executable, "-c", "print(6 * 7)", cwd=work)
    assert done.stdout == "42\n"
    assert "far" in laptop.run("ls", "--all").stdout
    assert len(_forwarders(runtime)) == 1, "one ssh serves all commands"
    # A connection that broke is made anew by the next command.
    os.kill(_forwarders(runtime)[0], signal.SIGKILL)
    assert "far" in laptop.run("ls", "--all").stdout
    refused = laptop.run("stop", check=False)
    assert (refused.returncode, "run clusterd stop there" in refused.stderr) == (2, True)


def test_ssh_reaches_the_host_of_a_job_through_the_head(
    laptop: RunningCluster, local_cluster: RunningCluster, tmp_path: Path
) -> None:
    """As VS Code does: OpenSSH with the printed block; only the head node can reach the host's sshd."""
    host = OpenSshServer("local0", tmp_path / "host", tmp_path / "id_ed25519")
    host.start()
    try:
        job = local_cluster.run("run", "-d", "--no-snapshot", "--name", "serves", "--", "sleep", "600").stdout.strip()
        local_cluster.wait_for(job, lambda row: row["state"] == "running")
        block = laptop.run("ssh-config", "--port", str(host.port), "serves").stdout
        public = (host.directory / "host_key.pub").read_text().split()
        (tmp_path / "known_of_host").write_text(f"local0 {public[0]} {public[1]}\n")
        config = tmp_path / "config_of_job"
        config.write_text(
            f"{block}    IdentityFile {tmp_path}/id_ed25519\n    UserKnownHostsFile {tmp_path}/known_of_host\n"
        )
        data = os.urandom(300_000)
        done = subprocess.run(
            [run("which", "ssh").strip(), "-F", config, "-o", "BatchMode=yes", "clusterd-serves", "cat"],
            env=laptop.environment, input=data, capture_output=True, timeout=90, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout == data) == (0, True), done.stderr
    finally:
        host.stop()


def test_a_machine_behind_a_firewall_joins_over_ssh(laptop: RunningCluster, local_cluster: RunningCluster) -> None:
    """No server listens there: its own connection, through the jump host, is the only one."""
    local_cluster.run("host", "drain", "local0")
    local_cluster.run("host", "drain", "local1")
    state = local_cluster.directory / "local" / "laptop"  # the fixture ends what runs below "local"
    head = laptop.environment["CLUSTERD_HOST"]
    with open(laptop.directory / "output", "w") as output:
        joined = subprocess.Popen(
            [sys.executable, "-m", "clusterd", "agent", "--join", head, "--name", "behind"],
            env={**laptop.environment, "CLUSTERD_STATE_DIR": str(state)}, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        local_cluster.wait_until_up(3)
        done = local_cluster.run("run", "--no-snapshot", "--", sys.executable, "-c", "print(6 * 7)")
        assert done.stdout == "42\n"
        joined.send_signal(signal.SIGINT)
        assert joined.wait(HANG_S) == 0, (laptop.directory / "output").read_text()
    finally:
        joined.kill()
        joined.wait()
    assert {row["name"] for row in local_cluster.call("hosts")} == {"local0", "local1"}


@pytest.mark.parametrize(
    ("host", "code", "message"),
    [
        ("head", 2, "write ssh://HEAD"),
        ("ssh://nowhere.invalid/x.sock", 69, "`ssh ssh://nowhere.invalid` failed"),
        ("ssh://head", 69, "no daemon of yours has a socket there: name it, as in ssh://head/PATH/OF.sock"),
        ("ssh://head/nothing.sock", 69, "the daemon at ssh://head/nothing.sock"),
    ],
)
def test_a_foreign_socket_is_reported_in_one_line(laptop: RunningCluster, host: str, code: int, message: str) -> None:
    laptop.environment["CLUSTERD_HOST"] = host
    done = laptop.run("ls", check=False)
    assert done.returncode == code
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
