"""GPUs as reported by a test library with NVML's binary interface."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterd.agent.host.gpu_probe import Probe
from tests.agent.client import AgentClient, rank
from tests.agent.host.fake_nvml import fake_driver, needs_gcc, set_state

OUTSIDE = 1 << 30
"""A pid that no kernel gives."""

pytestmark = needs_gcc


def test_gpus_come_with_uuid_memory_and_the_processes_on_them(tmp_path: Path) -> None:
    gpus, error = Probe(fake_driver(tmp_path)).gpus()
    assert error is None
    assert [gpu["uuid"] for gpu in gpus] == ["GPU-1", "GPU-2"]
    assert gpus[0]["name"] == "Fake H100"
    assert (gpus[0]["memory_bytes"], gpus[0]["memory_used_bytes"]) == (80 << 30, 1 << 30)
    assert [gpu["utilisation"] for gpu in gpus] == [0.5, None]
    assert [gpu["compute_capability"] for gpu in gpus] == ["9.0", ""]
    assert gpus[0]["processes"] == [{"pid": 1, "memory_bytes": 1 << 30}, {"pid": 7, "memory_bytes": None}]


def test_a_driver_whose_newest_process_list_is_of_another_form_is_read_right(tmp_path: Path) -> None:
    """R535.43 to R535.86: 32 bytes for each process, not 24."""
    gpus, _ = Probe(fake_driver(tmp_path, more="unsigned long long protected;")).gpus()
    assert gpus[0]["processes"] == [{"pid": 1, "memory_bytes": 1 << 30}, {"pid": 7, "memory_bytes": None}]


@pytest.mark.parametrize(
    ("init", "text"), [(18, "driver/library version mismatch"), (9, "not loaded"), (999, "Unknown Error")]
)
def test_a_driver_that_refuses_is_quoted(tmp_path: Path, init: int, text: str) -> None:
    gpus, error = Probe(fake_driver(tmp_path, init=init)).gpus()
    assert gpus == []
    assert error is not None
    assert text in error


def test_a_gpu_that_fell_off_the_bus_leaves_the_others(tmp_path: Path) -> None:
    gpus, error = Probe(fake_driver(tmp_path, second=15)).gpus()
    assert [gpu["uuid"] for gpu in gpus] == ["GPU-1"]
    assert error == "GPU 1: the NVIDIA driver reports: Unknown Error"


@pytest.mark.parametrize("memory", [0, 4])  # 4: that of the whole GPU may be hidden then
def test_slices_of_a_gpu_with_mig_on_are_its_devices(tmp_path: Path, memory: int) -> None:
    gpus, error = Probe(fake_driver(tmp_path, second=memory, mig=1)).gpus()
    assert error is None
    assert [(gpu["uuid"], gpu["index"], gpu.get("slice")) for gpu in gpus] == [
        ("GPU-1", 0, None),
        ("MIG-0", 1, 0),
        ("MIG-2", 1, 2),
    ]
    assert [gpu["name"] for gpu in gpus[1:]] == ["Fake H100 MIG 20gb", "Fake H100 MIG 3g.40gb"]
    assert [gpu["memory_bytes"] >> 30 for gpu in gpus[1:]] == [20, 40]
    assert [len(gpu["processes"]) for gpu in gpus[1:]] == [0, 2]


def test_a_gpu_with_mig_on_and_no_slice_is_not_offered_and_that_is_reported(tmp_path: Path) -> None:
    gpus, error = Probe(fake_driver(tmp_path, mig=1, slices=0)).gpus()
    assert [gpu["uuid"] for gpu in gpus] == ["GPU-1"]
    assert error is not None
    assert error.startswith("GPU 1: MIG is on, and there is no slice")


@pytest.mark.parametrize("kind", ["command", "checkpointable", "elastic"])
def test_ranks_on_slices_of_one_gpu_see_one_slice_each_as_if_on_hosts_of_their_own(
    connect: Callable[..., AgentClient], tmp_path: Path, kind: str
) -> None:
    fake_driver(tmp_path, "libnvidia-ml.so.1", mig=1)
    agent = connect(env={"LD_LIBRARY_PATH": str(tmp_path)})
    shown = "echo $CUDA_VISIBLE_DEVICES $LOCAL_RANK $LOCAL_WORLD_SIZE $NCCL_HOSTID"
    ranks = [
        rank(n, world_size=2, local_rank=n, local_world_size=2, device=_cuda(uuid))
        for n, uuid in enumerate(["MIG-0", "MIG-2"])
    ]
    agent.launch(["sh", "-c", shown], kind=kind, ranks=ranks)
    for _ in ranks:
        agent.event("rank_exited")
    assert [agent.log(rank=n) for n in range(2)] == ["MIG-0 0 1 rank0\n", "MIG-2 0 1 rank1\n"]


def test_a_whole_gpu_beside_slices_is_named_by_uuid(connect: Callable[..., AgentClient], tmp_path: Path) -> None:
    """CUDA numbers GPUs with MIG on in a way of its own."""
    fake_driver(tmp_path, "libnvidia-ml.so.1", mig=1)
    agent = connect(env={"LD_LIBRARY_PATH": str(tmp_path)})
    agent.launch(["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"], kind="command", ranks=[rank(device=_cuda("GPU-1"))])
    agent.event("rank_exited")
    assert agent.log() == "GPU-1\n"


def test_a_process_for_several_slices_is_refused(connect: Callable[..., AgentClient], tmp_path: Path) -> None:
    fake_driver(tmp_path, "libnvidia-ml.so.1", mig=1)
    agent = connect(env={"LD_LIBRARY_PATH": str(tmp_path)})
    with pytest.raises(Exception, match="one process cannot use 2 MIG slices"):
        agent.launch(["true"], kind="command", ranks=[rank(device=_cuda("MIG-0,MIG-2"))])


def _cuda(uuid: str) -> dict[str, object]:
    return {"kind": "cuda", "uuid": uuid, "cores": [], "threads": 1}


def test_a_gpu_that_lets_in_one_process_is_told_and_one_that_lets_in_none_is_not_offered(tmp_path: Path) -> None:
    gpus, error = Probe(fake_driver(tmp_path, compute=3)).gpus()
    assert ([gpu["exclusive"] for gpu in gpus], error) == ([False, True], None)
    gpus, error = Probe(fake_driver(tmp_path, "libother.so", compute=2)).gpus()
    assert [gpu["uuid"] for gpu in gpus] == ["GPU-1"]
    assert error is not None
    assert error.startswith("GPU 1: its compute mode prohibits all processes")


@pytest.mark.parametrize(("answers", "opened"), [({"mig": 1, "slices": 0}, 1), ({"second": 4}, 1), ({"second": 15}, 3)])
def test_the_driver_is_loaded_anew_only_where_that_may_mend_something(
    tmp_path: Path, answers: dict[str, int], opened: int
) -> None:
    """Each time costs seconds on a GPU that nobody uses, where the driver does not persist."""
    library = fake_driver(tmp_path, **answers)
    probe = Probe(library)
    for _ in range(3):
        assert len(probe.gpus()[0]) == 1
    assert ctypes.c_int.in_dll(ctypes.CDLL(library), "opened").value == opened


def test_a_gpu_that_came_back_is_seen(tmp_path: Path) -> None:
    library = fake_driver(tmp_path, there=1)
    probe = Probe(library)
    for _ in range(2):
        assert [gpu["uuid"] for gpu in probe.gpus()[0]] == ["GPU-1"]
    ctypes.CDLL(library).come_back()
    assert [gpu["uuid"] for gpu in probe.gpus()[0]] == ["GPU-1", "GPU-2"]


def test_a_gpu_without_memory_of_its_own_has_the_host_s(tmp_path: Path) -> None:
    gpus, error = Probe(fake_driver(tmp_path, second=3)).gpus()
    assert error is None
    assert gpus[1]["memory_bytes"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert gpus[1]["memory_used_bytes"] is None  # what others use of that is no use of the GPU


def test_memory_that_the_kernel_gives_out_is_not_told_as_used(tmp_path: Path) -> None:
    """Grace Hopper: the kernel keeps pages there after those who used them have ended."""
    gpus, _ = Probe(fake_driver(tmp_path, used_gib=70, numa=0)).gpus()
    assert (gpus[0]["memory_bytes"], gpus[0]["memory_used_bytes"]) == (80 << 30, None)


def test_in_a_container_a_rank_s_own_use_of_its_gpu_is_not_foreign(
    connect: Callable[..., AgentClient], tmp_path: Path
) -> None:
    """The driver tells pids as they are outside, where the agent cannot look."""
    fake_driver(tmp_path, "libnvidia-ml.so.1", pid=OUTSIDE, used_gib=60)
    agent = connect(env={"LD_LIBRARY_PATH": str(tmp_path)})

    def seen() -> tuple[list[bool], int]:
        gpu = agent.ok("facts")["gpus"][0]
        return [process["ours"] for process in gpu["processes"] if process["pid"] == OUTSIDE], gpu["unlisted_bytes"]

    assert seen() == ([False], 59 << 30)
    device = {"kind": "cuda", "uuid": "GPU-2,GPU-1", "cores": [], "threads": 1}
    agent.launch(["sleep", "1000"], ranks=[rank(device=device)])
    assert seen() == ([True], 0)
    agent.stop(grace_s=0.0)
    assert seen() == ([False], 59 << 30)


@pytest.mark.parametrize("kind", ["command", "checkpointable", "elastic"])
@pytest.mark.parametrize("second", [0, 15])
def test_programs_find_their_gpus_by_index_where_that_is_certain(
    connect: Callable[..., AgentClient], tmp_path: Path, kind: str, second: int
) -> None:
    """Launchers parse integers; where a GPU does not answer, who knows whether CUDA counts it."""
    fake_driver(tmp_path, "libnvidia-ml.so.1", second=second)
    agent = connect(env={"LD_LIBRARY_PATH": str(tmp_path)})
    device = {"kind": "cuda", "uuid": "GPU-1", "cores": [], "threads": 1}
    agent.launch(["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"], kind=kind, ranks=[rank(device=device)])
    agent.event("rank_exited")
    assert agent.log() == ("0\n" if kind != "elastic" and not second else "GPU-1\n")


def test_a_driver_that_hangs_blocks_nobody_for_long_and_is_asked_once(tmp_path: Path) -> None:
    hang = tmp_path / "hang"
    hang.touch()
    probe = Probe(fake_driver(tmp_path, hang=json.dumps(str(hang))), answers_s=0.05)
    calls = {t.ident for t in threading.enumerate()}
    for _ in range(3):
        gpus, error = probe.gpus()
        assert gpus == []
        assert error is not None and "the NVIDIA driver has not answered" in error
    assert len([t for t in threading.enumerate() if t.ident not in calls]) == 1
    hang.unlink()
    while (found := probe.gpus())[1] is not None:
        time.sleep(0.01)
    assert len(found[0]) == 2


def test_a_host_without_a_driver_has_no_gpus_and_nothing_is_wrong(tmp_path: Path) -> None:
    assert Probe("libabsent.so", driver_device=tmp_path / "absent").gpus() == ([], None)


def test_a_driver_whose_library_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    gpus, error = Probe("libabsent.so", driver_device=tmp_path / "nvidiactl").gpus()
    assert gpus == []
    assert error is not None and error.startswith(
        "the NVIDIA driver is there, but its library cannot be loaded: libabs"
    )


def probe_without_kernel_log(tmp_path: Path) -> Probe:
    return Probe(fake_driver(tmp_path), kernel_log=tmp_path / "absent")


def test_errors_of_a_gpu_are_its_facts_and_fatal_ones_its_fault(tmp_path: Path) -> None:
    probe = probe_without_kernel_log(tmp_path)
    first, second = probe.gpus()[0]
    assert (first["fault"], first["xids"], first["ecc_corrected"], first["ecc_uncorrected"]) == ("", {}, 0, 0)
    assert (second["ecc_corrected"], second["ecc_uncorrected"]) == (None, None)  # it does not count them
    set_state(tmp_path, corrected0=7, ecc0=2, xid1=31)
    first, second = probe.gpus()[0]
    assert (first["ecc_corrected"], first["ecc_uncorrected"]) == (7, 2)
    assert first["fault"] == "2 uncorrectable ECC errors"
    assert (second["xids"], second["fault"]) == ({"31": 1}, "")  # a program's wrong address
    set_state(tmp_path, xid1=79)
    first, second = probe.gpus()[0]
    assert first["fault"] == ""  # the counts begin anew with a reset
    assert second["xids"] == {"31": 1, "79": 1}
    assert second["fault"] == "XID 79 (it fell off the bus)"


@pytest.mark.parametrize(
    ("state", "text"), [("remap0", "no spare rows left"), ("recovery0", "its driver asks for a reset of the GPU")]
)
def test_a_gpu_that_its_driver_wants_replaced_or_reset_is_at_fault(tmp_path: Path, state: str, text: str) -> None:
    probe = probe_without_kernel_log(tmp_path)
    set_state(tmp_path, **{state: 1})
    assert text in probe.gpus()[0][0]["fault"]


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"cap0": 300_000}, "its power is capped at 300 of 700 W: `nvidia-smi -pl 700` as root"),
        ({"slow0": 0x2 | 0x4}, "its clocks are set lower"),
        ({"slow0": 0x40 | 0x8}, "its clocks are lowered: it is too hot"),
        ({"slow0": 0x8}, "its clocks are lowered: its hardware asks for it"),
        ({"eccmode0": 0}, "ECC is off"),
    ],
)
def test_what_slows_a_gpu_or_hides_its_errors_is_noted_with_a_remedy(
    tmp_path: Path, state: dict[str, int], text: str
) -> None:
    probe = probe_without_kernel_log(tmp_path)
    assert [gpu["notes"] for gpu in probe.gpus()[0]] == [[], []]
    set_state(tmp_path, **state)
    first, second = probe.gpus()[0]
    assert len(first["notes"]) == 1 and first["notes"][0].startswith(text)
    assert second["notes"] == []


def test_xids_since_boot_are_read_from_the_kernel_log(tmp_path: Path) -> None:
    """It has those from before the agent started, too."""
    log = tmp_path / "kmsg"
    log.write_bytes(
        b"4,1,1,-;NVRM: Xid (PCI:0000:20:00): 13, pid=7, Graphics Exception\n"
        b"4,2,1,-;NVRM: Xid (PCI:0000:20:00): 79, pid='<unknown>', GPU has fallen off the bus.\n"
        b"4,3,1,-;NVRM: Xid (PCI:0000:5e:00): 48, of a GPU that is not there\n"
    )
    probe = Probe(fake_driver(tmp_path), kernel_log=log)
    set_state(tmp_path, xid1=79)  # the event of the same error
    first, second = probe.gpus()[0]
    assert (first["xids"], first["fault"]) == ({}, "")
    assert second["xids"] == {"13": 1, "79": 1}
    with log.open("ab") as more:
        more.write(b"4,4,9,-;NVRM: Xid (PCI:0000:20:00): 79, pid=9\n")
    assert probe.gpus()[0][1]["fault"] == "XID 79 (it fell off the bus) 2 times"
