"""SSH connections along a route: every hop's key checked, every failure one line that says what to do."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncssh

from clusterd.errors import HostError
from clusterd.ssh.hostkeys import Changed, HostKeys, Known, Unknown
from clusterd.ssh.resolve import Route, fill

KEEPALIVE_S = 15.0
KEEPALIVES_MISSED_MAX = 3
AUTHENTICATION_S = 20.0
"""Added to the connect timeout, as SSH agents may ask their user and servers a directory service."""

DIALS_PER_JUMP = 3
"""Dials under way through, or to, one jump host."""

KEYBOARD = "keyboard-interactive"
"""Way of authentication by which a server asks what only a person can answer."""

Tunnel = asyncssh.SSHClientConnection


class Dialer:
    """Opens SSH connections, a few at a time, and shares the connections to jump hosts.

    sshd drops new connections at random when ten have not authenticated yet (MaxStartups 10:30:100), so a start with
    fifty hosts must not dial all at once, nor open fifty connections to one jump host.

    Args:
        at_once: dials under way in this process.
    """

    def __init__(self, keys: HostKeys, *, at_once: int = 8) -> None:
        self.keys = keys
        self._slots = asyncio.Semaphore(at_once)
        self._jump_slots: dict[tuple[str, str, int], asyncio.Semaphore] = {}
        self._jumps: dict[Route, _Jump] = {}

    @asynccontextmanager
    async def connect(self, route: Route) -> AsyncIterator[Tunnel]:
        """Open a connection to the last hop of `route`; connections to jump hosts are shared.

        Raises:
            HostKeyUnknown, HostKeyChanged: of any hop.
            HostError: any other obstacle, in one line.
        """
        async with AsyncExitStack() as stack:
            tunnel = await stack.enter_async_context(self._through(route))
            connection = await self._dial(route, tunnel)
            try:
                yield connection
            finally:
                await close(connection)

    async def inspect(self, route: Route) -> Known | Unknown | Changed:
        """Compare the host's key with the known ones; every hop before it must be known already.

        Raises:
            HostKeyUnknown, HostKeyChanged: of a hop before.
            HostError: the host cannot be reached.
        """
        async with self._through(route) as tunnel, self._dial_slot(route):
            return await inspect(route, tunnel, self.keys)

    @asynccontextmanager
    async def _through(self, route: Route) -> AsyncIterator[Tunnel | None]:
        if route.via is None:
            yield None
            return
        jump = self._jumps.setdefault(route.via, _Jump())
        jump.users += 1
        try:
            async with jump.lock:
                if jump.connection is None or jump.connection.is_closed():
                    await jump.stack.aclose()
                    jump.stack = AsyncExitStack()
                    before = await jump.stack.enter_async_context(self._through(route.via))
                    jump.connection = await self._dial(route.via, before)
                    jump.stack.push_async_callback(close, jump.connection)
            yield jump.connection
        finally:
            jump.users -= 1
            if jump.users == 0 and self._jumps.get(route.via) is jump:
                del self._jumps[route.via]
                await jump.stack.aclose()

    async def _dial(self, route: Route, tunnel: Tunnel | None) -> Tunnel:
        async with self._dial_slot(route):
            return await dial(route, tunnel, self.keys)

    @asynccontextmanager
    async def _dial_slot(self, route: Route) -> AsyncIterator[None]:
        hop = route.via or route
        place = (hop.user, hop.host, hop.port)
        async with self._jump_slots.setdefault(place, asyncio.Semaphore(DIALS_PER_JUMP)), self._slots:
            yield


@dataclass
class _Jump:
    users: int = 0
    connection: Tunnel | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)


class _Watcher(asyncssh.SSHClient):
    """Records the host's key where no known_hosts file vouches for it, and why the connection ended."""

    def __init__(self) -> None:
        self.shown: asyncssh.SSHKey | None = None
        self.is_asked = False  # what only a person could answer

    def kbdint_auth_requested(self) -> None:
        """Note that the server asks; nobody answers."""
        self.is_asked = True

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        """Never accept a key: known keys were passed with the connection."""
        self.shown = key
        return False


