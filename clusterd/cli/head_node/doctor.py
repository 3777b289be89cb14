"""``clusterd doctor``: what is wrong with this machine, the daemon and its hosts, and what to do about it."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from clusterd import __version__
from clusterd import config as configuration
from clusterd.agent.host.cgroups import lingers
from clusterd.cli.common.output import output_option, show_json, show_table
from clusterd.client import Client
from clusterd.errors import ClusterError, DaemonAbsent
from clusterd.units import counted, size

DISK_LEAST_BYTES = 1 << 30
"""The journal and logs of jobs need more in time."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    check: str
    result: str  # ok, warning, failed
    detail: str  # what was found, and what to do


@click.command()
@output_option
def doctor(output: str) -> int:
    """Check this machine, the daemon and its hosts, and say what to do.

    Exit code 1 if something failed. `clusterd host check` looks closer at one host.
    """
    found = [finding for check in CHECKS for finding in _safely(check)]
    if output != "table":
        show_json([asdict(finding) for finding in found], output)
    else:
        show_table(("check", "result", "detail"), [(f.check, f.result, f.detail) for f in found], "")
    return 1 if any(finding.result == "failed" for finding in found) else 0


def _safely(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Findings of one check; an error meant for users is a finding itself."""
    try:
        yield from check()
    except (ClusterError, OSError) as error:
        name = check.__name__.removeprefix("_")
        yield Finding(name, "failed", str(error).splitlines()[0] if str(error) else type(error).__name__)


def _installation() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("installation", "ok", f"clusterd {__version__}, Python {python} ({sys.executable})")
    on_path = shutil.which("clusterd")
    beside = Path(sys.executable).with_name("clusterd")
    if on_path is not None and beside.exists() and Path(on_path).resolve() != beside.resolve():
        yield Finding("installation", "warning", f"`clusterd` on the PATH is another one: {on_path}")


def _settings() -> Iterator[Finding]:
    from clusterd.daemon.settings import refuse_unknown

    file = _file_in_use()
    if file is not None and not os.access(file, os.R_OK):
        yield Finding("settings", "warning", f"the daemon uses {file}, which is closed to you: it was not checked")
        return
    config = configuration.load(file)
    refuse_unknown(config, str(file))
    yield Finding("settings", "ok", str(file) if file is not None else "no settings file: defaults")


def _file_in_use() -> Path | None:
    """Settings file of the daemon that serves, else the one that the next `clusterd start` would read."""
    try:
        with Client(timeout_s=10.0) as cluster:
            given = cluster.call("status")["config"]
    except ClusterError:  # which a later check reports
        return configuration.usual_file(system=False)
    return Path(given) if given else None


def _state() -> Iterator[Finding]:
    from clusterd.daemon.journal.journal import refuse_network_file_system

    file = _file_in_use()
    directory = configuration.load(file if file is None or os.access(file, os.R_OK) else None).state_dir
    there = next(path for path in (directory, *directory.parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        hint = "set CLUSTERD_STATE_DIR to a directory of yours"
        yield Finding("state", "failed", f"{there} is not writable: {hint}")
        return
    free_bytes = shutil.disk_usage(there).free
    detail = f"{directory}, {size(free_bytes)} free"
    yield Finding("state", "ok" if free_bytes >= DISK_LEAST_BYTES else "warning", detail)
    refuse_network_file_system(there)


def _ssh() -> Iterator[Finding]:
    usual = Path.home() / ".ssh"
    keys = [name for name in ("id_ed25519", "id_ecdsa", "id_rsa") if (usual / name).exists()]
    settings = _file_in_use()
    given = configuration.load(settings).ssh_config if settings is not None and os.access(settings, os.R_OK) else None
    file = Path(given).expanduser() if given else usual / "config"
    with contextlib.suppress(OSError):
        named = re.findall(r'(?im)^\s*IdentityFile[\s=]+"?([^"\n]+)', file.read_text(errors="replace"))
        if any(Path(key.strip()).expanduser().exists() for key in named):
            yield Finding("ssh", "ok", f"keys that {file} names")
            return
    agent = os.environ.get("SSH_AUTH_SOCK")
    if agent and not Path(agent).exists():
        yield Finding("ssh", "warning", f"no agent is at {agent} (SSH_AUTH_SOCK): its keys cannot be used")
        agent = None
    if keys or agent:
        there = [f"{counted(len(keys), 'key')} in ~/.ssh"] if keys else []
        there += ["an agent"] if agent else []
        yield Finding("ssh", "ok", " and ".join(there))
    else:
        hint = "only hosts that need none can be added: ssh-keygen, then ssh-copy-id HOST"
        yield Finding("ssh", "warning", f"no key in ~/.ssh or named by {file}, and no agent: {hint}")


def _logout() -> Iterator[Finding]:
    """A daemon that was started by hand ends with the login where logind kills what is left of one."""
    if not Path("/run/systemd/seats").exists():  # no logind
        return
    user = pwd.getpwuid(os.getuid()).pw_name
    if lingers():
        yield Finding("logout", "ok", f"services of {user} outlive logins")
    else:
        detail = (
            f"services of {user} end with the last login: loginctl enable-linger, before `clusterd service install`"
        )
        yield Finding("logout", "warning", detail)


def _daemon() -> Iterator[Finding]:
    try:
        with Client(timeout_s=10.0) as cluster:
            status, hosts, backups = cluster.call("status"), cluster.call("hosts"), cluster.call("backups")
    except DaemonAbsent as error:
        yield Finding("daemon", "failed", str(error).splitlines()[0])
        return
    yield from _of_status(status)
    for host in hosts:
        if host["state"] != "up":
            yield Finding("host " + host["name"], "failed", f"{host['state']}: {host['why'] or 'no reason known'}")
        else:
            offered = len(host["devices"])
            detail = f"up, {counted(offered, 'device')}"
            yield Finding("host " + host["name"], "ok" if offered else "warning", detail)
    if not hosts:
        yield Finding("hosts", "warning", "none yet: clusterd host add HOST, or clusterd start --local 2 to try it out")
    for backup in backups:
        if backup["trouble"]:
            yield Finding("backup", "failed", f"{backup['to']}: {backup['trouble']}")


def _of_status(status: dict[str, Any]) -> Iterator[Finding]:
    detail = f"{status['version']}, pid {status['pid']}, policy {status['policy']}"
    if status["version"] != __version__:
        detail += f"; this command is of {__version__}: clusterd stop, then clusterd start (jobs keep running)"
        yield Finding("daemon", "warning", detail)
    else:
        yield Finding("daemon", "ok", detail)
    if status.get("trouble"):
        yield Finding("journal", "failed", f"events of hosts cannot be journaled: {status['trouble']}")
    if aside := status.get("set_aside"):
        detail = f"{counted(aside, 'event')} could not be handled: a bug; the daemon's log has the traceback"
        yield Finding("journal", "failed", detail)


CHECKS = (_installation, _settings, _state, _ssh, _logout, _daemon)
