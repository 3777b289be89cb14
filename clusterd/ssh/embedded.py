"""Hosts inside this machine, each behind a real SSH server on loopback: for the demo, tests and laptops.

Every command runs with a home of its own, so several embedded hosts behave as several machines, reached by the same
code as remote ones. Their agents and ranks outlive the daemon as remote ones do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import asyncssh

from clusterd.process_attributes import inherited_umask
from clusterd.ssh.hostkeys import made_key
from clusterd.ssh.resolve import Route
from clusterd.trusted_paths import private_directory

_CHUNK = 1 << 16


class EmbeddedHost:
    """One embedded host in `directory`, which holds its key, its home and its agent across restarts.

    Args:
        cores: cores that its commands may use; none: all.
    """

    def __init__(self, name: str, directory: Path, cores: Sequence[int] = ()) -> None:
        self.name = name
        self._cores = tuple(cores)
        self.directory = directory.absolute()
        self._server: asyncssh.SSHAcceptor | None = None
        self._host_key: asyncssh.SSHKey | None = None
        self._running: set[asyncio.subprocess.Process] = set()
        self._handlers: set[asyncio.Task[None]] = set()
        self._connections: set[asyncssh.SSHServerConnection] = set()

    @property
    def agent_home(self) -> Path:
        """Directory of the host's agent."""
        return self.directory / "agent"

    @property
    def route(self) -> Route:
        """The route to the host with its key; valid while the host is started."""
        assert self._server is not None and self._host_key is not None, (
            "an embedded host has a route once it is started"
        )
        return Route(
            name=self.name,
            host="127.0.0.1",
            port=self._server.get_port(),
            user="clusterd",
            identity_files=(str(self.directory / "client_key"),),
            identities_only=True,
            trusted_keys=(self._host_key.export_public_key().decode().strip(),),
        )

    async def start(self) -> None:
        """Listen on a free port of 127.0.0.1."""
        for place in (self.directory, self.directory / "home", self.agent_home):
            private_directory(str(place))
        self._host_key = made_key(self.directory / "host_key")
        client_key = made_key(self.directory / "client_key")
        self._server = await asyncssh.listen(
            "127.0.0.1",
            0,
            server_host_keys=[self._host_key],
            authorized_client_keys=asyncssh.import_authorized_keys(client_key.export_public_key().decode()),
            process_factory=self._run,
            acceptor=self._connections.add,
            encoding=None,
            config=None,
            allow_pty=False,
            agent_forwarding=False,
            x11_forwarding=False,
            password_auth=False,
            gss_auth=False,
            gss_kex=False,
        )

    async def stop(self) -> None:
        """Disconnect and stop listening; its agent and ranks go on."""
        self.hang_up()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None
        for process in list(self._running):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if self._handlers:
            await asyncio.wait(self._handlers)

    def hang_up(self) -> None:
        """Cut all connections, like a broken network."""
        for connection in self._connections:
            connection.abort()
        self._connections.clear()

    def environment(self) -> dict[str, str]:
        """Environment of its commands: this machine's, with a home and XDG directories of its own."""
        home = self.directory / "home"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERD_", "SSH_", "XDG_"))}
        return {
            **inherited,
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / ".cache"),
            "XDG_CONFIG_HOME": str(home / ".config"),
            "XDG_DATA_HOME": str(home / ".local/share"),
            "XDG_STATE_HOME": str(home / ".local/state"),
            "CLUSTERD_AGENT_HOME": str(self.agent_home),
            "CLUSTERD_AGENT_LOGIN": "inherited",  # from the prompt that the daemon was started at
            "PATH": os.pathsep.join([str(self._python_directory()), os.environ.get("PATH", os.defpath)]),
        }

    def _python_directory(self) -> Path:
        """A directory whose `python3` is this interpreter, so that the host's Python is the daemon's."""
        beside = Path(sys.executable).parent
        if (beside / "python3").exists():
            return beside
        place = self.directory / "bin"
        place.mkdir(exist_ok=True)
        (place / "python3").unlink(missing_ok=True)
        (place / "python3").symlink_to(sys.executable)
        return place

    async def _run(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        if process.command is None:
            process.stderr.write(b"this host runs commands only\n")
            process.exit(1)
            return
        child = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            process.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self.environment(),
            cwd=self.directory / "home",
            umask=inherited_umask(),
        )
        if self._cores:
            # Its instructions come over stdin, fed below, so it has started nothing yet.
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(child.pid, self._cores)
        self._running.add(child)
        if (handler := asyncio.current_task()) is not None:
            self._handlers.add(handler)
            handler.add_done_callback(self._handlers.discard)
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        feeding = asyncio.create_task(_feed(process.stdin, child.stdin))
        try:
            await asyncio.gather(_drain(child.stdout, process.stdout), _drain(child.stderr, process.stderr))
            code = await child.wait()
            if code < 0:
                process.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))
            else:
                process.exit(code)
        finally:
            feeding.cancel()
            if child.returncode is None:
                # The connection is gone. A bridge exits when its stdin closes; other commands are terminated.
                child.stdin.close()
                with contextlib.suppress(ProcessLookupError):
                    child.terminate()
                await child.wait()
            self._running.discard(child)


def shared_out(cores: Sequence[int], hosts: int, devices: int) -> list[tuple[int, ...]]:
    """Divide this machine's cores evenly among its hosts, if there is one core per device.

    Threads of ranks that share cores wait for each other, and steps take far longer. With fewer cores than devices, all
    hosts use all cores, and each device computes with one thread.
    """
    each = len(cores) // max(hosts, 1)
    if each < max(devices, 1):
        return [()] * hosts
    return [tuple(cores[number * each : (number + 1) * each]) for number in range(hosts)]


async def _feed(source: asyncssh.SSHReader[bytes], sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(_CHUNK):
            sink.write(data)
            await sink.drain()
    except (OSError, asyncssh.Error):
        pass
    finally:
        sink.close()


async def _drain(source: asyncio.StreamReader, sink: asyncssh.SSHWriter[bytes]) -> None:
    while data := await source.read(_CHUNK):
        try:
            sink.write(data)
            await sink.drain()
        except (OSError, asyncssh.Error):
            return
