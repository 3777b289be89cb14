"""Ranks for tests on real GPUs, on a machine that may have no more than torch and pytest; `make test-gpu` runs them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / path) for path in ("tests/train", "examples/gpt", "examples/hf")]

TEST_S = int(os.environ.get("CLUSTERD_GPU_TEST_S", "100"))
"""Time limit of one test: a hung collective must not cost the others their turn."""


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        pytest.fail(f"not over after {TEST_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(TEST_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
