"""Variables that the login shell of this account sets up: jobs start with them, as commands at a prompt do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import re
import signal
import subprocess
import uuid
from collections.abc import Mapping

from clusterd.agent.host import programs
from clusterd.agent.host.attempt_records import Refused
from clusterd.agent.threads import in_thread
from clusterd.trusted_paths import account_name

VARIABLE = "CLUSTERD_AGENT_LOGIN"
"""Environment variable of an agent; `INHERITED`: its own environment is already that of a prompt."""

INHERITED = "inherited"

TIMEOUT_S = 20.0
"""Limit of a login; profiles on a network file system take seconds, one that waits for an answer takes for ever."""

_NO_LOGIN = ("nologin", "false")
"""Shells of accounts that nobody logs in to, whose agents are started by other ways."""

CLEAN = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "TZ")
"""Variables of a job that asks for none of the login's."""

_REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


class LoginEnvironment:
    """The captured environment; captured again when a daemon connects, and by a check of the host."""

    def __init__(self) -> None:
        self._capture: asyncio.Task[dict[str, str]] | None = None

    def renew(self) -> None:
        """Begin another capture, which the next launch waits for."""
        if self._capture is None or self._capture.done():
            self._capture = asyncio.ensure_future(in_thread(capture, "login"))
            self._capture.add_done_callback(lambda task: task.cancelled() or task.exception())  # `get` reports it

    async def get(self) -> dict[str, str]:
        """Variables of the newest login. One that failed is tried again.

        Raises:
            Refused: ``login``: the login shell fails, or takes too long.
        """
        if self._capture is None or (self._capture.done() and self._capture.exception()):
            self.renew()
        assert self._capture is not None
        return dict(await asyncio.shield(self._capture))


def capture() -> dict[str, str]:
    """Run the login shell of this account, without a terminal or input, and return the variables it ends with.

    Its output goes to files, not pipes: programs that a profile leaves running keep pipes open.

    Raises:
        Refused: ``login``: as `LoginEnvironment.get`.
    """
    own = programs.own_environment(os.environ)
    if os.environ.get(VARIABLE) == INHERITED:
        return own
    try:
        shell = pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
    except KeyError:  # a uid without an entry in the user database
        shell = "/bin/sh"
    mark = uuid.uuid4().hex  # what profiles print comes before it
    command = [shell, "-l", "-c", f"echo {mark}; exec env -0"]
    if shell.endswith("csh"):  # for which -l must be the only option
        command = [f"-{os.path.basename(shell)}", *command[2:]]
    if os.path.basename(shell) in _NO_LOGIN:
        return own
    what = f"the login shell of {account_name(os.getuid())} here ({shell})"
    remedy = "mend its profile, or submit with clean_env, for none of its variables"
    with open(os.memfd_create("login"), "w+b") as output, open(os.memfd_create("login-errors"), "w+b") as errors:
        try:
            process = subprocess.Popen(
                command, executable=shell, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=own,
                cwd=own.get("HOME") or "/", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise Refused("login", f"{what} cannot be run: {error.strerror}; {remedy}") from error
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise Refused("login", f"{what} does not end within {TIMEOUT_S:.0f} s; {remedy}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # itself, or what its profile started in the background
            process.wait()
        output.seek(0)
        _, marked, printed = output.read().rpartition(f"{mark}\n".encode())
        if code != 0 or not marked:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()
            last = f", after: {said[-1][:200]}" if said else ""
            raise Refused("login", f"{what} exits with {code} before its end{last}; {remedy}")
    return _variables(printed)


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
