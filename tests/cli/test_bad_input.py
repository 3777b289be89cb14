"""Every mistake is one line that says what, where and what to do, with its exit code; nothing accepted is lost."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import GPT, RunningCluster


def refused(cluster: RunningCluster, *arguments: str, code: int, **options: object) -> str:
    """What the command says when it refuses: one line."""
    done = cluster.run(*arguments, check=False, **options)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("sending ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("comand = ['true']", "unknown key 'comand'; did you mean 'command'?"),
        ("command = ['true']\n[resources]\ngpu = 1", "[resources]: unknown key 'gpu'; did you mean 'gpus'?"),
        ("command = 'true'", "command is 'true'; it must be a list"),
        ("command = ['true']\npriority = 'high'", "priority is 'high'; it must be a whole number"),
        ("command = ['true']\npriority = true", "priority is True; it must be a whole number"),
        ("command = ['true']\nkind = 'elastik'", "it must be one of command, checkpointable, elastic"),
        ("command = []", "command is empty"),
        ("name = 'a b'\ncommand = ['true']", "the name 'a b' must be letters"),
        (
            "command = ['true']\n[limits]\ntime = 'soon'",
            "time: 'soon' is no duration; write it as in 90s, 12h or 1h30m",
        ),
        ("command = ['true']\n[resources]\nmemory = '16 potatoes'", "memory: '16 potatoes' is no size"),
        (
            "command = ['true']\n[resources]\nplan = { dp = 0 }",
            "plan: dp is 0; it must be a whole number of at least 1",
        ),
        ("command = ['true']\n[resources]\nplan = { np = 2 }", "plan: a plan has no field 'np'"),
        ("command = ['true']\n[resources]\ndevices = 2\nplan = { dp = 4 }", "has 4 ranks, resources ask for 2 devices"),
        ("command = ['true']\n[secrets]\nKEY = 'hunter2'", "KEY: write env:VARIABLE or file:PATH"),
        ("command = ['true']\n[secrets]\nKEY = 'env:NOT_SET_HERE'", "the environment variable NOT_SET_HERE is not set"),
        ("command = [", "Invalid value"),
    ],
)
def test_job_files(cluster: RunningCluster, text: str, said: str) -> None:
    """Refused before a daemon is asked, or by it; the file is named where it is at fault."""
    file = cluster.directory / "job.toml"
    file.write_text(text)
    if said.startswith(("command is empty", "has 4 ranks", "is not carried")):
        cluster.start()
    assert said in refused(cluster, "submit", str(file), code=2)


def test_without_a_daemon(cluster: RunningCluster) -> None:
    """69, and how to get one."""
    assert "clusterd start" in refused(cluster, "ls", code=69)


def test_a_second_daemon(cluster: RunningCluster) -> None:
    """One per state directory."""
    cluster.start()
    said = refused(cluster, "start", code=1)
    assert f"a daemon (pid {cluster.pid}) already serves {cluster.directory}" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[daemon]\npolicie = 'default'", "[daemon]: unknown key 'policie'; did you mean 'policy'?"),
        ("[tenants.vision]\nquota = 'many'", "[tenants.vision]: quota is 'many'; it must be a number of devices"),
        ("[tenants.vision]\nshare = 0", "[tenants.vision]: share is 0; it must be a number above 0"),
    ],
)
def test_a_configuration_that_cannot_be(cluster: RunningCluster, text: str, said: str) -> None:
    """Named with file, table, and what would be right."""
    file = cluster.directory / "clusterd.toml"
    file.write_text(text)
    assert refused(cluster, "start", "--config", str(file), code=2).endswith(f"{file}: {said}")


def test_a_workdir_that_is_too_large_names_what_is_large(cluster: RunningCluster) -> None:
    """A checkpoint lies beside the script."""
    config = cluster.directory / "clusterd.toml"
    config.write_text("[daemon]\nworkdir_max = '1MiB'\n")
    work = cluster.directory / "work"
    work.mkdir()
    with (work / "model.ckpt").open("wb") as file:
        file.truncate(3 << 20)
    cluster.run("start", "--config", str(config))
    said = refused(cluster, "run", "--", "true", code=2, cwd=work)
    assert "the limit is 1.0 MiB; largest: model.ckpt (3.0 MiB)" in said
    assert ".clusterdignore" in said


def test_a_workdir_that_would_hide_our_modules(cluster: RunningCluster) -> None:
    """A project with a package named plans."""
    work = cluster.directory / "work"
    (work / "plans").mkdir(parents=True)
    (work / "plans" / "__init__.py").touch()
    cluster.start()
    assert "has a module 'plans'" in refused(cluster, "run", "--", "true", code=2, cwd=work)


def test_an_unreachable_host(cluster: RunningCluster) -> None:
    """A port where nobody listens."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets it, and it refuses
        port = holder.getsockname()[1]
        cluster.start()
        said = refused(cluster, "host", "add", f"me@127.0.0.1:{port}", code=1)
    assert f"127.0.0.1:{port}" in said
    assert cluster.call("hosts") == []


@pytest.mark.parametrize("address", ["-oProxyCommand=touch /tmp/x", "a b", "me@", "host:99999", "$(reboot)"])
def test_an_address_that_is_none(cluster: RunningCluster, address: str) -> None:
    """Nothing that looks like an option, or like shell, gets further than this."""
    cluster.start()
    done = cluster.run("host", "add", "--", address, check=False)
    assert done.returncode in (1, 2)
    assert "is no host" in done.stderr


def test_hosts_and_jobs_that_are_not_there(cluster: RunningCluster) -> None:
    """With what there is."""
    cluster.start()
    assert "there is no job 'nope'" in refused(cluster, "show", "nope", code=2)
    assert "there is no host 'nope' (hosts: none yet)" in refused(cluster, "host", "drain", "nope", code=2)


def test_a_plan_that_cannot_be_and_a_host_without_torch(local_cluster: RunningCluster, tmp_path: Path) -> None:
    """Both end the job with the reason, before any device is taken."""
    text = 'kind = "elastic"\ncommand = ["python", "train.py"]\nresources = {{ devices = {0}, plan = {{ {1} }} }}'
    wrong = local_cluster.submit(text.format(3, "dp = 3"), "odd")
    row = local_cluster.wait_for(wrong, lambda row: row["state"] == "failed")
    assert "a global batch of 16 cannot be cut into 3 equal shares" in row["reason"] or "asks for 3" in row["reason"]
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    file = local_cluster.directory / "bare.toml"
    file.write_text(f'name = "bare"\nworkdir = "{GPT}"\npython = "{bare}"\n' + text.format(2, "dp = 2"))
    job = local_cluster.run("submit", str(file)).stdout.strip()
    row = local_cluster.wait_for(job, lambda row: row["state"] == "failed")
    assert "torch" in row["reason"]
    assert str(bare) in row["reason"]
    assert row["devices"] == []