async def dial(route: Route, tunnel: Tunnel | None, keys: HostKeys) -> Tunnel:
    """Connect to `route`, through `tunnel` if it has hops before. Errors as of `Dialer.connect`."""
    watcher = _Watcher()
    credentials = await load_credentials(route)
    try:
        return await asyncssh.connect(
            route.host,
            route.port,
            **_options(route, tunnel, watcher),
            username=route.user,
            known_hosts=lambda _host, _addr, _port: keys.for_asyncssh(route),
            client_keys=credentials.pairs or None,
            client_certs=[path for path in route.certificate_files if os.path.exists(path)],
            connect_timeout=route.connect_timeout_s + AUTHENTICATION_S,
            login_timeout=0,
            keepalive_interval=KEEPALIVE_S,
            keepalive_count_max=KEEPALIVES_MISSED_MAX,
        )
    except (OSError, asyncssh.Error, ValueError) as error:
        raise await _explain(error, route, tunnel, keys, watcher, credentials) from error
    finally:
        credentials.close()


async def inspect(route: Route, tunnel: Tunnel | None, keys: HostKeys) -> Known | Unknown | Changed:
    """Compare the key that the host presents now with the known ones. Errors as of `Dialer.inspect`."""
    if any(entry.marker == "cert-authority" for entry in keys.entries(route)):
        # A handshake shows the host's certificate; authentication is not tried.
        try:
            connection = await dial(route, tunnel, keys)
            await close(connection)
            return Known()
        except HostError as error:
            if isinstance(error.__cause__, asyncssh.PermissionDenied):
                return Known()
    return await _judge_shown_key(route, tunnel, keys)


async def _judge_shown_key(route: Route, tunnel: Tunnel | None, keys: HostKeys) -> Known | Unknown | Changed:
    """Compare the key without looking at certificates."""
    try:
        key = await asyncio.wait_for(
            asyncssh.get_server_host_key(
                route.host, route.port, **_tunnel_options(route, tunnel), config=None, server_host_key_algs="default"
            ),
            route.connect_timeout_s,  # only the key is requested
        )
    except (OSError, asyncssh.Error) as error:
        raise HostError(f"{_place(route)}: {_why(error, route, route.connect_timeout_s)}") from error
    if key is None:
        raise HostError(f"{_place(route)}: it showed no host key")
    return keys.judge(route, key)


def _options(route: Route, tunnel: Tunnel | None, watcher: _Watcher) -> dict[str, Any]:
    return {
        **_tunnel_options(route, tunnel),
        "config": None,  # the route holds the user's settings already
        "client_factory": lambda: watcher,
        "host_key_alias": route.host_key_alias,
        "agent_path": None,  # its keys are loaded already
        "agent_forwarding": False,
        "password_auth": False,
        "host_based_auth": False,
        "gss_kex": False,
        "x509_trusted_certs": None,
        "x509_trusted_cert_paths": [],
        "compression_algs": ["none"],
    }


def _tunnel_options(route: Route, tunnel: Tunnel | None) -> dict[str, Any]:
    if tunnel is not None:
        return {"tunnel": tunnel}
    return {"proxy_command": proxy_argv(route)} if route.proxy_command else {}


def proxy_argv(route: Route) -> list[str]:
    """The ProxyCommand as an argv. Shell syntax in it needs a shell, whose arguments are host and port."""
    command = route.proxy_command or ""
    values = {"h": route.host, "p": str(route.port), "r": route.user, "n": route.name}
    if not any(mark in command for mark in "|&;<>()$`\n*?~"):
        return [fill(part, values) for part in shlex.split(command)]
    script = fill(command, {"h": '"$1"', "p": '"$2"', "r": '"$3"', "n": '"$4"'})
    return ["/bin/sh", "-c", script, "proxy", *values.values()]


@dataclass
class Credentials:
    """Keys offered to a host, and the keys left out with the reason."""

    pairs: list[Any]
    tried: list[str]
    skipped: list[str]
    agent: Any = None

    def close(self) -> None:
        """Let go of the agent's connection."""
        if self.agent is not None:
            self.agent.close()


