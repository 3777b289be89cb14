"""Bytes that examples save for their backward pass under CUDA's own autocast, traced without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import slow

from tests.hang import HANG_S

HERE = Path(__file__).parent

NO_MORE_BYTES = 64
"""State of random generators, which attention kernels save."""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the guard of CUDA devices")


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Library that registers the guard in a process that loads it."""
    library = tmp_path_factory.mktemp("guard") / "guard.so"
    torch_folder = Path(torch.__file__).parent
    command = [
        "g++",
        "-std=c++20",
        "-shared",
        "-fPIC",
        f"-I{torch_folder}/include",
        HERE / "cuda_guard.cpp",
        "-o",
        library,
    ]
    subprocess.run([*command, f"-L{torch_folder}/lib", "-lc10"], check=True)
    return library


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "precision"),
    [("gpt", "bf16"), slow("gpt", "fp32"), slow("convnet", "bf16"), slow("convnet", "fp32")],
)
def test_bytes_that_a_gpu_saves_are_those_of_the_description(example: str, precision: str, guard: Path) -> None:
    """Layer by layer: activations, copies of parameters in bfloat16, and what the next layer gets."""
    command = [sys.executable, HERE / "cuda_trace.py", guard, example, precision]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for layer, on_cuda in found["cuda"].items():
        described = found["described"][layer]
        assert described == pytest.approx(on_cuda, rel=0.01, abs=NO_MORE_BYTES), layer
