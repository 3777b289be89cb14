"""Jobs in containers, with a stand-in for Docker, or a real runtime that CLUSTERD_TEST_CONTAINER names.

As in CLUSTERD_TEST_CONTAINER=podman:localhost/image, whose image has a shell and the usual small programs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import RunningCluster, until
from tests.hang import HANG_S

STANDIN = Path(__file__).parent.parent / "standin_container" / "docker"
REAL = os.environ.get("CLUSTERD_TEST_CONTAINER", "")
CONTAINER = REAL or "docker:image"
RUNTIME = CONTAINER.partition(":")[0]

standin_only = pytest.mark.skipif(bool(REAL), reason="looks into the stand-in")


@pytest.fixture
def runtime(cluster: RunningCluster, tmp_path: Path) -> Path:
    """Directory of the stand-in, first on the PATH of the hosts."""
    directory = tmp_path / "bin"
    directory.mkdir()
    if not REAL:
        shutil.copy(STANDIN, directory / "docker")
        cluster.environment["PATH"] = f"{directory}:{os.environ['PATH']}"
    return directory


@pytest.fixture
def containers(cluster: RunningCluster, runtime: Path) -> Iterator[RunningCluster]:
    """Started cluster whose hosts have the runtime."""
    cluster.start(hosts=2)
    yield cluster
    for name in left(cluster):
        subprocess.run([RUNTIME, "rm", "--force", name], env=cluster.environment, capture_output=True, check=False)


def left(cluster: RunningCluster, *filters: str) -> list[str]:
    """Containers of clusterd that are there."""
    command = [RUNTIME, "ps", "--all", "--quiet", "--filter", "label=clusterd.tag", *filters]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def in_container(*more: str) -> list[str]:
    return ["--container", CONTAINER, *more, "--", "sh", "-c"]


def test_a_command_runs_in_its_container_with_the_jobs_variables_alone(
    containers: RunningCluster, tmp_path: Path
) -> None:
    """As the user, in the copy of the workdir, which is writable; its exit code is the job's."""
    (tmp_path / "workdir").mkdir()
    (tmp_path / "workdir" / "data.txt").write_text("from the workdir\n")
    containers.environment["OF_THE_LOGIN"] = "x"
    containers.environment["TOKEN"] = "s3cret"
    script = 'cat data.txt; touch new; id -u; echo "$LR $TOKEN [$OF_THE_LOGIN] $CLUSTERD_JOB $USER"; exit 7'
    command = ["run", "--env", "LR=0.1", "--secret", "TOKEN", *in_container(), script]
    ran = containers.run(*command, cwd=tmp_path / "workdir", check=False)
    assert ran.returncode == 7, ran.stderr
    assert ran.stdout.splitlines()[:2] == ["from the workdir", str(os.getuid())]
    assert re.fullmatch(r"0\.1 s3cret \[\] 1 \w+", ran.stdout.splitlines()[2])
    shown = containers.run("show", "1").stdout
    assert f"  container  {CONTAINER}\n" in shown
    assert left(containers) == []


@standin_only
def test_no_value_of_a_variable_is_in_a_command_line(containers: RunningCluster, runtime: Path, tmp_path: Path) -> None:
    """Other users of the host can read those."""
    containers.environment["TOKEN"] = "s3cret"
    containers.run("run", "--env", "LR=0.123", "--secret", "TOKEN", *in_container(), "true", cwd=tmp_path)
    calls = (runtime / "calls").read_text()
    assert '"--env", "TOKEN"' in calls
    assert '"--env", "LR"' in calls
    assert "s3cret" not in calls
    assert "0.123" not in calls


def test_cancel_ends_the_container_of_a_command_that_ignores_the_request(
    containers: RunningCluster, tmp_path: Path
) -> None:
    """It first gets SIGTERM inside, and its grace; what is killed then is the container, not its client alone."""
    beat = tmp_path / "beat"
    script = f"trap 'echo asked > {beat}.asked' TERM; while true; do echo > {beat}; sleep 0.1; done"
    (tmp_path / "job.toml").write_text(
        f'command = ["sh", "-c", {json.dumps(script)}]\ncontainer = "{CONTAINER}"\nmounts = ["{tmp_path}"]\n'
        'limits = { grace = "2s" }\n'
    )
    job = containers.run("submit", "job.toml", cwd=tmp_path).stdout.strip()
    until(beat.exists, HANG_S, lambda: containers.story(job))
    containers.run("cancel", "--wait", job)
    assert (tmp_path / "beat.asked").exists()
    assert left(containers) == []
    beat.unlink()
    containers.run("run", "--no-snapshot", "--", "sleep", "0.5", cwd=tmp_path)
    assert not beat.exists()


