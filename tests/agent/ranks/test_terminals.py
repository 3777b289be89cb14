"""Commands beside a rank, on a terminal or through pipes, which end with the attempt at the latest."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterd.agent.host import programs
from clusterd.agent.host.attempt_records import Refused
from clusterd.agent.ranks.terminals import SILENT_S, Terminal, Terminals
from tests.agent.client import AgentClient, wait_until

SCREEN = {"term": "xterm", "columns": 97, "rows": 31}


def opened(agent: AgentClient, *argv: str, screen: dict[str, Any] | None = None, **more: Any) -> str:
    asked = {"job": "j", "attempt": 1, "generation": 1, "rank": 0, "secrets": {}, **more}
    return str(agent.ok("terminal_open", argv=list(argv), screen=screen, **asked)["terminal"])


def message(agent: AgentClient, terminal: str, until: bytes | None = None) -> tuple[bytes, int | None]:
    """Output of a command up to `until`, or to its end, and its exit code."""
    found, code = b"", None
    while code is None and (until is None or until not in found):
        piece = agent.ok("terminal_read", terminal=terminal)
        found, code = found + piece["data"], piece["exit_code"]
    return found, code


@pytest.fixture
def job(agent: AgentClient) -> AgentClient:
    agent.launch(["sleep", "1000"], env={"COLOUR": "blue"})
    return agent


def test_a_command_has_the_environment_of_its_rank(job: AgentClient, tmp_path: Path) -> None:
    script = 'echo $COLOUR $PIN "rank:$RANK"; pwd; exit 3'
    out, code = message(job, opened(job, "sh", "-c", script, secrets={"PIN": "1234"}))
    assert out.decode().split() == ["blue", "1234", "rank:", str(tmp_path / "agent/attempts/j.1/work")]
    assert code == 3


def test_a_command_has_the_jobs_variables_under_the_next_agent_too(
    job: AgentClient, connect: Callable[..., AgentClient]
) -> None:
    """The daemon sends them again: agents do not write them down."""
    job.kill_agent()
    agent = connect()
    terminal = opened(agent, "sh", "-c", "echo $COLOUR $PIN", env={"COLOUR": "blue"}, secrets={"PIN": "1234"})
    assert message(agent, terminal)[0].split() == [b"blue", b"1234"]


def test_a_terminal_is_one(job: AgentClient) -> None:
    terminal = opened(job, "sh", "-c", "tty; stty size; echo $TERM; read x; stty size; cat -n", screen=SCREEN)
    out, _ = message(job, terminal, until=b"xterm")
    assert out.startswith(b"/dev/pts/")
    assert b"31 97" in out
    job.ok("terminal_write", terminal=terminal, screen={**SCREEN, "columns": 50})
    job.ok("terminal_write", terminal=terminal, data=b"go\n")
    message(job, terminal, until=b"31 50")
    job.ok("terminal_write", terminal=terminal, data=b"meow\n")
    message(job, terminal, until=b"1\tmeow")  # sh loses an interrupt that comes as it becomes the program
    job.ok("terminal_write", terminal=terminal, data=b"\x03")  # interrupts what is in the foreground
    assert message(job, terminal)[1] == -2


def test_the_shell_is_the_users(job: AgentClient) -> None:
    terminal = opened(job, screen=SCREEN)
    job.ok("terminal_write", terminal=terminal, data=b"echo $((6*7))x; exit 5\n")
    out, code = message(job, terminal)
    assert b"42x" in out
    assert code == 5


def test_pipes_carry_much_both_ways(job: AgentClient) -> None:
    terminal = opened(job, "cat")
    data = os.urandom(300_000)
    sending = [
        job.send("terminal_write", terminal=terminal, data=data[i : i + 60_000]) for i in range(0, 300_000, 60_000)
    ]
    found = b""
    while len(found) < len(data):
        found += job.ok("terminal_read", terminal=terminal)["data"]
    for number in sending:
        job.reply(number)
    assert found == data
    job.ok("terminal_write", terminal=terminal, end=True)
    assert message(job, terminal) == (b"", 0)


def test_output_that_nobody_reads_waits(job: AgentClient) -> None:
    """A command that writes without end is held up, not kept."""
    terminal = opened(job, "sh", "-c", "yes; true")
    for _ in range(3):
        assert len(job.ok("terminal_read", terminal=terminal)["data"]) <= 1 << 16
    job.ok("terminal_close", terminal=terminal)
    assert job.refused("terminal_read", terminal=terminal)["kind"] == "unknown"


def test_a_closed_terminal_hangs_up(job: AgentClient) -> None:
    terminal = opened(job, "sh", "-c", "echo $$; sleep 1000; true", screen=SCREEN)
    pid = int(message(job, terminal, until=b"\n")[0])
    job.ok("terminal_close", terminal=terminal)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the shell")


def test_whoever_is_not_asked_for_any_more_is_hung_up_on(tmp_path: Path) -> None:
    """Their daemon is gone."""

    async def script() -> int:
        command = programs.command("inside", "/", "", "", "sh", "-c", "echo begun; sleep 1000; true")
        terminals, terminal = Terminals(tmp_path / "ranks"), await Terminal.start(command, os.environ, None)
        assert (await terminal.read()).data == b"begun\n"
        terminals._open["it"] = terminal
        terminals.poll()
        assert terminals.get("it") is terminal
        terminal.asked_at -= SILENT_S + 1
        terminals.poll()
        with pytest.raises(Refused):
            terminals.get("it")
        return await terminal._process.wait()

    assert asyncio.run(script()) == -signal.SIGHUP


def test_it_ends_with_the_attempt_whatever_it_ignores(job: AgentClient) -> None:
    terminal = opened(job, "sh", "-c", "trap '' HUP TERM; echo ready; while :; do sleep 1; done", screen=SCREEN)
    message(job, terminal, until=b"ready")
    job.stop()
    assert message(job, terminal)[1] == -9


@pytest.mark.parametrize(
    ("more", "why"),
    [({"rank": 7}, "does not run here"), ({"job": "k"}, "never here"), ({"generation": 2}, "never here")],
)
def test_only_beside_a_rank_that_runs(job: AgentClient, more: dict[str, Any], why: str) -> None:
    asked = {"job": "j", "attempt": 1, "generation": 1, "rank": 0, "secrets": {}, "argv": [], **more}
    refused = job.refused("terminal_open", **asked)
    assert refused["kind"] == "unknown"
    assert why in refused["message"]


def test_not_after_the_end(job: AgentClient) -> None:
    job.stop()
    asked = {"job": "j", "attempt": 1, "generation": 1, "rank": 0, "secrets": {}, "argv": []}
    assert job.refused("terminal_open", **asked)["kind"] == "unknown"


def test_a_command_that_is_not_there(job: AgentClient) -> None:
    out, code = message(job, opened(job, "no-such-thing"))
    assert b"no-such-thing: not found" in out
    assert code == 127
