"""Links of GPUs and network cards, and the cores to which ranks near a GPU are pinned."""

from __future__ import annotations

from pathlib import Path

from clusterd.agent.host import facts
from clusterd.agent.host.gpu_probe import Probe
from clusterd.agent.ranks.launching import launch_record
from clusterd.protocol.launch import DeviceSpec, LaunchRequest, RankSpec
from tests.agent.host.fake_nvml import fake_driver, needs_gcc, set_state


def machine(sysfs: Path) -> Path:
    """Two NUMA nodes with a GPU each, an InfiniBand port, and one without a cable."""
    for file, text in {
        "bus/pci/devices/0000:10:00.0/numa_node": "0",
        "bus/pci/devices/0000:20:00.0/numa_node": "1",
        "bus/pci/devices/0000:30:00.0/numa_node": "-1",
        "devices/system/node/node0/cpulist": "0-3,8",
        "devices/system/node/node1/cpulist": "4-7",
        "class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
        "class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand",
        "class/infiniband/mlx5_1/ports/1/rate": "10 Gb/sec (4X SDR)",
        "class/infiniband/mlx5_1/ports/1/state": "1: DOWN",
    }.items():
        path = sysfs / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return sysfs


def test_numa_nodes_and_infiniband_are_read_from_sysfs(tmp_path: Path) -> None:
    sysfs = machine(tmp_path)
    addresses = ["00000000:10:00.0", "0000:20:00.0", "0000:30:00.0", ""]
    assert [facts.numa_node(address, sysfs) for address in addresses] == [0, 1, None, None]
    [port] = facts.infiniband(sysfs)
    assert port == {"card": "mlx5_0", "port": "1", "link_layer": "InfiniBand", "speed_mbit": 400_000}
    gpus = [{"uuid": "a", "numa_node": 0}, {"uuid": "b", "numa_node": 1}, {"uuid": "c", "numa_node": None}]
    assert facts.cores_by_gpu(gpus, [2, 3, 8, 9], sysfs) == {"a": (2, 3, 8)}  # this agent may not use those of b


@needs_gcc
def test_links_are_facts_of_a_gpu(tmp_path: Path) -> None:
    probe = Probe(fake_driver(tmp_path))
    alone = probe.gpus()[0][0]
    assert (alone["nvlinks"], alone["nvlink_peers"]) == (0, [])
    assert (alone["pcie_generation"], alone["pcie_width"]) == (5, 16)
    set_state(tmp_path, nvlinks0=18)
    first, second = probe.gpus()[0]
    assert (first["nvlinks"], first["nvlink_version"]) == (18, 4)
    assert (first["nvlink_peers"], second["nvlink_peers"]) == (["GPU-2"], ["GPU-1"])


def pinned(cores: int, *uuids: str, own: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    near = {"a": (0, 1, 2, 3), "b": (4, 5, 6, 7), "c": (4, 5, 6, 7)}
    ranks = tuple(
        RankSpec(rank=n, device=DeviceSpec(kind="cuda", uuid=uuid, cores=own)) for n, uuid in enumerate(uuids)
    )
    request = LaunchRequest(job="j", attempt=1, generation=1, ranks=ranks, kind="elastic", argv=("true",), cores=cores)
    return [rank.device.cores for rank in launch_record(request, Path("/data"), {}, near).ranks]


def test_ranks_are_pinned_to_the_cores_near_their_gpu_where_those_are_enough() -> None:
    assert pinned(8, "a", "b") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert pinned(6, "a", "b", "c") == [(0, 1, 2, 3), (4, 5, 6, 7), (4, 5, 6, 7)]
    assert pinned(12, "b", "c") == [(), ()]  # twelve cores were granted, four are near
    assert pinned(4, "a,b") == [(0, 1, 2, 3, 4, 5, 6, 7)]  # a command
    assert pinned(2, "a", "elsewhere") == [(0, 1, 2, 3), ()]
    assert pinned(2, "a", own=(9,)) == [(9,)]
