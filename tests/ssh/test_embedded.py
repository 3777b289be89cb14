"""From `EmbeddedHost` to a running agent: the whole path of a remote host, on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import asyncssh
import pytest

from clusterd import protocol
from clusterd.agent.host.bundle import Bundle, bundle
from clusterd.errors import HostError
from clusterd.protocol.proof import proof
from clusterd.ssh import bootstrap
from clusterd.ssh.bootstrap import COMMAND, AgentStream, BootstrapFailed, attach
from clusterd.ssh.connection import Dialer
from clusterd.ssh.embedded import EmbeddedHost, shared_out
from tests.agent.client import KEY, end_all

pytestmark = pytest.mark.anyio


async def greet(dialer: Dialer, host: EmbeddedHost, code: Bundle | None = None) -> protocol.Message:
    async with (
        dialer.connect(host.route) as connection,
        attach(connection, host.name, code or bundle(), None, key=KEY) as stream,
    ):
        return await hello(stream)


async def hello(stream: AgentStream) -> protocol.Message:
    await stream.send({"id": 1, "verb": "challenge"})
    shown = proof(KEY, "hello", (await stream.receive())["ok"]["nonce"], "test", 1)
    await stream.send(
        {"id": 2, "verb": "hello", "protocol": protocol.VERSION, "daemon": "test", "epoch": 1, "proof": shown}
    )
    answer: protocol.Message = (await stream.receive())["ok"]
    return answer


async def test_the_code_is_pushed_once_and_the_agent_started_once(dialer: Dialer, host: EmbeddedHost) -> None:
    first = await greet(dialer, host)
    code = host.directory / "home/.cache/clusterd" / f"agent-{bundle().version}"
    pushed_at = (code / "__main__.py").stat().st_mtime_ns
    second = await greet(dialer, host)
    assert first["agent"] == second["agent"]
    assert first["version"] == bundle().version
    assert (code / "__main__.py").stat().st_mtime_ns == pushed_at
    assert [path.name for path in code.parent.iterdir()] == [code.name]


async def test_two_hosts_with_one_home_have_an_agent_each(
    dialer: Dialer, tmp_path: Path, agent_homes: list[Path]
) -> None:
    """A home on NFS: the code is there already when the second host is reached, the agent is not."""
    hosts = [EmbeddedHost(f"gpu0{n}", tmp_path / f"gpu0{n}") for n in (1, 2)]
    (tmp_path / "gpu02").mkdir()
    (tmp_path / "gpu01" / "home").mkdir(parents=True)
    (tmp_path / "gpu02" / "home").symlink_to(tmp_path / "gpu01" / "home")
    agents = set()
    for host in hosts:
        agent_homes.append(host.agent_home)
        await host.start()
        agents.add((await greet(dialer, host))["agent"])
    assert len(agents) == 2
    for host in hosts:
        await host.stop()


async def test_a_home_that_cannot_be_written_is_not_needed(
    dialer: Dialer, host: EmbeddedHost, tmp_path: Path, agent_homes: list[Path]
) -> None:
    """The home is read-only or over its quota: state and code are stored where the settings say."""
    (host.directory / "home/.cache").write_text("no directory")
    with pytest.raises(BootstrapFailed, match=r"cannot keep the agent's code in .*: set agent_home of the host"):
        await greet(dialer, host)
    scratch = tmp_path / "scratch"
    agent_homes.append(scratch)
    async with (
        dialer.connect(host.route) as connection,
        attach(connection, host.name, bundle(), str(scratch), key=KEY) as stream,
    ):
        assert (await hello(stream))["version"] == bundle().version
    assert (scratch / f"agent-{bundle().version}").is_dir()
    assert (scratch / "attempts").is_dir()


async def test_damaged_code_is_not_run(dialer: Dialer, host: EmbeddedHost) -> None:
    code = bundle().data
    damaged = Bundle(bundle().sha256, code.replace(b"def main(", b"def mein(", 1))
    with pytest.raises(BootstrapFailed, match="gpu01: the agent's code arrived damaged"):
        await greet(dialer, host, damaged)
    assert not [path for path in (host.directory / "home/.cache").rglob("*") if path.is_file()]


async def test_what_python_compiled_on_a_full_disk_is_compiled_again(dialer: Dialer, host: EmbeddedHost) -> None:
    """Regression: the host never came up again, also with room on its disk: "EOFError: marshal data too short"."""
    await greet(dialer, host)
    end_all(host.agent_home)
    compiled = list((host.directory / "home/.cache").rglob("*.pyc"))
    assert compiled
    for file in compiled:
        os.truncate(file, file.stat().st_size // 1024 * 512)  # as at the end of a block
    assert (await greet(dialer, host))["version"] == bundle().version


async def test_code_that_was_changed_on_the_host_is_sent_again(dialer: Dialer, host: EmbeddedHost) -> None:
    """As by a disk that lost a file at a power failure, or by whoever got at it."""
    await greet(dialer, host)
    end_all(host.agent_home)
    code = host.directory / f"home/.cache/clusterd/agent-{bundle().version}"
    main, added = code / "__main__.py", code / "msgpack.py"
    for damage in (lambda: main.write_text(""), lambda: added.write_text("raise SystemExit(1)")):
        damage()
        assert (await greet(dialer, host))["version"] == bundle().version
        assert "clusterd.agent" in main.read_text() and not added.exists()
        end_all(host.agent_home)
    assert [path.name for path in code.parent.iterdir()] == [code.name]


async def test_a_login_that_prints_is_read_over(
    dialer: Dialer, host: EmbeddedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterd.ssh.bootstrap.COMMAND", f"echo Welcome to gpu01; printf 'You have mail. '; {COMMAND}")
    assert (await greet(dialer, host))["version"] == bundle().version


async def test_python_variables_of_start_up_files_do_not_reach_the_agent(
    dialer: Dialer, host: EmbeddedHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of the site's, or an environment of modules, had another msgpack, or another Python's library."""
    (tmp_path / "msgpack.py").write_text("raise SystemExit('not the one')")
    (tmp_path / "sitecustomize.py").write_text("print('loaded')")
    set_up = f"export PYTHONPATH={tmp_path} PYTHONHOME=/nonexistent"
    monkeypatch.setattr("clusterd.ssh.bootstrap.COMMAND", f"{set_up}; {COMMAND}")
    assert (await greet(dialer, host))["version"] == bundle().version


