"""One rule finds the daemon's socket, from a session and without one."""

from __future__ import annotations

import pytest

from tests.conftest import RunningCluster


@pytest.fixture
def at_home(cluster: RunningCluster) -> RunningCluster:
    """A daemon whose state and socket are in their usual places below a home of its own."""
    for name in ("CLUSTERD_STATE_DIR", "XDG_STATE_HOME"):
        cluster.environment.pop(name, None)
    cluster.environment |= {"HOME": str(cluster.directory / "home"), "XDG_RUNTIME_DIR": str(cluster.directory / "run")}
    (cluster.directory / "home").mkdir()
    (cluster.directory / "run").mkdir(mode=0o700)
    return cluster


def test_a_daemon_is_found_without_its_runtime_directory(at_home: RunningCluster) -> None:
    """As from cron, or by `su`, which set none or leave that of another user."""
    at_home.run("start")
    at_home.environment["XDG_RUNTIME_DIR"] = str(at_home.directory / "none")
    try:
        assert "no jobs" in at_home.run("ls").stderr
        assert "already serves" in at_home.run("start", check=False).stderr
    finally:
        at_home.run("stop")
    assert at_home.run("ls", check=False).returncode == 69
    at_home.run("start")
    at_home.run("stop")


def test_a_client_of_another_machine_starts_no_daemon_here(at_home: RunningCluster) -> None:
    at_home.environment["CLUSTERD_HOST"] = "ssh://head"
    refused = at_home.run("start", check=False)
    assert refused.returncode == 2 and "CLUSTERD_HOST is ssh://head, another machine" in refused.stderr
    del at_home.environment["CLUSTERD_HOST"]
    assert at_home.run("ls", check=False).returncode == 69
