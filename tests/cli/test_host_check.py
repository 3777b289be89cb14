"""`clusterd host check` finds obstacles before a job does."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterd import protocol
from clusterd.agent.host.checks import has_small_pages
from clusterd.core.host import Host
from clusterd.daemon.api.host_check import _computed, _facts, _limits, _network
from clusterd.types import Device, DeviceId, HostFacts, HostId
from tests.conftest import RunningCluster


def test_hosts_that_will_do_are_told_so(shared_cluster: RunningCluster) -> None:
    done = shared_cluster.run("host", "check", "--python", sys.executable, "-o", "json")
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    by_check = {(row["host"], row["check"]): row for row in rows}
    assert all(row["state"] != "failed" for row in rows)
    for host in ("local0", "local1"):
        assert "reaches the other host" in by_check[host, "network"]["said"]
        assert "torch" in by_check[host, "python"]["said"]
        assert by_check[host, "devices"]["said"] == "2 x CPU device"


def test_a_missing_interpreter_is_a_failure_of_that_host_alone(shared_cluster: RunningCluster) -> None:
    done = shared_cluster.run("host", "check", "local1", "--python", "/no/such/env", check=False)
    assert done.returncode == 1
    assert "clusterd: 1 of " in done.stderr and " checks failed" in done.stderr
    assert "no Python at /no/such/env" in done.stdout
    assert "local0 " not in done.stdout
    unknown = shared_cluster.run("host", "check", "gpu77", check=False)
    assert unknown.returncode and "gpu77" in unknown.stderr


@pytest.mark.parametrize(
    ("enforced", "lingers", "state", "text"),
    [
        (["memory", "cpu"], False, "ok", "host memory that they ask for"),
        (None, False, "warning", "enable-linger"),
        (None, True, "warning", "Delegate=memory cpu"),
        (["cpu"], True, "warning", "more host memory than a job asks for"),
        (["memory"], True, "warning", "more than its share of cores"),
    ],
)
def test_limits_that_are_not_enforced_come_with_a_remedy(
    enforced: list[str] | None, lingers: bool, state: str, text: str
) -> None:
    row = _limits(HostId("gpu01"), {"enforced": enforced, "lingers": lingers})
    assert row["state"] == state
    assert text in row["said"]


@pytest.mark.parametrize(("memory_bytes", "is_told"), [(None, True), (1 << 30, False)])
def test_a_driver_that_reports_no_memory_by_process_is_told_of(memory_bytes: int | None, is_told: bool) -> None:
    process = {"pid": 7, "user": "ann", "memory_bytes": memory_bytes, "ours": True}
    rows = [*_facts(Host(HostId("gpu01"), since_s=0.0), {"gpus": [{"index": 0, "processes": [process]}]})]
    assert any("a job above its share of a device is not noticed" in row["said"] for row in rows) == is_told


def test_slow_links_and_settings_of_gpus_are_warned_of_with_a_remedy() -> None:
    name = HostId("gpu01")
    about = {"host": name, "kind": "cuda", "name": "H100", "memory_bytes": 80 << 30}
    devices = tuple(Device(id=DeviceId(f"gpu01:gpu{n}"), uuid=f"GPU-{n}", **about) for n in (0, 1))
    host = Host(name, since_s=0.0)
    host.facts = HostFacts(boot_id="", cpu_cores=8, memory_bytes=1 << 38, address="10.0.0.1", devices=devices)
    gpus = [
        {"uuid": f"GPU-{n}", "index": n, "processes": [], "pcie_generation": 5, "pcie_width": 16, "notes": notes}
        for n, notes in enumerate((["ECC is off"], []))
    ]
    copied = {"GPU-0": (52e9, 51e9), "GPU-1": (13e9, 12e9)}
    answer = {
        "kernels": {u: {"seconds": 0.1, "to_bytes_per_s": a, "from_bytes_per_s": b} for u, (a, b) in copied.items()},
        "access": {"without_access": [["GPU-0", "GPU-1"]]},
        "small_pages": True,
    }
    rows = [*_facts(host, {"gpus": gpus}), *_computed(host, answer, gpus)]
    said = {(row["check"], row["state"]): row["said"] for row in rows}
    assert "gpu01:gpu0: ECC is off" in said["devices", "warning"]
    assert said["copies", "ok"].startswith("gpu01:gpu0 copies 52.0 GB/s from pinned memory")
    assert said["copies", "warning"].startswith("gpu01:gpu1 copies 13.0")
    assert "of the 63 of its slot" in said["copies", "warning"]
    assert said["access", "warning"].startswith("gpu01:gpu0 and gpu01:gpu1 do not reach each other's memory")
    assert any("huge=within_size" in row["said"] for row in rows)


@pytest.mark.parametrize(
    ("options", "is_small"), [("rw,relatime", True), ("rw,huge=within_size", False), ("rw,huge=never", True)]
)
def test_pages_of_shared_memory(tmp_path: Path, options: str, is_small: bool) -> None:
    mounts, kernel = tmp_path / "mounts", tmp_path / "shmem_enabled"
    mounts.write_text(f"proc /proc proc rw 0 0\ntmpfs /dev/shm tmpfs {options} 0 0\n")
    assert not has_small_pages(mounts, kernel)  # the kernel has no large ones
    kernel.touch()
    assert has_small_pages(mounts, kernel) == is_small


@pytest.mark.slow
def test_the_host_gets_the_memory_and_cores_of_a_job_to_enforce(shared_cluster: RunningCluster) -> None:
    """Not the memory that a job did not ask for."""
    for memory, expected in ((["--memory", "96MB"], 96 * 1000**2), ([], 0)):
        done = shared_cluster.run("run", "--cpus", "1", *memory, "--", "pwd")
        launch = protocol.decode((Path(done.stdout.strip()).parent / "launch.msgpack").read_bytes())
        assert launch["cores"] == 1
        assert launch["memory_bytes"] == expected


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


def test_free_space_is_that_of_now(shared_cluster: RunningCluster) -> None:
    """Not that of the time at which the host connected."""
    before = _free(shared_cluster)
    with open(shared_cluster.directory / "large", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 2 << 30)
        assert _free(shared_cluster) != before
    os.unlink(file.name)


def _free(cluster: RunningCluster) -> set[str]:
    rows = json.loads(cluster.run("host", "check", "-o", "json").stdout)
    return {row["said"] for row in rows if row["check"] == "disk"}