async def test_a_host_without_python_is_told_so(
    dialer: Dialer, host: EmbeddedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterd.ssh.bootstrap.COMMAND", COMMAND.replace("python3", "python3-is-absent"))
    with pytest.raises(BootstrapFailed, match=r"gpu01: `ssh gpu01 python3` finds no python3.*Python 3.10 or newer"):
        await greet(dialer, host)


@pytest.mark.parametrize("noise", ["clusterd-", "clusterd-1.2 clusterd-need ", "a clusterd-failed {"])
async def test_login_output_similar_to_our_marker_is_skipped(
    dialer: Dialer, host: EmbeddedHost, monkeypatch: pytest.MonkeyPatch, noise: str
) -> None:
    monkeypatch.setattr("clusterd.ssh.bootstrap.COMMAND", f"printf '{noise}'; {COMMAND}")
    assert (await greet(dialer, host))["version"] == bundle().version


@pytest.mark.parametrize(
    ("login", "why"),
    [
        (f"read answer; {COMMAND}", "gpu01: its start-up files read standard input.*only where there is a terminal"),
        (
            "echo This account is currently not available.; exit 1",
            "gpu01: the login ended with exit code 1 .*; it said: This account is currently not available.",
        ),
        (
            "echo 'python3: error while loading shared libraries: libpython3.11.so.1.0: no file' >&2; exit 127",
            "gpu01: Python ended with exit code 127 .*; it said: python3: error while loading shared libraries: libpy",
        ),
        (
            "printf 'Fatal Python error: init_fs_encoding: no codec\n\n<no Python frame>\n' >&2; exit 1",
            "it said: Fatal Python error: init_fs_encoding: no codec$",
        ),
        (
            "echo 'fish: Unknown command: S' >&2; exit 1",
            "it said: fish: Unknown command: S; a shell, not Python, may have answered",
        ),
        ("echo 'python3: Command not found.' >&2; exit 1", "finds no python3 in its PATH"),
        ("echo 'nvm: command not found' >&2; exit 3", "Python ended with exit code 3 .*it said: nvm: command not fo"),
    ],
)
async def test_the_reason_why_python_cannot_start_is_reported(
    dialer: Dialer, host: EmbeddedHost, monkeypatch: pytest.MonkeyPatch, login: str, why: str
) -> None:
    monkeypatch.setattr("clusterd.ssh.bootstrap.COMMAND", login)
    with pytest.raises(BootstrapFailed, match=why):
        await greet(dialer, host)


async def test_an_agent_that_cannot_start_says_why(dialer: Dialer, host: EmbeddedHost) -> None:
    host.agent_home.rmdir()
    host.agent_home.write_text("not a directory")
    with pytest.raises(BootstrapFailed, match=r"gpu01: .*Not a directory.*agent"):
        await greet(dialer, host)


@pytest.mark.parametrize("version", ["3.6", "3.8"])
def test_an_old_python_says_so_or_finds_a_newer_one(tmp_path: Path, version: str) -> None:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    old = sorted(pyenv.glob(f"versions/{version}*/bin/python3"))
    if not old:
        pytest.skip(f"no Python {version} on this machine")
    stage1 = bootstrap.first_program()
    given = {"sha256": 64 * "0", "bytes": 0, "agent_home": None, "cluster": "", "former": None}
    source = f"S = {stage1!r}\nexec(compile(S, 'x', 'exec'))\nmain({given}, S)"
    sent = f"{len(source.encode())}\n{source}".encode()
    command = COMMAND.removeprefix("exec ").replace("python3", str(old[0]))
    alone = {"PATH": "/usr/nowhere", "HOME": str(tmp_path)}
    done = subprocess.run(["/bin/sh", "-c", command], input=sent, env=alone, capture_output=True, check=False)
    assert b"clusterd-failed" in done.stdout
    assert f"its python3 is {version} ({old[0]}".encode() in done.stdout
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3.11").symlink_to(sys.executable)
    newer = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}
    done = subprocess.run(["/bin/sh", "-c", command], input=sent, env=newer, capture_output=True, check=False)
    assert b"clusterd-need" in done.stdout


