"""Ranks for tests on real GPUs, on a machine that may have no more than torch and pytest; `make test-gpu` runs them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / path) for path in ("tests/train", "examples/gpt", "examples/hf")]

TEST_S = int(os.environ.get("CLUSTERD_GPU_TEST_S", "100"))
"""Time limit of one test: a hung collective must not cost the others their turn."""


@pytest.fixture(scope="session")
def up_to_cuda() -> Callable[[str], None]:
    """Ends a test before its first CUDA call on a machine without a GPU, with what it has done until there."""

    def check(done: str) -> None:
        if torch.cuda.device_count() == 0:
            pytest.skip(f"dry run, no GPU here: {done}; the next step calls CUDA")

    return check


@pytest.fixture(autouse=True)
def limited(request: pytest.FixtureRequest) -> Iterator[None]:
    marker = request.node.get_closest_marker("time_limit")
    seconds = marker.args[0] if marker is not None else TEST_S

    def stop(*_: object) -> None:
        pytest.fail(f"not over after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
