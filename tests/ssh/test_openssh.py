"""Against OpenSSH itself: its configuration, keys and servers, with a jump host in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterd.errors import HostKeyChanged, HostKeyUnknown
from clusterd.ssh.connection import Dialer, load_credentials
from clusterd.ssh.host import HostLink, Leader, LinkCallbacks
from clusterd.ssh.hostkeys import HostKeys, Known, Unknown
from clusterd.ssh.resolve import Route, parse_address, resolve
from tests.agent.client import KEY, end_all, launch
from tests.ssh.openssh import OpenSshServer, make_key, needs_sshd, run, ssh_agent

pytestmark = [pytest.mark.anyio, pytest.mark.slow, needs_sshd]


class Lab:
    """A host that is reached directly, one behind it, and the user's files that lead there."""

    def __init__(self, directory: Path) -> None:
        self.known_hosts = directory / "known_hosts"
        self.ssh_config = directory / "ssh_config"
        self.key = make_key(directory / "id_ed25519")
        self.bastion = OpenSshServer("bastion", directory / "bastion", self.key)
        self.inner = OpenSshServer("gpu01", directory / "gpu01", self.key)

    def start(self) -> None:
        for server in (self.bastion, self.inner):
            server.start()
        self.ssh_config.write_text(
            self.bastion.config(self.known_hosts) + self.inner.config(self.known_hosts, ProxyJump="bastion")
        )

    def stop(self) -> None:
        for server in (self.inner, self.bastion):
            server.stop()
            end_all(server.agent_home)

    async def route(self, name: str) -> Route:
        return await resolve(parse_address(name), config=self.ssh_config)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    started = Lab(tmp_path)
    started.start()
    yield started
    started.stop()


async def introduce(lab: Lab, dialer: Dialer, keys: HostKeys) -> None:
    """Run `clusterd host add` as a user who accepts the fingerprint."""
    for name in ("bastion", "gpu01"):
        verdict = await dialer.inspect(await lab.route(name))
        assert isinstance(verdict, Unknown)
        keys.accept(verdict.route, verdict.key)


async def test_hosts_are_met_one_after_the_other_and_known_then(lab: Lab, dialer: Dialer, keys: HostKeys) -> None:
    with pytest.raises(HostKeyUnknown, match="clusterd host add bastion"):
        await dialer.inspect(await lab.route("gpu01"))
    await introduce(lab, dialer, keys)
    assert isinstance(await dialer.inspect(await lab.route("gpu01")), Known)
    shown = run("ssh-keygen", "-lf", lab.inner.directory / "host_key.pub")
    assert keys.entries(await lab.route("gpu01"))[0].fingerprint in shown


async def test_host_keys_that_openssh_learned_are_trusted(lab: Lab, dialer: Dialer) -> None:
    """The user said yes to ssh once, with hashed names; nobody asks again."""
    for name in ("bastion", "gpu01"):  # the bastion first: its own ssh, for the jump, gets no options
        options = ("-o", "StrictHostKeyChecking=accept-new", "-o", "HashKnownHosts=yes")
        run("ssh", "-F", lab.ssh_config, *options, name, "true")
    assert lab.known_hosts.read_text().startswith("|1|")
    before, jumps = lab.known_hosts.read_bytes(), lab.bastion.log.count("Accepted publickey")
    async with dialer.connect(await lab.route("gpu01")) as connection:
        assert (await connection.run("echo hello")).stdout == "hello\n"
    assert lab.known_hosts.read_bytes() == before
    assert lab.bastion.log.count("Accepted publickey") == jumps + 1


async def test_a_reinstalled_host_is_refused_by_the_line_that_knows_better(
    lab: Lab, dialer: Dialer, keys: HostKeys
) -> None:
    public = (lab.bastion.directory / "host_key.pub").read_text().split()
    lab.known_hosts.write_text(f"# lab\n[127.0.0.1]:{lab.bastion.port} {public[0]} {public[1]}\n")
    lab.bastion.stop()
    for name in ("host_key", "host_key.pub"):
        (lab.bastion.directory / name).unlink()
    lab.bastion.start()
    with pytest.raises(HostKeyChanged, match=f"remove {lab.known_hosts}:2, then clusterd host trust bastion"):
        async with dialer.connect(await lab.route("bastion")):
            pass


