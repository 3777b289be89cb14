"""Imports of a fork server, before it forks ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_warnings_of_torch_are_no_errors_of_a_job() -> None:
    """A job with PYTHONWARNINGS=error is about its own script, where the filter goes on."""
    script = "import clusterd.train.process.preload, warnings; warnings.warn('own')"
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "UserWarning: own"
