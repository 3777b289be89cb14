"""`clusterd history` for somebody who was away."""

from __future__ import annotations

import json

from tests.conftest import RunningCluster


def test_history_is_in_order_with_reasons(shared_cluster: RunningCluster) -> None:
    shared_cluster.run("run", "--no-snapshot", "--name", "bad", "--", "sh", "-c", "exit 3", check=False)
    shared_cluster.run("host", "drain", "local1", "--why", "new fan")
    lines = [line[16:] for line in shared_cluster.run("history").stdout.splitlines()]
    texts = [line.partition("bad (1)")[2].strip() for line in lines if line.startswith("bad (1)")]
    assert [text.partition(" ")[0] for text in texts] == ["submitted", "started", "failed:"]
    assert "exit code 3" in texts[-1]
    (drained,) = [line for line in lines if "drained" in line]
    assert drained.startswith("local1 ") and drained.endswith(": new fan")
    about_job = shared_cluster.run("history", "--job", "bad").stdout
    assert "drained" not in about_job
    every = shared_cluster.run("history", "--job", "bad", "--verbose").stdout
    assert "rank 0 ended: exit code 3" in every and "rank 0 ended" not in about_job
    about_host = json.loads(shared_cluster.run("history", "--host", "local1", "-o", "json").stdout)
    assert {row["host"] for row in about_host} == {"local1"}
    nothing = shared_cluster.run("history", "--since", "0s")
    assert nothing.stdout == "" and nothing.stderr.startswith("nothing since 20")
    assert shared_cluster.run("history", "--since", "yesterday").stdout
    wrong = shared_cluster.run("history", "--since", "soon", check=False)
    assert wrong.returncode == 2 and "--since: 'soon' is no duration" in wrong.stderr


def test_who_is_asked_about_must_be_there(shared_cluster: RunningCluster) -> None:
    for option in ("--job", "--host"):
        assert "nosuch" in shared_cluster.run("history", option, "nosuch", check=False).stderr
