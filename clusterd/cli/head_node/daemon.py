"""``clusterd start``, ``stop``, ``status``, ``login`` and ``backup``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from clusterd import config as configuration
from clusterd.cli.common.arguments import time_s
from clusterd.cli.common.output import ago, note, output_option, print_line, show_json, shown_as
from clusterd.client import Client
from clusterd.config import python_path
from clusterd.errors import ClusterError, DaemonAbsent
from clusterd.trusted_paths import own_directory
from clusterd.units import counted, duration, size

START_TIMEOUT_S = 30.0


@click.command()
@click.option("--local", type=click.IntRange(1, 64), help="Also run this many hosts inside this machine.")
@click.option("--devices", type=click.IntRange(1, 64), help="CPU devices of each local host; default: as before, or 2.")
@click.option("--config", "file", type=click.Path(path_type=Path), help="Use this file, not the usual clusterd.toml.")
@click.option("--system", is_flag=True, help="Use /var/lib, /run and /etc instead of the user's directories.")
@click.option("--restored", is_flag=True, help="The state is from a backup: take over hosts with a later state.")
@click.option("--foreground", is_flag=True, help="Run in the foreground and log to standard error.")
def start(
    local: int | None, devices: int | None, file: Path | None, system: bool, restored: bool, foreground: bool
) -> int:
    """Start the daemon."""
    if (url := os.environ.get("CLUSTERD_HOST")) and not system:
        raise click.UsageError(f"CLUSTERD_HOST is {url}, another machine: run clusterd start there, or unset it")
    if devices and not local:
        raise click.UsageError("--devices applies to local hosts: give their number with --local N")
    config = configuration.load(file, system=system)
    arguments = ["--local", str(local)] if local else []
    arguments += ["--devices", str(devices)] if devices else []
    arguments += ["--config", str(file.absolute())] if file else []
    arguments += ["--system"] if system else []
    arguments += ["--restored"] if restored else []
    if foreground:
        from clusterd.daemon.main import main

        return main([*arguments, "--foreground"])
    error_file = config.state_dir / "start.err"
    try:
        own_directory(str(config.state_dir))
        opened = error_file.open("wb")
    except OSError as error:
        raise ClusterError(
            f"{error.filename}: {error.strerror}: set CLUSTERD_STATE_DIR to a writable directory"
        ) from None
    with opened as errors:
        started = subprocess.Popen(
            [sys.executable, "-m", "clusterd.daemon", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
            cwd=config.state_dir,
            env={**os.environ, **_absolute("CLUSTERD_STATE_DIR", "CLUSTERD_SOCKET"), "PYTHONPATH": python_path()},
        )
    code = _wait_until_it_answers(config, started, error_file, local, devices)
    if not code and config.socket != configuration.socket_path(system):
        note(f"for all other commands: export CLUSTERD_SOCKET={config.socket}")
    return code


def _absolute(*names: str) -> dict[str, str]:
    """Path variables of the environment made absolute, for a process that starts in another directory."""
    return {name: str(Path(os.environ[name]).absolute()) for name in names if os.environ.get(name)}


def _wait_until_it_answers(
    config: configuration.Config,
    started: subprocess.Popen[bytes],
    error_file: Path,
    local: int | None,
    devices: int | None,
) -> int:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        code = started.poll()
        if code is not None:
            message = error_file.read_text(errors="replace").strip()
            disk = error_file.parent
            note(message or f"clusterd: the daemon exited with {code} and could not write the reason: is {disk} full?")
            return code or 1
        try:
            with Client(config.socket, timeout_s=5.0) as cluster:
                answer = cluster.call("status")
                if answer["pid"] == started.pid:
                    break
        except DaemonAbsent:
            time.sleep(0.05)
    else:
        raise ClusterError(
            f"the daemon does not answer after {START_TIMEOUT_S:.0f} s: its log is {config.state_dir}/daemon.log"
        )
    note(f"clusterd is up (pid {started.pid}, state in {config.state_dir}, {_settings(answer)})")
    if not local:
        note("next: clusterd host add HOST" if not cluster_hosts(config) else "next: clusterd host ls")
        return 0
    with Client(config.socket) as cluster:
        for item in cluster.stream("watch"):
            rows = item["snapshot"]["hosts"] if "snapshot" in item else cluster_hosts(config)
            here = _embedded(rows)
            if len(here) >= local and all(row["state"] == "up" for row in here):
                for row in here:
                    gpus = sum(device["kind"] == "cuda" for device in row["devices"])
                    cpus = len(row["devices"]) - gpus
                    difference = _why_different(config, row) if devices and cpus != devices else ""
                    offered = f"{counted(gpus, 'GPU')}, " if gpus else ""
                    note(f"  {row['name']}: {offered}{cpus} CPU devices{difference}")
                note("next: clusterd run -- COMMAND, clusterd submit FILE, clusterd top")
                return 0
            failed = [row for row in here if row["why"] not in ("", "not connected yet", "the daemon has just started")]
            if failed and time.monotonic() > deadline_s:
                raise ClusterError(f"{failed[0]['name']} did not come up: {failed[0]['why']}")
    return 1


def _why_different(config: configuration.Config, row: dict[str, Any]) -> str:
    """Reason why a local host does not offer the requested number of devices."""
    if row["name"] in config.hosts:
        return f", as set in [hosts.{row['name']}]"
    if row["jobs"]:
        return f" as before, because it runs {', '.join(row['jobs'])}: start again when it is idle"
    return " as before, because it is beyond the number given with --local"


def _settings(status: dict[str, Any]) -> str:
    return f"settings from {status['config']}" if status["config"] else "no settings file"


def cluster_hosts(config: configuration.Config) -> list[dict[str, Any]]:
    """Host rows, over a separate connection."""
    with Client(config.socket) as cluster:
        rows: list[dict[str, Any]] = cluster.call("hosts")
        return rows


@click.command()
@click.option("--system", is_flag=True, help="The system's daemon, not the user's.")
def stop(system: bool) -> None:
    """Stop the daemon; jobs keep running."""
    if os.environ.get("CLUSTERD_HOST") and not system:
        raise click.UsageError("CLUSTERD_HOST names another machine: run clusterd stop there")
    with Client(configuration.served_socket(system)) as cluster:
        local = [row["name"] for row in _embedded(cluster.call("hosts"))]
        answer = cluster.call("stop")
    pid = answer["pid"]
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not _has_ended(pid):
        if time.monotonic() > deadline_s:
            raise ClusterError(f"the daemon (pid {pid}) did not stop within {START_TIMEOUT_S:.0f} s")
        time.sleep(0.02)
    running = answer["running"]
    verb = "jobs keep" if len(running) > 1 else "job keeps"
    note("clusterd is stopped" + (f"; {len(running)} {verb} running: {', '.join(running)}" if running else ""))
    if local and not running:
        names = " ".join(local)
        note(f"the agents of {names} wait for the next start; clusterd host remove {names}, before a stop, ends them")


def _embedded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the hosts that `start --local` made."""
    return [row for row in rows if row["link"].get("address", "").startswith("local:")]


