"""A job's log from any host, across attempts that never started."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clusterd.cli.common.following import TerminalText
from tests.conftest import RunningCluster, cut_power, until
from tests.hang import HANG_S
from tests.scenarios.test_migration import agent_of
from tests.tui.terminal import Terminal


def test_a_log_is_followed_past_a_host_that_did_not_start_the_job(shared_cluster: RunningCluster) -> None:
    """Only one of two hosts has the job's Python; the log is followed while the job is redirected to that host."""
    (shared_cluster.directory / "local/1/home/env").symlink_to(sys.prefix)
    spec = {"name": "picky", "command": ["python", "-c", "print('said')"], "python": "~/env"}
    with shared_cluster.client() as client:
        job = client.call("submit", spec=spec)["id"]
        chunks = b"".join(piece["data"] for piece in client.stream("logs", job=job, follow=True))
    assert chunks == b"said\n"
    row = shared_cluster.wait_for(job, lambda row: row["state"] == "finished")
    assert len(row["attempts"]) == 2, "local0 was tried first"
    assert shared_cluster.run("logs", "-f", job).stdout == "said\n"
    refused = shared_cluster.run("logs", "-f", "--attempt", "1", job, check=False)
    assert f"attempt 1 of job {job} (picky) has no log: it never started" in refused.stderr


