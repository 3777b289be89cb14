"""SSH servers for tests: changing keys, jump hosts, and commands with prepared output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncssh

from clusterd.ssh.resolve import Route


class _Access(asyncssh.SSHServer):
    """Lets `user` in by key, and jump to where it likes."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def connection_made(self, connection: asyncssh.SSHServerConnection) -> None:
        self._server.connections.append(connection)

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        self._server.jumps.append((dest_host, dest_port))
        return True


class Server:
    """One server, with keys in `directory`."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.connections: list[asyncssh.SSHServerConnection] = []
        self.jumps: list[tuple[str, int]] = []
        self.commands: list[str] = []
        self.host_key = asyncssh.generate_private_key("ssh-ed25519")
        self.client_key = directory / "client_key"
        directory.mkdir()
        key = asyncssh.generate_private_key("ssh-ed25519")
        key.write_private_key(str(self.client_key))
        self._authorized = key.export_public_key().decode()
        self._acceptor: asyncssh.SSHAcceptor | None = None

    @property
    def port(self) -> int:
        assert self._acceptor is not None
        return self._acceptor.get_port()

    async def start(
        self,
        reply: Callable[[str], bytes] = lambda _command: b"",
        authorized_keys: str | None = None,
        port: int = 0,
        **more: Any,
    ) -> None:
        async def answer(process: asyncssh.SSHServerProcess[bytes]) -> None:
            self.commands.append(process.command or "")
            process.stdout.write(reply(process.command or ""))
            process.exit(0)

        options: dict[str, Any] = {
            "server_host_keys": [self.host_key],
            "authorized_client_keys": asyncssh.import_authorized_keys(authorized_keys or self._authorized),
        }
        self._acceptor = await asyncssh.listen(
            "127.0.0.1",
            port,
            **{**options, **more},
            server_factory=lambda: _Access(self),
            process_factory=answer,
            encoding=None,
            config=None,
            gss_auth=False,
            gss_kex=False,
        )

    async def stop(self) -> None:
        for connection in self.connections:
            connection.abort()
        if self._acceptor is not None:
            self._acceptor.close()
            await self._acceptor.wait_closed()

    async def reinstall(self) -> None:
        """Replace the host key, as a new installation of the same machine does."""
        port = self.port
        await self.stop()
        self.host_key = asyncssh.generate_private_key("ssh-ed25519")
        await self.start(port=port)

    def route(self, **more: Any) -> Route:
        given: dict[str, Any] = {
            "name": self.name,
            "host": "127.0.0.1",
            "port": self.port,
            "user": "user",
            "identity_files": (str(self.client_key),),
            "identities_only": True,
            "connect_timeout_s": 5.0,
        }
        return Route(**{**given, **more})
