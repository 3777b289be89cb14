"""GPUs as reported by a test library with NVML's binary interface."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterd.agent.host.gpu_probe import Probe, parse_query
from tests.agent.client import AgentClient, rank

OUTSIDE = 1 << 30
"""A pid that no kernel gives."""

FAKE = r"""
#include <stdio.h>
#include <string.h>
#include <unistd.h>
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned gpu, memory; } utilisation;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process_v2;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; MORE } process_v3;
static int holders, there = THERE, seen; /* what came back is seen by the first holder alone */
void come_back(void) { there = 2; }
int opened;
int nvmlInit_v2(void) { opened++; if (INIT == 0 && holders++ == 0) seen = there; return INIT; }
int nvmlShutdown(void) { holders--; return 0; }
const char *nvmlErrorString(int code) { (void)code; return "Unknown Error"; }
int nvmlDeviceGetCount_v2(unsigned *n) { while (access(HANG, 0) == 0) usleep(1000); *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)(unsigned long)(i + 1); return 0; }
int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *next) {
    if ((unsigned long)h == 1) return 3;
    *now = *next = MIG; return 0; }
/* Slices 0 and 2 of the second GPU. */
#define SLICE(h) ((unsigned long)h >= 100 ? (int)((unsigned long)h - 100) : -1)
int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *n) { (void)h; *n = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned i, void **slice) {
    (void)h; if (SLICES == 0 || (i != 0 && i != 2)) return 6;
    *slice = (void *)(unsigned long)(100 + i); return 0; }
int nvmlDeviceGetComputeMode(void *h, unsigned *m) { *m = (unsigned long)h == 2 ? COMPUTE : 0; return 0; }
int nvmlDeviceGetMemoryInfo(void *h, memory *m) {
    if ((unsigned long)h == 2 && SECOND) return SECOND;
    if (SLICE(h) >= 0) { m->total = (SLICE(h) ? 40ULL : 20ULL) << 30; m->used = 1ULL << 30; return 0; }
    if ((int)(unsigned long)h > seen) return 15;
    m->total = 80ULL << 30; m->used = (unsigned long long)USED_GIB << 30; return 0; }
int nvmlDeviceGetNumaNodeId(void *h, unsigned *n) { (void)h; *n = 1; return NUMA; }
int nvmlDeviceGetUtilizationRates(void *h, utilisation *u) { u->gpu = 50; return (unsigned long)h >= 2 ? 3 : 0; }
int nvmlDeviceGetUUID(void *h, char *b, unsigned n) {
    if (SLICE(h) >= 0) { snprintf(b, n, "MIG-%d", SLICE(h)); return 0; }
    snprintf(b, n, "GPU-%lu", (unsigned long)h); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *h, int *a, int *b) {
    *a = 9; *b = 0; return (unsigned long)h == 2 ? 3 : 0; }
int nvmlDeviceGetName(void *h, char *b, unsigned n) { /* drivers differ in whether slices have names of their own */
    snprintf(b, n, SLICE(h) == 2 ? "Fake H100 MIG 3g.40gb" : "Fake H100"); return 0; }
#define PROCESSES(version) \
int nvmlDeviceGetComputeRunningProcesses_##version(void *h, unsigned *n, process_##version *p) { \
    if ((unsigned long)h == 2 || (unsigned long)h == 100) { *n = 0; return 0; } \
    p[0].pid = PID; p[0].used = 1ULL << 30; p[1].pid = 7; p[1].used = ~0ULL; *n = 2; return 0; } \
int nvmlDeviceGetGraphicsRunningProcesses_##version(void *h, unsigned *n, process_##version *p) { \
    (void)h; (void)p; *n = 0; return 0; }
