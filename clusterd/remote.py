"""Socket of a daemon on another machine, forwarded by the user's own ``ssh``.

``CLUSTERD_HOST=ssh://HEAD`` (or ``ssh://USER@HEAD:PORT/PATH/OF.sock``) makes commands clients of that daemon. sshd
there connects to the socket as the user who logged in, so the daemon knows each user as on the head node itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import socket
import subprocess
import tempfile
from pathlib import Path

from clusterd.errors import DaemonAbsent, UsageError
from clusterd.trusted_paths import private_directory

URL = re.compile(r"(ssh://[A-Za-z0-9][^/\s]*)(/\S+)?/?")

KEEPALIVE = ("ServerAliveInterval=15", "ServerAliveCountMax=4")
"""Options of ssh: a connection whose other side is gone ends within a minute."""

CONNECT_S = 60.0
"""Limit of a login, with time to type a passphrase."""

RUNTIME_BYTES_MAX = 64
"""Length of XDG_RUNTIME_DIR up to which the path of a socket in it is one: these have 107 bytes at most."""

FIND_SOCKET = r"""
for path in "$CLUSTERD_SOCKET" "$CLUSTERD_STATE_DIR/clusterd.sock" "$XDG_RUNTIME_DIR/clusterd/clusterd.sock" \
    "/run/user/$(id -u)/clusterd/clusterd.sock" "$HOME/.local/state/clusterd/clusterd.sock" /run/clusterd/clusterd.sock
do
    if [ -S "$path" ]; then printf %s "$path"; exit 0; fi
done
exit 3
"""


def forwarded_socket(url: str) -> Path:
    """Local socket that leads to the daemon of another machine; `ssh` is started where it is not there yet.

    Raises:
        UsageError: it is no address of a daemon.
        DaemonAbsent: ssh cannot connect, or no daemon has a socket there.
    """
    match = URL.fullmatch(url)
    if match is None:
        raise UsageError(f"CLUSTERD_HOST is {url!r}; write ssh://HEAD, or ssh://USER@HEAD:PORT/PATH/OF.sock")
    destination, path = match.groups()
    local = _directory() / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.sock"
    with open(local.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two commands at once one starts ssh
        if not _leads_somewhere(local):
            _forward(destination, local, path or _find(destination))
    return local


def _directory() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    is_short = 0 < len(os.fsencode(runtime)) <= RUNTIME_BYTES_MAX
    directory = Path(runtime) / "clusterd-remote" if is_short else Path(f"/tmp/clusterd-remote-{os.getuid()}")
    private_directory(str(directory))
    return directory


def _leads_somewhere(local: Path) -> bool:
    """True if an `ssh` listens there. One whose daemon is gone accepts and closes, which the client reports."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(local))
        except OSError:
            return False
        return True


def _find(destination: str) -> str:
    """Path of the daemon's socket on the head node, by the variables and places that commands there use."""
    code, output, error = _ssh([destination, "exec sh -s"], FIND_SOCKET)
    if code == 3:
        raise DaemonAbsent(f"no daemon of yours has a socket there: name it, as in {destination}/PATH/OF.sock")
    if code:
        raise DaemonAbsent(f"`ssh {destination}` failed: {error}")
    return output.splitlines()[-1]


def _forward(destination: str, local: Path, remote: str) -> None:
    local.unlink(missing_ok=True)
    options = ("ExitOnForwardFailure=yes", *KEEPALIVE)
    flags = [part for option in options for part in ("-o", option)]
    code, _, error = _ssh(["-f", "-N", *flags, "-L", f"{local}:{remote}", destination])
    if code:
        raise DaemonAbsent(f"`ssh {destination}` failed: {error}")


def _ssh(arguments: list[str], text: str = "") -> tuple[int, str, str]:
    """Run ssh; returns its exit code, its output, and the last line of its errors."""
    # Files, not pipes: an ssh that goes to the background keeps them open.
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+", errors="replace") as errors,
    ):
        given.write(text)
        given.seek(0)
        try:
            command = ["ssh", *arguments]
            done = subprocess.run(command, stdin=given, stdout=output, stderr=errors, timeout=CONNECT_S, check=False)
        except FileNotFoundError:
            raise DaemonAbsent("there is no `ssh` program on this machine: install OpenSSH's client") from None
        except subprocess.TimeoutExpired:
            raise DaemonAbsent(f"`ssh` did not connect within {CONNECT_S:.0f} s: {' '.join(arguments)}") from None
        output.seek(0)
        errors.seek(0)
        lines = errors.read().strip().splitlines()
        return done.returncode, output.read(), lines[-1] if lines else f"exit code {done.returncode}"