def test_a_container_is_paused_and_a_cancel_lets_it_end_by_itself(containers: RunningCluster, tmp_path: Path) -> None:
    """Its runtime freezes it, as its client passes no stop on."""
    job = that_traps(containers, tmp_path)
    assert "is paused, and keeps its devices" in containers.run("pause", job).stderr
    until(lambda: len(left(containers, "--filter", "status=paused")) == 1)
    containers.run("unpause", job)
    assert left(containers, "--filter", "status=paused") == []
    containers.run("pause", job)
    containers.run("cancel", "--wait", job)
    assert (tmp_path / "asked").exists()
    assert left(containers) == []


@standin_only
def test_a_container_goes_on_that_its_runtime_cannot_pause(
    containers: RunningCluster, runtime: Path, tmp_path: Path
) -> None:
    job = that_traps(containers, tmp_path)
    (runtime / "cannot-pause").touch()
    refused = containers.run("pause", job, check=False)
    assert refused.returncode == 1
    assert "docker pause: cannot pause rootless containers with cgroup V1" in refused.stderr
    assert containers.job(job)["paused_by"] is None
    (runtime / "cannot-pause").unlink()


def that_traps(cluster: RunningCluster, tmp_path: Path) -> str:
    """Running job that ends by itself at SIGTERM, and writes that it was asked."""
    script = f"trap 'echo > {tmp_path}/asked; exit 0' TERM; echo begun; while true; do sleep 0.1; done"
    command = ["run", "-d", "--mount", str(tmp_path), *in_container(), script]
    job = cluster.run(*command, cwd=tmp_path).stdout.strip()
    until(lambda: "begun" in cluster.run("logs", job, check=False).stdout, HANG_S, lambda: cluster.story(job))
    return job


@standin_only
def test_steps_of_a_batch_script_run_in_its_container(
    containers: RunningCluster, runtime: Path, tmp_path: Path
) -> None:
    """By the image's Python, which the host's is not, and clusterd's code; an image without one is named."""
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "image").mkdir()
    for program in ("bash", "sh"):
        (tmp_path / "image" / program).symlink_to(str(shutil.which(program)))
    script = (
        f"#!/bin/bash\n#SBATCH --ntasks=2\n#CLUSTERD container = \"{CONTAINER}\"\nsrun -l sh -c 'echo $SLURM_PROCID'\n"
    )
    (work / "job.sh").write_text(script)
    job = containers.run("submit", "--wait", "job.sh", cwd=work).stdout.split()[0]
    assert sorted(containers.run("logs", job).stdout.splitlines()) == ["0: 0", "1: 1"]
    begun = [call for line in (runtime / "calls").read_text().splitlines() if (call := json.loads(line))[0] == "run"]
    assert any(re.search(r"target=.*/agent-[0-9a-f]{16},readonly$", word) for word in begun[-1])
    (work / "job.sh").write_text(script.replace("srun", f"export PATH={tmp_path}/image\nsrun", 1))
    done = containers.run("submit", "--wait", "job.sh", cwd=work, check=False)
    assert done.returncode == 127
    assert (
        "clusterd: srun needs python3 (3.10 or newer) in the image"
        in containers.run("logs", done.stdout.split()[0]).stdout
    )


