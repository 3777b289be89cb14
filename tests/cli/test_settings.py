"""``clusterd config``: it accepts valid files and shows the settings in effect."""

from __future__ import annotations

import getpass
import re
from pathlib import Path

import msgspec
import pytest

from clusterd.cli.head_node.settings import config
from clusterd.config import load
from clusterd.errors import ConfigError, UsageError
from clusterd.submission.job_file import read_job_file
from tests.conftest import RunningCluster

NEVER_TAKEN = [
    "command = []",
    "command = ['']",
    'command = ["true", "a\\u0000b"]',
    "command = ['true']\ntarget_loss = nan",
    "command = ['true']\nsnapshots = -3",
    "command = ['true']\nafter = ['']",
    "command = ['true']\n[resources]\nhosts = ['']",
    "command = ['true']\npriority = 1" + "0" * 30,
    "command = ['true']\nkind = 'checkpointable'",
    "command = ['true']\n[env]\n'A=B' = 'x'",
    "command = ['true']\n[resources]\ndevices = -1",
    "command = ['true']\n[resources]\ncpus = -4",
    "command = ['true']\n[resources]\nmin_devices = -1",
    "command = ['true']\n[resources]\ndevices = 2\nplan = { dp = 4 }",
    "command = ['true']\n[limits]\ntime = -3",
    "command = ['true']\n[limits]\ntime = 0",
    "command = ['true']\n[limits]\ntime = nan",
    "command = ['true']\n[limits]\ntime = inf",
    "command = ['true']\n[limits]\nretries = -1",
    "command = ['true']\n[limits]\nstall = '1m'",
    "command = ['true']\n[resources]\nplan = { dp = 2 }",
    "command = ['true']\ntarget_loss = 2.1",
    "command = ['true']\nsnapshots = 20",
    "command = ['true']\n[checkpoints]\ndirectory = '/shared'",
    "command = ['true']\n[checkpoints]\ndirectory = '/shared'\nevery = 0",
]


