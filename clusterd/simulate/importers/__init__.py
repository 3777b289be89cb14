"""Readers of public workloads and tables, one module per authors' format."""

from __future__ import annotations

from pathlib import Path

from clusterd.simulate.cluster import Cluster
from clusterd.simulate.errors import InputError
from clusterd.simulate.importers.lines import table_of
from clusterd.simulate.truth import Truth, read_truth
from clusterd.simulate.workload import Workload

FORMATS = ("a800", "arena", "gavel", "pollux")


def read(form: str, workload: Path, truth: Path, cluster: Cluster) -> tuple[Truth, Workload]:
    """Read step times and jobs.

    Args:
        form: one of `FORMATS`, or ``auto``: detected from the truth.
    Raises:
        InputError: a file cannot be read, a line is wrong, or nothing of the workload can be run.
    """
    from clusterd.simulate.importers import a800, arena, gavel, pollux

    if form == "auto":
        form = _form_of(truth)
    if form not in FORMATS:
        raise InputError(f"--format {form}: there are {', '.join(FORMATS)}")
    if form == "a800":
        world = read_truth(truth, cluster.groups[0].device_type).on(cluster.sizes)
        return world, a800.read(workload, world)
    if form == "arena":
        world = arena.read_truth(truth).on(cluster.sizes)
        return world, arena.read(workload, world)
    if form == "gavel":
        world = gavel.read_truth(truth, cluster.sizes)
        return world, gavel.read(workload, world)
    return pollux.read(workload, truth, cluster)


def _form_of(truth: Path) -> str:
    """Detect the format of a truth: Pollux's is a folder, Gavel's and Arena's are JSON, Arena's says ``optimal``."""
    if truth.is_dir():
        return "pollux"
    if truth.suffix != ".json":
        return "a800"
    return "arena" if "optimal" in table_of(truth, "a table of step times") else "gavel"
