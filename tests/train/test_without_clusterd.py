"""The example runs without clusterd: in one process, and under torchrun."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from rank_pool import ENVIRONMENT, ROOT

SCRIPT = ROOT / "examples/gpt/train.py"


def losses(output: str) -> dict[int, float]:
    return {
        int(step): float(loss) for step, loss in re.findall(r"^step (\d+)/\d+  loss ([\d.]+)", output, re.MULTILINE)
    }


@pytest.mark.slow
def test_the_example_trains_in_one_process_and_learns() -> None:
    ended = subprocess.run(
        [sys.executable, SCRIPT, "--steps", "40", "--width", "32", "--depth", "2"],
        env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    seen = losses(ended.stdout)
    assert {1, 40} <= set(seen)
    assert seen[40] < seen[1] - 0.5


@pytest.mark.slow
def test_the_example_trains_under_torchrun() -> None:
    small = ["--steps", "10", "--width", "32", "--depth", "2"]
    alone = subprocess.run(
        [sys.executable, SCRIPT, *small], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    many = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT, *small],
        env={**ENVIRONMENT, "CLUSTERD_PLAN": "dp=1,tp=2"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert many.returncode == 0, many.stderr
    assert losses(many.stdout)[10] == losses(alone.stdout)[10]


SEEDED = """
import torch
from torch.nn import functional as F
from clusterd import train

torch.manual_seed(1234)
data = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.long))
options = {"model": lambda: torch.nn.Linear(4, 2), "loss": F.cross_entropy, "data": data, "global_batch": 4, "steps": 1}
outcome = train.run(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **options, **GIVEN)
torch.manual_seed(1234)
print("loss", outcome.loss, F.cross_entropy(torch.nn.Linear(4, 2)(data.tensors[0][:4]), data.tensors[1][:4]).item())
"""


@pytest.mark.parametrize("given", ["{}", "{'seed': 1234}"])
def test_a_seed_that_the_script_sets_is_no_silent_one(given: str) -> None:
    """Initial weights follow the argument; with it they are those of plain torch under that seed."""
    program = SEEDED.replace("GIVEN", given)
    ended = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    told = "the script seeds torch with 1234: initial weights, the order of samples and draws of steps follow the"
    assert (told in ended.stdout + ended.stderr) == (given == "{}")
    _, trained, plain = ended.stdout.splitlines()[-1].split()
    assert (float(trained) == pytest.approx(float(plain), rel=1e-5)) == (given != "{}")


def test_the_script_is_short() -> None:
    """A script is at most 40 lines beyond its model."""
    assert sum(bool(line.strip()) for line in SCRIPT.read_text().splitlines()) <= 40


def test_importing_the_package_imports_no_torch() -> None:
    program = "import sys; from clusterd import train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, check=False).returncode == 0


@pytest.mark.slow
def test_preloaded_modules_start_no_threads_or_drivers() -> None:
    """Threads and CUDA contexts do not survive a fork, nor does a driver's library that was initialised."""
    program = (
        "import os, clusterd.train.process.preload, torch\n"
        "print(len(os.listdir('/proc/self/task')), torch.cuda.is_initialized(), torch.distributed.is_initialized())\n"
        "mapped = open('/proc/self/maps').read()\n"
        "print([name for name in ('libcuda.so', 'libnvidia-ml.so') if name in mapped])"
    )
    environment = {**ENVIRONMENT, "OPENBLAS_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["1", "False", "False", "[]"]


@pytest.mark.slow
def test_a_rank_imports_hardly_more() -> None:
    """Imports after the fork would cost seconds at every start and in every migration."""
    program = (
        "import sys, clusterd.train.process.preload; before = set(sys.modules)\n"
        "sys.argv = ['train.py', '--steps', '2']\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "print(sum(m.startswith('torch') for m in set(sys.modules) - before))"
    )
    environment = {**ENVIRONMENT, "CLUSTERD_PLAN": "zero=3,offload=parameters,checkpointing"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert int(ended.stdout.splitlines()[-1]) < 5
