"""Facts of an agent as the scheduler sees them."""

from __future__ import annotations

from typing import Any

import pytest

from clusterd.config import HostOptions, host_options
from clusterd.daemon.hosts.facts import host_facts
from clusterd.errors import ConfigError
from clusterd.types import HostId
from clusterd.units import compact_devices

GIB = 1 << 30


def foreign(total_gib: int = 80, **gpu: Any) -> str:
    """Description of foreign processes on a host's one GPU."""
    one = {"uuid": "GPU-1", "index": 0, "name": "A100", "memory_bytes": total_gib * GIB, "processes": [], **gpu}
    answer = {"boot_id": "b", "cpu_cores": 4, "cpu_ids": [0, 1, 2, 3], "memory_bytes": GIB, "gpus": [one]}
    [device] = host_facts(HostId("a"), answer, HostOptions(), "10.0.0.1").devices
    return device.foreign


def test_a_foreign_process_keeps_the_gpu_from_being_offered() -> None:
    theirs = {"pid": 42, "user": "bob", "memory_bytes": 3 * GIB, "ours": False}
    assert foreign(processes=[theirs]) == "in use by bob (pid 42)"
    assert foreign(processes=[{**theirs, "ours": True}]) == ""
    assert foreign(processes=[{**theirs, "memory_bytes": 100 << 20}]) == ""  # a display


@pytest.mark.parametrize(("total_gib", "unlisted_gib", "is_foreign"), [
    (80, 60, True), (80, 6, False), (24, 6, True), (24, 3, False),
])  # fmt: skip
def test_use_by_an_unlisted_process_is_foreign(total_gib: int, unlisted_gib: int, is_foreign: bool) -> None:
    """In another container, say; a little is the driver's own."""
    message = foreign(total_gib, unlisted_bytes=unlisted_gib * GIB)
    assert message == ("in use, the driver does not say by whom" if is_foreign else "")


def test_a_gpu_that_another_host_of_the_machine_offers_is_left_out() -> None:
    """Two embedded hosts see the same GPUs."""
    one = {"uuid": "GPU-1", "index": 0, "name": "A100", "memory_bytes": GIB, "processes": []}
    answer = {"boot_id": "b", "cpu_cores": 4, "cpu_ids": [0], "memory_bytes": GIB, "gpus": [one]}
    elsewhere = {"GPU-1": HostId("local0")}
    [device] = host_facts(HostId("local1"), answer, HostOptions(), "127.0.0.1", elsewhere=elsewhere).devices
    assert device.foreign == "local0 offers this GPU, on the same machine"
    assert device.offered_by == "local0"


def test_a_host_whose_gpus_cannot_be_read_offers_no_cpus_in_their_place() -> None:
    """Jobs that ask for devices would train on CPUs without a word."""
    answer = {
        "boot_id": "b", "cpu_cores": 64, "cpu_ids": [*range(64)], "memory_bytes": GIB, "gpus": [],
        "gpu_error": "the NVIDIA kernel driver is not loaded",
    }  # fmt: skip
    found = host_facts(HostId("a"), answer, HostOptions(), "10.0.0.1")
    assert (found.devices, found.gpu_error) == ((), "the NVIDIA kernel driver is not loaded")
    assert len(host_facts(HostId("a"), answer, HostOptions(cpu_devices=2), "10.0.0.1").devices) == 2
    assert len(host_facts(HostId("a"), {**answer, "gpu_error": None}, HostOptions(), "10.0.0.1").devices) == 16


def test_facts_of_an_agent_from_before_are_understood() -> None:
    assert foreign() == ""


def test_devices_have_the_compute_capability_and_hosts_the_labels() -> None:
    gpu = {"uuid": "GPU-1", "index": 0, "name": "A100", "memory_bytes": GIB, "compute_capability": "8.0"}
    answer = {"boot_id": "b", "cpu_cores": 4, "cpu_ids": [0, 1, 2, 3], "memory_bytes": GIB, "gpus": [gpu]}
    facts = host_facts(HostId("a"), answer, host_options({"labels": ["nvlink", "rack=a"]}, "here"), "10.0.0.1")
    assert facts.labels == ("nvlink", "rack=a")
    assert facts.devices[0].compute_capability == "8.0"


@pytest.mark.parametrize("labels", ["nvlink", ["a b"], [1], [""], ["a,b"]])
def test_an_invalid_label_is_refused(labels: object) -> None:
    with pytest.raises(ConfigError, match=r"labels is .* it must be a list of words"):
        host_options({"labels": labels}, "[hosts.a]")


def test_slices_of_a_gpu_are_devices_with_names_of_their_own() -> None:
    slices = [
        {"uuid": f"MIG-{n}", "index": 1, "slice": n, "name": "A100 MIG 3g.20gb", "memory_bytes": 20 * GIB}
        for n in (0, 2)
    ]
    whole = {"uuid": "GPU-0", "index": 0, "name": "A100", "memory_bytes": 40 * GIB}
    answer = {"boot_id": "b", "cpu_cores": 4, "cpu_ids": [0], "memory_bytes": GIB, "gpus": [whole, *slices]}
    devices = host_facts(HostId("a"), answer, HostOptions(exclude_devices=(1,)), "10.0.0.1").devices
    assert [device.id for device in devices] == ["a:gpu0", "a:gpu1.0", "a:gpu1.2"]
    assert [device.excluded for device in devices] == [False, True, True]
    assert compact_devices([device.id for device in devices]) == "a:gpu0 a:gpu1.0,2"


@pytest.mark.parametrize(("links", "peers", "expected"), [
    ({"nvlinks": 18, "nvlink_version": 4}, 2, 450e9),  # through switches
    ({"nvlinks": 4, "nvlink_version": 3}, 1, 31.52e9),  # pairs with bridges: a ring crosses PCIe
    ({}, 0, 31.52e9),
])  # fmt: skip
def test_the_slowest_link_of_a_ring_is_that_of_its_gpus(links: dict[str, int], peers: int, expected: float) -> None:
    uuids = ["A", "B", "C"]
    gpus = [
        {"uuid": uuid, "index": n, "name": "H100", "memory_bytes": GIB, "pcie_generation": 4, "pcie_width": 16,
         "nvlink_peers": [other for other in uuids if other != uuid][:peers], **links}
        for n, uuid in enumerate(uuids)
    ]  # fmt: skip
    ports = [{"card": "mlx5_0", "speed_mbit": 400_000}, {"card": "mlx5_1", "speed_mbit": 200_000}]
    answer = {
        "boot_id": "b", "cpu_cores": 4, "cpu_ids": [0], "memory_bytes": GIB, "gpus": gpus, "infiniband": ports,
    }  # fmt: skip
    facts = host_facts(HostId("a"), answer, HostOptions(), "10.0.0.1")
    assert facts.gpu_link_bytes_per_s == pytest.approx(expected)
    assert facts.rdma_mbit == 200_000
