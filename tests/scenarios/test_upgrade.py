"""An upgrade of a cluster in the middle of its work, and the way back."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, RunningCluster

GROWN = {
    "core/state.py": ("Job", "Attempt", "Progress"),
    "core/events.py": ("JobSubmitted", "AttemptProgressed"),
    "protocol/agent.py": ("HelloReply", "AttemptRow"),
    "rows.py": ("Status",),
}
"""Classes to which the later version adds a field, as versions do."""

UNTIL = "until [ -e {file} ]; do sleep 0.1; done; echo {name} done"


def later_version(folder: Path) -> Path:
    """Copy of the product with another version number, other code on the hosts, and fields that this one lacks."""
    package = folder / "clusterd"
    shutil.copytree(REPOSITORY / "clusterd", package, ignore=shutil.ignore_patterns("__pycache__"))
    edit(package / "__init__.py", r'__version__ = "[^"]*"', '__version__ = "0.99.0"')
    for file, names in GROWN.items():
        for name in names:
            last_field = rf"(^class {name}\b.*?\n)(\n\n|\n    def |\n    @)"
            edit(package / file, last_field, r'\1    of_later_version: str = "new"\n\2')
    added = "".join(f'"{name}.of_later_version", ' for name in GROWN["core/state.py"])
    edit(package / "daemon" / "journal" / "codec.py", r"ADDED = frozenset\(\n    \{\n", rf"\g<0>        {added}\n")
    return folder


def edit(file: Path, pattern: str, by: str) -> None:
    text, count = re.subn(pattern, by, file.read_text(), count=1, flags=re.MULTILINE | re.DOTALL)
    assert count == 1, f"{file} has nothing like {pattern}"
    file.write_text(text)


@pytest.mark.slow
def test_jobs_of_every_kind_go_through_an_upgrade_and_the_way_back(
    local_cluster: RunningCluster, tmp_path: Path
) -> None:
    cluster, go_on = local_cluster, tmp_path / "go on"
    wait = json.dumps(["sh", "-c", UNTIL.format(file=f"'{go_on}'", name="it")])
    command = f"command = {wait}\nworkdir = '{tmp_path}'\nresources = {{ devices = 0, cpus = 1 }}\n"
    elastic = cluster.submit(
        'kind = "elastic"\ncommand = ["python", "train.py", "--steps", "100000"]\nresources = { devices = 2 }\n'
        "trials = false\n",
        "elastic",
    )
    cluster.wait_for(elastic, lambda row: row["step"] >= 2)  # the others need the cores that it leaves
    plain, paused = cluster.submit(command, "plain"), cluster.submit(command, "paused")
    again = ("submit", "--wait-for-hosts", str(cluster.directory / "plain.toml"))
    after = cluster.submit(f"after = ['{plain}']\n{command}", "after")
    array = cluster.run(*again, "--hold", "--array", "0-1%1", "--name", "tasks").stdout.split()[0]
    for job in (plain, paused):
        cluster.wait_for(job, lambda row: row["state"] == "running")
    cluster.run("pause", paused)
    cluster.wait_for(paused, lambda row: row["paused_by"] is not None)
    former = cluster.call("status")["version"]

    def others(version: str, source: Path | None) -> None:
        """Stop the daemon, and start that of the other version."""
        cluster.run("stop")
        cluster.environment.pop("PYTHONPATH", None)
        if source is not None:
            cluster.environment["PYTHONPATH"] = str(source)
        cluster.run("start")
        cluster.wait_until_up(2)
        assert cluster.call("status")["version"] == version
        assert {job: cluster.job(job)["state"] for job in states} == states
        assert cluster.job(paused)["paused_by"] is not None
        step = cluster.job(elastic)["step"]
        assert cluster.wait_for(elastic, lambda row: row["step"] > step + 1)["attempt"] == 1

    states = {elastic: "running", plain: "running", paused: "running", after: "queued", array: "queued"}
    others("0.99.0", later_version(tmp_path / "later"))
    # Agents of the former version obey the later daemon: it starts jobs on them, and moves those that run.
    cluster.run("migrate", elastic, "--plan", "dp=1", "--pin")
    moved = cluster.wait_for(elastic, lambda row: row["plan"] == "dp=1" and row["migrations"])
    assert moved["attempt"] == 1 and not moved["migrations"][-1]["failure"]
    assert cluster.run("run", "--devices", "0", "--", "echo", "new").stdout == "new\n"
    others(former, None)
    cluster.run("unpause", paused)
    cluster.run("release", array)
    go_on.touch()
    for job in (plain, paused, after):
        done = cluster.wait_for(job, lambda row: row["state"] == "finished")
        assert (done["attempt"], cluster.run("logs", job).stdout) == (1, "it done\n")
    cluster.run("wait", array)
    cluster.run("cancel", elastic)
