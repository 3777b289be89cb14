"""Facts of the driver against torch's, checks of a host's GPUs, and processes that fork beside a CUDA context."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from figures import Figures

from clusterd.agent.host import checks
from clusterd.agent.host.gpu_probe import Probe
from clusterd.train.process import accelerator

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.gpu, pytest.mark.time_limit(60)]


@pytest.mark.own_process
def test_the_driver_and_torch_agree_on_the_gpus(needs_driver: Callable[[str], None], figures: Figures) -> None:
    """Both orders are that of the PCI bus, as clusterd sets it for ranks."""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    found, wrong = Probe().gpus()
    needs_driver(f"this host has no driver ({len(found)} GPUs)")
    assert wrong is None
    used_before = found[0]["memory_used_bytes"]
    for number in range(torch.cuda.device_count() if not any("slice" in gpu for gpu in found) else 0):
        seen = torch.cuda.get_device_properties(number)
        [gpu] = [gpu for gpu in found if gpu["uuid"].endswith(str(seen.uuid))]
        assert gpu["name"] == seen.name
        # The driver keeps some of the memory that NVML counts.
        assert 0.9 * gpu["memory_bytes"] <= seen.total_memory <= gpu["memory_bytes"]
        assert gpu["compute_capability"] == f"{seen.major}.{seen.minor}"
        assert not gpu.get("fault"), "this GPU is not fit for jobs"
    if len(found) == 1 and used_before is not None:
        accelerator.select(0)
        used = Probe().gpus()[0][0]["memory_used_bytes"]
        figures.record(
            "memory of a CUDA context with one kernel", used - used_before - torch.cuda.memory_reserved(), "B"
        )


def test_host_check_computes_on_every_gpu(up_to_cuda: Callable[[str], None], kind: str, figures: Figures) -> None:
    found, _ = Probe().gpus()
    uuids = [gpu["uuid"] for gpu in found] if kind == "cuda" else ["cpu0", "cpu1"]
    up_to_cuda("the check's program is ready")
    kernels, reduced, access = checks.check_gpus(sys.executable, uuids, kind, deadline_s=50)
    assert [result for result in kernels.values() if "error" in result] == []
    assert (reduced is not None) == (len([uuid for uuid in uuids if not uuid.startswith("MIG-")]) > 1)
    assert reduced is None or "error" not in reduced
    assert access is None or "error" not in access
    for name in ("to_bytes_per_s", "from_bytes_per_s"):
        figures.record(f"host check: copies {name[:-12]}", min(result[name] for result in kernels.values()), "B/s")
    figures.record("first kernel of a process", max(result["seconds"] for result in kernels.values()), "s")


FORK_SERVER = """
import os, sys
import clusterd.train.process.preload
from scenarios import Recorded, job
from clusterd.train.inspect.describe import describe
from clusterd.train.process import accelerator
from clusterd.train.process.run_in_fork import run_in_fork
import torch

kind = sys.argv[1]
run_in_fork(lambda: describe(job(Recorded(64), precision="bf16"), trace=True).parameter_bytes)
assert not accelerator.is_in_use(), "preparing a rank creates a CUDA context"

def compute():
    device = accelerator.select(0) if kind == "cuda" else torch.device("cpu")
    return torch.ones(8, device=device).sum().item()

if len(sys.argv) > 2:
    print("forks without a context", flush=True)
    sys.exit()
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if compute() == 8 else 1)
    assert os.waitpid(pid, 0)[1] == 0, "a fork of the fork server cannot use CUDA"
if kind == "cuda":
    compute()
    pid = os.fork()
    if pid == 0:
        try:
            compute()
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0, "torch lets a fork of a process with a context use CUDA"
"""


def test_forks_of_a_process_without_a_context_have_their_own(up_to_cuda: Callable[[str], None], kind: str) -> None:
    """A fork server imports torch and describes models, and each rank then creates its context."""
    folders = [ROOT, *(ROOT / path for path in ("tests/train", "examples/gpt", "examples/hf"))]
    paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def serve(*more: str) -> None:
        command = [sys.executable, "-c", FORK_SERVER, kind, *more]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=50)
        assert done.returncode == 0, done.stderr

    serve("without CUDA")
    up_to_cuda("a process has described a model in a fork, and has no CUDA context")
    serve()
