"""Variables that the login shell of this account sets up: jobs start with them, as commands at a prompt do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping
from typing import NamedTuple

from clusterd.agent.background_tasks import in_thread
from clusterd.agent.host import processes, programs
from clusterd.agent.host.attempt_records import Refused
from clusterd.agent.log import log_line
from clusterd.trusted_paths import account_name

VARIABLE = "CLUSTERD_AGENT_LOGIN"
"""Environment variable of an agent; `INHERITED`: its own environment is already that of a prompt."""

INHERITED = "inherited"

TIMEOUT_S = 20.0
"""Limit of a login; profiles on a network file system take seconds, one that waits for an answer takes for ever."""

END_S = 2.0
"""Time in which what is killed is gone, but where the kernel cannot end it."""

HANG_UP_S = 1.0
"""Time of programs of a login to end by themselves: `pyenv init`, killed, leaves a lock that later logins wait for."""

_NO_LOGIN = ("nologin", "false")
"""Shells of accounts that nobody logs in to, whose agents are started by other ways."""

CLEAN = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "TZ")
"""Variables of a job that asks for none of the login's."""

_NO_TERMINAL = re.compile(r"^\s*$|no job control in this shell|cannot set terminal process group")
"""Lines of every interactive shell without a terminal."""

_REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


class Login(NamedTuple):
    """Variables that a login ends with.

    Attributes:
        note: why they are those of a login without a prompt; empty: they are those of a prompt.
    """

    variables: dict[str, str]
    note: str = ""


class LoginEnvironment:
    """The captured environment; captured again when a daemon connects, and by a check of the host."""

    def __init__(self) -> None:
        self._capture: asyncio.Task[Login] | None = None

    def renew(self) -> None:
        """Begin another capture, which the next launch waits for; one that runs may have read older files."""
        self._capture = asyncio.ensure_future(self._after(self._capture))
        self._capture.add_done_callback(lambda task: task.cancelled() or task.exception())  # `get` reports it

    async def _after(self, before: asyncio.Task[Login] | None) -> Login:
        if before is not None:
            await asyncio.wait([before])
        return await in_thread(capture, "login")

    async def get(self) -> Login:
        """The newest login. One that failed is tried again.

        Raises:
            Refused: ``login``: the login shell fails, or takes too long.
        """
        if self._capture is None or (self._capture.done() and self._capture.exception()):
            self.renew()
        assert self._capture is not None
        return await asyncio.shield(self._capture)


def capture() -> Login:
    """Run the login shell of this account, without a terminal or input, and return the variables it ends with.

    It is run as an interactive one first: the usual ~/.bashrc returns at once in any other, before what `conda init`
    wrote. Where that fails, as with an rc file that starts another program in the place of the shell, a login that
    is not interactive counts.

    Raises:
        Refused: ``login``: as `LoginEnvironment.get`.
    """
    own = programs.own_environment(os.environ)
    if os.environ.get(VARIABLE) == INHERITED:
        return Login(own)
    try:
        shell = pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
    except KeyError:  # a uid without an entry in the user database
        shell = "/bin/sh"
    if os.path.basename(shell) in _NO_LOGIN:
        return Login(own)
    what = f"the login shell of {account_name(os.getuid())} here ({shell})"
    note = ""
    if not shell.endswith("csh"):  # which reads the same files either way
        try:
            return Login(_run([shell, "-l", "-i"], shell, own))
        except _LoginFailed as failed:
            note = f"{what}, when it is interactive, {failed}: jobs get what it sets up without a prompt"
            log_line(f"agent: {note}")
    try:
        # Of csh, -l must be the only option.
        begin = [f"-{os.path.basename(shell)}"] if shell.endswith("csh") else [shell, "-l"]
        return Login(_run(begin, shell, own), note)
    except _LoginFailed as failed:
        remedy = "mend its profile, or submit with clean_env, for none of its variables"
        raise Refused("login", f"{what} {failed}; {remedy}") from None


class _LoginFailed(Exception):
    """A login shell ended without variables; the message says how."""


def _run(begin: list[str], program: str, own: dict[str, str]) -> dict[str, str]:
    """Variables that a shell of this command line ends with.

    Its output goes to files, not pipes: programs that a profile leaves running keep pipes open. These are killed, also
    those that left its session, such as an ssh-agent for each login.

    Raises:
        _LoginFailed: it cannot be run, exits early, or takes too long.
    """
    mark = uuid.uuid4().hex  # what profiles print comes before it
    tag = f"login/{mark}"
    # Prompts of a dumb terminal ask and draw nothing.
    env = {**own, "TERM": "dumb", processes.TAG: tag}
    with open(os.memfd_create("login"), "w+b") as output, open(os.memfd_create("login-errors"), "w+b") as errors:
        try:
            process = subprocess.Popen(
                [*begin, "-c", f"echo {mark}; exec env -0"], executable=program, stdin=subprocess.DEVNULL,
                stdout=output, stderr=errors, env=env, cwd=own.get("HOME") or "/", start_new_session=True,
                preexec_fn=lambda: processes.set_mark(tag),  # later, what the shell has started by then is without it
            )  # fmt: skip
        except OSError as error:
            raise _LoginFailed(f"cannot be run: {error.strerror}") from error
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise _LoginFailed(f"does not end within {TIMEOUT_S:.0f} s") from None
        finally:
            _end(tag)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        output.seek(0)
        _, marked, printed = output.read().rpartition(f"{mark}\n".encode())
        if code != 0 or not marked:
            errors.seek(0)
            said = [
                line for line in errors.read().decode(errors="replace").splitlines() if not _NO_TERMINAL.search(line)
            ]
            last = f", after: {said[-1].strip()[:200]}" if said else ""
            raise _LoginFailed(f"exits with {code} before its end{last}")
    return _variables(printed)


def _end(tag: str) -> None:
    """End the processes with a tag as a terminal that closes does, then kill them.

    What waits for a dead file server cannot end now.
    """
    began_s = time.monotonic()
    asked: set[int] = set()
    while (left := processes.of_attempt(tag)) and (passed_s := time.monotonic() - began_s) < HANG_UP_S + END_S:
        for pid in left:
            with contextlib.suppress(OSError):
                if passed_s > HANG_UP_S:
                    os.kill(pid, signal.SIGKILL)
                elif pid not in asked:
                    os.kill(pid, signal.SIGHUP)  # shells at a prompt ignore SIGTERM
                    os.kill(pid, signal.SIGTERM)
                    asked.add(pid)
        time.sleep(0.01)


def _variables(printed: bytes) -> dict[str, str]:
    """Variables of the output of ``env -0``; those that are not text, or of that shell alone, are left out."""
    found: dict[str, str] = {}
    for entry in printed.split(b"\0"):
        with contextlib.suppress(UnicodeDecodeError):
            name, equals, value = entry.decode().partition("=")
            if equals and name not in programs.OF_SHELLS and not name.startswith(("CLUSTERD_", "SSH_")):
                found[name] = value
    return found


def clean() -> dict[str, str]:
    """Variables of a job that asks for none of the login's: those that programs cannot do without."""
    return {name: os.environ[name] for name in CLEAN if name in os.environ}


def expanded(value: str, env: Mapping[str, str]) -> str:
    """The value with ``$NAME`` and ``${NAME}`` replaced where `env` has the variable, as in ``/opt/x/bin:$PATH``."""
    return _REFERENCE.sub(lambda found: env.get(found[1] or found[2], found[0]), value)
