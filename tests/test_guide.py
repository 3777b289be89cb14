"""The outputs in docs/guide.md have the form of what the commands print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from docs.guide import form

ROOT = Path(__file__).parent.parent


def test_runs_that_differ_in_numbers_alone_have_one_form() -> None:
    first = form("STEP  TIME\ndp=2,zero=1  40 ms\ndp=4  1m02s\n")
    assert first == form("STEP   TIME\npp=2  9.5 s\n") != form("STEP  TIMES\npp=2  9.5 s\n")


@pytest.mark.slow
def test_the_guide_prints_what_it_shows() -> None:
    command = [sys.executable, "-m", "docs.guide", "--check"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
