"""``clusterd host`` and ``agent``: add, list, check, drain and remove hosts, and join a cluster from one."""

from __future__ import annotations

import math
import os
import re
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click

from clusterd import config
from clusterd.cli.common.arguments import complete_host, host_names, point_in_time_s, time_s
from clusterd.cli.common.output import (
    PLAYING,
    ago,
    for_each,
    held_for,
    note,
    output_option,
    print_effect,
    print_line,
    quantiles_cell,
    raise_all,
    show_json,
    show_table,
    shown_as,
)
from clusterd.client import Client
from clusterd.config import DEVICES_MAX
from clusterd.errors import ClusterError, UsageError
from clusterd.units import counted, size

SLOW_S = 5.0
"""Wait for a new host after which `host add` tells what it waits for."""


@click.group()
def host() -> None:
    """Add, list, drain and remove hosts."""


@host.command()
@click.argument("addresses", nargs=-1, required=True, metavar="ALIAS|USER@HOST[:PORT]...")
@click.option("-y", "--yes", is_flag=True, help="Accept the host keys shown, without confirmation.")
@click.option("--cpu-devices", type=click.IntRange(0, DEVICES_MAX), help="Number of CPU devices to offer.")
@click.option("--label", "labels", multiple=True, help="For constraints of jobs, as in nvlink; may be repeated.")
@click.option("--no-wait", is_flag=True, help="Do not wait until the host is up.")
def add(addresses: tuple[str, ...], yes: bool, cpu_devices: int | None, labels: tuple[str, ...], no_wait: bool) -> None:
    """Add hosts that `ssh HOST` reaches. An unknown host key is shown for confirmation."""
    options = _host_options(cpu_devices, labels)
    with Client() as cluster:

        def add_one(address: str) -> None:
            accept = _agreed(cluster, address, yes)
            name = cluster.call("host_add", address=address, accept=accept, options=options)["name"]
            if no_wait:
                note(f"{name} is added")
            else:
                _wait_until_up(cluster, name)

        for_each(addresses, add_one)


def _host_options(cpu_devices: int | None, labels: tuple[str, ...]) -> dict[str, Any]:
    options = {"cpu_devices": cpu_devices, "labels": list(labels) or None}
    return {key: value for key, value in options.items() if value is not None}


def _agreed(cluster: Client, address: str, yes: bool) -> list[str]:
    """Fingerprints of unknown host keys on the route to the host that the user accepts."""
    accept: list[str] = []
    # One hop at a time: a key behind a jump host is visible only after the jump host is accepted.
    while unknown := cluster.call("host_inspect", address=address, accept=accept, new=True)["unknown"]:
        hop = unknown[0]
        note(f"{hop['host']} is not in any known_hosts file. Its key is {hop['kind']} {hop['fingerprint']}")
        if not yes:
            if not sys.stdin.isatty():
                raise ClusterError(f"{address}: compare the fingerprint and add it with --yes (no terminal to ask on)")
            if not click.confirm("Is this the right key?", err=True):
                raise ClusterError(f"{address} was not added: its key was not accepted")
        accept.append(hop["fingerprint"])
    return accept


def _wait_until_up(cluster: Client, name: str) -> None:
    tells_s, row = time.monotonic() + SLOW_S, None
    for item in cluster.stream("watch"):
        rows = item["snapshot"]["hosts"] if "snapshot" in item else item.get("hosts", ())
        row = next((r for r in rows if r["name"] == name), row)
        if row is None:
            continue
        if row["state"] == "up":
            note(f"{name} is up: {_offers(row)}; next: clusterd host check {name}")
            return
        if row["why"] and row["why"] != "not connected yet":
            again = f"the daemon keeps trying; clusterd host show {name}"
            raise ClusterError(f"{name} is added but not up: {row['why']} ({again})")
        if tells_s < math.inf and not cluster.ready(max(tells_s - time.monotonic(), 0.0)):
            note(f"{name} is not up yet: {cluster.call('host', host=name)['link']['state']}")
            tells_s = math.inf


