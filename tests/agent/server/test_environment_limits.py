"""Limits of a surrounding allocation on what an agent offers."""

from __future__ import annotations

from typing import Any

import pytest

from clusterd.agent.server.environment_limits import of_allocation, restrict

GPUS = [{"index": number, "uuid": f"GPU-{number}{number}aa"} for number in range(4)]
FACTS: dict[str, Any] = {
    "gpus": GPUS, "cpu_cores": 8, "cpu_ids": list(range(8)), "memory_bytes": 64 << 30,
    "memory_available_bytes": 32 << 30, "hostname": "node1",
}  # fmt: skip


def test_without_variables_nothing_is_restricted() -> None:
    assert restrict(FACTS, of_allocation({"PATH": "/bin"})) == FACTS


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("1,3", [1, 3]),
        ("GPU-22aa,GPU-0", [2, 0]),
        ("", []),
        ("NoDevFiles", []),
        ("2,9,1", [2]),  # as in CUDA: nothing counts behind one that does not exist
        ("2,2", [2]),
    ],
)
def test_gpus_are_those_that_cuda_would_see(visible: str, indices: list[int]) -> None:
    found = restrict(FACTS, of_allocation({"CUDA_VISIBLE_DEVICES": visible}))
    assert [gpu["index"] for gpu in found["gpus"]] == indices


def test_cores_and_memory_are_those_of_the_allocation() -> None:
    found = restrict(FACTS, of_allocation({"SLURM_CPUS_ON_NODE": "2", "SLURM_MEM_PER_CPU": "1024"}))
    assert (found["cpu_cores"], found["cpu_ids"]) == (2, [])
    assert (found["memory_bytes"], found["memory_available_bytes"]) == (2 << 30, 2 << 30)
    assert found["gpus"] == GPUS


def test_all_of_a_node_s_memory_and_more_cores_than_there_are_do_not_restrict() -> None:
    environment = {"SLURM_CPUS_ON_NODE": "64", "SLURM_MEM_PER_NODE": "0", "SLURM_MEM_PER_CPU": "odd"}
    assert restrict(FACTS, of_allocation(environment)) == FACTS
