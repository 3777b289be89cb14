"""``clusterd service``: the unit file and what systemd is asked, with a stand-in for systemctl."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import RunningCluster

SYSTEMCTL = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
    *is-system-running*) echo running ;;
    *is-active*) exit 3 ;;
    *enable*) {enable} ;;
esac
"""


class Systemd:
    """A PATH with a systemctl that records its arguments, and an empty home."""

    def __init__(self, directory: Path, enable: str = "exit 0") -> None:
        self.home, self.log = directory / "home dir", directory / "log"
        self.home.mkdir()
        program = directory / "bin" / "systemctl"
        program.parent.mkdir()
        program.write_text(SYSTEMCTL.format(log=shlex.quote(str(self.log)), enable=enable))
        program.chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CLUSTERD_", "XDG_"))}
        self.environment = {
            **kept,
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "CLUSTERD_STATE_DIR": str(directory / "state of 100%"),
        }
        self.unit = self.home / ".config/systemd/user/clusterd.service"

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "clusterd", "service", *arguments]
        env = {**self.environment, **environment}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    @property
    def asked(self) -> list[str]:
        return self.log.read_text().splitlines()


def test_install_writes_the_unit_and_enables_it(tmp_path: Path) -> None:
    systemd = Systemd(tmp_path)
    done = systemd.run("install")
    assert done.returncode == 0, done.stderr
    assert str(systemd.unit) in done.stderr
    assert systemd.unit.read_text() == systemd.run("show").stdout
    assert systemd.asked[-3:] == [
        "--user daemon-reload",
        "--user enable clusterd.service",
        "--user restart clusterd.service",
    ]
    assert f'Environment="CLUSTERD_STATE_DIR={tmp_path}/state of 100%%"' in systemd.unit.read_text()
    assert systemd.run("install").returncode == 0  # again, after an upgrade


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze, of Debian's systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    systemd = Systemd(tmp_path)
    systemd.run("install")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(systemd.unit)], capture_output=True, text=True, check=False
    )
    assert "clusterd.service:" not in done.stderr


def test_remove_stops_the_service_and_deletes_the_unit(tmp_path: Path) -> None:
    systemd = Systemd(tmp_path)
    systemd.run("install")
    assert systemd.run("remove").returncode == 0
    assert not systemd.unit.exists()
    assert "--user disable --now clusterd.service" in systemd.asked
    again = systemd.run("remove")
    assert (again.returncode, str(systemd.unit) in again.stderr) == (1, True)


def test_a_unit_written_by_hand_is_left_alone(tmp_path: Path) -> None:
    systemd = Systemd(tmp_path)
    systemd.unit.parent.mkdir(parents=True)
    systemd.unit.write_text("[Service]\nExecStart=mine\n")
    done = systemd.run("install")
    assert done.returncode == 1
    assert "remove it first" in done.stderr
    assert systemd.unit.read_text() == "[Service]\nExecStart=mine\n"


def test_the_message_of_systemctl_is_shown(tmp_path: Path) -> None:
    done = Systemd(tmp_path, enable="echo 'Unit is masked.' >&2; exit 1").run("install")
    assert done.returncode == 1
    assert done.stderr.startswith("clusterd: systemctl enable clusterd.service: Unit is masked.")


def test_a_machine_without_systemd_is_reported_and_nothing_is_written(tmp_path: Path) -> None:
    systemd = Systemd(tmp_path)
    done = systemd.run("install", PATH=str(tmp_path))
    assert done.returncode == 1
    assert "no systemd here" in done.stderr
    assert not systemd.unit.exists()


def test_a_daemon_that_runs_already_is_not_doubled(cluster: RunningCluster, tmp_path: Path) -> None:
    cluster.start()
    systemd = Systemd(tmp_path)
    done = systemd.run("install", CLUSTERD_STATE_DIR=str(cluster.directory), CLUSTERD_SOCKET=str(cluster.socket))
    assert done.returncode == 1
    assert "a daemon runs already" in done.stderr
    assert not systemd.unit.exists()
