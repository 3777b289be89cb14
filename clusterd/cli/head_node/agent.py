"""``clusterd agent --join``: make this machine a host of a cluster, by a connection that it opens itself."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path

import click

from clusterd import config
from clusterd.cli.common.arguments import point_in_time_s, time_s
from clusterd.cli.common.output import note
from clusterd.config import DEVICES_MAX
from clusterd.errors import UsageError

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

    options = {"cpu_devices": cpu_devices, "labels": list(labels) or None}
    here = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()) or "host"
    wanted = Wanted(
        name=name or here.partition(".")[0],
        is_exact=name is not None,
        options={key: value for key, value in options.items() if value is not None},
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
