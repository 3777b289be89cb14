"""Connections: every hop's key is checked, and every obstacle is one line with a remedy."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from clusterd.errors import HostError, HostKeyChanged, HostKeyUnknown
from clusterd.ssh.connection import Dialer
from clusterd.ssh.hostkeys import Changed, HostKeys, Known, Unknown
from clusterd.ssh.resolve import Route
from tests.ssh.servers import Server

pytestmark = pytest.mark.anyio

Serve = Callable[..., Awaitable[Server]]


def public(server: Server) -> asyncssh.SSHKey:
    return server.host_key.convert_to_public()


async def run_command(dialer: Dialer, route: Route) -> str:
    async with dialer.connect(route) as connection:
        return str((await connection.run("hello")).stdout)


async def refusal(dialer: Dialer, route: Route) -> str:
    with pytest.raises(HostError) as refused:
        await run_command(dialer, route)
    assert "\n" not in str(refused.value)
    return str(refused.value)


async def test_an_unknown_host_is_inspected_accepted_and_reached(serve: Serve, dialer: Dialer, keys: HostKeys) -> None:
    server = await serve("gpu01", reply=lambda _: b"hi")
    with pytest.raises(HostKeyUnknown, match=re.escape(public(server).get_fingerprint())):
        await run_command(dialer, server.route())
    verdict = await dialer.inspect(server.route())
    assert isinstance(verdict, Unknown)
    assert verdict.fingerprint == public(server).get_fingerprint()
    keys.accept(server.route(), verdict.key)
    assert isinstance(await dialer.inspect(server.route()), Known)
    assert await run_command(dialer, server.route()) == "hi"


async def test_a_changed_key_is_refused_before_anything_is_sent(serve: Serve, dialer: Dialer, keys: HostKeys) -> None:
    server = await serve("gpu01")
    keys.accept(server.route(), public(server))
    await server.reinstall()
    with pytest.raises(HostKeyChanged, match="clusterd host trust gpu01"):
        await run_command(dialer, server.route())
    assert server.commands == []
    verdict = await dialer.inspect(server.route())
    assert isinstance(verdict, Changed)
    keys.trust(server.route(), verdict.key)
    await run_command(dialer, server.route())


async def test_a_key_of_another_type_than_the_known_one_is_a_changed_key(
    serve: Serve, dialer: Dialer, keys: HostKeys
) -> None:
    server = await serve("gpu01")
    keys.accept(server.route(), asyncssh.generate_private_key("ecdsa-sha2-nistp256").convert_to_public())
    with pytest.raises(HostKeyChanged):
        await run_command(dialer, server.route())


async def test_a_revoked_key_is_refused(serve: Serve, dialer: Dialer, tmp_path: Path) -> None:
    server = await serve("gpu01")
    theirs = tmp_path / "theirs"
    line = " ".join(public(server).export_public_key().decode().split()[:2])
    theirs.write_text(f"[127.0.0.1]:{server.port} {line}\n@revoked * {line}\n")
    with pytest.raises(HostKeyChanged, match=f"is revoked by {theirs}:2"):
        await run_command(dialer, server.route(user_known_hosts=(str(theirs),)))


async def test_a_host_certificate_is_enough(serve: Serve, dialer: Dialer, tmp_path: Path) -> None:
    """A lab that signs its hosts' keys has one line in everybody's known_hosts."""
    authority = asyncssh.generate_private_key("ssh-ed25519")
    host_key = asyncssh.generate_private_key("ssh-ed25519")
    certificate = authority.generate_host_certificate(host_key, "gpu01", principals=["127.0.0.1"])
    server = await serve("gpu01", reply=lambda _: b"hi", server_host_keys=[(host_key, certificate)])
    theirs = tmp_path / "theirs"
    theirs.write_text(f"@cert-authority [127.0.0.1]:* {authority.export_public_key().decode()}")
    route = server.route(user_known_hosts=(str(theirs),))
    assert isinstance(await dialer.inspect(route), Known)
    assert await run_command(dialer, route) == "hi"


async def test_a_user_certificate_lets_in(serve: Serve, dialer: Dialer, keys: HostKeys, tmp_path: Path) -> None:
    authority = asyncssh.generate_private_key("ssh-ed25519")
    mine = asyncssh.generate_private_key("ssh-ed25519")
    mine.write_private_key(str(tmp_path / "mine"))
    certificate = authority.generate_user_certificate(mine, "me", principals=["user"])
    certificate.write_certificate(str(tmp_path / "issued.pub"))
    trusted = f"cert-authority {authority.export_public_key().decode()}"
    server = await serve("gpu01", reply=lambda _: b"hi", authorized_keys=trusted)
    keys.accept(server.route(), public(server))
    route = server.route(identity_files=(str(tmp_path / "mine"),))
    assert "does not let user in" in await refusal(dialer, route)
    route = server.route(identity_files=(str(tmp_path / "mine"),), certificate_files=(str(tmp_path / "issued.pub"),))
    assert await run_command(dialer, route) == "hi"


async def test_being_kept_out_says_what_was_tried(serve: Serve, dialer: Dialer, keys: HostKeys, tmp_path: Path) -> None:
    server = await serve("gpu01")
    keys.accept(server.route(), public(server))
    wrong, locked = tmp_path / "wrong", tmp_path / "locked"
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(wrong))
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(locked), "pkcs8-pem", passphrase="secret")
    message = await refusal(dialer, server.route(identity_files=(str(wrong), str(locked), "/no/such/key")))
    assert (
        f"does not let user in: tried {wrong}; not usable: {locked} (needs a passphrase: ssh-add {locked})" in message
    )
    assert message.endswith("Make `ssh gpu01` work without a password, for example with ssh-copy-id")
    assert "tried no key at all" in await refusal(dialer, server.route(identity_files=()))
    with_port = replace(server.route(identity_files=()), name=f"me@gpu01:{server.port}")
    assert f"Make `ssh -p {server.port} me@gpu01` work" in await refusal(dialer, with_port), "ssh takes no HOST:PORT"


async def test_a_host_behind_a_jump_host_is_reached_through_it(serve: Serve, dialer: Dialer, keys: HostKeys) -> None:
    bastion, inner = await serve("bastion"), await serve("gpu01", reply=lambda _: b"inside")
    route = inner.route(via=bastion.route())
    keys.accept(inner.route(), public(inner))
    with pytest.raises(HostKeyUnknown, match="clusterd host add bastion"):
        await run_command(dialer, route)
    keys.accept(bastion.route(), public(bastion))
    assert await run_command(dialer, route) == "inside"
    assert bastion.jumps == [("127.0.0.1", inner.port)]


async def test_a_changed_key_of_the_inner_host_is_seen_through_the_jump(
    serve: Serve, dialer: Dialer, keys: HostKeys
) -> None:
    bastion, inner = await serve("bastion"), await serve("gpu01")
    keys.accept(bastion.route(), public(bastion))
    assert isinstance(await dialer.inspect(inner.route(via=bastion.route())), Unknown)
    keys.accept(inner.route(), public(inner))
    await inner.reinstall()
    with pytest.raises(HostKeyChanged, match="gpu01 refused"):
        await run_command(dialer, inner.route(via=bastion.route()))


async def test_many_hosts_share_one_connection_to_their_jump_host(serve: Serve, dialer: Dialer, keys: HostKeys) -> None:
    bastion, inner = await serve("bastion"), await serve("gpu01", reply=lambda _: b"inside")
    for server in (bastion, inner):
        keys.accept(server.route(), public(server))
    route = inner.route(via=bastion.route())
    async with dialer.connect(route):
        assert await asyncio.gather(*(run_command(dialer, route) for _ in range(5))) == ["inside"] * 5
    assert len(bastion.connections) == 1
    await run_command(dialer, route)
    assert len(bastion.connections) == 2  # the first was closed with its last user


async def test_a_jump_host_that_cannot_reach_further_says_so(serve: Serve, dialer: Dialer, keys: HostKeys) -> None:
    bastion = await serve("bastion")
    keys.accept(bastion.route(), public(bastion))
    gone = await serve("gpu01")
    route = gone.route(via=bastion.route())
    await gone.stop()
    message = await refusal(dialer, route)
    assert message.startswith("gpu01 (user@127.0.0.1:")
    assert "(through bastion (user@127.0.0.1:" in message
    assert "the jump host cannot reach 127.0.0.1:" in message


async def test_a_second_factor_is_told_from_a_key_that_is_not_let_in(
    dialer: Dialer, keys: HostKeys, tmp_path: Path
) -> None:
    """`ssh-copy-id` would change nothing: the key is accepted, and a code is asked for."""

    class Asks(asyncssh.SSHServer):
        def __init__(self, begins_with_it: bool) -> None:
            self.has_key = begins_with_it

        def public_key_auth_supported(self) -> bool:
            return True

        def kbdint_auth_supported(self) -> bool:
            return self.has_key

        def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
            self.has_key = True
            return False

    messages = []
    for begins_with_it in (False, True):
        server = Server("gpu01", tmp_path / f"gpu01-{begins_with_it}")
        asks = partial(Asks, begins_with_it)
        server._acceptor = await asyncssh.listen(
            "127.0.0.1", 0, server_factory=asks, server_host_keys=[server.host_key], config=None
        )
        keys.accept(server.route(), public(server))
        mine = tmp_path / "mine"
        asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(mine))
        messages.append(await refusal(dialer, server.route(identity_files=(str(mine),))))
        server._acceptor.close()
    assert "asks for a second factor" in messages[0] and "ssh-copy-id" not in messages[0]
    assert "ssh-copy-id" in messages[1]


async def test_at_most_so_many_dials_are_under_way(keys: HostKeys, tmp_path: Path) -> None:
    """Fifty hosts at a start must not be fifty half-open connections."""
    under_way, most = 0, 0

    class Slow(asyncssh.SSHServer):
        async def begin_auth(self, username: str) -> bool:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0.05)
            under_way -= 1
            return False

    hosts = []
    for number in range(6):
        server = Server(f"gpu{number}", tmp_path / f"gpu{number}")
        server._acceptor = await asyncssh.listen(
            "127.0.0.1", 0, server_factory=Slow, server_host_keys=[server.host_key], config=None
        )
        keys.accept(server.route(), public(server))
        hosts.append(server)
    dialer = Dialer(keys, at_once=2)

    async def reach(route: Route) -> None:
        async with dialer.connect(route):
            pass

    try:
        await asyncio.gather(*(reach(server.route()) for server in hosts))
    finally:
        for server in hosts:
            await server.stop()
    assert most == 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"port": 1}, "nothing listens on port 1; is sshd running there?"),
        ({"host": "no-such-host.invalid"}, "the name 'no-such-host.invalid' cannot be resolved"),
        ({"proxy_command": "/no/such/program %h"}, "its ProxyCommand cannot be run"),
    ],
)
async def test_a_host_that_cannot_be_reached_says_why(
    serve: Serve, dialer: Dialer, changes: dict[str, Any], text: str
) -> None:
    server = await serve("gpu01")
    assert text in await refusal(dialer, server.route(**changes))


async def test_a_host_that_does_not_answer_is_not_waited_for_forever(
    dialer: Dialer, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterd.ssh.connection.AUTHENTICATION_S", 0.1)

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    server = await serve("gpu01")
    message = await refusal(dialer, server.route(port=port, connect_timeout_s=0.2))
    assert "no answer within 0.3 s; is it switched on, and does `ssh gpu01` work?" in message, "with the time to log in"
    monkeypatch.setattr("clusterd.ssh.connection.AUTHENTICATION_S", 1e6)
    with pytest.raises(HostError, match=r"no answer within 0\.2 s"):  # a look at its key takes no time to log in
        await dialer.inspect(server.route(port=port, connect_timeout_s=0.2))
    silent.close()
    await silent.wait_closed()


async def test_a_port_without_an_ssh_server_is_reported(dialer: Dialer, serve: Serve) -> None:
    async def http(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    other = await asyncio.start_server(http, "127.0.0.1", 0)
    server = await serve("gpu01")
    message = await refusal(dialer, server.route(port=other.sockets[0].getsockname()[1]))
    assert "the connection was closed before it was ready" in message
    other.close()
    await other.wait_closed()


async def test_a_proxy_command_carries_the_connection(
    serve: Serve, dialer: Dialer, keys: HostKeys, tmp_path: Path
) -> None:
    server = await serve("gpu01", reply=lambda _: b"hi")
    keys.accept(server.route(), public(server))
    relay = tmp_path / "relay.py"
    relay.write_text(
        "import socket, sys, threading\n"
        "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "def up():\n"
        "    while d := sys.stdin.buffer.read1(): s.sendall(d)\n"
        "threading.Thread(target=up, daemon=True).start()\n"
        "while d := s.recv(65536):\n"
        "    sys.stdout.buffer.write(d); sys.stdout.buffer.flush()\n"
    )
    assert await run_command(dialer, server.route(proxy_command=f"{sys.executable} {relay} %h %p")) == "hi"
    # The loop must not end before it has seen the relay's end: its watcher's thread tells it with a last callback.
    while any(thread.name.startswith("waitpid") for thread in threading.enumerate()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.01)
