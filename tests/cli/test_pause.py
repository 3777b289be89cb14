"""``clusterd pause`` and ``unpause``."""

from __future__ import annotations

from pathlib import Path

from clusterd.agent.host import processes
from tests.conftest import RunningCluster, until

SCRIPT = "setsid sh -c 'echo $$ > child; exec sleep 1000' & echo $$ > own; while :; do sleep 0.1; done"


def test_a_paused_command_stands_still_with_its_devices(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    """With the processes that left its session, as workers of torchrun do; a cancel ends it all the same."""
    cluster = shared_cluster
    command = ("run", "-d", "--no-snapshot", "--devices", "1", "--", "sh", "-c", SCRIPT)
    job = cluster.run(*command, cwd=tmp_path).stdout.strip()

    def pids() -> list[int]:
        texts = [file.read_text() for name in ("own", "child") if (file := tmp_path / name).exists()]
        return [int(text) for text in texts if text.strip()]

    def states() -> set[str]:
        return {found.state for pid in pids() if (found := processes.stat(pid))}

    until(lambda: len(pids()) == 2)
    said = cluster.run("pause", job).stderr
    assert "is paused, and keeps its devices" in said
    until(lambda: states() == {"T"})
    row = cluster.job(job)
    assert (row["state"], row["holds_devices"]) == ("running", True)
    assert f"its devices are kept: clusterd unpause {job}" in cluster.run("ls").stdout
    cluster.run("unpause", job)
    until(lambda: "T" not in states())
    assert cluster.job(job)["paused_by"] is None
    assert "is not paused" in cluster.run("unpause", job, check=False).stderr
    cluster.run("pause", job)
    cluster.run("cancel", "--wait", job)
    assert not states() - {"Z"}


def test_a_queued_job_is_held(shared_cluster: RunningCluster) -> None:
    cluster = shared_cluster
    first = cluster.run("run", "-d", "--no-snapshot", "--", "sleep", "1000").stdout.strip()
    waits = cluster.run("run", "-d", "--no-snapshot", "--after", f"{first}:any", "--", "true").stdout.strip()
    assert "is held" in cluster.run("pause", waits).stderr
    cluster.run("cancel", "--wait", first)
    assert cluster.job(waits)["state"] == "queued"
    cluster.run("unpause", waits)
    assert cluster.run("wait", waits).returncode == 0