def _offers(row: dict[str, Any]) -> str:
    kinds = Counter(device["name"] if device["kind"] == "cuda" else "CPU device" for device in row["devices"])
    devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "no devices"
    return f"{devices}; {row['cpu_cores']} cores, {size(row['memory_bytes'])}"


@host.command()
@output_option
def ls(output: str) -> None:
    """List hosts with state, capacity and jobs."""
    with Client() as cluster:
        rows = cluster.call("hosts")
    if shown_as(output, rows, "Host"):
        return
    lines: list[list[Any]] = []
    for row in rows:
        leased = sum(1 for d in row["devices"] if d["job"])
        state = f"{row['state']}{' (drained)' if row['drained'] is not None else ''}"
        devices = f"{leased}/{len(row['devices'])}" if row["devices"] else ""
        claims = [
            f"{_local(claim['devices'], row['name'])} {held_for(claim)}: {claim['reason']}".removesuffix(": ")
            for claim in row.get("claims", ())
        ]
        drained = f"drained ({row['drained']})" if row["drained"] not in (None, "drained") else ""
        why = "; ".join(filter(None, (drained, row["why"] or ", ".join(row["jobs"]), *claims)))
        memory = size(row["memory_bytes"]) if row["memory_bytes"] else ""
        lines.append([row["name"], state, ago(row["since_s"]), devices, row["cpu_cores"], memory, why])
    headings = ["host", "state", "for", "leased", "cores", "memory", "jobs"]
    if any(row.get("labels") for row in rows):
        headings.insert(6, "labels")
        for row, line in zip(rows, lines, strict=True):
            line.insert(6, " ".join(row.get("labels", ())))
    show_table(headings, lines, "no hosts yet: clusterd host add HOST")


def _local(devices: list[str], host: str) -> str:
    """Names of devices on one host: ``gpu1, gpu3``."""
    return ", ".join(device.removeprefix(f"{host}:") for device in devices if device.startswith(f"{host}:"))


@host.command()
@click.argument("names", nargs=-1, shell_complete=complete_host)
@click.option("--python", help="Also check this interpreter or environment, and its torch.")
@output_option
def check(names: tuple[str, ...], python: str | None, output: str) -> None:
    """Check these hosts, or all: devices, disk space, network between hosts, Python."""
    with Client() as cluster:
        rows = cluster.call("host_check", hosts=host_names(cluster, names), python=python)
    if output != "table":
        show_json(rows, output)
    else:
        width = max((len(row["host"]) for row in rows), default=0)
        for row in rows:
            print_line(f"{row['host']:<{width}}  {row['check']:<10}  {row['state']:<7}  {row['said']}")
        if not rows:
            note("no hosts yet: clusterd host add HOST")
        elif python is None:
            note("Python, torch and idle GPUs are tried with --python ENVIRONMENT")
    failed = sum(row["state"] == "failed" for row in rows)
    if failed:
        raise ClusterError(f"{failed} of {len(rows)} checks failed")


