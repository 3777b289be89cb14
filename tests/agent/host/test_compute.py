"""Kernels and an all-reduce of a host check, on CPU devices in the place of GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from clusterd.agent.host import checks

pytestmark = pytest.mark.slow

DEADLINE_S = 10.0
"""All of it is waited for, for the one that hangs."""


def test_devices_compute_and_reach_each_other() -> None:
    kernels, reduced, access = checks.check_gpus(sys.executable, ["a", "b"], "cpu")
    for result in kernels.values():
        assert result["seconds"] >= 0 and min(result["to_bytes_per_s"], result["from_bytes_per_s"]) > 1e8
    assert access == {"without_access": []}
    assert reduced is not None and reduced["seconds"] > 0


def scripted(tmp_path: Path, script: str) -> str:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return str(python)


def test_a_gpu_that_hangs_or_fails_is_told_from_the_others(tmp_path: Path) -> None:
    python = scripted(
        tmp_path,
        'case "$CUDA_VISIBLE_DEVICES" in\n'
        "    hangs) sleep 1000 ;;\n"
        "    dies) echo 'Bus error' >&2; exit 7 ;;\n"
        """    wrong) echo '{"error": "a product of matrices is wrong"}'; exit 1 ;;\n"""
        """    *) echo '{"seconds": 0.5}' ;;\n"""
        "esac",
    )
    gpus = ["hangs", "dies", "wrong", "fine", "MIG-1"]
    kernels, reduced, access = checks.check_gpus(python, gpus, deadline_s=DEADLINE_S)
    assert kernels == {
        "hangs": {"error": "no answer within 10 s"},
        "dies": {"error": "it exited with 7: Bus error"},
        "wrong": {"error": "a product of matrices is wrong"},
        "fine": {"seconds": 0.5},
        "MIG-1": {"seconds": 0.5},
    }
    assert reduced is access is None  # one whole GPU is left, and slices have no direct link


def test_gpus_that_do_not_reach_each_other_are_named(tmp_path: Path) -> None:
    python = scripted(
        tmp_path,
        """case "$CUDA_VISIBLE_DEVICES" in *,*) echo '{"without_access": [[0, 2], [1, 2]]}' ;;"""
        """ *) echo '{"seconds": 0.5}' ;; esac""",
    )
    _, _, access = checks.check_gpus(python, ["a", "b", "c"], deadline_s=DEADLINE_S)
    assert access == {"without_access": [["a", "c"], ["b", "c"]]}


def test_an_all_reduce_is_explained_by_the_rank_that_failed(tmp_path: Path) -> None:
    """The others wait for it until the deadline."""
    python = scripted(
        tmp_path,
        """if [ "$CUDA_VISIBLE_DEVICES" = a,b ]; then echo '{"without_access": [[0, 1]]}'\n"""
        """elif [ $# = 4 ]; then echo '{"seconds": 0.5}'\n"""
        """elif [ "$CUDA_VISIBLE_DEVICES" = b ]; then echo '{"error": "no route between GPUs"}'; exit 1\n"""
        "else sleep 1000; fi",
    )
    _, reduced, _ = checks.check_gpus(python, ["a", "b"], deadline_s=DEADLINE_S)
    assert reduced == {"error": "no route between GPUs"}
