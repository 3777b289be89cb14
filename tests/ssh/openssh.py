"""OpenSSH's own server, started for a test on a loopback port with its own keys and configuration."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.agent.client import wait_until
from tests.hang import HANG_S

SSHD = shutil.which("sshd") or next((p for p in ("/usr/sbin/sshd", "/usr/local/sbin/sshd") if os.path.exists(p)), None)

needs_sshd = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None,
    reason="needs OpenSSH's sshd, ssh and ssh-keygen: apt-get install openssh-server openssh-client",
)


def make_key(path: Path, *, passphrase: str = "") -> Path:
    """A key pair, as ssh-keygen makes it."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", path, "-C", "test"], check=True)
    return path


def run(*command: str | Path, **env: str) -> str:
    """Output of a program, which must succeed."""
    environment = {**os.environ, **env}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=HANG_S).stdout


@contextlib.contextmanager
def ssh_agent(path: Path, *keys: Path) -> Iterator[None]:
    """An agent that listens on `path` and holds `keys`."""
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    try:
        wait_until(path.exists, "ssh-agent to listen")
        for key in keys:
            run("ssh-add", "-q", key, SSH_AUTH_SOCK=str(path))
        yield
    finally:
        agent.terminate()
        agent.wait(10)


@dataclass
class OpenSshServer:
    """One sshd: the user who runs the test gets in with `client_key`, to a host with directories of its own."""

    name: str
    directory: Path
    client_key: Path
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def agent_home(self) -> Path:
        """Of agents of no cluster; each cluster's is below it."""
        return self.directory / "state/clusterd/agent" / socket.gethostname()

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def start(self, *, own_keys: bool = False, forced: str = "") -> None:
        """Listen on a free port of 127.0.0.1.

        Args:
            own_keys: users other than the test's have their own authorized keys, home and directories.
            forced: command that the authorized keys run, whatever is asked for.
        """
        assert SSHD is not None
        self.directory.mkdir(parents=True, exist_ok=True)
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where sshd drops its privileges to
        if not (self.directory / "host_key").exists():
            make_key(self.directory / "host_key")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", self.port))
            self.port = probe.getsockname()[1]
        config = self.directory / "sshd_config"
        keys = ".ssh/authorized_keys" if own_keys else f"{self.client_key}.pub"
        if forced:
            keys = str(self.directory / "authorized_keys")
            Path(keys).write_text(f'command="{forced}" {Path(f"{self.client_key}.pub").read_text()}')
        config.write_text(
            f"ListenAddress 127.0.0.1\nPort {self.port}\nHostKey {self.directory}/host_key\n"
            f"AuthorizedKeysFile {keys}\nPidFile none\nUsePAM no\nStrictModes no\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n"
            "LogLevel VERBOSE\nSubsystem sftp internal-sftp\n"
        )
        (self.directory / "home").mkdir(exist_ok=True)  # profiles of whoever runs the tests are no part of them
        own = (
            f"SetEnv HOME={self.directory}/home XDG_STATE_HOME={self.directory}/state "
            f"XDG_CACHE_HOME={self.directory}/cache\n"
        )
        user = pwd.getpwuid(os.getuid()).pw_name
        only = f"Match User {user}\nAuthorizedKeysFile {self.client_key}.pub\n" if own_keys else ""
        with open(config, "a") as file:
            file.write(only + own)
        with open(self.directory / "log", "wb") as log:
            self.process = subprocess.Popen([SSHD, "-D", "-e", "-f", config], stdin=subprocess.DEVNULL, stderr=log)
        wait_until(lambda: "Server listening" in self.log, f"sshd {self.name} to listen")

    def stop(self) -> None:
        """End the listener and the connections that it serves."""
        if self.process is None:
            return
        children = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, check=False
        )
        self.process.terminate()
        self.process.wait(10)
        for pid in map(int, children.stdout.split()):
            try:
                os.kill(pid, 15)
            except ProcessLookupError:
                continue
        self.process = None

    def config(self, known_hosts: Path, **more: str) -> str:
        """The part of an ssh_config that names this server."""
        settings = {
            "HostName": "127.0.0.1",
            "Port": str(self.port),
            "IdentityFile": str(self.client_key),
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": str(known_hosts),
            "GlobalKnownHostsFile": "none",
            **more,
        }
        return f"Host {self.name}\n" + "".join(f"    {key} {value}\n" for key, value in settings.items())