@host.command()
@click.argument("name", shell_complete=complete_host)
@output_option
def show(name: str, output: str) -> None:
    """Show all details of one host."""
    with Client() as cluster:
        row = cluster.call("host", host=name)
    if shown_as(output, row):
        return
    facts = row["link"].get("facts", {})
    print_line(f"{row['name']}  {row['state']}{': ' + row['why'] if row['why'] else ''}")
    details = {
        "drained": row["drained"],
        "reached as": row["link"].get("address"),
        "link": row["link"].get("state"),
        "address": row["address"],
        "system": f"{facts.get('os', '?')}, kernel {facts.get('kernel', '?')}, Python {facts.get('python', '?')}"
        if facts
        else None,
        "cores": f"{row['cpu_cores']} ({row['cores_used']} in use by jobs)" if row["cpu_cores"] else None,
        "memory": f"{size(row['memory_bytes'])}, {size(facts.get('memory_available_bytes', 0))} available"
        if facts
        else None,
        "disk free": size(facts["disk_free_bytes"]) if facts else None,
        "shared mem": f"{size(facts['shm_free_bytes'])} free of {size(facts['shm_bytes'])}" if facts else None,
        "clock skew": f"{facts['clock_skew_s']:+.2f} s" if facts.get("clock_skew_s") is not None else None,
        "boot id": row["boot_id"],
        "labels": " ".join(row.get("labels", ())),
        "GPU error": facts.get("gpu_error"),
    }
    for label, value in details.items():
        if value:
            print_line(f"  {label:<10} {value}")
    for device in row["devices"]:
        use = f"job {device['job_name']} ({device['job']})" if device["job"] else device["foreign"] or "free"
        if (others := device.get("jobs", 1) - 1) > 0:
            use += f", shared with {counted(others, 'more job')}"
        capability = device.get("compute_capability")  # absent from the reply of an older daemon
        model = f"{device['name']}, {size(device['memory_bytes'])}{f', {capability}' if capability else ''}"
        print_line(f"  {device['id']:<20} {model}: {use}")
    for gpu in facts.get("gpus", ()):
        for process in gpu["processes"]:
            if not process["ours"]:
                used = f"{size(process['memory_bytes'])} " if process["memory_bytes"] is not None else ""
                user = f"{process['user']} (pid {process['pid']})"
                name = f"gpu{gpu['index']}" + (f".{gpu['slice']}" if gpu.get("slice") is not None else "")
                print_line(f"  {name}: {used}used outside the queue by {user}")


@host.command()
@click.argument("names", nargs=-1, required=True, shell_complete=complete_host)
@click.option("--why", "--reason", "why", default="", help="Reason, shown to other users.")
@click.option("--when-idle", is_flag=True, help="Move no job away: all of them run to completion.")
@click.option("--dry-run", is_flag=True, help="Print when the hosts would be free, and whom that would delay.")
def drain(names: tuple[str, ...], why: str, when_idle: bool, dry_run: bool) -> None:
    """Place nothing new on hosts, and move jobs away where possible; others run to completion."""

    if dry_run:
        with Client() as cluster:
            wanted = host_names(cluster, names)
            preview = cluster.call("drain_preview", hosts=wanted, jobs_stay=when_idle, meanwhile=PLAYING)
        print_effect(preview)
        return
    known: list[str] = []
    failures: list[ClusterError] = []
    with Client() as cluster:
        for name in host_names(cluster, names):
            try:
                known.append(cluster.call("host", host=name)["name"])
            except ClusterError as error:
                failures.append(error)
        if known:
            others: dict[str, Any] = {"also": known[1:]} if known[1:] else {}
            others |= {"jobs_stay": True} if when_idle else {}
            cluster.call("host_drain", host=known[0], why=why, **others)
        for row in [cluster.call("host", host=name) for name in known]:
            still = f"still running: {', '.join(row['jobs'])}" if row["jobs"] else "no jobs"
            note(f"{row['name']} is drained; {still}")
            if when_idle and row["jobs"]:
                preview = cluster.call("drain_preview", hosts=[row["name"]], jobs_stay=True, meanwhile=PLAYING)
                note(f"free: {quantiles_cell(preview['free'])}")
    raise_all(failures)


@host.command()
@click.argument("names", nargs=-1, required=True, shell_complete=complete_host)
def undrain(names: tuple[str, ...]) -> None:
    """Return drained hosts to service."""
    with Client() as cluster:

        def undrain_one(name: str) -> None:
            cluster.call("host_undrain", host=name)
            note(f"{name} is undrained")

        for_each(host_names(cluster, names), undrain_one)


@host.command()
@click.argument("names", nargs=-1, required=True, shell_complete=complete_host)
def remove(names: tuple[str, ...]) -> None:
    """Remove idle hosts from the cluster."""
    with Client() as cluster:
        for_each(host_names(cluster, names), lambda name: note(_remove(cluster, name)))


