"""Start of an agent from a shell on a host: one constant command; everything else goes over its stdin."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import asyncssh

from clusterd import protocol
from clusterd.agent.host.bundle import Bundle
from clusterd.errors import AgentLost, HostError
from clusterd.outside_text import bounded, one_line
from clusterd.ssh.joined import JoinedConnection, JoinedProcess, JoinedWriter

PROGRAM = "import sys;n=int(sys.stdin.buffer.readline());exec(compile(sys.stdin.buffer.read(n),'clusterd','exec'))"
"""Python that executes what comes over its standard input: a length in a line, and the source text."""

# The same bytes for every host and user, with nothing interpolated; valid in sh, bash, zsh, csh and fish.
# -E: environment modules set PYTHONPATH for jobs, and it may hold another msgpack.
COMMAND = f'exec python3 -E -c "{PROGRAM}"'

BECOME = "exec sudo -n -H -u {account} -- "
"""Beginning of the command that runs as another account, in the place of ``exec``."""

TIMEOUT_S = 90.0
"""Timeout of the first reply; login shells and network home directories may be slow."""

ERRORS_S = 2.0
"""Wait for the last of a failed program's errors, which come on a stream of their own."""

_NOISE_BYTES_MAX = 1 << 20
_QUOTED_LETTERS = 300
"""Of the output of a host in a message, so that the advice behind it stays."""
_SENT_AT_ONCE = 1 << 16
_FIRST_WORDS = ("Fatal Python error", "sudo: ")
"""Beginnings of messages whose first line tells more than the last."""

Process = asyncssh.SSHClientProcess[bytes] | JoinedProcess

_REPLY = re.compile(rb"clusterd-(need|failed|attached) ")
_NO_PYTHON = re.compile(rb"python3: (command )?not found|(command not found|unknown command): python3", re.IGNORECASE)
_SHELL = re.compile(rb"fish:|command not found|unknown command|syntax error", re.IGNORECASE)


class BootstrapFailed(HostError):
    """The host was reached, but cannot run the agent."""


@dataclass(slots=True)
class _Noise:
    """Output of a host that is not a reply of the bootstrap."""

    errors: bytearray = field(default_factory=bytearray)
    output: bytes = b""  # its last line
    complete: asyncio.Event = field(default_factory=asyncio.Event)  # set when all errors were read

    def __str__(self) -> str:
        lines = (self.errors.strip() or self.output).decode(errors="replace").splitlines()
        if not lines:
            return ""
        telling = next((line for line in lines if line.startswith(_FIRST_WORDS)), lines[-1])
        shell = (
            "; a shell, not Python, may have answered: see that its start-up files start none (`exec fish`)"
            if _SHELL.search(self.errors) and b"Traceback" not in self.errors
            else ""
        )
        return f"; it said: {one_line(telling, _QUOTED_LETTERS)}{shell}"


@dataclass(frozen=True, slots=True)
class AgentStream:
    """Frames to and from the agent of one host."""

    reader: asyncssh.SSHReader[bytes] | asyncio.StreamReader
    writer: asyncssh.SSHWriter[bytes] | JoinedWriter
    agent_home: str

    async def send(self, message: protocol.Message) -> None:
        """Send one frame, waiting while the connection has no room for it.

        Raises:
            AgentLost: the connection is gone.
        """
        try:
            self.writer.write(protocol.encode(message))
            await self.writer.drain()
        except (OSError, asyncssh.Error) as error:
            raise AgentLost(f"the connection ended: {error}") from error

    async def receive(self) -> protocol.Message:
        """Return the next frame; raises as `receive_sized`."""
        return (await self.receive_sized())[0]

    async def receive_sized(self) -> tuple[protocol.Message, int]:
        """Return the next frame, with its texts bounded, and its length in bytes.

        Raises:
            AgentLost: the connection is gone, or what came is no frame.
        """
        try:
            length = await protocol.read_length(self.reader)
            return bounded(protocol.decode(await self.reader.readexactly(length), "backslashreplace")), length
        except asyncio.IncompleteReadError as error:
            raise AgentLost("the connection ended") from error
        except (OSError, asyncssh.Error, protocol.ProtocolError, RecursionError) as error:
            raise AgentLost(f"the connection ended: {error}") from error


