"""Checks of a host: other hosts, an interpreter, processes that end with the login."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterd.agent.host import checks
from tests.agent.client import AgentClient


def test_a_host_behind_a_firewall_is_told_from_one_that_answers(connect: Callable[..., AgentClient]) -> None:
    agent = connect()
    port = agent.request("fabric")["ok"]["port"]
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[1]
    peers = agent.request("check", peers={"b": ["127.0.0.1", port], "c": ["127.0.0.1", nobody]})["ok"]["peers"]
    assert peers["b"]["seconds"] < checks.REACH_TIMEOUT_S
    assert peers["c"] == {"error": "Connection refused"}


@pytest.mark.parametrize(
    ("torch", "message"),
    [
        (None, "No module named 'torch'"),
        ("raise OSError('libcudart.so.12: cannot open shared object file')", "OSError: libcudart.so.12"),
        ("__version__ = '2.6.0'\nclass version: cuda = '12.4'\nclass cuda: device_count = lambda: 4", "too old"),
    ],
)
def test_an_interpreter_without_a_torch_that_will_do(tmp_path: Path, torch: str | None, message: str) -> None:
    python = tmp_path / "python"
    module = tmp_path / "site" / "torch.py"
    module.parent.mkdir()
    if torch is not None:
        module.write_text(torch)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={module.parent} exec {sys.base_prefix}/bin/python3 "$@"\n')
    python.chmod(0o755)
    found = checks.check({}, str(python)).environment
    assert found["python"] and message in found["error"]


@pytest.mark.parametrize(
    ("script", "message"),
    [("exit 3", "exited with 3: no output"), ("echo no such thing >&2; exit 1", "exited with 1: no such thing")],
)
def test_an_invalid_interpreter_is_refused(tmp_path: Path, script: str, message: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    assert message in checks.check({}, str(python)).environment["error"]
    assert "no Python at" in checks.check({}, str(tmp_path / "missing")).environment["error"]


LOGIND = """#!/bin/sh
case "$5" in
    KillUserProcesses) echo "b {kills}" ;;
    KillOnlyUsers) echo 'as {only}' ;;
    KillExcludeUsers) echo 'as {spared}' ;;
esac
"""


@pytest.mark.parametrize(
    ("kills", "only", "spared", "ends"),
    [
        ("false", "0", '1 "root"', False),
        ("true", "0", '1 "root"', True),
        ("true", "0", '2 "root" "ann"', False),
        ("true", '1 "bob"', "0", False),
        ("true", '2 "bob" "ann"', "0", True),
    ],
)
def test_hosts_that_end_processes_at_logout_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: str, only: str, spared: str, ends: bool
) -> None:
    """Read from logind over D-Bus, which can spare or select users by name."""
    busctl = tmp_path / "busctl"
    busctl.write_text(LOGIND.format(kills=kills, only=only, spared=spared))
    busctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(checks.pwd, "getpwuid", lambda uid: type("Entry", (), {"pw_name": "ann"}))
    assert checks.check({}, None).ends_at_logout is ends


def test_a_host_without_logind_says_nothing_of_logins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checks.check({}, None).ends_at_logout is None
