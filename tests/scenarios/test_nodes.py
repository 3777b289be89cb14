"""Commands over several hosts: one launcher on each, with the variables by which the nodes find each other."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile

import pytest

from tests.conftest import RunningCluster

ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1) * dist.get_rank()
dist.all_reduce(x)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "on node", os.environ["GROUP_RANK"], "sum", x.item())
"""


def test_each_node_has_the_variables_of_its_launcher(local_cluster: RunningCluster) -> None:
    names = "('NNODES', 'NODE_RANK', 'NPROC_PER_NODE', 'WORLD_SIZE', 'MASTER_PORT', 'PET_NNODES', 'PET_NODE_RANK')"
    script = f"import json, os; print(json.dumps({{k: os.environ.get(k) for k in {names}}}))"
    job = local_cluster.run(
        "run", "-d", "--nodes", "2", "--devices-per-node", "2", "--", "python3", "-c", script
    ).stdout.strip()
    assert local_cluster.run("wait", job).returncode == 0
    assert sorted(local_cluster.job(job)["hosts"]) == ["local0", "local1"]
    logs = [local_cluster.run("logs", job, "--rank", rank).stdout for rank in ("0", "2")]
    nodes = [json.loads(log.strip().splitlines()[-1]) for log in logs]
    assert [node.pop("NODE_RANK") for node in nodes] == ["0", "1"]
    assert [node.pop("PET_NODE_RANK") for node in nodes] == ["0", "1"]
    assert nodes[0] == nodes[1]
    assert (nodes[0]["NNODES"], nodes[0]["NPROC_PER_NODE"], nodes[0]["WORLD_SIZE"]) == ("2", "2", "4")
    assert nodes[0]["MASTER_PORT"]


def test_a_batch_script_without_gpus_gets_cores_of_each_of_its_nodes(local_cluster: RunningCluster) -> None:
    """Its nodes have the variables by which they find each other, and end together at the time limit."""
    script = local_cluster.directory / "pair.sh"
    shown = "$SLURM_NODEID/$SLURM_NNODES $NODE_RANK/$NNODES $NPROC_PER_NODE $WORLD_SIZE $MASTER_PORT"
    script.write_text(f"#!/bin/sh\n#SBATCH -N 2 -t 0:02\necho {shown}\nsleep infinity\n")
    job = local_cluster.run("submit", str(script)).stdout.strip()
    assert local_cluster.run("wait", job, check=False).returncode == 124
    assert sorted(local_cluster.job(job)["hosts"]) == ["local0", "local1"]
    first, second = (local_cluster.run("logs", job, "--rank", rank).stdout.splitlines()[0] for rank in "01")
    port = first.split()[-1]
    assert (first, second) == (f"0/2 0/2 1 2 {port}", f"1/2 1/2 1 2 {port}")
    assert port.isdigit()


def test_a_run_shows_the_output_of_every_node(local_cluster: RunningCluster) -> None:
    """Each line has the first rank of its node before it; stderr stays apart."""
    command = ("run", "--nodes", "2", "--devices-per-node", "2", "--", "sh", "-c", "echo on $NODE_RANK; echo bad >&2")
    done = local_cluster.run(*command)
    assert sorted(done.stdout.splitlines()) == ["0: on 0", "2: on 1"]
    assert {"0: bad", "2: bad"} <= {*done.stderr.splitlines()}


@pytest.mark.slow
def test_a_node_that_fails_ends_the_others_and_gives_its_exit_code(local_cluster: RunningCluster) -> None:
    script = 'test "$NODE_RANK" = 0 || exit 7; sleep infinity'
    done = local_cluster.run("run", "--nodes", "2", "--devices-per-node", "1", "--", "sh", "-c", script, check=False)
    assert done.returncode == 7
    assert "exit code 7" in done.stderr


@pytest.mark.slow
def test_more_nodes_than_there_are_is_refused_at_submit(local_cluster: RunningCluster) -> None:
    done = local_cluster.run("run", "--nodes", "3", "--devices-per-node", "1", "--", "true", check=False)
    assert done.returncode == 2
    assert "1 devices on each of 3 hosts" in done.stderr or "1 device on each of 3 hosts" in done.stderr
    assert "--wait-for-hosts" in done.stderr


@pytest.mark.slow
def test_a_plain_torchrun_trains_over_two_hosts(local_cluster: RunningCluster) -> None:
    import sys
    from pathlib import Path

    torchrun = Path(sys.executable).with_name("torchrun")
    script = local_cluster.directory / "all_reduce.py"
    script.write_text(ALL_REDUCE)
    done = local_cluster.run(
        "run", "--no-snapshot", "--nodes", "2", "--devices-per-node", "2", "--", str(torchrun), str(script)
    )
    assert "rank 0 of 4 on node 0 sum 6.0" in done.stdout


def test_files_that_no_host_can_unpack_end_the_job_at_once(local_cluster: RunningCluster) -> None:
    """Regression: it was tried again as if the host had been lost, six times in all."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:") as archive:
        for _ in range(2):
            archive.addfile(tarfile.TarInfo("a"))
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    local_cluster.call("snapshot_put", digest=digest, offset=0, data=buffer.getvalue(), last=True)
    spec = {"name": "x", "kind": "command", "command": ["true"], "snapshot": digest}
    job = local_cluster.call("submit", spec=spec)["id"]
    row = local_cluster.wait_for(job, lambda row: row["state"] in ("failed", "finished"))
    assert re.fullmatch(r"local\d did not start it: the workdir has '.*/a' twice", row["reason"])
