"""Embedded hosts: hosts inside this machine behind the daemon's own SSH servers."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from clusterd.config import HostOptions
from clusterd.core.state import State
from clusterd.daemon.hosts.registry import LOCAL, HostRegistry
from clusterd.ssh.embedded import EmbeddedHost, shared_out
from clusterd.types import HostId

log = logging.getLogger(__name__)

DEVICES = 2
"""Default number of CPU devices of a new embedded host."""


@asynccontextmanager
async def local_hosts(
    hosts: HostRegistry,
    state: State,
    directory: Path,
    count: int,
    devices: int | None,
    servers: dict[int, EmbeddedHost],
) -> AsyncIterator[None]:
    """Start the servers of known embedded hosts and of the first `count`, then dial every host of the cluster.

    Args:
        devices: of each of the first `count`; None: what it has, or the default. One with jobs keeps what it has.
        servers: is filled, by number.
    """
    known = {
        int(address.removeprefix(LOCAL)): options
        for _, address, options in await hosts.known()
        if address.startswith(LOCAL)
    }
    offered = dict(known)
    for number in range(count):
        if number not in known:
            offered[number] = HostOptions(cpu_devices=devices or DEVICES)
        elif devices is not None and not any(state.attempts_on(_name(number))):
            offered[number] = replace(known[number], cpu_devices=devices)
    numbers = sorted(offered)
    most = max((options.cpu_devices or DEVICES for options in offered.values()), default=DEVICES)
    cores = shared_out(sorted(os.sched_getaffinity(0)), len(numbers), most)
    async with AsyncExitStack() as stack:
        for number, own in zip(numbers, cores, strict=True):
            server = EmbeddedHost(_name(number), directory / str(number), cores=own)
            await server.start()
            stack.push_async_callback(server.stop)
            servers[number] = server
        for number in _changed(known, offered):
            log.info("%s offers %s CPU devices from now on", _name(number), offered[number].cpu_devices)
            await hosts.keep_options(_name(number), offered[number])
        await hosts.restore()
        for number in range(count):
            if _name(number) not in state.hosts:
                options = offered[number] if any(cores) else replace(offered[number], cores_per_device=1)
                await hosts.add(_name(number), f"{LOCAL}{number}", options)
        yield


def _changed(known: dict[int, HostOptions], offered: dict[int, HostOptions]) -> Iterable[int]:
    return [number for number, options in known.items() if offered[number] != options]


def _name(number: int) -> HostId:
    return HostId(f"local{number}")
