"""Python environments that hosts build for jobs, with a real venv and pip, and no network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.conftest import RunningCluster, until
from tests.hang import HANG_S
from tests.local_package import wait_for_file, write_package
from tests.scenarios.test_containers import pids_with


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A workdir whose requirements name a package in it."""
    write_package(tmp_path / "pkg")
    (tmp_path / "requirements.txt").write_text("./pkg  # the only one\n")
    return tmp_path


def test_a_job_runs_in_the_environment_of_its_requirements(local_cluster: RunningCluster, project: Path) -> None:
    """Built once: the second job finds it. Scripts of the environment are on the PATH, as after its activation."""
    show = "import greeter, os, sys; print(greeter.GREETING, os.environ['VIRTUAL_ENV'] == sys.prefix)"
    command = ["run", "--requirements", "requirements.txt", "--", "sh", "-c", f'greeter-greet; python -c "{show}"']
    for _ in range(2):
        ran = local_cluster.run(*command, cwd=project)
        assert ran.stdout == "hello\nhello True\n"
    first, second = sorted(local_cluster.call("jobs", all=True), key=lambda row: int(row["id"]))
    story = local_cluster.run("history", "--job", first["id"]).stdout
    assert "builds its environment on" in story
    assert re.search(r"its environment on \S+ was built in", story)
    assert "environment built on" in local_cluster.run("show", first["id"]).stdout
    shown = local_cluster.run("show", second["id"]).stdout
    assert "environment built on" not in shown
    assert "built from requirements.txt" in shown
    assert "builds its environment" not in local_cluster.run("history", "--job", second["id"]).stdout


@pytest.mark.slow
def test_a_build_is_a_phase_of_the_job_and_ends_with_it(local_cluster: RunningCluster, project: Path) -> None:
    """Cancelled in the middle, it leaves no process and no environment; the next job builds it whole."""
    gate = project.parent / f"{project.name}-gate"
    write_package(project / "pkg", before=wait_for_file(gate))
    command = ["run", "-d", "--requirements", "requirements.txt", "--", "greeter-greet"]
    job = local_cluster.run(*command, cwd=project).stdout.strip()
    until(lambda: Path(f"{gate}.begun").exists(), HANG_S, lambda: local_cluster.story(job))
    listed = local_cluster.run("ls").stdout
    assert re.search(r"starting .*building its environment on \S+, [0-9.]+ ?m?s", listed), listed
    assert "building its environment on" in local_cluster.run("why", job).stdout
    assert local_cluster.job(job)["building"]
    local_cluster.run("cancel", "--wait", job)
    environments = list(local_cluster.directory.glob("local/*/agent/environments/*"))
    assert [path.suffix for path in environments] == [".log"]
    assert not pids_with(str(environments[0].with_suffix("")))
    gate.touch()
    assert local_cluster.run(*[a for a in command if a != "-d"], cwd=project).stdout == "hello\n"


@pytest.mark.slow
def test_a_failed_build_ends_the_job_with_the_end_of_its_output(local_cluster: RunningCluster, project: Path) -> None:
    """It would fail everywhere: the job does not go from host to host, and retries are for failures of its command."""
    write_package(project / "pkg", before="raise RuntimeError('no compiler for this')")
    (project / "job.toml").write_text(
        'command = ["true"]\nrequirements = "requirements.txt"\nlimits = { retries = 3 }\n'
    )
    job = local_cluster.run("submit", "job.toml", cwd=project).stdout.strip()
    row = local_cluster.wait_for(job, lambda row: row["state"] == "failed", HANG_S)
    assert "its environment could not be built" in row["reason"]
    assert "no compiler for this" in row["reason"] or "no compiler for this" in _log_named_in(row["reason"])
    assert len(row["attempts"]) == 1


