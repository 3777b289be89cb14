"""What ends is over: its devices are free, whatever it left behind and whoever did not answer."""

from __future__ import annotations

import sys

from tests.conftest import RunningCluster

STEPS = """
import json
step = {"step": 1, "loss": None, "time_s": 0.5, "samples": 16, "at_s": 1.7e9, "plan": "dp=2,tp=2,pp=2,zero=3"}
with open("../steps.jsonl", "w") as steps:
    print(json.dumps(step), file=steps)
    for number in range(2, 180_001):
        print(json.dumps({**step, "step": number, "loss": 1 / number}), file=steps)
    steps.write('{"step": 180001, "los')
"""


def test_a_job_of_many_steps_ends(local_cluster: RunningCluster) -> None:
    """Of 21 MB of steps the end is kept, from the middle of a line on; a crash cut the last one off."""
    job = local_cluster.run("run", "-d", "--", sys.executable, "-c", STEPS).stdout.strip()
    local_cluster.run("wait", job, timeout=30)
    row = local_cluster.job(job)
    assert (row["state"], row["step"], row["loss"]) == ("finished", 180_000, 1 / 180_000)
    kept = local_cluster.call("steps", job=job)["data"]
    assert len(kept) == 16 << 20
    assert not any(device["job"] for host in local_cluster.call("hosts") for device in host["devices"])