async def test_the_ssh_agent_lends_its_keys(lab: Lab, dialer: Dialer, keys: HostKeys, tmp_path: Path) -> None:
    await introduce(lab, dialer, keys)
    text = lab.ssh_config.read_text()
    lab.ssh_config.write_text(f"Host *\n    IdentityAgent {tmp_path}/agent.sock\n{text}")
    with ssh_agent(tmp_path / "agent.sock", lab.key):
        lab.key.rename(tmp_path / "put-away")  # only its public half is left to say which key is meant
        async with dialer.connect(await lab.route("gpu01")) as connection:
            assert (await connection.run("echo hello")).stdout == "hello\n"


async def test_the_named_key_of_an_agent_that_holds_many_is_offered_first(
    lab: Lab, dialer: Dialer, keys: HostKeys, tmp_path: Path
) -> None:
    """The server hears out six: `ssh` gets in, and so do we."""
    await introduce(lab, dialer, keys)
    socket = tmp_path / "agent.sock"
    lab.ssh_config.write_text(lab.bastion.config(lab.known_hosts, IdentitiesOnly="no", IdentityAgent=str(socket)))
    strangers = [make_key(tmp_path / f"stranger{number}") for number in range(7)]
    with ssh_agent(socket, *strangers, lab.key):
        shown = run("ssh", "-F", lab.ssh_config, "-o", "StrictHostKeyChecking=no", "bastion", "echo hello")
        assert shown == "hello\n"
        async with dialer.connect(await lab.route("bastion")) as connection:
            assert (await connection.run("echo hello")).stdout == "hello\n"


async def test_a_key_that_the_agent_offered_is_not_offered_again(lab: Lab, tmp_path: Path) -> None:
    """A repeated offer would use up one of the server's tries; no passphrase is asked for either."""
    socket = tmp_path / "agent.sock"
    config = lab.bastion.config(lab.known_hosts, IdentitiesOnly="no", IdentityAgent=str(socket))
    lab.ssh_config.write_text(config)
    with ssh_agent(socket, make_key(tmp_path / "stranger"), lab.key):
        for passphrase in ("", "hush"):
            run("ssh-keygen", "-q", "-p", "-P", "", "-N", passphrase, "-f", lab.key)
            credentials = await load_credentials(await lab.route("bastion"))
            credentials.close()
            assert (credentials.tried, credentials.skipped) == (["2 keys of the SSH agent"], [])
            assert len({pair.public_data for pair in credentials.pairs}) == len(credentials.pairs) == 2


async def test_a_job_runs_on_both_hosts_and_through_a_restart_of_sshd(lab: Lab, dialer: Dialer, keys: HostKeys) -> None:
    await introduce(lab, dialer, keys)
    ups: dict[str, int] = {"bastion": 0, "gpu01": 0}
    changed = asyncio.Condition()
    ends: dict[str, dict[str, Any]] = {}

    def link(name: str) -> HostLink:
        async def up(_hello: dict[str, Any]) -> None:
            async with changed:
                ups[name] += 1
                changed.notify_all()

        async def event(message: dict[str, Any]) -> None:
            async with changed:
                if message["event"] == "rank_exited":
                    ends[name] = message
                changed.notify_all()

        return HostLink(
            name,
            lambda: lab.route(name),
            dialer,
            Leader("test", 1, KEY),
            LinkCallbacks(lambda _state: None, up, event),
        )

    links = {name: link(name) for name in ups}
    tasks = [asyncio.create_task(each.run()) for each in links.values()]
    try:
        async with changed:
            await asyncio.wait_for(changed.wait_for(lambda: all(ups.values())), 30)
        for name, each in links.items():
            await each.request("launch", **launch(["sh", "-c", "while [ ! -e go ]; do sleep 0.05; done; exit 7"]))
            assert (await each.request("facts"))["hostname"]
            assert (lab.bastion if name == "bastion" else lab.inner).agent_home.joinpath("attempts/j.1").is_dir()
        for server in (lab.inner, lab.bastion):
            server.stop()
        for server in (lab.bastion, lab.inner):
            server.start()
        async with changed:
            await asyncio.wait_for(changed.wait_for(lambda: min(ups.values()) >= 2), 60)
        for server in (lab.bastion, lab.inner):
            (server.agent_home / "attempts/j.1/work/go").touch()
        async with changed:
            await asyncio.wait_for(changed.wait_for(lambda: len(ends) == 2), 30)
        assert {name: end["exit_code"] for name, end in ends.items()} == {"bastion": 7, "gpu01": 7}
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
