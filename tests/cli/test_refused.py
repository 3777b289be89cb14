"""Requests that a daemon refuses: one line each, nothing is accepted, the daemon stays intact."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterd.errors import ConfigError, UsageError
from clusterd.submission.job_file import read_job_file
from tests.cli.test_bad_input import refused
from tests.conftest import RunningCluster, new_cluster


@pytest.fixture(scope="module")
def started() -> Iterator[RunningCluster]:
    """One daemon for all of it."""
    with new_cluster() as made:
        made.start()
        yield made


@pytest.fixture
def cluster(started: RunningCluster) -> Iterator[RunningCluster]:
    """The same daemon after each test, with no job and no host."""
    pid = started.pid
    yield started
    assert started.pid == pid
    assert started.call("jobs", all=True) == started.call("hosts") == []


def test_a_workdir_that_would_hide_our_modules(cluster: RunningCluster, tmp_path: Path) -> None:
    """A project with a package named clusterd."""
    (tmp_path / "clusterd").mkdir()
    (tmp_path / "clusterd" / "__init__.py").touch()
    file = tmp_path / "job.toml"
    file.write_text('name = "net"\nkind = "elastic"\ncommand = ["python", "train.py"]\nresources = { devices = 1 }\n')
    assert "has a module 'clusterd'" in refused(cluster, "submit", str(file), code=2)


def test_an_unreachable_host(cluster: RunningCluster) -> None:
    """A port where nobody listens."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets it, and it refuses
        port = holder.getsockname()[1]
        message = refused(cluster, "host", "add", f"me@127.0.0.1:{port}", code=1)
    assert f"127.0.0.1:{port}" in message


@pytest.mark.parametrize("address", ["-oProxyCommand=touch /tmp/x", "a b", "me@", "host:99999", "$(reboot)"])
def test_an_address_that_is_none(cluster: RunningCluster, address: str) -> None:
    """Nothing that looks like an option, or like shell, gets further than this."""
    done = cluster.run("host", "add", "--", address, check=False)
    assert done.returncode in (1, 2)
    assert "is no host" in done.stderr


