"""Command lines of container runtimes, and containers without an attempt."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from clusterd.agent import CODE_ROOT
from clusterd.agent.host import programs
from clusterd.agent.host.attempt_records import Refused
from clusterd.agent.ranks import containers
from clusterd.agent.ranks.containers import Inside
from clusterd.protocol.launch import DeviceSpec, LaunchRequest, RankSpec
from tests.agent.client import AgentClient, wait_until

STANDIN = Path(__file__).parents[2] / "standin_container" / "docker"
GPUS = ("GPU-1", "GPU-2")


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs of all runtimes, on the PATH; each is the stand-in."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("docker", "podman", "singularity"):
        shutil.copy(STANDIN, directory / name)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return directory


def inside(container: str, *, kind: str = "command", env: dict[str, str] | None = None, **more: Any) -> Inside:
    """A rank with two GPUs."""
    device = DeviceSpec("cuda", ",".join(GPUS), (2, 3), 2)
    rank = RankSpec(rank=0, device=device)
    launch = LaunchRequest(
        job="j", attempt=1, generation=1, kind=kind, argv=("python",), ranks=(rank,), container=container,
        cores=4, env=dict(env or {}), **more,
    )  # fmt: skip
    on_host = programs.own_environment(os.environ)
    everything = {**on_host, "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "4,5", **(env or {})}
    named = frozenset(env or {})
    return Inside(launch, rank, "clusterd-a-j.1-0", "a/j.1", everything, named, Path("/work dir"), (Path("/attempt"),))


def options(line: list[str], name: str) -> list[str]:
    return [value for option, value in pairwise(line) if option == name]


def test_docker_gets_user_devices_limits_and_names_of_variables(installed: Path) -> None:
    """Inside only its own GPUs are there, numbered from 0, whatever their number on the host."""
    here = inside("docker:org/image:1", env={"TOKEN": "s3cret", "PATH": "/opt/bin"}, memory_bytes=1 << 30)
    line, env = containers.command(here, ["python", "train.py"])
    assert line[0] == str(installed / "docker")
    assert line[-3:] == ["org/image:1", "python", "train.py"]
    assert options(line, "--user") == [f"{os.getuid()}:{os.getgid()}"]
    assert options(line, "--gpus") == ['"device=GPU-1,GPU-2"']
    assert options(line, "--memory") == [str(1 << 30)]
    assert options(line, "--cpu-shares") == ["4096"]
    assert options(line, "--cpuset-cpus") == ["2,3"]
    assert options(line, "--workdir") == ["/work dir"]
    assert "type=bind,source=/work dir,target=/work dir" in options(line, "--mount")
    passed = {name: env[name] for name in options(line, "--env")}
    assert passed["TOKEN"] == "s3cret"
    assert passed["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert passed["HOME"] == "/work dir"
    assert passed["PATH"] == "/opt/bin"  # only because the job sets it
    assert not any("s3cret" in argument for argument in line)


def test_podman_gets_its_gpus_by_their_uuid() -> None:
    line, _ = containers.command(inside("podman:image"), ["true"])
    assert options(line, "--device") == [f"nvidia.com/gpu={uuid}" for uuid in GPUS]
    assert "PATH" not in options(line, "--env")


@pytest.mark.parametrize(
    ("image", "given"),
    [("org/image:1", "docker://org/image:1"), ("/images/a.sif", "/images/a.sif"), ("oras://r/a", "oras://r/a")],
)
def test_apptainer_gets_variables_by_its_prefix_and_all_gpus(installed: Path, image: str, given: str) -> None:
    """It hides no GPU: the host's numbers hold inside."""
    line, env = containers.command(inside(f"apptainer:{image}", env={"TOKEN": "s3cret"}), ["python"])
    assert line[:3] == [str(installed / "singularity"), "exec", "--cleanenv"]
    assert line[-2:] == [given, "python"]
    assert "--nv" in line
    assert options(line, "--bind") == ["/work dir:/work dir", "/attempt:/attempt"]
    assert env["APPTAINERENV_TOKEN"] == "s3cret"
    assert env["APPTAINERENV_CUDA_VISIBLE_DEVICES"] == "4,5"
    assert not any("s3cret" in argument for argument in line)


def test_a_checkpointable_job_finds_clusterd_inside() -> None:
    line, env = containers.command(inside("docker:image", kind="checkpointable"), ["python"])
    assert f"type=bind,source={CODE_ROOT},target={CODE_ROOT},readonly" in options(line, "--mount")
    assert env["PYTHONPATH"].startswith(str(CODE_ROOT))
    assert "PYTHONPATH" in options(line, "--env")


def test_mounts_are_of_what_is_there(tmp_path: Path) -> None:
    mounts = (f"{tmp_path}:/data:ro", f"{tmp_path}")
    line, _ = containers.command(inside("docker:image", mounts=mounts), ["true"])
    assert options(line, "--mount")[-2:] == [
        f"type=bind,source={tmp_path},target=/data,readonly",
        f"type=bind,source={tmp_path},target={tmp_path}",
    ]
    for absent, message in ((f"{tmp_path}/x", "is not on this host"), (_comma(tmp_path), "a comma or a quote")):
        with pytest.raises(Refused, match=message):
            containers.command(inside("docker:image", mounts=(absent,)), ["true"])


def _comma(directory: Path) -> str:
    (directory / "a,b").mkdir()
    return f"{directory}/a,b"


def test_a_runtime_that_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Refused, match="docker is not on this host"):
        containers.command(inside("docker:image"), ["true"])
    assert containers.runtimes() == {}


def test_runtimes_say_why_they_cannot_be_used(installed: Path) -> None:
    """podman and apptainer need no daemon: their programs are asked for their version only."""
    (installed / "broken").touch()
    for name in ("podman", "singularity"):
        (installed / name).write_text("#!/bin/sh\necho 4.3\n")
    assert containers.runtimes() == {
        "docker": "permission denied while trying to connect to the Docker daemon socket",
        "podman": "",
        "apptainer": "",
    }


def test_an_agent_that_starts_removes_containers_of_attempts_that_it_does_not_know(
    connect: Callable[..., AgentClient], installed: Path
) -> None:
    """Their files were removed, or lost with the disk; those of another agent are left alone."""
    agent = connect()
    identity = json.loads((agent.root / "identity.json").read_text())["agent"]
    agent.ok("shutdown")
    running = [
        subprocess.Popen(
            [installed / "docker", "run", "--name", name, "--label", f"clusterd.tag={tag}", "--workdir", "/", "image",
             sys.executable, "-c", "import time; time.sleep(600)"]
        )
        for name, tag in (("ours", f"{identity}/lost.1"), ("theirs", "other/lost.1"))
    ]  # fmt: skip
    state = installed / "state"
    try:
        wait_until(lambda: state.exists() and len(list(state.iterdir())) == 2, "the containers to run")
        connect(epoch=2)
        wait_until(lambda: running[0].poll() is not None, "the container to end")
        assert [record.name for record in state.iterdir()] == ["theirs"]
        assert running[1].poll() is None
    finally:
        subprocess.run([installed / "docker", "rm", "--force", "theirs"], check=True)
        for client in running:
            client.wait()