@pytest.mark.slow
def test_a_container_is_ended_by_an_agent_that_came_back(containers: RunningCluster, tmp_path: Path) -> None:
    """The agent and its fork server were killed, and the client of the runtime with them."""
    beat = tmp_path / "beat"
    script = f"while true; do echo > {beat}; sleep 0.1; done"
    command = ["run", "-d", "--mount", str(tmp_path), *in_container(), script]
    job = containers.run(*command, cwd=tmp_path).stdout.strip()
    until(beat.exists, HANG_S, lambda: containers.story(job))
    number = containers.job(job)["hosts"][0].removeprefix("local")
    home = containers.directory / "local" / number / "agent"
    kill(int(json.loads((home / "agent.json").read_text())["pid"]))  # first: it must not see the client's end
    for pid in pids_with(RUNTIME, f"name clusterd-{json.loads((home / 'identity.json').read_text())['agent'][:12]}"):
        kill(pid)
    containers.run("cancel", "--wait", job)
    assert left(containers) == []


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def pids_with(*texts: str) -> list[int]:
    """Processes whose command line has all of these."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if all(text in line for text in texts):
            found.append(int(name))
    return found


@pytest.mark.slow
def test_a_shell_joins_the_container_of_a_job(containers: RunningCluster, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = f"echo > started; while [ ! -e {gate} ]; do sleep 0.1; done"
    command = ["run", "-d", "--env", "LR=0.1", "--mount", str(tmp_path), *in_container(), script]
    job = containers.run(*command, cwd=tmp_path).stdout.strip()
    containers.wait_for(job, lambda row: row["state"] == "running")
    until(lambda: bool(left(containers)))
    joined = containers.run("shell", job, "--", "sh", "-c", "ls started; echo $LR $CLUSTERD_JOB; exit 3", check=False)
    assert joined.stdout.split() == ["started", "0.1", job], joined.stderr
    assert joined.returncode == 3
    gate.touch()
    containers.wait_for(job, lambda row: row["state"] == "finished")


@pytest.mark.slow
def test_a_reservation_is_a_shell_in_a_container(containers: RunningCluster, tmp_path: Path) -> None:
    (tmp_path / "given").write_text("mounted\n")
    script = f"cat {tmp_path}/given; echo $CLUSTERD_JOB"
    mount = ["--mount", f"{tmp_path}:{tmp_path}:ro"]
    shell = containers.run("shell", "--devices", "1", *in_container(*mount), script, cwd=tmp_path / "bin")
    assert shell.stdout.split() == ["mounted", "1"]
    containers.wait_for("1", lambda row: row["state"] in ("finished", "cancelled", "failed"))
    assert left(containers) == []


@pytest.mark.slow
def test_an_image_that_cannot_be_started_is_named(containers: RunningCluster, tmp_path: Path) -> None:
    image = f"{RUNTIME}:{'localhost/' if REAL else ''}absent"
    ran = containers.run("run", "--container", image, "--", "true", cwd=tmp_path, check=False)
    assert ran.returncode == 125
    assert f"{RUNTIME} could not start" in ran.stderr


def test_a_host_without_the_runtime_is_not_offered(containers: RunningCluster, tmp_path: Path) -> None:
    """The job is refused at its submission; one that waits for hosts says why in `why`."""
    command = ["run", "-d", "--container", "apptainer:image"]
    if shutil.which("apptainer") or shutil.which("singularity"):
        pytest.skip("apptainer is on this machine")
    ran = containers.run(*command, "--", "true", cwd=tmp_path, check=False)
    assert ran.returncode == 2
    assert "asks for a container of apptainer, which no host can run (local0 has no apptainer" in ran.stderr
    job = containers.run(*command, "--wait-for-hosts", "--", "true", cwd=tmp_path).stdout.strip()
    assert "local1 has no apptainer" in containers.run("why", job).stdout
    assert f"{RUNTIME} runs containers of jobs" in containers.run("host", "check", check=False).stdout


@pytest.mark.slow
@standin_only
def test_a_runtime_that_the_account_may_not_use_is_said(cluster: RunningCluster, runtime: Path, tmp_path: Path) -> None:
    (runtime / "broken").touch()
    cluster.start(hosts=1)
    ran = cluster.run("run", *in_container(), "true", cwd=tmp_path, check=False)
    assert "docker on local0 cannot be used: permission denied while trying to connect" in ran.stderr


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('container = "lxc:image"', "container is 'lxc:image'; it must be docker:IMAGE, podman:IMAGE"),
        ('container = "docker:"', "container is 'docker:'"),
        ('kind = "elastic"\ncontainer = "docker:i"', "ranks of an elastic job are forks of a process of the host"),
        ('container = "docker:i"\npython = "~/env"', "Python is that of the image"),
        ('container = "docker:i"\nmounts = ["data"]', "mounts: 'data': write /SOURCE, /SOURCE:/TARGET"),
        ('mounts = ["/data"]', "mounts is for a job in a container"),
    ],
)
def test_a_container_that_cannot_be_is_refused(
    local_cluster: RunningCluster, tmp_path: Path, lines: str, message: str
) -> None:
    (tmp_path / "job.toml").write_text(f'command = ["python", "x.py"]\n{lines}\n')
    refused = local_cluster.run("submit", "--wait-for-hosts", "job.toml", cwd=tmp_path, check=False)
    assert refused.returncode == 2
    assert message in refused.stderr
