"""``attach``: bridge stdin and stdout to the agent's socket, starting the agent if none runs.

The first line on stdout is ``clusterd-attached`` or ``clusterd-failed`` and a JSON object; after the former, frames
flow both ways. The agent runs in its own session, so it outlives this process and its SSH connection.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from clusterd.agent.host import login_environment, programs
from clusterd.agent.host.home import Home, default_home, no_space, read_json
from clusterd.agent.server import environment_limits
from clusterd.socket_files import peer_uid
from clusterd.trusted_paths import UnsafePath, account_name

START_DEADLINE_S = 30.0
_CHUNK = 1 << 16


def main(arguments: Sequence[str] = ()) -> int:
    """Attach to the agent. The exit code is 0 once the agent was reached, however the connection ended.

    With the argument ``living``, only a running agent is attached to: none is started and no directory is made. After
    ``--key-fd`` comes the number of a pipe with the cluster's key, for an agent that is started (arguments and
    environments of processes can be read by others); without a key none is started.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    home = default_home()
    key = _read_key(arguments)
    try:
        if "living" in arguments or not key:
            home.check()
            connection = _connect(home)
        else:
            home.make()
            connection = reach(home, key, is_wanted=lambda: not _has_hung_up(0))
    except (OSError, UnsafePath, TimeoutError) as error:
        _reply("clusterd-failed", {"message": str(error), "home": str(home.root)})
        return 1
    _reply("clusterd-attached", {"home": str(home.root)})
    bridge(connection, 0, 1)
    return 0


def _reply(status: str, fields: dict[str, str]) -> None:
    sys.stdout.write(f"{status} {json.dumps(fields)}\n")
    sys.stdout.flush()


def _read_key(arguments: Sequence[str]) -> bytes:
    if "--key-fd" not in arguments:
        return b""
    with open(int(arguments[arguments.index("--key-fd") + 1]), "rb") as pipe:
        return pipe.read()


def _has_hung_up(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def reach(home: Home, key: bytes, is_wanted: Callable[[], bool] = lambda: True) -> socket.socket:
    """Connect to the agent of `home`, starting it with the cluster's `key` if none runs.

    Args:
        is_wanted: False once whoever asked is gone: a host that was removed meanwhile keeps no agent.
    Raises:
        ConnectionAbortedError: it is not wanted any more.
        TimeoutError: the agent does not answer; the message names its log and quotes the last line.
    """
    deadline = time.monotonic() + START_DEADLINE_S
    pause_s = 0.005
    started = False
    while True:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            return _connect(home)
        if not started and not held(home):
            if not is_wanted():
                raise ConnectionAbortedError("the daemon has hung up")
            start(home, key)
            started = True
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the agent did not start within {START_DEADLINE_S:.0f} s; {home.log} ends with: {_tail(home)}"
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.1)


def _connect(home: Home) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # An agent of an earlier version serves daemons on a socket of another name.
        connection.connect(str((read_json(home.record) or {}).get("socket") or home.socket))
        if peer_uid(connection) != os.getuid():
            raise UnsafePath(f"{home.socket} is served by {account_name(peer_uid(connection))}: remove it")
    except (OSError, UnsafePath):
        connection.close()
        raise
    return connection


def start(home: Home, key: bytes) -> None:
    """Start an agent in its own session. If several are started, the one that takes the lock stays.

    The intermediate process exits at once, so that init adopts and reaps the agent.
    """
    log = os.open(home.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    key_source, key_sink = os.pipe()
    os.write(key_sink, key)
    os.close(key_sink)
    try:
        intermediate = os.fork()
        if intermediate == 0:
            try:
                os.setsid()
                subprocess.Popen(
                    programs.command("serve", heeds_environment=False),
                    stdin=key_source,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    env={**_environment(), "CLUSTERD_AGENT_HOME": str(home.root)},
                )
            finally:
                os._exit(0)
        os.waitpid(intermediate, 0)
    finally:
        os.close(log)
        os.close(key_source)


def _environment() -> dict[str, str]:
    # CLUSTERD_PRELOAD is the one variable of ours that a user may set: the module that fork servers import.
    ours = ("CLUSTERD_PRELOAD", environment_limits.VARIABLE, login_environment.VARIABLE)
    return {n: value for n, value in os.environ.items() if not n.startswith("CLUSTERD_") or n in ours}


def held(home: Home) -> bool:
    """True if an agent holds the lock, even one that does not listen yet or is just exiting."""
    descriptor = os.open(home.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _tail(home: Home) -> str:
    try:
        lines = home.log.read_text(errors="replace").strip().splitlines()
    except OSError as error:
        return str(error)
    return lines[-1] if lines else no_space(home.root) or "(nothing)"


def bridge(connection: socket.socket, source: int, sink: int) -> None:
    """Copy in both directions until either side closes. At most one chunk is buffered in each direction."""
    connection.setblocking(False)
    os.set_blocking(source, False)
    os.set_blocking(sink, False)
    to_agent, to_daemon = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        while True:
            wanted: dict[int, int] = {}
            for descriptor, mask, active in (
                (source, selectors.EVENT_READ, not to_agent),
                (connection.fileno(), selectors.EVENT_WRITE, bool(to_agent)),
                (connection.fileno(), selectors.EVENT_READ, not to_daemon),
                (sink, selectors.EVENT_WRITE, bool(to_daemon)),
            ):
                if active:
                    wanted[descriptor] = wanted.get(descriptor, 0) | mask
            _select_only(selector, wanted)
            for key, mask in selector.select():
                try:
                    if key.fd == source:
                        data = os.read(source, _CHUNK)
                        if not data:
                            return
                        to_agent += data
                    elif key.fd == sink:
                        del to_daemon[: os.write(sink, to_daemon)]
                    else:
                        if mask & selectors.EVENT_WRITE:
                            del to_agent[: connection.send(to_agent)]
                        if mask & selectors.EVENT_READ:
                            data = connection.recv(_CHUNK)
                            if not data:
                                return
                            to_daemon += data
                except BlockingIOError:
                    continue
                except (BrokenPipeError, ConnectionResetError):
                    return


def _select_only(selector: selectors.BaseSelector, wanted: dict[int, int]) -> None:
    have = {key.fd: key.events for key in selector.get_map().values()}
    for descriptor in have.keys() - wanted.keys():
        selector.unregister(descriptor)
    for descriptor, mask in wanted.items():
        if descriptor not in have:
            selector.register(descriptor, mask)
        elif have[descriptor] != mask:
            selector.modify(descriptor, mask)
