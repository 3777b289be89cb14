"""What is asked for several at once, and by several at once."""

from __future__ import annotations

from tests.conftest import RunningCluster


def test_hosts_that_are_drained_together_pass_no_job_on(local_cluster: RunningCluster) -> None:
    answer = local_cluster.run("host", "drain", "local0", "nosuch", "local1", check=False)
    assert answer.returncode == 2
    assert "there is no host 'nosuch'" in answer.stderr
    rows = {row["name"]: row for row in local_cluster.call("hosts")}
    assert rows["local0"]["drained"] is not None
    assert rows["local1"]["drained"] is not None
    drains = [event["at_s"] for event in local_cluster.call("history")["events"] if event["kind"] == "HostDrained"]
    assert len(drains) == 2
    assert len(set(drains)) == 1


def test_a_priority_below_zero_is_a_number(local_cluster: RunningCluster) -> None:
    job = local_cluster.run("run", "-d", "--no-snapshot", "--", "sleep", "1000").stdout.strip()
    local_cluster.run("priority", job, "-5")
    assert local_cluster.job(job)["priority"] == -5
    answer = local_cluster.run("priority", job, "low", check=False)
    assert answer.returncode == 2


def test_nobody_is_meant_by_an_empty_name(local_cluster: RunningCluster) -> None:
    local_cluster.run("run", "--no-snapshot", "--", "true")
    for verb in ("plans", "profile"):
        answer = local_cluster.run(verb, "", check=False)
        assert answer.returncode == 2
        assert "no job is named" in answer.stderr
