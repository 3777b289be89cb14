"""The command line shows the order of the queue that the scheduler uses."""

from __future__ import annotations

import json

from tests.conftest import RunningCluster


def test_why_and_a_dry_run_say_who_comes_first_and_by_what(shared_cluster: RunningCluster) -> None:
    """`why` counted held jobs, and put a job that came earlier before one for which a person waits."""
    cluster = shared_cluster
    cluster.wait_until_up(2)
    run = ("run", "-d", "--no-snapshot", "--devices", "1")
    blockers = [cluster.run(*run, "--name", f"busy-{n}", "--", "sleep", "1000").stdout.strip() for n in range(4)]
    for job in blockers:
        cluster.wait_for(job, lambda row: row["state"] == "running")
    held = cluster.run(*run, "--name", "held", "--priority", "9", "--", "true").stdout.strip()
    cluster.run("hold", held)
    plain = cluster.run(*run, "--name", "plain", "--", "true").stdout.strip()
    urgent = cluster.run(*run, "--name", "urgent", "--priority", "5", "--", "true").stdout.strip()
    why = cluster.run("why", plain).stdout
    assert "1 ahead in the queue: urgent\n" in why
    assert "urgent comes just before it, because its priority is higher" in why
    rows = {row["id"]: row for row in json.loads(cluster.run("ls", "-o", "json").stdout)}
    assert [rows[job]["place"] for job in (urgent, plain, held)] == [1, 2, None]
    dry = ("run", "--no-snapshot", "--devices", "1", "--dry-run")
    answer = cluster.run(*dry, "--detach", "--priority", "1", "--", "true").stdout
    assert "would be queued behind 1 job (urgent comes just before it, because its priority is higher): " in answer
    answer = cluster.run(*dry, "--", "true").stdout
    assert "would be queued behind 1 job (urgent comes just before it, because its priority is higher): " in answer, (
        "a person waits for it, so it comes before the plain one"
    )
    answer = cluster.run(*dry, "--detach", "--", "true").stdout
    assert "would be queued behind 2 jobs (plain comes just before it, because it was submitted earlier): " in answer
    assert "\n  expected start: " in answer and ", end: " in answer
    cluster.run("cancel", held, plain, urgent, *blockers)
    for job in blockers:  # the next test's clean-up would find them between the two states
        cluster.wait_for(job, lambda row: row["state"] == "cancelled")