def _has_ended(pid: int) -> bool:
    """The process is gone or a zombie; in a container there may be no parent that reaps it."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


@click.command()
@click.option("--system", is_flag=True, help="The system's daemon, not the user's.")
@output_option
def status(system: bool, output: str) -> None:
    """Show the state of the daemon."""
    with Client(configuration.client_socket(system)) as cluster:
        answer = cluster.call("status")
        backups = cluster.call("backups") if output == "table" else []
    if shown_as(output, answer):
        return
    hosts = list(answer["hosts"].values())
    up = hosts.count("up")
    print_line(
        f"clusterd {answer['version']} is up for {ago(answer['started_s'])} "
        f"(pid {answer['pid']}, policy {answer['policy']})"
    )
    print_line(f"  hosts    {up} of {len(hosts)} up, {answer['leased']} of {answer['devices']} devices leased")
    counts = ", ".join(f"{count} {state}" for state, count in sorted(answer["jobs"].items())) or "none yet"
    print_line(f"  jobs     {counts}")
    print_line(f"  state    {answer['state_dir']} ({answer['events']} events)")
    print_line(f"  socket   {answer['socket']}")
    print_line(f"  accounts {_ACCOUNTS[answer.get('accounts')].format(account=answer.get('account'))}")
    print_line(f"  settings {answer['config'] or 'defaults (no file found or given)'}")
    if web := answer.get("web"):
        trouble = f"; FAILS: {web['trouble']}" if web["trouble"] else ""
        print_line(f"  pages    {web['url']} (read-only, visibility {web['visibility']}){trouble}")
    for row in backups:
        print_line(f"  backup   {described(row)}")
    if aside := answer.get("set_aside"):
        print_line(
            f"  bug      {aside} events could not be handled and were set aside: see the daemon's log, and report it"
        )
    if trouble := answer.get("trouble"):  # absent from the reply of an older daemon
        print_line(f"  trouble  events of hosts cannot be journaled yet: {trouble}")
    if answer["recovering"]:
        print_line(f"  waiting for reports of {', '.join(answer['recovering'])} before placing anything")


@click.command()
@output_option
def reload(output: str) -> None:
    """Read the settings file again, without a restart: operators, readers, tenants, limits and users.

    Other settings that differ are named; they change at the next start.
    """
    with Client() as cluster:
        answer = cluster.call("reload")
    if shown_as(output, answer):
        return
    note(f"changed: {', '.join(answer['changed']) or 'nothing'} (by {answer['config'] or 'defaults, without a file'})")
    if answer["at_next_start"]:
        note(f"differs, and changes at the next start: {', '.join(answer['at_next_start'])}")


_ACCOUNTS = {
    None: "jobs of {account} alone (accounts is not set)",
    "own": "each user's jobs run as that user",
    "shared": "all jobs run as {account}: every user's jobs can read the others' files and secrets",
}


@click.command()
@output_option
def login(output: str) -> int:
    """Let the cluster run your jobs under your own account.

    Shows the account, the line to add to its authorized keys, and whether each host lets the cluster in.
    """
    with Client() as cluster:
        answer = cluster.call("login", meanwhile="the hosts are dialed")
    refused = {host: why for host, why in answer["hosts"].items() if why}
    code = 1 if refused and len(refused) == len(answer["hosts"]) else 0
    if shown_as(output, answer):
        return code
    account = answer["account"]
    if not account:
        others = ", like those of all users" if answer["shared"] else ", as you are that user"
        print_line(f"your jobs run as {answer['daemon']}{others}: nothing to do")
        return 0
    print_line(f"your jobs run as {account}")
    for host, why in answer["hosts"].items():
        print_line(f"  {host}: {why or 'ready'}")
    if refused and answer["key"]:
        print("\nOn each of these hosts, or once for a shared home, run as that account:\n")
        print_line(f"  mkdir -p -m 700 ~/.ssh && echo '{answer['key']}' >> ~/.ssh/authorized_keys")
        print()
        print("then: clusterd login")
    return code


@click.command()
@click.argument("to", required=False)
@click.option("--every", help="Repeat it so often, as in 1m, also after the daemon's next start.")
@click.option("--stop", is_flag=True, help="Repeat it no more; the backup stays.")
@output_option
def backup(to: str | None, every: str | None, stop: bool, output: str) -> int:
    """Copy what another daemon needs to lead the hosts, to a directory or to HOST:DIRECTORY.

    The daemon writes it, over its own SSH connection. Without a target: show the backups that are repeated.
    """
    if to is None:
        if every or stop:
            raise click.UsageError("name a directory, or HOST:DIRECTORY")
        with Client() as cluster:
            rows = cluster.call("backups")
        if output != "table":
            show_json(rows, output)
        elif not rows:
            print("no backup is repeated: clusterd backup --every 1m HOST:DIRECTORY")
        for row in rows if output == "table" else ():
            print(described(row))
        return 1 if any(row["trouble"] for row in rows) else 0
    if every and stop:
        raise click.UsageError("--every and --stop exclude each other")
    every_s = 0.0 if stop else time_s("--every", every) if every else None
    is_directory = ":" not in to.partition("/")[0]
    if is_directory and os.environ.get("CLUSTERD_HOST") and not to.startswith("/"):
        raise click.UsageError("CLUSTERD_HOST names another machine: write an absolute directory of it")
    target = str(Path(to).absolute()) if is_directory else to
    with Client() as cluster:
        answer = cluster.call("backup", to=target, every_s=every_s, meanwhile="the backup is written")
    if output != "table":
        show_json(answer, output)
    elif stop:
        note(f"the backup to {target} is repeated no more")
    else:
        repeated = f", every {duration(every_s)} from now on" if every_s else ""
        print_line(f"{target} is the state as of event {answer['event']} ({size(answer['bytes'])} copied{repeated})")
    return 0


def described(row: dict[str, Any]) -> str:
    """One line about a repeated backup."""
    last = f"{ago(row['at_s'])} ago, event {row['event']}" if row["at_s"] else "not written since the daemon's start"
    trouble = f"; FAILS: {row['trouble']}" if row["trouble"] else ""
    return f"{row['to']}  every {duration(row['every_s'])}  {last}{trouble}"
