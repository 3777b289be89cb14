"""Ten jobs of every kind arrive one after another, and the default pipeline schedules them all."""

from __future__ import annotations

import json

import pytest

from tests.conftest import RunningCluster, until


def elastic(steps: int, devices: int, more: str = "", sizes: str = "") -> str:
    command = json.dumps(["python", "train.py", "--steps", str(steps), *sizes.split()])
    return f'kind = "elastic"\ncommand = {command}\n{more}\nresources = {{ devices = {devices} }}\n'


def command(text: str, resources: str) -> str:
    return f"command = {json.dumps(['python3', '-c', text])}\nresources = {resources}\n"


STREAM = {
    "night": elastic(250, 4),
    "probe": command("print('one device')", "{ devices = 1 }"),
    "thesis": elastic(120, 2, sizes="--depth 6"),
    "notes": command("print('cores alone')", "{ cpus = 1 }"),
    "explore": elastic(100000, 1, more="target_loss = 4.5"),  # its last step is not known
    "paper": elastic(80, 2, more="guaranteed = true"),
    "sweep-1": elastic(120, 1),
    "sweep-2": elastic(120, 1),
    "eval": command("import time; time.sleep(1); print('evaluated')", "{ devices = 2 }"),
    "urgent": elastic(40, 2, more="priority = 10"),
}


@pytest.mark.slow
def test_ten_jobs_of_every_kind(local_cluster: RunningCluster) -> None:
    """All finish without lost steps; some migrate, and `why` explains each."""
    first, *others = STREAM
    ids = {first: local_cluster.submit(STREAM[first], first)}
    local_cluster.wait_for(ids[first], lambda row: row["step"] >= 3)
    ids |= {name: local_cluster.submit(STREAM[name], name) for name in others}

    def all_over() -> bool:
        return all(row["ended_s"] is not None for row in local_cluster.call("jobs", all=True))

    until(all_over, 540.0, local_cluster.log)
    rows = {row["name"]: row for row in local_cluster.call("jobs", all=True)}
    assert {name: row["state"] for name, row in rows.items()} == dict.fromkeys(STREAM, "finished")
    moves = [move for row in rows.values() for move in row["migrations"] if not move["failure"]]
    assert len(moves) >= 3
    assert all(move["reason"] for move in moves)
    for name, row in rows.items():
        message = local_cluster.run("why", name).stdout
        assert name in message and len(message.splitlines()) >= 2, message
        if row["kind"] == "elastic":
            data = local_cluster.call("steps", job=ids[name])["data"]
            steps = [line["step"] for line in map(json.loads, data.splitlines()) if "step" in line]
            assert steps == list(range(1, len(steps) + 1)), name
            assert row["attempt"] == 1, row["reason"]
    assert "its loss reached 4.5" in rows["explore"]["reason"]
    status = local_cluster.call("status")
    assert status["leased"] == 0