@asynccontextmanager
async def attach(
    connection: asyncssh.SSHClientConnection | JoinedConnection,
    name: str,
    bundle: Bundle,
    agent_home: str | None,
    cluster: str = "",
    former: str | None = None,
    key: str = "",
    become: str = "",
) -> AsyncIterator[AgentStream]:
    """Connect to the host's agent; send its code and start it where needed.

    Args:
        name: name of the host, for messages.
        agent_home: directory of the agents' state there; None: their default.
        cluster: cluster of the agent, which lives in a folder of that directory; "": in the directory itself.
        former: connect to the agent that still runs in this other directory ("": the default), and start none.
        key: key of the cluster, for an agent that is started; without a key it accepts no daemon.
        become: account to change to with sudo; "": that of the login.
    Raises:
        BootstrapFailed: no Python, too old a Python, no space, or the agent does not start.
        HostError: the connection broke.
    """
    command = COMMAND.replace("exec ", BECOME.format(account=become), 1) if become else COMMAND
    try:
        process: Process = await connection.create_process(command, encoding=None)
    except (OSError, asyncssh.Error) as error:
        raise HostError(f"{name}: no command can be run there: {error}") from error
    noise = _Noise()
    listening = asyncio.create_task(_keep_errors(process.stderr, noise))
    try:
        try:
            given = {"agent_home": agent_home, "cluster": cluster, "former": former, "key": key}
            attached = await asyncio.wait_for(_speak(process, name, bundle, given, noise), TIMEOUT_S)
        except TimeoutError:
            raise BootstrapFailed(f"{name}: its agent did not answer within {TIMEOUT_S:.0f} s{noise}") from None
        except (OSError, asyncssh.Error) as error:
            raise HostError(f"{name}: the connection broke while the agent was started: {error}") from error
        yield AgentStream(process.stdout, process.stdin, attached["home"])
    finally:
        listening.cancel()
        process.close()


async def _speak(process: Process, name: str, bundle: Bundle, given: dict[str, Any], noise: _Noise) -> dict[str, Any]:
    given = {**given, "sha256": bundle.sha256, "bytes": len(bundle.data)}
    call = f"import json\nmain(json.loads({json.dumps(given)!r}), S)\n"
    source = f"S = {first_program()!r}\nexec(compile(S, 'clusterd', 'exec'))\n{call}".encode()
    process.stdin.write(b"%d\n" % len(source) + source)
    status, fields = await _next_reply(process, name, noise)
    if status == "need":
        # In chunks, as the channel's window is limited.
        for start in range(0, len(bundle.data), _SENT_AT_ONCE):
            process.stdin.write(bundle.data[start : start + _SENT_AT_ONCE])
            await process.stdin.drain()
        status, fields = await _next_reply(process, name, noise)
    if status != "attached" or "home" not in fields:
        raise BootstrapFailed(f"{name}: {fields.get('message', f'it answered {status!r}, without what belongs to it')}")
    return fields


def first_program() -> str:
    """Source of the first program, with the module of ours that it imports."""
    ours = resources.files("clusterd")
    trusted_paths = ours.joinpath("trusted_paths.py").read_text()
    return (
        "import sys, types\n"
        "for name in ('clusterd', 'clusterd.trusted_paths'):\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        f"exec(compile({trusted_paths!r}, 'clusterd', 'exec'), sys.modules[name].__dict__)\n"
    ) + ours.joinpath("ssh", "stage1.py").read_text()


async def _next_reply(process: Process, name: str, noise: _Noise) -> tuple[str, dict[str, Any]]:
    """Read the next reply; output of the login's start-up files is skipped."""
    skipped_bytes = 0
    while skipped_bytes < _NOISE_BYTES_MAX:
        try:
            line = await process.stdout.readline()
        except ValueError:  # longer than a line may be
            break
        if not line:
            await process.wait_closed()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(noise.complete.wait(), ERRORS_S)
            raise BootstrapFailed(_no_python(process, name, noise))
        if found := _find_reply(line):
            return found
        skipped_bytes += len(line)
        noise.output = line.strip() or noise.output
    raise BootstrapFailed(f"{name}: its login prints without end; make its start-up files silent for commands")


def _find_reply(line: bytes) -> tuple[str, dict[str, Any]] | None:
    """Find a reply at the end of a line: start-up files may print without a newline, or something similar."""
    for found in _REPLY.finditer(line):
        try:
            fields = json.loads(line[found.end() :])
        except ValueError:
            continue
        if isinstance(fields, dict):
            return found[1].decode(), {key: bounded(str(value)) for key, value in fields.items()}
    return None


def _no_python(process: Process, name: str, noise: _Noise) -> str:
    broken = b"shared librar" in noise.errors  # the dynamic linker exits like a shell whose command is missing
    if (process.exit_status == 127 and not broken) or _NO_PYTHON.search(noise.errors):
        return f"{name}: `ssh {name} python3` finds no python3 in its PATH; clusterd needs Python 3.10 or newer there"
    if b"invalid literal for int()" in noise.errors:
        return (
            f"{name}: its start-up files read standard input, which is meant for Python: "
            "have them ask questions (`read`) only where there is a terminal"
        )
    code = f"with exit code {process.exit_status}" if process.exit_status is not None else "without an exit code"
    program = "Python" if noise.errors else "the login"
    if noise.errors.startswith(b"sudo: "):
        program = "sudo"
    return f"{name}: {program} ended {code} before the agent was reached{noise}"


async def _keep_errors(stream: asyncssh.SSHReader[bytes] | asyncio.StreamReader, noise: _Noise) -> None:
    """Keep the end of the host's stderr; it is always read, or a host that prints much would block."""
    try:
        while data := await stream.read(4096):
            noise.errors += data
            del noise.errors[:-4096]
    except (OSError, asyncssh.Error):
        return
    finally:
        noise.complete.set()