@pytest.mark.slow
def test_an_elastic_job_trains_in_a_built_environment_and_moves_to_a_host_that_builds_it(
    local_cluster: RunningCluster, tmp_path: Path
) -> None:
    """Its ranks are forks of an interpreter of that environment, which reads torch from the one of these tests."""
    write_package(tmp_path / "pkg")
    packages = Path(torch.__file__).parent.parent
    (tmp_path / "pkg" / "backend.py").write_text(
        (tmp_path / "pkg" / "backend.py")
        .read_text()
        .replace('wheel.write("greeter.py")', f'wheel.write("greeter.py"); wheel.writestr("t.pth", {str(packages)!r})')
    )
    (tmp_path / "requirements.txt").write_text("./pkg\n")
    (tmp_path / "train.py").write_text(
        "import greeter, torch\nfrom clusterd import train\n"
        "print('says', greeter.GREETING)\n"
        "import pathlib, time\n"
        f"def wait(step, metrics): time.sleep(0 if pathlib.Path({str(tmp_path / 'gate')!r}).exists() else 0.2)\n"
        "train.run(model=lambda: torch.nn.Linear(4, 4), loss=lambda output, target: output.square().mean(),\n"
        "    data=[(torch.zeros(4), torch.zeros(4))] * 64, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),\n"
        "    global_batch=4, steps=3000, on_step=wait)\n"
    )
    (tmp_path / "job.toml").write_text(
        'kind = "elastic"\ntrials = false\ncommand = ["python", "train.py"]\nrequirements = "requirements.txt"\n'
        "resources = { devices = 1 }\n"
    )
    job = local_cluster.run("submit", "job.toml", cwd=tmp_path).stdout.strip()
    row = local_cluster.wait_for(job, lambda row: row["step"] > 0 or row["state"] == "failed")
    other = "local1" if row["hosts"] == ["local0"] else "local0"
    local_cluster.run("migrate", job, "--plan", "dp=1", "--devices", f"{other}:cpu0", "--pin")
    local_cluster.wait_for(job, lambda row: row["hosts"] == [other] or row["state"] in ("finished", "failed"))
    (tmp_path / "gate").touch()
    row = local_cluster.wait_for(job, lambda row: row["state"] in ("finished", "failed"))
    assert row["state"] == "finished", local_cluster.story(job)
    assert [migration["failure"] for migration in row["migrations"]] == [""]
    assert f"builds its environment on {other}" in local_cluster.run("history", "--job", job).stdout
    assert "says hello" in local_cluster.run("logs", job).stdout


@pytest.mark.skipif(shutil.which("uv") is not None, reason="uv is on this machine")
def test_a_host_without_uv_refuses_in_one_line(local_cluster: RunningCluster, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1"\n')
    (tmp_path / "uv.lock").write_text("version = 1\n")
    ran = local_cluster.run("run", "--uv", "uv.lock", "--", "true", cwd=tmp_path, check=False)
    assert ran.returncode == 1
    assert "uv is not on this host: install it there for this account" in ran.stderr


@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not on this machine")
def test_a_job_runs_in_the_environment_of_its_lock(local_cluster: RunningCluster, tmp_path: Path) -> None:
    """The project is installed as it was submitted: changed code, under the same lock, is another environment."""
    for greeting in ("hello", "good day"):
        write_package(tmp_path, greeting)
        subprocess.run(["uv", "lock", "--offline"], cwd=tmp_path, check=True)
        ran = local_cluster.run("run", "--uv", "uv.lock", "--", "greeter-greet", cwd=tmp_path)
        assert ran.stdout == f"{greeting}\n"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--requirements", "absent.txt"], "--requirements: requirements: there is no absent.txt in the workdir"),
        (["--requirements", "../a.txt"], "requirements is '../a.txt'; it must be a path inside the workdir"),
        (["--uv", "requirements.txt"], "uv is 'requirements.txt'; it must be pyproject.toml or uv.lock"),
        (["--uv", "pyproject.toml"], "there is no uv.lock in the workdir"),
        (["--uv", "uv.lock", "--requirements", "a.txt"], "uv and requirements are both given: give one of them"),
    ],
)
def test_a_wrong_environment_is_refused_before_anything_is_sent(
    local_cluster: RunningCluster, tmp_path: Path, given: list[str], message: str
) -> None:
    (tmp_path / "pyproject.toml").touch()
    ran = local_cluster.run("run", *given, "--", "true", cwd=tmp_path, check=False)
    assert ran.returncode == 2
    assert message in ran.stderr


@pytest.mark.slow
def test_an_editable_package_is_refused(local_cluster: RunningCluster, project: Path) -> None:
    (project / "requirements.txt").write_text("-e ./pkg\n")
    ran = local_cluster.run("run", "--requirements", "requirements.txt", "--", "true", cwd=project, check=False)
    assert ran.returncode == 1
    assert "write './pkg', which installs it as submitted" in ran.stderr


def _log_named_in(reason: str) -> str:
    match = re.search(r"all of its output: (\S+)\)", reason)
    assert match, reason
    return Path(match[1]).read_text()


@pytest.mark.slow
def test_dry_runs_and_json_name_the_environment(local_cluster: RunningCluster, project: Path) -> None:
    job = local_cluster.run("run", "-d", "--requirements", "requirements.txt", "--", "true", cwd=project).stdout.strip()
    assert json.loads(local_cluster.run("show", job, "-o", "json").stdout)["spec"]["requirements"] == "requirements.txt"
    local_cluster.run("cancel", "--wait", job)
