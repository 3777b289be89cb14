"""Readers of public workloads and tables, one module for each authors' format."""

from __future__ import annotations

from pathlib import Path

from clusterd.simulate.cluster import Cluster
from clusterd.simulate.errors import InputError
from clusterd.simulate.truth import Truth, read_truth
from clusterd.simulate.workload import Workload

FORMATS = ("a800",)


def read(form: str, workload: Path, truth: Path, cluster: Cluster) -> tuple[Truth, Workload]:
    """Step times and jobs.

    Raises:
        InputError: a file cannot be read, a line is wrong, or nothing of the workload can be run.
    """
    from clusterd.simulate.importers import a800

    if form == "auto":
        form = "a800"
    if form not in FORMATS:
        raise InputError(f"--format {form}: there are {', '.join(FORMATS)}")
    first_type = cluster.groups[0].device_type
    world = read_truth(truth, first_type).on(cluster.sizes)
    return world, a800.read(workload, world)
