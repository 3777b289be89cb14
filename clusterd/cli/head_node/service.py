"""``clusterd service``: the daemon as a service of systemd, which starts it at boot and again after a crash."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click

from clusterd import config as configuration
from clusterd.agent.host.cgroups import lingers
from clusterd.cli.common.output import note
from clusterd.client import Client
from clusterd.config import python_path
from clusterd.errors import ClusterError, DaemonAbsent

UNIT = "clusterd.service"
MARK = "# Written by `clusterd service install`; changes are lost at the next one."


@click.group()
def service() -> None:
    """Run the daemon as a service of systemd."""


system_option = click.option("--system", is_flag=True, help="A service of the machine, not of the user.")
file_option = click.option("--config", "file", type=click.Path(path_type=Path), help="Start with this settings file.")


@service.command()
@system_option
@file_option
def show(system: bool, file: Path | None) -> None:
    """Print the unit file that `install` writes."""
    print(unit(system, file), end="")


@service.command()
@system_option
@file_option
def install(system: bool, file: Path | None) -> None:
    """Write the unit file, start the daemon by it, and start it at every boot."""
    configuration.load(file, system=system)  # before anything is written
    _require_systemd(system)
    path = unit_file(system)
    if path.exists() and MARK not in path.read_text(errors="replace"):
        raise ClusterError(f"{path} was not written by `clusterd service install`: remove it first")
    if _run(system, "is-active", UNIT).returncode != 0:
        _refuse_second_daemon(system)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(unit(system, file))
    except OSError as error:
        raise ClusterError(f"{error.filename}: {error.strerror}") from None
    _systemctl(system, "daemon-reload")
    _systemctl(system, "enable", UNIT)
    _systemctl(system, "restart", UNIT)  # a changed unit, too; returns once the daemon is up
    note(f"clusterd is up, and starts at every boot: {path}")
    if not system and not lingers():
        note("your services end with your last login; run once: loginctl enable-linger")


@service.command()
@system_option
def remove(system: bool) -> None:
    """Stop the daemon and remove the unit file; jobs and state stay."""
    _require_systemd(system)
    path = unit_file(system)
    if not path.exists():
        raise ClusterError(f"there is no {path}")
    _systemctl(system, "disable", "--now", UNIT)
    path.unlink()
    _systemctl(system, "daemon-reload")
    note("the service is removed; jobs keep running, and `clusterd start` leads them again")


def unit_file(system: bool) -> Path:
    """Path of the unit file."""
    if system:
        return Path("/etc/systemd/system") / UNIT
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "systemd/user" / UNIT


def unit(system: bool, file: Path | None) -> str:
    """Text of the unit file."""
    arguments = [sys.executable, "-m", "clusterd", "start", "--foreground"]
    arguments += ["--system"] if system else []
    arguments += ["--config", str(file.absolute())] if file else []
    variables = {name: os.environ[name] for name in ("CLUSTERD_STATE_DIR", "CLUSTERD_SOCKET") if os.environ.get(name)}
    variables = {name: str(Path(value).absolute()) for name, value in variables.items()}
    lines = [
        MARK,
        "[Unit]",
        "Description=clusterd, a cluster manager",
        *(["After=network-online.target", "Wants=network-online.target"] if system else []),
        "",
        "[Service]",
        "Type=notify",
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in variables.items()),
        f"Environment={_quoted(f'PYTHONPATH={python_path()}')}",
        f"ExecStart={' '.join(_quoted(argument).replace('$', '$$') for argument in arguments)}",
        "# Hosts inside this machine, and their jobs, outlive the daemon.",
        "KillMode=process",
        "ExecReload=/bin/kill -HUP $MAINPID",
        "Restart=on-failure",
        "WatchdogSec=60",
        "",
        "[Install]",
        f"WantedBy={'multi-user' if system else 'default'}.target",
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A word of a unit file: systemd expands %, and reads quotes and backslashes as C does."""
    text = text.replace("\\", "\\\\").replace("%", "%%").replace('"', '\\"')
    return f'"{text}"' if any(letter in text for letter in " \t'\"\\") else text


def _require_systemd(system: bool) -> None:
    if system and os.geteuid() != 0:
        raise ClusterError("--system writes to /etc/systemd/system: run it as root")
    if shutil.which("systemctl") is None:
        raise ClusterError("there is no systemd here (no systemctl): start the daemon at boot by `clusterd start`")
    state = _run(system, "is-system-running").stdout.strip()
    if not state or state == "offline":
        of = "the machine" if system else pwd.getpwuid(os.getuid()).pw_name
        raise ClusterError(f"systemd does not manage services of {of} here: `systemctl` says {state or 'nothing'!r}")


def _refuse_second_daemon(system: bool) -> None:
    try:
        with Client(configuration.socket_path(system), timeout_s=5.0) as cluster:
            pid = cluster.call("status")["pid"]
    except DaemonAbsent:
        return
    raise ClusterError(f"a daemon runs already (pid {pid}): clusterd stop first; its jobs keep running")


def _systemctl(system: bool, *arguments: str) -> None:
    done = _run(system, *arguments)
    if done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        log = f"journalctl {'' if system else '--user '}-u {UNIT}"
        raise ClusterError(f"systemctl {shlex.join(arguments)}: {said} (see {log})")


def _run(system: bool, *arguments: str) -> subprocess.CompletedProcess[str]:
    scope = [] if system else ["--user"]
    return subprocess.run(["systemctl", *scope, *arguments], capture_output=True, text=True, check=False)