PROCESSES(v2)
PROCESSES(v3)
"""

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None, reason="no gcc to build the stand-in for the driver's library"
)


def fake_driver(tmp_path: Path, name: str = "libfake.so", **answers: object) -> str:
    source, library = tmp_path / "fake.c", tmp_path / name
    source.write_text(FAKE)
    usual = {
        "init": 0, "second": 0, "more": "", "there": 2, "mig": 0, "slices": 1, "pid": 1, "used_gib": 1, "numa": 3,
        "compute": 0, "hang": json.dumps("/nonexistent"),
    }  # fmt: skip
    defined = [f"-D{key.upper()}={value}" for key, value in {**usual, **answers}.items()]
    subprocess.run(["gcc", "-shared", "-fPIC", *defined, "-o", library, source], check=True)
    return str(library)


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


def test_a_host_without_a_driver_has_no_gpus_and_nothing_is_wrong() -> None:
    assert Probe("libabsent.so", "absent-smi").gpus() == ([], None)


def test_without_the_library_the_program_is_asked(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\ncase $1 in\n"
        "*compute_cap) echo 'GPU-a, 8.0';;\n"
        "--query-gpu*) echo 'GPU-a, 0, NVIDIA A100, 40960, 512, 7, Disabled, Exclusive_Process';;\n"
        "*) echo 'GPU-a, 42, 500';;\nesac\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    gpus, error = Probe("libabsent.so", str(program)).gpus()
    assert error is None
    assert gpus[0]["memory_bytes"] == 40960 << 20
    assert gpus[0]["processes"] == [{"pid": 42, "memory_bytes": 500 << 20}]
    assert gpus[0]["exclusive"]
    assert gpus[0]["compute_capability"] == "8.0"


def test_a_program_of_an_old_driver_knows_no_compute_capability(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\ncase $1 in\n"
        "*compute_cap) echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2;;\n"
        "--query-gpu*) echo 'GPU-a, 0, NVIDIA A100, 40960, 512, 7, Disabled, Default';;\nesac\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    gpus, error = Probe("libabsent.so", str(program)).gpus()
    assert ([gpu["compute_capability"] for gpu in gpus], error) == ([""], None)


def test_a_program_that_fails_is_quoted(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    gpus, error = Probe("libabsent.so", str(program)).gpus()
    assert gpus == []
    assert error == "Failed to initialize NVML: Driver/library version mismatch: reboot this host"


@pytest.mark.parametrize("code", [0, 6])
def test_a_program_that_finds_no_gpus_is_not_taken_for_one_that_fails(tmp_path: Path, code: int) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho 'No devices were found'; exit {code}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert Probe("libabsent.so", str(program)).gpus() == ([], None)


def test_values_that_the_program_does_not_know_are_unknown() -> None:
    [gpu], error = parse_query("GPU-a, 0, NVIDIA L4, 23034, [N/A], [N/A], [N/A], [N/A]\n", "GPU-a, 42, [N/A]\n")
    assert error is None
    assert (gpu["memory_used_bytes"], gpu["utilisation"], gpu["processes"][0]["memory_bytes"]) == (None, None, None)


@pytest.mark.parametrize("message", ["[N/A]", "[Not Supported]"])
def test_a_gpu_without_memory_of_its_own_has_the_host_s_by_the_program_too(message: str) -> None:
    [gpu], error = parse_query(f"GPU-a, 0, NVIDIA GB10, {message}, {message}, 0, [N/A], Default\n", "")
    assert error is None
    assert gpu["memory_bytes"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_gpu_whose_memory_may_not_be_told_leaves_the_others() -> None:
    devices = "GPU-a, 0, A100, [Insufficient Permissions], 0, 0, Disabled, Default\n"
    devices += "GPU-b, 1, A100, 81920, 1, 0, Disabled, Default\n"
    gpus, error = parse_query(devices, "")
    assert [gpu["uuid"] for gpu in gpus] == ["GPU-b"]
    assert error == "GPU 0: nvidia-smi reports as its memory: [Insufficient Permissions]"


def test_a_process_that_the_program_does_not_name_leaves_the_others() -> None:
    [gpu], _ = parse_query("GPU-a, 0, A100, 81920, 1, 0, Disabled, Default\n", "GPU-a, [N/A], [N/A]\nGPU-a, 42, 500\n")
    assert gpu["processes"] == [{"pid": 42, "memory_bytes": 500 << 20}]


def test_mig_is_reported_by_the_program_too() -> None:
    devices = "GPU-a, 0, A100, 81920, 1, [N/A], Enabled, Default\nGPU-b, 1, A100, 81920, 1, 0, Disabled, Default\n"
    gpus, error = parse_query(devices, "")
    assert [gpu["uuid"] for gpu in gpus] == ["GPU-b"]
    assert error is not None
    assert error.startswith("GPU 0: MIG is on")