def test_a_job_file_that_is_right_is_taken(
    cluster: RunningCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checked, it was right; submitted, it was refused. Now both say the same, the one with the file's name."""
    cluster.start()
    file = tmp_path / "job.toml"
    for text in NEVER_TAKEN:
        file.write_text(text)
        with pytest.raises(UsageError) as refused:
            cluster.call("submit", spec=msgspec.to_builtins(read_job_file(file).spec))
        with pytest.raises(ConfigError) as answer:
            config.main(["check", "--job", str(file)], standalone_mode=False)
        found = [re.sub(r"^(.*\.toml)(:\d+)?: ", r"\1: ", line) for line in str(answer.value).splitlines()]
        assert f"{file}: {refused.value}" in found
    file.write_text("command = ['true']\n[limits]\ntime = 3")
    config.main(["check", "--job", str(file)], standalone_mode=False)
    assert f"{file}: job job, command: valid" in capsys.readouterr().err
    cluster.call("submit", spec=msgspec.to_builtins(read_job_file(file).spec))


@pytest.mark.parametrize("workdir", ["not-there", "x" * 5000])
def test_a_workdir_that_is_not_there_is_refused_alike(cluster: RunningCluster, tmp_path: Path, workdir: str) -> None:
    """The check called it right; submit took a name that is too long for a bug of its own."""
    file = tmp_path / "job.toml"
    file.write_text(f"command = ['true']\nworkdir = '{workdir}'\n")
    message = f"workdir {tmp_path / workdir} is no directory: set workdir to where the job's code is"
    cluster.start()
    for command in (("config", "check", "--job"), ("submit",)):
        refused = cluster.run(*command, str(file), check=False)
        assert refused.returncode == 2
        assert refused.stderr.strip().endswith(message)


def test_the_settings_shown_are_those_in_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, under the names that a file gives them: what is shown is a file that says the same."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("CLUSTERD_CONFIG", raising=False)
    file, shown = tmp_path / "clusterd.toml", tmp_path / "shown.toml"
    file.write_text(
        '[daemon]\nstate_dir = "state"\noperators = ["ann"]\npolicy = "fifo"\nhost_lost_after = "90s"\n'
        'workdir_max = "1MB"\ntrials = false\n'
        '[hosts."10.0.0.1"]\ncpu_devices = 2\n[tenants."\\u007f\\"ö"]\nquota = 16\nshare = 2.0\n'
        '[datasets]\ncorpus = "gpu03:/data"\n[notify]\ncommand = ["~/tell", "--chat"]\non = ["host lost"]\n'
    )
    for given in (file, None):
        config.main(["show", *(["--config", str(given)] if given else [])], standalone_mode=False)
        shown.write_text(capsys.readouterr().out)
        assert load(shown) == load(given)
        assert "# ssh_config is not set" in shown.read_text()
    assert "host_lost_after = 120.0\nworkdir_max = 268435456\n" in shown.read_text()


@pytest.mark.slow
def test_an_agents_home_that_is_changed_leaves_what_runs_under_the_old_one(cluster: RunningCluster) -> None:
    """Regression: the agent under the new home did not know the running job, and a second copy of it was started."""
    cluster.start(hosts=1)
    cluster.wait_until_up(1)
    runs, go = cluster.directory / "runs", cluster.directory / "go"
    held = f"echo ran >> {runs}; while [ ! -e {go} ]; do sleep 0.05; done"
    job = cluster.submit(f'command = ["sh", "-c", "{held}"]\n')
    cluster.wait_for(job, lambda row: row["state"] == "running" and runs.exists())
    cluster.kill()
    scratch = cluster.directory / "local/scratch"
    settings = cluster.directory / "clusterd.toml"
    settings.write_text(f'[hosts.local0]\nagent_home = "{scratch}"\n')
    cluster.environment["CLUSTERD_CONFIG"] = str(settings)
    cluster.start()
    cluster.wait_until_up(1)
    go.touch()
    row = cluster.wait_for(job, lambda row: row["state"] in ("finished", "failed"))
    assert (row["state"], row["attempt"], runs.read_text()) == ("finished", 1, "ran\n")
    cluster.kill()
    cluster.start()
    work = cluster.directory / "work"
    work.mkdir()
    assert cluster.run("run", "--", "pwd", cwd=work).stdout.startswith(str(scratch))


MISTAKEN_JOB = """\
name = "night"
command = ["python", "train.py"]
prioritty = 3
kind = "elastc"

[resources]
gpus = "many"
cpus = 4

[limits]
time = "soon"
"""

MISTAKEN_SETTINGS = """\
[daemon]
policy = "best"
trials = "yes"
host_lost_after = "never"

[hosts.gpu01]
cpu_devices = -1
labels = ["nv link"]

[tenants.vision]
quota = "all"
"""


@pytest.mark.parametrize(
    "text, lines", [(MISTAKEN_JOB, [3, 4, 7, 11]), (MISTAKEN_SETTINGS, [2, 3, 4, 7, 8, 11])], ids=["job", "settings"]
)
def test_all_mistakes_are_reported_with_their_lines(text: str, lines: list[int], tmp_path: Path) -> None:
    file = tmp_path / "file.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        config.main(["check", str(file)], standalone_mode=False)
    reported = str(error.value).splitlines()
    assert [line.split(": ")[0] for line in reported] == [f"{file}:{number}" for number in lines]


def test_limits_of_users_do_not_make_a_job_of_the_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: [limits] is a table of both files, and each key of the daemon's was reported as unknown."""
    file = tmp_path / "file.toml"
    file.write_text('[daemon]\naccounts = "shared"\n[limits]\ndevices = 4\n')
    config.main(["check", str(file)], standalone_mode=False)
    assert capsys.readouterr().err == f"{file}: valid\n"


def test_a_missing_command_is_reported_without_a_line(tmp_path: Path) -> None:
    file = tmp_path / "file.toml"
    file.write_text('name = "night"\nresources = { gpus = "many" }\n')
    with pytest.raises(ConfigError) as error:
        config.main(["check", str(file)], standalone_mode=False)
    first, second = str(error.value).splitlines()
    assert first.startswith(f"{file}: command is missing")
    assert second.startswith(f"{file}:2: ")


def test_limits_that_change_count_for_queued_jobs_at_once(cluster: RunningCluster, tmp_path: Path) -> None:
    """Mistakes are named with line and key, and what was in force stays so."""
    me = getpass.getuser()
    settings = cluster.directory / "clusterd.toml"
    settings.write_text("[limits]\ndevices = 1\n")
    cluster.environment["CLUSTERD_CONFIG"] = str(settings)
    cluster.start(hosts=1, devices=2)
    command = ("run", "-d", "--no-snapshot", "--devices", "1", "--", "sleep", "1000")
    first, second = (cluster.run(*command, cwd=tmp_path).stdout.strip() for _ in range(2))
    cluster.wait_for(first, lambda row: row["state"] == "running")
    assert f"{me} may hold 1 device, and holds 1" in cluster.run("why", second).stdout
    settings.write_text(f'[limits]\ndevices = "two"\n\n[users.{me}]\ndevises = 2\n')
    refused = cluster.run("reload", check=False)
    assert refused.returncode == 2
    assert f"{settings}:2: [limits]: devices is 'two'; it must be a whole number" in refused.stderr
    assert f"{settings}:5: [users.{me}]: unknown key 'devises'; did you mean 'devices'?" in refused.stderr
    assert f"{me} may hold 1 device, and holds 1" in cluster.run("why", second).stdout
    settings.write_text(f"[limits]\ndevices = 1\n\n[users.{me}]\ndevices = 2\n")
    assert "changed: users" in cluster.run("reload").stderr
    cluster.wait_for(second, lambda row: row["state"] == "running")
