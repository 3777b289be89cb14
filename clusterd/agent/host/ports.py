"""Rendezvous ports of this host, leased to one attempt generation at a time."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from clusterd.agent.host.attempt_records import Refused
from clusterd.agent.host.home import read_json, write_json
from clusterd.agent.log import log_line

FIRST, LAST = 20000, 32767
"""Range of the leased ports, below the kernel's range of ephemeral ports, which could collide with a lease."""

UNUSED_S = 600.0
"""A lease ends after this long if its generation was never launched on this host."""


class Ports:
    """Port leases of this agent, stored on disk and exclusive among all agents of the network namespace.

    An agent claims a port by binding an abstract Unix socket named after it: abstract names belong to the same network
    namespace as ports, and the kernel releases them when the process exits.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._claims: dict[int, socket.socket] = {}
        self._leases: dict[int, tuple[str, int, float]] = {}  # port -> attempt, generation, since (wall clock)
        self._next = FIRST + os.getpid() % (LAST - FIRST)
        for port, (name, generation, since) in (read_json(file) or {}).items():
            if claim := _claim(int(port)):
                self._claims[int(port)] = claim
                self._leases[int(port)] = (name, generation, since)

    def begin_at(self, port: int) -> None:
        """Set the port at which the next search starts."""
        self._next = port

    def lease(self, name: str, generation: int) -> int:
        """Lease a free port to this generation of attempt `name`.

        Every call returns another port, so that a launch whose port turned out to be taken can ask again.

        Raises:
            Refused: no port is free.
        """
        for _ in range(LAST - FIRST + 1):
            port = self._next
            self._next = FIRST + (self._next + 1 - FIRST) % (LAST - FIRST + 1)
            if port in self._leases or not _is_free(port) or not (claim := _claim(port)):
                continue
            self._claims[port] = claim
            self._leases[port] = (name, generation, time.time())
            self._write()
            return port
        raise Refused("ports", f"no port between {FIRST} and {LAST} is free on this host")

    def release(self, over: Callable[[str, int, float], bool]) -> None:
        """End the leases for which ``over(attempt, generation, age_s)`` is true."""
        now = time.time()
        ended = [
            port for port, (name, generation, since) in self._leases.items() if over(name, generation, now - since)
        ]
        for port in ended:
            del self._leases[port]
            self._claims.pop(port).close()
        if ended:
            try:
                self._write()
            except OSError as error:  # the next agent releases these leases again
                log_line(f"agent: cannot write {self._file}: {error}")

    def close(self) -> None:
        """Release the claims; the leases stay on disk for the next agent."""
        for claim in self._claims.values():
            claim.close()
        self._claims.clear()

    def _write(self) -> None:
        write_json(self._file, {str(port): list(lease) for port, lease in self._leases.items()})


def _claim(port: int) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0clusterd-port-{port}")
    except OSError:
        claim.close()
        return None
    return claim


def _is_free(port: int) -> bool:
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError as error:
            if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                continue  # the host has no IPv6
            return False
    return True