async def load_credentials(route: Route) -> Credentials:
    """Load keys of the SSH agent, then of files, in the order of the route; never raises.

    What cannot be used is in `skipped`. A server accepts six attempts by default, and an SSH agent may hold more keys:
    those that the route names come first, as in OpenSSH, and no key is offered twice.
    """
    found = Credentials([], [], [])
    files = [
        path for path in dict.fromkeys(route.identity_files) if os.path.exists(path) or os.path.exists(f"{path}.pub")
    ]
    if route.identity_agent:
        try:
            found.agent = await asyncssh.connect_agent(route.identity_agent)
            named = _public_blobs(files)
            pairs = await found.agent.get_keys(named if route.identities_only else None)
            places = {blob: place for place, blob in enumerate(named)}
            found.pairs += sorted(pairs, key=lambda pair: places.get(pair.public_data, len(places)))
            found.tried.append(f"{len(pairs)} keys of the SSH agent")
        except (OSError, ValueError, asyncssh.Error) as error:
            found.skipped.append(f"the SSH agent at {route.identity_agent}: {error}")
    for path in files:
        offered = {pair.public_data for pair in found.pairs}
        try:
            if pairs := [pair for pair in asyncssh.load_keypairs([path]) if pair.public_data not in offered]:
                found.pairs += pairs
                found.tried.append(path)
        except (OSError, ValueError, asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
            if offered.intersection(_public_blobs([path])):
                continue  # the agent has it
            locked = "assphrase" in str(error)  # asyncssh has no error of its own for it
            found.skipped.append(f"{path} (needs a passphrase: ssh-add {path})" if locked else f"{path} ({error})")
    return found


def _public_blobs(files: list[str]) -> list[bytes]:
    blobs = []
    for path in files:
        for candidate in (f"{path}.pub", path):
            try:
                blobs.append(asyncssh.read_public_key(candidate).public_data)
                break
            except (OSError, ValueError, asyncssh.KeyImportError):
                continue
    return blobs


async def close(connection: Tunnel) -> None:
    """Close the connection to the SSH agent."""
    connection.close()
    try:
        await asyncio.wait_for(connection.wait_closed(), 2.0)
    except (TimeoutError, OSError, asyncssh.Error):
        connection.abort()


async def _explain(
    error: Exception, route: Route, tunnel: Tunnel | None, keys: HostKeys, watcher: _Watcher, credentials: Credentials
) -> HostError:
    """Describe an error in one line: what happened, where, what to do."""
    if isinstance(error, asyncssh.HostKeyNotVerifiable) and watcher.shown is not None:
        verdict = keys.judge(route, watcher.shown)
        if not isinstance(verdict, Known):
            return verdict.error()
    if isinstance(error, (asyncssh.HostKeyNotVerifiable, asyncssh.KeyExchangeFailed)):
        # Only known types of key were asked for, so a new type looks like no common algorithm; or the key is revoked.
        try:
            verdict = await _judge_shown_key(route, tunnel, keys)
        except HostError:
            verdict = Known()
        if not isinstance(verdict, Known):
            return verdict.error()
    if isinstance(error, asyncssh.PermissionDenied):
        tried = ", ".join(credentials.tried) or "no key at all"
        skipped = f"; not usable: {'; '.join(credentials.skipped)}" if credentials.skipped else ""
        usual = f"Make `{route.command}` work without a password, for example with ssh-copy-id"
        remedy = route.remedy or usual
        if watcher.is_asked and KEYBOARD not in await _first_methods(route, tunnel):
            # It did not say so before it had the key.
            why = f"takes a key of {route.user} and then asks for a second factor, which nobody here can answer"
            exempt = "sshd_config there can exempt this machine (Match Address ..., AuthenticationMethods publickey)"
            return HostError(f"{_place(route)} {why}: {exempt}, or the host dials in: clusterd agent --join")
        return HostError(f"{_place(route)} does not let {route.user} in: tried {tried}{skipped}. {remedy}")
    return HostError(f"{_place(route)}: {_why(error, route, route.connect_timeout_s + AUTHENTICATION_S)}")


async def _first_methods(route: Route, tunnel: Tunnel | None) -> Sequence[str]:
    """Ways of authentication that the server names before any was tried."""
    to = _tunnel_options(route, tunnel)
    try:
        return await asyncio.wait_for(
            asyncssh.get_server_auth_methods(route.host, route.port, route.user, config=None, **to), AUTHENTICATION_S
        )
    except (OSError, TimeoutError, asyncssh.Error):
        return (KEYBOARD,)  # not known: as if it had


def _place(route: Route) -> str:
    return f"{route} (through {route.via})" if route.via else str(route)


def _why(error: BaseException, route: Route, waited_s: float) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name {route.host!r} cannot be resolved; correct the address, or HostName in your SSH configuration"
    if isinstance(error, TimeoutError):
        return f"no answer within {waited_s:.3g} s; is it switched on, and does `{route.command}` work?"
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens on port {route.port}; is sshd running there?"
    if isinstance(error, asyncssh.ChannelOpenError):
        return f"the jump host cannot reach {route.host}:{route.port}: {error.reason}"
    if isinstance(error, FileNotFoundError) and route.proxy_command:
        return f"its ProxyCommand cannot be run: {error.strerror}: {error.filename}"
    if isinstance(error, (asyncssh.DisconnectError, ConnectionResetError)):
        reason = getattr(error, "reason", "") or "no reason given"
        return f"the connection was closed before it was ready ({reason}); sshd's log there knows more"
    if isinstance(error, OSError):
        return f"cannot be reached: {error.strerror or error}"
    return str(error)
