"""Real users of the machine, made for a test and removed after it, and a daemon with one host that they share."""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clusterd.agent.host import processes
from clusterd.client import Client
from clusterd.errors import ClusterError
from tests.agent.client import end_all
from tests.conftest import RunningCluster, until
from tests.ssh.openssh import OpenSshServer, make_key, needs_sshd

needs_users = [
    needs_sshd,
    pytest.mark.skipif(
        os.getuid() != 0 or shutil.which("useradd") is None, reason="makes users: needs root and useradd"
    ),
]
"""Marks of tests with several accounts."""

NAME = f"clusterd{os.getpid()}"
"""Start of the names made here: two runs at once share the machine's users."""

GROUP = f"{NAME}test"


@dataclass
class Person:
    """A user of the head node and the hosts."""

    name: str

    @property
    def home(self) -> Path:
        return Path(pwd.getpwnam(self.name).pw_dir)

    def does(self, action: Callable[[], Any]) -> Any:
        """Result of an action of this user, in a process of theirs; an error of the cluster is a text."""
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                entry = pwd.getpwnam(self.name)
                os.initgroups(self.name, entry.pw_gid)
                os.setgid(entry.pw_gid)
                os.setuid(entry.pw_uid)
                os.environ["HOME"] = entry.pw_dir
                try:
                    result = {"ok": action()}
                except (ClusterError, OSError) as error:
                    result = {"error": str(error)}
                os.write(writer, json.dumps(result, default=str).encode())
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            answer = json.loads(pipe.read() or "{}")
        assert os.waitpid(pid, 0)[1] == 0
        return answer.get("ok", answer.get("error"))

    def calls(self, socket: Path, verb: str, **args: Any) -> Any:
        def call() -> Any:
            with Client(socket) as client:
                return client.call(verb, **args)

        return self.does(call)

    def lets_in(self, key: str) -> None:
        """Add a key to the authorized ones."""
        ssh = self.home / ".ssh"
        ssh.mkdir(mode=0o700, exist_ok=True)
        with open(ssh / "authorized_keys", "a") as file:
            file.write(key + "\n")
        for path in (ssh, ssh / "authorized_keys"):
            shutil.chown(path, self.name)


@pytest.fixture(scope="module")
def people() -> Iterator[tuple[Person, Person]]:
    subprocess.run(["groupadd", "-f", GROUP], check=True)
    names = (f"{NAME}ann", f"{NAME}bob")
    for name in names:
        subprocess.run(["useradd", "-m", "-p", "*", "-s", "/bin/sh", "-G", GROUP, name], check=True)
    try:
        yield Person(names[0]), Person(names[1])
    finally:
        for name in names:
            subprocess.run(["pkill", "-KILL", "-u", name], check=False)
            subprocess.run(["userdel", "-r", "-f", name], check=False, capture_output=True)
        subprocess.run(["groupdel", GROUP], check=False)


@dataclass
class Site:
    """A daemon of the test's own user, and one host behind a real sshd."""

    cluster: RunningCluster
    socket: Path
    server: OpenSshServer

    def settings(self, text: str) -> None:
        (self.cluster.directory / "clusterd.toml").write_text(
            f'[daemon]\nssh_config = "{self.cluster.directory}/ssh_config"\nsocket_group = "{GROUP}"\n{text}'
        )


@pytest.fixture
def site(people: tuple[Person, Person]) -> Iterator[Site]:
    directory = Path(tempfile.mkdtemp(prefix="clusterd-accounts-"))
    directory.chmod(0o711)
    run = directory / "run"
    run.mkdir()
    os.chown(run, 0, grp.getgrnam(GROUP).gr_gid)
    run.chmod(0o750)
    state = directory / "state"
    state.mkdir(mode=0o700)
    server = OpenSshServer("node", directory / "node", make_key(state / "id_ed25519"))
    server.directory.mkdir(mode=0o700)
    server.start(own_keys=True)
    (state / "ssh_config").write_text(server.config(state / "known"))
    cluster = RunningCluster(state)
    cluster.environment |= {
        "CLUSTERD_CONFIG": str(state / "clusterd.toml"), "CLUSTERD_SOCKET": str(run / "clusterd.sock"),
        "HOME": str(state),
    }  # fmt: skip
    cluster.socket = run / "clusterd.sock"
    try:
        yield Site(cluster, cluster.socket, server)
    finally:
        cluster.close()
        server.stop()
        end_all(server.agent_home)
        until(lambda: not _bootstraps(directory))
        shutil.rmtree(directory, ignore_errors=True)


def _bootstraps(directory: Path) -> list[int]:
    """Kill and list processes that still start an agent in the directory."""
    everyone = (pid for pid in processes.everyone() if pid != os.getpid())
    left = [pid for pid in everyone if os.fsencode(directory) in processes.environment(pid)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def command(name: str, script: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": "command", "command": ["sh", "-c", script], "workdir": "/", **more}


def start_and_let_in(site: Site, person: Person) -> None:
    """Start a daemon that runs jobs as their owners, with one host, and let it into the person's account there."""
    site.settings('accounts = "own"\n')
    site.cluster.start()
    site.cluster.run("host", "add", "--yes", "--cpu-devices", "2", "node")
    person.lets_in(person.calls(site.socket, "login")["key"])
    assert person.calls(site.socket, "login")["hosts"] == {"node": ""}