def _remove(cluster: Client, name: str) -> str:
    """Remove a host; returns what became of it."""
    answer = cluster.call("host_remove", host=name)
    for account, why in answer.get("agents_left", {}).items():  # absent from the reply of an older daemon
        note(f"an agent of {account} may still run on {name}, which could not be asked: {why}")
    left = answer.get("left", ())
    if left:
        named = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
        return (
            f"{name} is removed; it was lost, and may still run {named}: "
            f"clusterd host add {name} ends them, once it can be reached"
        )
    if answer.get("agent_left"):
        return (
            f"{name} is removed; it could not be reached, and its idle agent is still running there: "
            f"to end it, clusterd host add {name}, and remove it again once it is up"
        )
    return f"{name} is removed"


@host.command()
@click.argument("name", shell_complete=complete_host)
@click.option("-y", "--yes", is_flag=True, help="Accept the new key shown, without confirmation.")
def trust(name: str, yes: bool) -> None:
    """Accept a host's changed key, after confirmation."""
    with Client() as cluster:
        address = cluster.call("host", host=name)["link"]["address"]
        seen = cluster.call("host_inspect", address=address, accept=[])
        for hop in (*seen["changed"], *seen["unknown"]):
            was = f"was {hop['old_fingerprint']}" if "old_fingerprint" in hop else "is in no known_hosts file"
            note(f"{hop['host']}: its key {was}, is {hop['kind']} {hop['fingerprint']}")
            if not yes and not (sys.stdin.isatty() and click.confirm("Is the new key right?", err=True)):
                raise ClusterError(f"{name} is unchanged: its new key was not accepted (--yes accepts it)")
        accept = [hop["fingerprint"] for hop in (*seen["changed"], *seen["unknown"])]
        if not address.startswith(("local:", "joined:")):  # which have no key of their own
            cluster.call("host_trust", host=name, accept=accept)  # dials at once, also without a new key
        note(f"{name}'s new key is trusted; connecting again" if accept else f"{name} has the known key")


END_VARIABLE = "SLURM_JOB_END_TIME"


@click.command()
@click.option("--join", "head", required=True, metavar="ssh://HEAD", help="Head node, as in CLUSTERD_HOST.")
@click.option("--name", help="Name in the cluster; default: the host name, with a number where that is taken.")
@click.option("--until", metavar="TIME", help="End: 18:00, '2026-12-24 08:00' or +2h; default: that of a Slurm job.")
@click.option(
    "--margin", default="5m", metavar="TIME", help="Drain the host this long before its end.", show_default=True
)
@click.option("--cpu-devices", type=click.IntRange(0, DEVICES_MAX), help="Number of CPU devices to offer.")
@click.option("--label", "labels", multiple=True, help="For constraints of jobs, as in nvlink; may be repeated.")
def agent(
    head: str, name: str | None, until: str | None, margin: str, cpu_devices: int | None, labels: tuple[str, ...]
) -> None:
    """Make this machine a host, without a login from the head node: for allocations, pods and machines behind NAT.

    Runs in the foreground and connects out by `ssh HEAD`. The host offers the GPUs, cores and memory that this process
    may use. Ctrl-C or SIGTERM takes it out of the cluster: its jobs are queued again.

    \b
    clusterd agent --join ssh://head
    sbatch --gres=gpu:4 --time=8:00:00 --wrap 'clusterd agent --join ssh://head'
    """
    import anyio

    from clusterd.ssh.joining import Joining, Slot, Wanted

    here = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()) or "host"
    wanted = Wanted(
        name=name or here.partition(".")[0],
        is_exact=name is not None,
        options=_host_options(cpu_devices, labels),
        until_s=_end_s(until),
        margin_s=time_s("--margin", margin),
    )
    root = Path(config.state_dir()) / "joined" / here
    anyio.run(Joining(head, wanted, Slot(root), note).run)


def _end_s(until: str | None) -> float | None:
    """Wall clock of the end: as given, or that of the Slurm job around this process.

    Raises:
        UsageError: it is over already, or is no time.
    """
    if until is not None:
        end_s = point_in_time_s("--until", until)
        if end_s <= time.time():
            raise UsageError(f"--until {until} is over already")
        return end_s
    text = os.environ.get(END_VARIABLE, "")
    return float(text) if text.isdigit() else None