def test_hosts_and_jobs_that_are_not_there(cluster: RunningCluster) -> None:
    """The message lists those that exist."""
    assert "there is no job 'nope'" in refused(cluster, "show", "nope", code=2)
    assert "there is no host 'nope' (hosts: none yet)" in refused(cluster, "host", "drain", "nope", code=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "\udcff\udcfe"), "is no UTF-8"),
        (("host", "add", "\udcff"), "is no UTF-8"),
        (("priority", "1", "9" * 30), "beyond what fits 64 bits"),
        (("wait", "1", "--timeout", "soon"), "--timeout: 'soon' is no duration"),
        (("wait", "1", "--timeout", "nan"), "give a time of at least 0"),
        (("ls", "--state", "lost"), "unknown state; known ones are queued, starting, running"),
        (("cancel", "nope"), "there is no job 'nope'"),
        (("submit", "FILE", "--name", "a b"), "the name 'a b' must be letters"),
        (("submit", "nosuch.sh"), "clusterd: nosuch.sh: No such file or directory: give the path of a job file"),
        (("submit", "-n", "0", "--wrap", "true"), "options: --ntasks=0: it must be at least 1"),
        (("run", "--time", "nan", "--", "true"), "limits.time is nan s: it must be a time"),
        (("run", "--time", "1e400", "--", "true"), "limits.time is inf s: it must be a time"),
        (("run", "--devices", "9" * 30, "--", "true"), "beyond what fits 64 bits"),
        (("run", "--", ""), "command begins with an empty word"),
        (("run", "--name", "", "--", "true"), "the name '' must be letters"),
        (("run", "--name", ".a", "--", "true"), "the name '.a' must begin with a letter or digit"),
        (("run", "--", "cd", "a b"), """clusterd run -- sh -c 'cd '"'"'a b'"'"'' for a shell"""),
        (("run", "--", "LR=1", "python", "train.py"), "clusterd run -- sh -c 'LR=1 python train.py' for a shell"),
    ],
)
def test_arguments_that_nothing_can_be_made_of(
    cluster: RunningCluster, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    """Bytes that are no text, numbers that no clock has: refused with 2, and the daemon goes on.

    A time limit of nan ended the daemon, and every later one, for it was in the journal.
    """
    job_file = tmp_path / "job.toml"
    job_file.write_text("command = ['true']")
    assert message in refused(cluster, *[str(job_file) if word == "FILE" else word for word in arguments], code=2)


@pytest.mark.parametrize("verb", ["run", "shell"])
def test_an_option_that_there_is_not(cluster: RunningCluster, verb: str) -> None:
    """Regression: `run --gpu 1 -- python ...` queued a job named 1, since the option was taken for the command."""
    done = cluster.run(verb, "--gpu", "1", "--", "python", "-c", "print(1)", check=False)
    assert done.returncode == 2
    assert "No such option" in done.stderr and "Did you mean" in done.stderr and "--gpus" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("command = ['true', 'a\\u0000b']", "command holds a null byte"),
        ("command = ['true']\n[env]\n'A=B' = 'x'", "'A=B' is no name of a variable"),
        ("command = ['true']\n[resources]\nplan = ['dp=2']", "plan is ['dp=2']; write it as \"dp=2,tp=2\""),
        ("command = ['true']\n[limits]\ntime = ['1h']", "[limits]: time is ['1h']; it must be a time"),
        ("command = ['true']\n[limits]\nretries = -1", "limits.retries is -1; it must be 0 to 1000"),
        ("command = ['true']\n[limits]\ngrace = -1", "limits.grace is -1 s: it must be a time"),
        ("command = ['true']\ntarget_loss = nan", "target_loss is nan"),
        ("command = ['true']\ntarget_loss = 1" + "0" * 400, "target_loss is a number of 401 digits"),
        ("command = ['true']\nworkdir = 'a\\u0000b'".replace("'a\\u0000b'", '"a\\u0000b"'), "workdir is 'a\\x00b'"),
        ("command = ['true']\nworkdir = 'loop'", "loop"),
        ("command = ['true']\n[resources]\nmemory = '" + "9" * 400 + "'", "[resources]: memory: cannot convert"),
        ("command = ['true']\n[secrets]\nKEY = 'file:binary'", "KEY: 'binary' cannot be read as text"),
    ],
)
def test_job_files_that_no_process_could_be_made_of(
    cluster: RunningCluster, tmp_path: Path, text: str, message: str
) -> None:
    """Null bytes, loops of links, numbers of 400 digits."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    file = tmp_path / "job.toml"
    file.write_text(text.replace("['true', 'a\\u0000b']", '["true", "a\\u0000b"]'))
    assert message in refused(cluster, "submit", str(file), code=2, cwd=tmp_path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"resources": {"hosts": ["\x1b[2Jgone"]}}, "resources.hosts is '\\x1b[2Jgone'"),
        ({"tenant": "a\nb"}, "tenant is 'a\\nb'"),
        ({"workdir": "/tmp/\x07"}, "workdir is '/tmp/\\x07'"),
        ({"env": {"A\tB": "1"}}, "env is 'A\\tB'"),
        ({"secrets": ["A"]}, "the secret A holds a null byte"),
    ],
)
def test_what_would_end_up_on_other_peoples_terminals(
    cluster: RunningCluster, more: dict[str, Any], message: str
) -> None:
    """By a client of one's own: ours has checked some of it already."""
    spec = {"name": "odd", "command": ["true"], "user": "", **more}
    secrets = {"A": "x\0y"} if "secrets" in more else {}
    with pytest.raises(UsageError) as refused:
        cluster.call("submit", spec=spec, secrets=secrets)
    assert message in str(refused.value)


def test_a_key_of_a_section_is_sent_there(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('command = ["true"]\nmin_devices = 2\n')
    with pytest.raises(ConfigError, match=r"unknown key 'min_devices'; it belongs into \[resources\]"):
        read_job_file(file)
