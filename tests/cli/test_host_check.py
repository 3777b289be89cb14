"""`clusterd host check` finds obstacles before a job does."""

from __future__ import annotations

import json
import sys
from typing import Any

from clusterd.daemon.api.host_check import _network
from clusterd.types import HostId
from tests.conftest import RunningCluster


def test_hosts_that_will_do_are_told_so(local_cluster: RunningCluster) -> None:
    done = local_cluster.run("host", "check", "--python", sys.executable, "-o", "json")
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    by_check = {(row["host"], row["check"]): row for row in rows}
    assert all(row["state"] != "failed" for row in rows)
    for host in ("local0", "local1"):
        assert "reaches the other host" in by_check[host, "network"]["said"]
        assert "torch" in by_check[host, "python"]["said"]
        assert by_check[host, "devices"]["said"] == "2 x CPU device"


def test_a_missing_interpreter_is_a_failure_of_that_host_alone(local_cluster: RunningCluster) -> None:
    done = local_cluster.run("host", "check", "local1", "--python", "/no/such/env", check=False)
    assert done.returncode == 1
    assert "clusterd: 1 of " in done.stderr and " checks failed" in done.stderr
    assert "no Python at /no/such/env" in done.stdout
    assert "local0 " not in done.stdout
    unknown = local_cluster.run("host", "check", "gpu77", check=False)
    assert unknown.returncode and "gpu77" in unknown.stderr


def test_a_firewall_shows_from_either_side() -> None:
    """c alone was asked about: b cannot reach it, and it cannot reach d, though the other way is open in both."""
    b, c, d = HostId("b"), HostId("c"), HostId("d")
    answers: dict[HostId, Any] = {
        b: {"peers": {"c": {"error": "timed out"}}},
        c: {"peers": {"b": {"seconds": 0.001}, "d": {"error": "No route to host"}}},
        d: {"peers": {"c": {"seconds": 0.002}}},
    }
    places: dict[HostId, Any] = {b: ["10.0.0.2", 4000], c: ["10.0.0.3", 4001], d: ["10.0.0.4", 4002]}
    findings = {row["said"].partition(";")[0]: row["state"] for row in _network(c, answers, places, {c})}
    assert findings == {
        "reaches 1 of 2 hosts within 1.0 ms": "ok",
        "c does not reach d at 10.0.0.4:4002: No route to host": "failed",
        "b does not reach c at 10.0.0.3:4001: timed out": "failed",
    }
