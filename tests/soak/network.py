"""Simulated connections between a daemon and agents: delayed, broken, and with messages that come late."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from clusterd import protocol
from clusterd.errors import AgentLost, HostError

if TYPE_CHECKING:
    from tests.soak.host import Machine

LATENCY_S = 0.01
CONNECT_S = 0.2
CONNECT_TIMEOUT_S = 15.0
RETRANSMISSION_S = 100.0
"""Longest pause before TCP sends again what a partition held back."""


class Connection:
    """One connection to an agent. Each direction keeps its order, as TCP does; a partition holds messages back.

    What the daemon has sent may reach the agent after the daemon gave the connection up: it is in a buffer of a host
    that is slow, or behind a partition that ends.
    """

    def __init__(self, network: Network, machine: Machine) -> None:
        self.daemon: tuple[str, int] | None = None  # name and epoch, after hello
        self._network, self._machine = network, machine
        self._inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._is_open = True  # for the daemon
        self._free_s = [0.0, 0.0]  # when the newest message in each direction arrives
        self._held: list[tuple[int, bytes | None]] = []

    # --- the daemon's end -----------------------------------------------------------------------------------------

    agent_home = ""

    async def send_request(self, message: protocol.Message) -> None:
        """Send a frame to the agent."""
        if not self._is_open or self._network.is_silenced:
            raise AgentLost("the connection ended")
        self._pass(0, protocol.encode(message))

    async def receive_sized(self) -> tuple[protocol.Message, int]:
        """The next frame from the agent."""
        frame = await self._inbox.get() if self._is_open or not self._inbox.empty() else None
        if frame is None:
            raise AgentLost("the connection ended")
        return protocol.decode(frame[4:], "backslashreplace"), len(frame) - 4

    def close(self) -> None:
        """The daemon gives the connection up, or is gone."""
        if self._is_open:
            self._is_open = False
            self._pass(0, None)

    # --- the agent's end ------------------------------------------------------------------------------------------

    def send(self, message: protocol.Message) -> None:
        """Send a frame to the daemon."""
        self._pass(1, protocol.encode(message))

    def reset(self) -> None:
        """The connection breaks at once, and with it all that is on its way."""
        self._held.clear()
        self._machine.closed(self)
        if self._is_open:
            self._is_open = False
            self._inbox.put_nowait(None)

    # --- the way --------------------------------------------------------------------------------------------------

    def _pass(self, direction: int, frame: bytes | None) -> None:
        if self._network.is_cut(self._machine):
            self._held.append((direction, frame))
            return
        loop = asyncio.get_running_loop()
        latency_s = self._network.randomness.uniform(0.1, 1.0) * LATENCY_S * self._machine.slowness
        self._free_s[direction] = max(self._free_s[direction], loop.time() + latency_s)
        loop.call_at(self._free_s[direction], self._arrive, direction, frame)

    def _arrive(self, direction: int, frame: bytes | None) -> None:
        if self._network.is_cut(self._machine):
            self._held.append((direction, frame))
        elif direction:
            if self._is_open:
                self._inbox.put_nowait(frame)
        elif frame is None:
            self._machine.closed(self)
        elif self._machine.is_on:
            self._machine.receive(self, protocol.decode(frame[4:]))

    def heal(self) -> None:
        """A partition is over: TCP sends again what it held back, perhaps after a newer connection was made."""
        held, self._held = self._held, []
        again_s = asyncio.get_running_loop().time() + self._network.randomness.uniform(0.0, RETRANSMISSION_S)
        self._free_s = [max(free_s, again_s) for free_s in self._free_s]
        for direction, frame in held:
            self._pass(direction, frame)


class _Stream:
    """The daemon's end of a connection, as `clusterd.ssh.bootstrap.AgentStream` is."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.agent_home = ""
        self.send = connection.send_request
        self.receive_sized = connection.receive_sized

    async def receive(self) -> protocol.Message:
        return (await self.receive_sized())[0]


class Network:
    """Machines by address, and the partitions between them and the daemon."""

    def __init__(self, randomness: random.Random) -> None:
        self.randomness = randomness
        self.machines: dict[str, Machine] = {}
        self.is_silenced = False  # the daemon was killed: nothing that its clean-up does leaves it
        self._cut: set[str] = set()
        self._connections: dict[Connection, None] = {}

    def is_cut(self, machine: Machine) -> bool:
        """True while nothing passes."""
        return machine.name in self._cut

    def cut(self, machine: Machine) -> None:
        """Hold all messages from and to a machine back."""
        self._cut.add(machine.name)

    def heal(self, machine: Machine) -> None:
        """Let messages pass again."""
        self._cut.discard(machine.name)
        for connection in list(self._connections):
            if connection._machine is machine:
                connection.heal()

    def reset(self, machine: Machine) -> None:
        """Break all connections to a machine."""
        for connection in list(self._connections):
            if connection._machine is machine:
                connection.reset()

    @asynccontextmanager
    async def connect(self, route: Any) -> AsyncIterator[Machine]:
        """Reach a machine, as `clusterd.ssh.connection.Dialer.connect` does."""
        machine = self.machines[route.name]
        await asyncio.sleep(self.randomness.uniform(0.1, 1.0) * CONNECT_S * machine.slowness)
        if not machine.is_on or self.is_cut(machine) or self.is_silenced:
            await asyncio.sleep(CONNECT_TIMEOUT_S)
            raise HostError(f"{machine.name}: no route to it")
        yield machine

    @asynccontextmanager
    async def attach(self, machine: Machine, name: str, *_rest: Any, **_options: Any) -> AsyncIterator[_Stream]:
        """Connect to the agent of a machine, as `clusterd.ssh.bootstrap.attach` does."""
        if not machine.is_on or self.is_cut(machine):
            raise HostError(f"{name}: the connection broke")
        connection = Connection(self, machine)
        self._connections[connection] = None
        machine.accept(connection)
        try:
            yield _Stream(connection)
        finally:
            connection.close()
            if not connection._held:
                self._connections.pop(connection, None)
