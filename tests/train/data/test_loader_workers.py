"""Scripts that fail while their data-loader workers run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from cases import slow
from rank_pool import ENVIRONMENT, ROOT

from tests.hang import HANG_S

SCRIPT = """
import os, signal, torch
from clusterd import train

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        if torch.utils.data.get_worker_info() is not None and i == 37:
            {fault}
        return torch.ones(2), torch.zeros(2)

def loss(outputs, targets):
    if {losses_fail} and not torch._guards.detect_fake_mode(outputs):
        raise ValueError("the loss fails")
    return (outputs - targets).square().mean()

train.run(model=lambda: torch.nn.Linear(2, 2), loss=loss, data=Data(), num_workers=2, global_batch=4, steps=40,
          optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "losses_fail", "said"),
    [
        slow("raise ValueError('sample 37 is broken')", False, "sample 37 is broken"),
        # PyTorch's own message, or that of a read from the dead worker, whichever comes first.
        ("os.kill(os.getpid(), signal.SIGKILL)", False, "is killed by signal: Killed|Connection reset by peer"),
        slow("pass", True, "the loss fails"),
    ],
    ids=["sample", "killed", "loss"],
)
def test_it_ends_with_its_error(tmp_path: Path, fault: str, losses_fail: bool, said: str) -> None:
    """Regression: the rank waited for ever for workers that ignore SIGTERM, and kept its devices."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(fault=fault, losses_fail=losses_fail))
    ended = subprocess.run(
        [sys.executable, script], env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=HANG_S, cwd=ROOT
    )
    assert ended.returncode == 1
    assert re.search(said, ended.stderr)
