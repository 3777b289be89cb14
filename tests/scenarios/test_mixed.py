"""One job on hosts of two device types: placed by the pipeline, launched with unequal shares, the same losses."""

from __future__ import annotations

import csv
import io
import json
import os

import pytest

from clusterd.plans.plan import Plan
from tests.conftest import RunningCluster, until

JOB = """
kind = "elastic"
trials = false
command = ["python", "train.py", "--steps", "{steps}"]
resources = {{ devices = 1 }}
"""
BELIEVED = ((1, "small", 2.0), (2, "small", 1.0), (1, "large", 1.0))
"""Replicas, on which type, and how much longer a step takes than on a large slot: that is as fast as two small ones."""


def losses(cluster: RunningCluster, job: str) -> dict[int, float]:
    """Losses by step, as far as reported."""
    lines = map(json.loads, cluster.call("steps", job=job)["data"].splitlines())
    return {line["step"]: line["loss"] for line in lines if line.get("loss") is not None}


def believe(cluster: RunningCluster, types: dict[str, str]) -> None:
    """Import measurements of the model, as if from another cluster."""
    until(lambda: cluster.call("measurements_export")["count"] >= 1)
    reader = csv.DictReader(io.StringIO(cluster.call("measurements_export")["csv"]))
    row, names = next(iter(reader)), list(reader.fieldnames or [])
    _, cores, name, speed = json.loads(row["allocation"])[0]
    assert name == types["large"]
    text = io.StringIO()
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    for count, size, longer in BELIEVED:
        allocation = json.dumps([[count, cores, types[size], speed]])
        writer.writerow(
            {**row, "plan": f"dp={count}", "allocation": allocation, "device_type": types[size]}
            | {"step_time_s": longer * float(row["step_time_s"]), "steps": 20, "kind": "measured", "phases": "[]"}
        )
    assert cluster.call("measurements_import", csv=text.getvalue(), name="believed")["count"] == len(BELIEVED)


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="slots of two sizes need two cores")
def test_a_job_is_placed_over_two_types_and_trains_as_on_one(cluster: RunningCluster) -> None:
    """A host with two slots of a core and one with a slot of two: replicas on both, and shares of their own."""
    settings = cluster.directory / "clusterd.toml"
    small, large = "cpu_devices = 2\ncores_per_device = 1\n", "cpu_devices = 1\ncores_per_device = 2\n"
    settings.write_text(f"[hosts.local0]\n{small}[hosts.local1]\n{large}")
    cluster.environment["CLUSTERD_CONFIG"] = str(settings)
    cluster.start(hosts=2)
    cluster.wait_until_up(2)
    names = {host["name"]: {device["name"] for device in host["devices"]} for host in cluster.call("hosts")}
    types = {"small": names["local0"].pop(), "large": names["local1"].pop()}
    assert types["small"] != types["large"]

    alone = cluster.submit(JOB.format(steps=60), "alone")
    row = cluster.wait_for(alone, lambda row: row["ended_s"] is not None)
    assert (row["state"], row["plan"], row["migrations"]) == ("finished", "dp=1", [])
    undisturbed = losses(cluster, alone)
    believe(cluster, types)  # only now: earlier, on a slow machine, the job might migrate there

    mixed = cluster.submit(JOB.format(steps=5000), "mixed")
    # It may start before the measurements are loaded, and migrates then.
    row = cluster.wait_for(mixed, lambda row: row["step"] >= 40 and len(row["hosts"]) == 2)
    # Plan and shares depend on measurements of this machine too; tests/core tests that they follow speed.
    shares = Plan.parse(row["plan"]).shares
    assert sum(shares) == 16 and len(set(shares)) > 1, row["reason"]
    assert set(row["hosts"]) == {"local0", "local1"}
    assert "by their speed" in cluster.run("why", "mixed").stdout
    seen = losses(cluster, mixed)
    assert len(seen.keys() & undisturbed.keys()) >= 30
    assert all(seen[step] == pytest.approx(undisturbed[step], rel=1e-4) for step in seen.keys() & undisturbed.keys())
