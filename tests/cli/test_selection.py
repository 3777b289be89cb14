"""Options of `ls`, `logs`, `submit`, `run` and `forget` that select or override something."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterd.units import parse_duration_s, parse_time_s
from tests.conftest import RunningCluster
from tests.hang import HANG_S


def names(cluster: RunningCluster, *options: str) -> list[str]:
    return [row["name"] for row in json.loads(cluster.run("ls", *options, "-o", "json").stdout)]


def test_ls_selects_by_user_age_and_number(shared_cluster: RunningCluster) -> None:
    for name in ("a", "b", "c"):
        shared_cluster.run("run", "--no-snapshot", "--name", name, "--", "true")
    assert names(shared_cluster, "--all", "-n", "2") == ["b", "c"]
    for since in ("1h", "yesterday", "2026-03-01"):
        assert names(shared_cluster, "--since", since, "--user", ".") == ["a", "b", "c"]
    assert names(shared_cluster, "--since", "now") == []
    assert names(shared_cluster, "--since", "1h", "--user", "nobody-else") == []
    assert names(shared_cluster) == []
    assert "is finished\n" in shared_cluster.run("why", "a").stdout
    rows = [shared_cluster.run("ls", *which, "--csv").stdout.splitlines() for which in (("--all",), ("none",))]
    assert rows[1][0].startswith(rows[0][0]) and len(rows[1]) == 1
    shown = [
        line.split("  ")[1] for line in shared_cluster.run("show", "[ab]", "c").stdout.splitlines() if line[0] != " "
    ]
    assert shown == ["a", "b", "c"]
    assert len(json.loads(shared_cluster.run("show", "a", "c", "--json").stdout)) == 2
    assert "there is no job 'z*'" in shared_cluster.run("show", "z*", check=False).stderr


@pytest.mark.slow
def test_logs_print_the_last_lines(local_cluster: RunningCluster) -> None:
    local_cluster.run("run", "--no-snapshot", "--name", "long", "--", "seq", "1", "20000")
    assert local_cluster.run("logs", "long", "-n", "2").stdout == "19999\n20000\n"
    assert local_cluster.run("logs", "long", "-n", "2", "--follow").stdout == "19999\n20000\n"
    assert local_cluster.run("logs", "long", "-n", "0").stdout == ""
    assert local_cluster.run("logs", "long", "-n", "15000").stdout.splitlines()[0] == "5001"


def test_submit_and_run_override_and_say_what_is_wrong(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('name = "j"\ncommand = ["sleep", "100"]\n[resources]\ndevices = 1\n')
    assert "job j, command: valid" in shared_cluster.run("config", "check", str(file)).stderr
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --job-name=prep\ntrue\n")
    assert "job prep, command: valid" in shared_cluster.run("config", "check", "job.sh", cwd=tmp_path).stderr
    assert "START" in shared_cluster.run("when", "job.sh", cwd=tmp_path).stdout
    shared_cluster.run("submit", str(file), "--set", "time=2h", "--set", "guaranteed=true", "--set", "cpus=2")
    spec = shared_cluster.job("j")["spec"]
    assert (spec["time_limit_s"], spec["guaranteed"], spec["resources"]["cpus"]) == (7200.0, True, 2)
    assert spec["resources"]["devices"] == 1
    never = shared_cluster.run("submit", str(file), "--set", "devices=200", check=False)
    assert never.returncode == 2 and "j can never start" in never.stderr and "sending" not in never.stderr
    wrong = shared_cluster.run("submit", str(file), "--set", "colour=red", check=False)
    assert wrong.returncode == 2 and "write KEY=VALUE with one of the keys" in wrong.stderr
    told = shared_cluster.run(
        "run", "-d", "--no-snapshot", "--guaranteed", "--begin", "2020-02-01", "--name", "k", "--", "sleep", "100"
    ).stderr
    assert told == "begin: 2020-02-01 00:00 is over, so that it delays nothing\n"
    assert shared_cluster.job("k")["spec"]["guaranteed"]


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "is_deleted"), [(b"n\n", False), (b"y\n", True)])
def test_forget_asks_on_a_terminal(local_cluster: RunningCluster, answer: bytes, is_deleted: bool) -> None:
    local_cluster.run("run", "--no-snapshot", "--name", "over", "--", "echo", "kept")
    mine, theirs = pty.openpty()
    command = [sys.executable, "-m", "clusterd", "forget", "over"]
    asking = subprocess.Popen(command, env=local_cluster.environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(mine, answer)
    assert asking.wait(HANG_S) == (0 if is_deleted else 130)
    os.close(mine)
    logs = local_cluster.run("logs", "over", check=False)
    assert (logs.stdout == "kept\n") is not is_deleted


def test_a_socket_that_is_an_address_is_refused(cluster: RunningCluster) -> None:
    wrong = {**cluster.environment, "CLUSTERD_SOCKET": "ssh://head"}
    command = [sys.executable, "-m", "clusterd", "ls"]
    done = subprocess.run(command, env=wrong, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 2 and "set CLUSTERD_HOST" in done.stderr


def test_a_session_without_a_runtime_directory_finds_the_same_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a cron job, or after `su`, which leaves the directory of the user before."""
    from clusterd import config

    for name in ("CLUSTERD_SOCKET", "CLUSTERD_STATE_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    without = config.socket_path()
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc/1")
    if os.stat("/proc/1").st_uid != os.getuid():
        assert config.socket_path() == without
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nonexistent")
    assert config.socket_path() == without


def test_a_script_without_a_first_line_says_how(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("python train.py\n")
    done = shared_cluster.run("submit", str(tmp_path / "train.sh"), check=False)
    assert done.returncode == 2
    assert "begins with #!" in done.stderr and "clusterd run -d --gpus 1 -- sh" in done.stderr


def test_the_beginning_of_a_name_is_shown_and_not_ended(shared_cluster: RunningCluster) -> None:
    job = shared_cluster.run("run", "-d", "--name", "train2", "--", "sleep", "600").stdout.strip()
    shared_cluster.wait_for(job, lambda row: row["state"] == "running")
    assert f"train2 ({job}) is running" in shared_cluster.run("why", "train").stdout
    for command in (("cancel",), ("requeue",), ("pause",), ("cancel", "--signal", "TERM"), ("forget", "-y")):
        refused = shared_cluster.run(*command, "train", check=False)
        assert "there is no job 'train' of yours, but train2" in refused.stderr, command
        assert refused.returncode == 2
    assert shared_cluster.job(job)["state"] == "running"
    shared_cluster.run("cancel", "--wait", "train2")


def test_states_and_times_are_understood_as_slurm_writes_them(shared_cluster: RunningCluster) -> None:
    """Regression: `squeue -t PD,R` and `srun --time 1:30:00` were refused in their places here."""
    job = shared_cluster.run("run", "-d", "--name", "timed", "--time", "1-2:30:00", "--", "sleep", "600").stdout.strip()
    assert shared_cluster.job(job)["time_limit_s"] == 26.5 * 3600
    assert "timed" in shared_cluster.run("ls", "--state", "PD,R,starting").stdout
    assert "timed" not in shared_cluster.run("ls", "--all", "--state", "failed,cancelled").stdout
    assert "--state lost: unknown state" in shared_cluster.run("ls", "--state", "running,lost", check=False).stderr
    shared_cluster.run("edit", job, "time=2:00:00")
    assert shared_cluster.job(job)["time_limit_s"] == 7200.0
    refused = shared_cluster.run("edit", job, "time=30:00", check=False).stderr  # minutes in Slurm, or hours
    assert "'30:00' is no duration" in refused
    assert shared_cluster.run("edit", job, "time=UNLIMITED").stderr.endswith("time 2h00m -> none\n")
    shared_cluster.run("cancel", "--state", "queued,running,starting", "timed")


@pytest.mark.parametrize(
    ("typed", "seconds"),
    [("90min", 5400.0), ("2 Hours", 7200.0), ("1d12h", 129600.0), ("1w", 604800.0), ("3 days", 259200.0)],
)
def test_times_are_understood_as_people_write_them(typed: str, seconds: float) -> None:
    """Regression: `--time 90min`, and `--begin now+1hour` of sbatch's own manual, were refused."""
    assert parse_duration_s(typed) == seconds
    assert parse_time_s(f"now+{typed}") - time.time() == pytest.approx(seconds, abs=HANG_S)
    for wrong in ("100ms", "3 months", "1h30", f"{typed} ago"):
        with pytest.raises(ValueError, match="is no duration"):
            parse_duration_s(wrong)


def test_points_in_time_are_those_of_iso_8601() -> None:
    assert parse_time_s("2026-12-01T10:00:00+01:00") == parse_time_s("2026-12-01T09:00Z")
    assert parse_time_s("2026-12-1 9:05") == parse_time_s("2026-12-01T09:05:00")
    assert parse_time_s("now") == pytest.approx(time.time(), abs=HANG_S)


def test_a_time_that_clocks_leave_out_is_as_much_after_the_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a booking from 2:30 in the night of the change began an hour before it, at 1:30."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    try:
        assert parse_time_s("2027-03-28 02:30") == parse_time_s("2027-03-28 03:30") == 1806197400.0
        assert parse_time_s("2027-03-28 01:30") == 1806193800.0
    finally:
        monkeypatch.undo()
        time.tzset()