def test_run_tells_why_no_host_started_the_job(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    """The working directory has been removed from every host by the time the job starts."""
    here = tmp_path / "here"
    here.mkdir()
    shared_cluster.run("host", "drain", "local0", "local1")
    command = [sys.executable, "-m", "clusterd", "run", "--no-snapshot", "--", "true"]
    with subprocess.Popen(command, cwd=here, env=shared_cluster.environment, stderr=subprocess.PIPE, text=True) as run:
        until(lambda: bool(shared_cluster.call("jobs")))
        shutil.rmtree(here)
        shared_cluster.run("host", "undrain", "local0", "local1")
        _, message = run.communicate(timeout=HANG_S)
    assert run.returncode == 1
    assert re.search(r"true \(\d+\) failed: local", message)
    assert f"the working directory {here} does not exist on this host" in message
    assert "has no log" not in message


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("answer", [True, False])
def test_run_waits_on_when_nobody_reads_its_output(
    shared_cluster: RunningCluster, tmp_path: Path, answer: bool
) -> None:
    """``run ... | head -1`` ended with 0 while its job ran on; with ``2>&1`` there is nobody left to be told."""
    over = tmp_path / "over"
    script = (
        "import os, sys, time\n"
        f"while not os.path.exists({str(over)!r}):\n"
        "    print('y', flush=True)\n"
        "    time.sleep(0.01)\n"
        "sys.exit(3)"
    )
    command = [sys.executable, "-m", "clusterd", "run", "--no-snapshot", "--name", "yes", "--", "python", "-c", script]
    errors = subprocess.PIPE if answer else subprocess.STDOUT
    with subprocess.Popen(
        command, cwd=tmp_path, env=shared_cluster.environment, stdout=subprocess.PIPE, stderr=errors, text=True
    ) as run:
        assert run.stdout is not None
        assert "y\n" in run.stdout
        run.stdout.close()
        if run.stderr is not None:
            assert any(re.search(r"standard output was closed; yes \(\d+\) keeps", line) for line in run.stderr)
        over.touch()
        assert run.wait(30) == 3


def test_a_follower_ends_with_its_terminal_or_pipe(shared_cluster: RunningCluster) -> None:
    """`logs -f` and `shell` of a silent job have nothing to write, and so no error of a write to end by."""
    silent = ["sh", "-c", "echo begun; exec sleep 1000"]
    job = shared_cluster.run("run", "-d", "--no-snapshot", "--", *silent).stdout.strip()
    ignoring = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", sys.executable, "-m", "clusterd"]
    for command in (["logs", "-f", job], ["shell", job, "--", *silent]):
        terminal = Terminal([*ignoring, *command], 80, 24, shared_cluster.environment)
        try:
            terminal.expect(b"begun")
            terminal.hang_up()
            assert terminal.process is not None
            assert terminal.process.wait(HANG_S) == 129
        finally:
            terminal.close()
        with subprocess.Popen(
            [*ignoring, *command], env=shared_cluster.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        ) as piped:
            assert piped.stdout is not None
            assert piped.stdout.readline() == b"begun\n"
            piped.stdout.close()
            assert piped.wait(HANG_S) == 0
    shared_cluster.run("cancel", "--wait", job)


def test_wait_returns_the_exit_code_when_nobody_reads_its_output(shared_cluster: RunningCluster) -> None:
    """Regression: `wait` exited with 0 on a closed pipe, as `ls` does, and a script went on after a failed job."""
    job = shared_cluster.run("run", "-d", "--no-snapshot", "--", "sh", "-c", "exit 3").stdout.strip()
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "clusterd", "wait", "-o", "json", job]
    done = subprocess.run(command, env=shared_cluster.environment, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.slow
def test_who_follows_a_log_is_told_that_its_host_is_away(cluster: RunningCluster, tmp_path: Path) -> None:
    """`logs -f` and `run` stood still, without a word, for as long as the host did not answer."""
    settings = cluster.directory / "clusterd.toml"
    settings.write_text('[daemon]\nhost_lost_after = "6s"\n')
    cluster.environment["CLUSTERD_CONFIG"] = str(settings)
    cluster.start(hosts=2)
    command = [sys.executable, "-m", "clusterd", "run", "--no-snapshot", "--name", "long", "--"]
    script = ["sh", "-c", 'echo "$CLUSTERD_ATTEMPT" begins; [ "$CLUSTERD_ATTEMPT" = 2 ] || sleep 1000']
    with subprocess.Popen(
        [*command, *script], cwd=tmp_path, env=cluster.environment, stdout=-1, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "1 begins\n"
        (row,) = cluster.call("jobs")
        cut_power(cluster.directory, int(row["hosts"][0].removeprefix("local")))
        out, message = run.communicate(timeout=HANG_S)
    lines = message.splitlines()
    assert run.returncode == 0, message
    assert out == "2 begins\n"
    away = next(line for line in lines if " is unreachable since " in line)
    assert away.startswith("long (1): local")
    assert "the job goes on without them" in away


@pytest.mark.slow
def test_a_log_on_a_host_that_has_fallen_silent_is_not_waited_for(cluster: RunningCluster) -> None:
    """Until the connection was given up nothing was said for a minute, and what was copied was not shown."""
    cluster.start(hosts=1)
    job = cluster.run("run", "-d", "--no-snapshot", "--", "sh", "-c", "echo here; sleep 1000").stdout.strip()
    stored = cluster.directory / "attempts" / f"{job}.1" / "rank-0.1.tail"
    cluster.wait_for(job, lambda row: row["state"] == "running")
    agent = agent_of(cluster, 0)
    os.kill(agent, signal.SIGSTOP)
    refused = cluster.run("logs", job, check=False)
    os.kill(agent, signal.SIGCONT)
    assert (refused.returncode, "local0 cannot be reached now: it has not answered" in refused.stderr) == (1, True)
    until(stored.exists, 60.0)
    os.kill(agent, signal.SIGSTOP)
    assert cluster.run("logs", job).stdout.startswith("here\n\n[clusterd: local0 does not answer; ")
    assert {row["state"] for row in cluster.call("hosts")} == {"up"}, "it was not waited for"
    os.kill(agent, signal.SIGCONT)


@pytest.mark.slow
def test_control_sequences_of_a_log_do_not_reach_a_terminal(local_cluster: RunningCluster) -> None:
    """Somebody else's job may rename the window, or have the terminal type an answer for the reader."""
    script = r"printf 'a\033]0;title\007b \033[31mred\033[0m caf\303\251\233\rdone\n'"
    local_cluster.run("run", "-d", "--no-snapshot", "--", "sh", "-c", script)
    local_cluster.wait_for("1", lambda row: row["state"] == "finished")
    shown = b"a\\x1b]0;title\\x07b \x1b[31mred\x1b[0m caf\xc3\xa9\\x9b\rdone"
    sent = b"a\x1b]0;title\x07b \x1b[31mred\x1b[0m caf\xc3\xa9\x9b\rdone"
    assert shown in on_terminal(local_cluster, "logs", "1")
    assert b"0: " + shown in on_terminal(local_cluster, "logs", "--all-ranks", "1")
    assert sent in on_terminal(local_cluster, "logs", "--raw", "1")
    command = [sys.executable, "-m", "clusterd", "logs", "1"]
    piped = subprocess.run(command, env=local_cluster.environment, capture_output=True, check=True).stdout
    assert piped == sent + b"\n"


def on_terminal(cluster: RunningCluster, *arguments: str) -> bytes:
    """Output of a command on a terminal."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "clusterd", *arguments]
    with subprocess.Popen(command, env=cluster.environment, stdout=theirs, stdin=subprocess.DEVNULL):
        os.close(theirs)
        output = b""
        try:
            while piece := os.read(ours, 65536):
                output += piece
        except OSError:  # the other side is closed
            pass
    os.close(ours)
    return output


def test_a_sequence_that_comes_in_two_pieces() -> None:
    text = TerminalText()
    pieces = (b"a\x1b[3", b"1mred\x1b", b"]0;t", b"\xc3", b"\xa9\x1b[")
    assert [text.feed(piece) for piece in pieces] == [b"a", b"\x1b[31mred", b"\\x1b]0;t", b"", b"\xc3\xa9"]
    assert text.feed(b"", final=True) == b"\\x1b["
