"""``clusterd doctor``: what it finds about the machine, the daemon and its hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterd.cli.head_node import doctor
from clusterd.daemon.journal import journal
from tests.conftest import RunningCluster


def findings(cluster: RunningCluster) -> tuple[int, dict[str, tuple[str, str]]]:
    done = cluster.run("doctor", "-o", "json", check=False)
    rows = json.loads(done.stdout)
    return done.returncode, {row["check"]: (row["result"], row["detail"]) for row in rows}


def test_a_cluster_that_works_has_no_failure(cluster: RunningCluster) -> None:
    cluster.start(1, 2)
    cluster.wait_until_up(1)
    code, found = findings(cluster)
    assert code == 0
    assert found["daemon"][0] == "ok"
    assert found["host local0"] == ("ok", "up, 2 devices")
    assert found["state"][1].startswith(str(cluster.directory))


def test_a_key_that_the_ssh_configuration_names_is_a_key(
    cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: where each host had a key of its own, "only hosts that need none" were said to be possible."""
    for name in ("HOME", "SSH_AUTH_SOCK"):
        monkeypatch.setitem(cluster.environment, name, str(tmp_path) if name == "HOME" else "")
    (tmp_path / "lab").touch()
    (tmp_path / "ssh_config").write_text(f"Host gpu*\n  IdentityFile {tmp_path}/lab\n")
    settings = tmp_path / "lab.toml"
    settings.write_text(f'[daemon]\nssh_config = "{tmp_path}/ssh_config"\n')
    assert findings(cluster)[1]["ssh"][0] == "warning"
    cluster.run("start", "--config", str(settings))
    assert findings(cluster)[1]["ssh"] == ("ok", f"keys that {tmp_path}/ssh_config names")


def test_an_absent_daemon_is_a_failure_with_the_command_that_starts_it(cluster: RunningCluster) -> None:
    code, found = findings(cluster)
    assert code == 1
    assert found["daemon"][0] == "failed"
    assert "clusterd start" in found["daemon"][1]


def test_a_host_that_is_not_up_is_a_failure_with_its_reason(cluster: RunningCluster) -> None:
    cluster.start()
    cluster.run("host", "add", "--yes", "nobody@127.0.0.1:1", check=False)
    code, found = findings(cluster)
    hosts = {name: row for name, row in found.items() if name.startswith("host ")}
    if hosts:  # a host that never answered may be refused at once
        assert code == 1
        assert all(result == "failed" and detail for result, detail in hosts.values())
    else:
        assert found["hosts"][0] == "warning"


def test_the_settings_file_that_the_daemon_uses_is_the_one_that_is_checked(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    file = tmp_path / "lab.toml"
    file.write_text("[daemon]\ntrials = false\n")
    cluster.run("start", "--config", str(file))
    assert findings(cluster)[1]["settings"] == ("ok", str(file))
    file.write_text("[daemon]\npolicy = 3\n")
    assert findings(cluster)[1]["settings"][0] == "failed"


def test_settings_that_others_can_change_are_refused_as_they_name_commands(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    file, program = tmp_path / "lab.toml", tmp_path / "tell"
    program.write_text("#!/bin/sh\ncat\n")
    program.chmod(0o755)
    file.write_text(f'[notify]\ncommand = ["{program}"]\n')
    for path in (file, program):
        path.chmod(0o777)
        done = cluster.run("start", "--config", str(file), check=False)
        assert done.returncode == 2
        assert f"{path} can be changed by others: chmod go-w {path}" in done.stderr
        path.chmod(0o755)
    cluster.run("start", "--config", str(file))


def test_a_mistake_in_the_settings_is_one_finding_among_the_others(cluster: RunningCluster, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[daemon]\npolicy = 3\n")
    cluster.environment["CLUSTERD_CONFIG"] = str(wrong)
    code, found = findings(cluster)
    assert code == 1
    assert found["settings"][0] == "failed"
    assert "policy" in found["settings"][1]
    assert "installation" in found
    assert "daemon" in found


@pytest.mark.parametrize("kind", ["nfs4", "ext4"])
def test_a_state_on_a_network_file_system_is_a_failure_as_it_is_for_the_daemon(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERD_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(journal, "_file_system", lambda _: (kind, "/home"))
    found = [finding for finding in doctor._safely(doctor._state) if "network file system" in finding.detail]
    assert [(finding.check, finding.result) for finding in found] == ([("state", "failed")] if kind == "nfs4" else [])
