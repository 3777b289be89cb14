"""The daemon as a systemd unit of ``Type=notify`` with a watchdog."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.conftest import RunningCluster, until


def test_systemd_is_told_when_it_is_up_and_that_it_turns(cluster: RunningCluster, tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(path))
        systemd.settimeout(30.0)
        cluster.environment |= {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "100000"}
        cluster.start()
        received = {systemd.recv(4096).decode().partition("\n")[0] for _ in range(3)}
        assert received == {"READY=1", "WATCHDOG=1"}
    path.unlink()
    until(lambda: f"systemd cannot be notified at {path}" in cluster.log())
    assert cluster.call("status")["pid"] == cluster.pid, "it serves on"
