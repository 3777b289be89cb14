"""Builds a stand-in for the driver's NVML library, with its binary interface."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")

needs_gcc = pytest.mark.skipif(
    shutil.which("gcc") is None, reason="no gcc to build the stand-in for the driver's library"
)


def fake_driver(tmp_path: Path, name: str = "libfake.so", **answers: object) -> str:
    """Path of a library that answers as these macros of its source say."""
    library = tmp_path / name
    usual = {
        "init": 0, "second": 0, "more": "", "there": 2, "mig": 0, "slices": 1, "pid": 1, "used_gib": 1, "numa": 3,
        "compute": 0, "hang": json.dumps(str(tmp_path / "no driver hangs")),
        "state": json.dumps(str(tmp_path / "state")),
    }  # fmt: skip
    defined = [f"-D{key.upper()}={value}" for key, value in {**usual, **answers}.items()]
    subprocess.run(["gcc", "-shared", "-fPIC", *defined, "-o", library, SOURCE], check=True)
    return str(library)


def set_state(tmp_path: Path, **numbers: int) -> None:
    """Change what libraries built in this folder answer; they may be loaded in other processes."""
    new = tmp_path / "state.new"
    new.write_text("".join(f"{key} {number}\n" for key, number in numbers.items()))
    new.replace(tmp_path / "state")
