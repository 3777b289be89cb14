"""Shells: with an allocation of their own, or inside a running job."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import RunningCluster, until
from tests.hang import HANG_S


def _own_terminal() -> None:
    """A Ctrl-C there is an interrupt, also where these tests run in the background, which ignores them."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def is_running(*argv: str) -> bool:
    """True while a process has this command line."""
    line = b"".join(os.fsencode(word) + b"\0" for word in argv)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cmdline").read_bytes() == line:
                return True
    return False


class Person:
    """At a terminal, in front of one command."""

    def __init__(self, cluster: RunningCluster, cwd: Path, *arguments: str) -> None:
        self._screen, theirs = pty.openpty()
        self.message = b""
        env = {**cluster.environment, "TERM": "xterm"}
        command = [sys.executable, "-m", "clusterd", *arguments]
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self.process = subprocess.Popen(
            command, env=env, cwd=cwd, start_new_session=True, preexec_fn=_own_terminal, **streams
        )
        os.close(theirs)

    def types(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def sees(self, text: str) -> None:
        """Waits for `text`, which is dropped with all before it."""
        end = time.monotonic() + HANG_S
        while text.encode() not in self.message:
            ready, _, _ = select.select([self._screen], [], [], 0.1)
            assert time.monotonic() < end, f"waited for {text!r} and saw {self.message!r}"
            if ready:
                try:
                    self.message += os.read(self._screen, 1 << 16)
                except OSError:
                    raise AssertionError(f"{text!r} did not come; it ended with {self.message!r}") from None
        self.message = self.message.partition(text.encode())[2]

    def leaves(self) -> int:
        return self.process.wait(HANG_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._screen)


@pytest.fixture(name="at_terminal")
def at_terminal_(shared_cluster: RunningCluster, tmp_path: Path) -> Iterator[Callable[..., Person]]:
    people: list[Person] = []
    (tmp_path / "mine.txt").write_text("of this directory\n")

    def sit_down(*arguments: str) -> Person:
        people.append(Person(shared_cluster, tmp_path, *arguments))
        return people[-1]

    yield sit_down
    for person in people:
        person.close()


def test_a_shell_has_a_device_until_it_ends(shared_cluster: RunningCluster, at_terminal: Callable[..., Person]) -> None:
    person = at_terminal("shell", "--devices", "1")
    person.sees("exit releases the devices")
    person.types("cat mine.txt; echo $((6*7))-$CLUSTERD_JOB_NAME\r")
    person.sees("of this directory")
    person.sees("42-shell")
    (row,) = shared_cluster.call("jobs")
    assert (row["name"], row["state"], len(row["devices"])) == ("shell", "running", 1)
    person.types("PS1='re''ady> '\r")
    person.sees("ready> ")
    person.types("sh -c 'echo be''gun; sleep 61013'\r")
    person.sees("begun")
    until(lambda: is_running("sleep", "61013"))  # sh loses an interrupt that comes as it becomes the program
    person.types("\x03")
    person.sees("ready> ")  # what is typed before may be dropped with the rest of the line that was interrupted
    person.types("echo go''on\r")
    person.sees("goon")
    person.types("exit 7\r")
    assert person.leaves() == 7
    ended = shared_cluster.wait_for(row["id"], lambda row: row["state"] == "finished")
    assert not ended["holds_devices"], "as of salloc: it was no failure, nor did anybody cancel it"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("how", [signal.SIGHUP, signal.SIGKILL])
def test_whoever_goes_away_holds_nothing(
    shared_cluster: RunningCluster, at_terminal: Callable[..., Person], how: signal.Signals
) -> None:
    person = at_terminal("shell", "--devices", "2")
    person.sees("exit releases the devices")
    (row,) = shared_cluster.call("jobs")
    person.process.send_signal(how)
    ended = shared_cluster.wait_for(row["id"], lambda row: row["state"] == "cancelled" and not row["holds_devices"])
    assert ended["reason"].endswith("its shell is gone")


def test_who_waits_is_told_why_and_may_give_up(
    shared_cluster: RunningCluster, at_terminal: Callable[..., Person], tmp_path: Path
) -> None:
    first = shared_cluster.run("shell", "--devices", "2", "--detach", cwd=tmp_path).stdout.strip()
    second = shared_cluster.run("shell", "--devices", "2", "-d", cwd=tmp_path).stdout.strip()
    person = at_terminal("shell", "--devices", "1", "--name", "third")
    person.sees(f"{int(second) + 1} is waiting: ")
    person.types("\x03")
    assert person.leaves() == 130
    shared_cluster.wait_for("third", lambda row: row["state"] == "cancelled")
    another = at_terminal("shell", "--devices", "1", "--name", "fourth")
    another.sees(f"{int(second) + 2} is waiting: ")
    another.process.kill()  # as when a lid is closed: nothing is reserved for whoever is not there
    shared_cluster.wait_for("fourth", lambda row: row["state"] == "cancelled")
    assert [shared_cluster.job(job)["state"] for job in (first, second)] == ["running", "running"]


@pytest.mark.slow
def test_a_reservation_is_entered_again_and_ends_by_itself(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    job = shared_cluster.run("shell", "--devices", "1", "--time", "20s", "-d", cwd=tmp_path).stdout.strip()
    shared_cluster.wait_for(job, lambda row: row["state"] == "running")
    shared_cluster.run("shell", job, "--", "touch", "was-here")
    assert shared_cluster.run("shell", job, "--", "ls").stdout == "was-here\n"
    ended = shared_cluster.wait_for(job, lambda row: row["ended_s"])
    assert "time limit" in ended["reason"]


@pytest.mark.slow
def test_the_end_of_a_shell_by_its_time_limit_is_no_cancel(
    shared_cluster: RunningCluster, at_terminal: Callable[..., Person], tmp_path: Path
) -> None:
    """Regression: the shell exited as if killed, without a message, and its job was listed as cancelled."""
    person = at_terminal("shell", "--devices", "1", "--time", "5s", "--name", "brief")
    person.sees("ends: its time limit of 5.0s is over")
    assert person.leaves() == 124
    ended = shared_cluster.wait_for("brief", lambda row: row["ended_s"])
    assert (ended["state"], ended["exit_code"]) == ("failed", 124)
    piped = ("shell", "--devices", "1", "--time", "5s", "--", "sleep", "1000")
    done = shared_cluster.run(*piped, cwd=tmp_path, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 124
    assert done.stderr.endswith("ends: its time limit of 5.0s is over\n")


@pytest.mark.slow
def test_a_command_inside_a_job_has_its_surroundings(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    script = "import os, time\nopen('there', 'w').close()\nprint('up', flush=True)\ntime.sleep(1000)"
    command = ("run", "-d", "--devices", "1", "--env", "COLOUR=blue", "--", "python3", "-c", script)
    job = shared_cluster.run(*command, cwd=tmp_path).stdout.strip()
    until(lambda: shared_cluster.run("logs", job).stdout == "up\n")
    done = shared_cluster.run("shell", job, "sh", "-c", "echo $COLOUR; ls; cat; exit 3", input="piped\n", check=False)
    assert done.stdout.split() == ["blue", "there", "piped"]
    assert done.returncode == 3
    shared_cluster.run("cancel", "--wait", job)


@pytest.mark.slow
def test_a_shell_ends_with_its_job(shared_cluster: RunningCluster, at_terminal: Callable[..., Person]) -> None:
    job = shared_cluster.run("run", "-d", "--devices", "1", "--", "sleep", "1000").stdout.strip()
    shared_cluster.wait_for(job, lambda row: row["state"] == "running")
    person = at_terminal("shell", job)
    person.sees("exit leaves the job running")
    shared_cluster.run("cancel", "--wait", job)
    assert person.leaves() > 128


@pytest.mark.slow
def test_what_cannot_be_is_said_in_a_line(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    shared_cluster.run("run", "--name", "done", "--", "true", cwd=tmp_path)
    for arguments, code, why in (
        ((), 2, "give a JOB to join, or devices to reserve"),
        (("--gpus", "1", "--devices", "1"), 2, "--gpus and --devices are both given"),
        (("--time", "2h", "gpt"), 2, "--time applies to a reservation"),
        (("nobody",), 2, "no job"),
        (("done",), 1, "only inside a running job"),
    ):
        refused = shared_cluster.run("shell", *arguments, check=False)
        assert (refused.returncode, refused.stdout) == (code, ""), arguments
        assert why in refused.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_an_idle_shell_is_warned_in_its_terminal_and_ended(cluster: RunningCluster, tmp_path: Path) -> None:
    """Work in it, also where it left the shell's session, is use of its devices; a prompt is not."""
    settings = tmp_path / "clusterd.toml"
    settings.write_text('[daemon]\nidle_after = "15s"\nreclaim_idle = "40s"\n')
    cluster.environment["CLUSTERD_CONFIG"] = str(settings)
    cluster.start(hosts=1)
    person = Person(cluster, tmp_path, "shell", "--no-snapshot", "--devices", "1", "sh")
    try:
        person.sees("$ " if os.getuid() else "# ")
        person.types("setsid sh -c 'echo $$ > busy; while :; do :; done' & echo begu''n\n")
        person.sees("begun")
        begun_s = time.monotonic()
        until(lambda: time.monotonic() - begun_s > 40.0)
        assert cluster.job("shell")["idle_since_s"] is None
        person.types("kill $(cat busy)\n")
        person.sees("clusterd: idle: its devices have done nothing since")
        assert "idle: " in cluster.run("why", "shell").stdout
        person.sees("its devices did nothing for")
        assert person.leaves() == 124
    finally:
        person.close()
    ended = cluster.wait_for("shell", lambda row: row["state"] == "failed")
    assert (ended["exit_code"], ended["holds_devices"]) == (124, False)
    assert "its devices have done nothing for" in cluster.run("history").stdout