@pytest.mark.parametrize(
    ("cores", "hosts", "devices", "each"),
    [
        (range(4), 2, 2, [(0, 1), (2, 3)]),
        (range(9), 2, 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ((5, 7), 2, 1, [(5,), (7,)]),
        (range(3), 2, 2, [(), ()]),
        (range(2), 0, 2, []),
    ],
)
def test_cores_are_shared_out_where_every_device_gets_one(
    cores: Sequence[int], hosts: int, devices: int, each: list[tuple[int, ...]]
) -> None:
    assert shared_out(cores, hosts, devices) == each


async def test_an_embedded_host_has_its_own_cores(dialer: Dialer, tmp_path: Path, agent_homes: list[Path]) -> None:
    own = sorted(os.sched_getaffinity(0))[-1:]
    host = EmbeddedHost("gpu01", tmp_path / "gpu01", cores=own)
    agent_homes.append(host.agent_home)
    await host.start()
    facts = (await greet(dialer, host))["facts"]
    await host.stop()
    assert (facts["cpu_ids"], facts["cpu_cores"]) == (own, 1)


async def test_only_its_own_key_opens_an_embedded_host(dialer: Dialer, host: EmbeddedHost, tmp_path: Path) -> None:
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(tmp_path / "other"))
    with pytest.raises(HostError, match="does not let clusterd in"):
        async with dialer.connect(replace(host.route, identity_files=(str(tmp_path / "other"),))):
            pass


async def test_an_embedded_host_keeps_its_keys(tmp_path: Path) -> None:
    keys = set()
    for _ in range(2):
        host = EmbeddedHost("gpu01", tmp_path / "gpu01")
        await host.start()
        keys.add(host.route.trusted_keys)
        await host.stop()
    assert len(keys) == 1
