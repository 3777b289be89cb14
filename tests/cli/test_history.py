"""`clusterd history` for somebody who was away."""

from __future__ import annotations

import json

from tests.conftest import RunningCluster


def test_what_happened_is_told_in_order_with_its_reasons(local_cluster: RunningCluster) -> None:
    local_cluster.run("run", "--no-snapshot", "--name", "bad", "--", "sh", "-c", "exit 3", check=False)
    local_cluster.run("host", "drain", "local1", "--why", "new fan")
    lines = [line[16:] for line in local_cluster.run("history").stdout.splitlines()]
    kinds = [line[:20].strip() for line in lines]
    assert kinds.index("job submitted") < kinds.index("launch attempt") < kinds.index("rank exited")
    assert any(line.startswith("rank exited          bad (1) on local") and "exit code 3" in line for line in lines)
    assert any(line.startswith("host drained         local1") and "why new fan" in line for line in lines)
    about_job = local_cluster.run("history", "--job", "bad").stdout
    assert "host drained" not in about_job
    assert "end job" in about_job
    about_host = json.loads(local_cluster.run("history", "--host", "local1", "-o", "json").stdout)
    assert {row["host"] for row in about_host} == {"local1"}
    nothing = local_cluster.run("history", "--since", "0s")
    assert (nothing.stdout, nothing.stderr) == ("", "nothing in the last 0s\n")


def test_who_is_asked_about_must_be_there(local_cluster: RunningCluster) -> None:
    for option in ("--job", "--host"):
        assert "nosuch" in local_cluster.run("history", option, "nosuch", check=False).stderr
