"""The route to a host is the one that OpenSSH resolves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from textwrap import dedent

import pytest

from clusterd.errors import HostError
from clusterd.ssh.connection import proxy_argv
from clusterd.ssh.resolve import Route, parse_address, resolve

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh program on this machine"),
]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config"
    path.write_text(
        dedent("""
            Host gpu*
                User trainer
                ProxyJump bastion
                IdentityFile ~/keys/%h
                UserKnownHostsFile ~/known_lab
            Host gpu01
                HostName 10.1.0.1
                HostKeyAlias lab-gpu01
            Host gpu02
                HostName 10.1.0.2
                Port 2202
                ConnectTimeout 7
                IdentitiesOnly yes
                IdentityAgent none
                CertificateFile ~/keys/cert.pub
            Host bastion
                HostName bastion.example
                User jumper
                Port 2200
            Host direct
                ProxyJump none
            Host via-two
                ProxyJump ops@first:2201,bastion
            Host first
                ProxyJump zeroth
            Host round
                ProxyJump robin
            Host robin
                ProxyJump round
            Host behind-command
                HostName 10.1.0.9
                ProxyCommand nc -x 'proxy host:1080' %h %p
            Host evil
                HostName "a;b"
        """)
    )
    return path


async def test_an_alias_is_resolved_with_its_jump_host(config: Path) -> None:
    route = await resolve(parse_address("gpu01"), config=config)
    assert (route.name, route.host, route.port, route.user) == ("gpu01", "10.1.0.1", 22, "trainer")
    assert route.lookup_name == "lab-gpu01"
    assert route.identity_files == (os.path.expanduser("~/keys/10.1.0.1"),)
    assert route.user_known_hosts == (os.path.expanduser("~/known_lab"),)
    assert route.via is not None
    assert (route.via.name, route.via.host, route.via.port, route.via.user) == (
        "bastion",
        "bastion.example",
        2200,
        "jumper",
    )


async def test_every_setting_of_a_host_is_kept(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    route = await resolve(parse_address("gpu02"), config=config)
    assert (route.port, route.connect_timeout_s, route.identities_only) == (2202, 7.0, True)
    assert route.identity_agent is None
    assert route.certificate_files == (os.path.expanduser("~/keys/cert.pub"),)
    assert route.lookup_name == "[10.1.0.2]:2202"
    assert (await resolve(parse_address("direct"), config=config)).identity_agent == "/run/agent"


async def test_a_given_option_overrides_the_configuration(config: Path) -> None:
    route = await resolve(parse_address("me@gpu02:99"), config=config)
    assert (route.user, route.port) == ("me", 99)


async def test_jumps_are_a_chain_and_the_first_one_may_have_its_own(config: Path) -> None:
    route = await resolve(parse_address("via-two"), config=config)
    assert [hop.name for hop in route.hops] == ["zeroth", "ops@first:2201", "bastion", "via-two"]
    assert (route.hops[1].user, route.hops[1].port) == ("ops", 2201)


async def test_no_jump_is_no_jump(config: Path) -> None:
    assert (await resolve(parse_address("direct"), config=config)).via is None


async def test_jumps_in_circles_are_shown(config: Path) -> None:
    with pytest.raises(HostError, match=r"round: its ProxyJump goes in circles \(round -> robin -> round\)"):
        await resolve(parse_address("round"), config=config)


async def test_a_proxy_command_becomes_an_argv(config: Path) -> None:
    route = await resolve(parse_address("behind-command"), config=config)
    assert proxy_argv(route) == ["nc", "-x", "proxy host:1080", "10.1.0.9", "22"]


def test_a_proxy_command_for_a_shell_gets_the_host_as_an_argument() -> None:
    route = Route("n", "10.1.0.9", 22, "u", proxy_command="connect %h:%p | tee log%%")
    assert proxy_argv(route) == ["/bin/sh", "-c", 'connect "$1":"$2" | tee log%', "proxy", "10.1.0.9", "22", "u", "n"]


async def test_a_host_name_that_is_none_is_refused(config: Path) -> None:
    with pytest.raises(HostError, match=r"evil: .*a;b"):
        await resolve(parse_address("evil"), config=config)


async def test_a_broken_configuration_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host x\n    Prot 22\n")
    with pytest.raises(HostError, match=r"gpu01: `ssh -G` refuses: .*config.*line 2: Bad configuration option: prot"):
        await resolve(parse_address("gpu01"), config=tmp_path / "config")


@pytest.mark.slow
async def test_a_machine_without_ssh_is_told_so() -> None:
    with pytest.raises(HostError, match=r"no `absent-ssh` program on this machine.*install OpenSSH's client"):
        await resolve(parse_address("gpu01"), program="absent-ssh")


async def test_a_configuration_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    slow = tmp_path / "ssh"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    with pytest.raises(HostError, match=r"gave no answer within 0 s; look for `Match exec`"):
        await resolve(parse_address("gpu01"), program=str(slow), timeout_s=0.1)
