"""Readers of published workloads and tables of step times, one module per authors' format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clusterd.simulate.cluster import Cluster
from clusterd.simulate.errors import InputError
from clusterd.simulate.trace import text_of
from clusterd.simulate.truth import Truth
from clusterd.simulate.workload import Workload


def read(workload: Path, truth: Path, cluster: Cluster) -> tuple[Truth, Workload] | None:
    """Read step times and jobs; None if their truth has none of these formats.

    Pollux's truth is a folder, Gavel's and Arena's are JSON, Arena's says ``optimal``.

    Raises:
        InputError: a file cannot be read, a line is wrong, or nothing of the workload can be run.
    """
    from tests.benchmarks.traces import arena, gavel, pollux

    if truth.is_dir():
        return pollux.read(workload, truth, cluster)
    if truth.suffix != ".json":
        return None
    if "optimal" in table_of(truth, "a table of step times"):
        world = arena.read_truth(truth).on(cluster.sizes)
        return world, arena.read(workload, world)
    world = gavel.read_truth(truth, cluster.sizes)
    return world, gavel.read(workload, world)


def table_of(path: Path, expected: str) -> dict[str, Any]:
    """Read the object that a JSON file holds.

    Args:
        expected: description of the content, for the message.
    Raises:
        InputError: it cannot be read, is no JSON, or holds something else.
    """
    try:
        found = json.loads(text_of(path))
    except ValueError as error:
        raise InputError(f"{path}: no JSON ({error}); give {expected}") from None
    if not isinstance(found, dict) or not found:
        raise InputError(f"{path}: holds no object; give {expected}")
    return found
