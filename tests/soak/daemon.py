"""One life of the real daemon inside a simulation: its disk may fail, and it is killed at any instant."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import anyio

from clusterd.config import Config
from clusterd.core.events import Event
from clusterd.core.scheduler import Scheduler
from clusterd.daemon import main as daemon_main
from clusterd.daemon.api.server import Peer
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.journal.journal import Journal
from clusterd.errors import ClusterError
from clusterd.forecasting import Answer, Request
from clusterd.ssh.resolve import Route
from clusterd.types import HostId
from tests.soak.clock import InlineExecutor
from tests.soak.host import AGENT_VERSION
from tests.soak.network import Network

OPERATOR = Peer("operator", os.getuid(), True, 1)
LIFTED_PAGES = 1 << 30


class Killed(BaseException):
    """The daemon is dead: ends whatever of it still runs."""


class Disk:
    """Faults of the disk that holds the journal."""

    def __init__(self) -> None:
        self.is_full = False
        self.fails = 0  # writes that fail
        self.kill_at: str | None = None  # at the next write: "before" or "after" its commit


class Life:
    """One process of the daemon, from its start to its end.

    Args:
        directory: state directory.
        on_batch: called after each batch of events that was handled.
    """

    def __init__(
        self, directory: Path, network: Network, disk: Disk, on_batch: Callable[[Engine, Sequence[Event]], None]
    ) -> None:
        self.directory = directory
        self.disk = disk
        self.engine: Engine | None = None
        self.verbs: dict[str, Any] | None = None  # while it serves
        self.image: Path | None = None  # copy of its files at the moment of the kill
        self._network = network
        self._on_batch = on_batch
        self._task: asyncio.Task[None] | None = None
        self._calls: dict[asyncio.Task[Any], None] = {}

    @property
    def is_dead(self) -> bool:
        """True after a kill."""
        return self.image is not None

    async def run(self) -> str:
        """Run to the end; returns why it ended by itself, or "" after a kill."""
        self._network.is_silenced = False
        config = Config(state_dir=self.directory, socket=self.directory / "socket", operators=("operator",))
        self._task = asyncio.create_task(daemon_main.Daemon(config).run())
        try:
            await self._task
        except asyncio.CancelledError:
            return ""
        except BaseException as error:
            return "" if self.is_dead else f"{type(_first(error)).__name__}: {_first(error)}"
        finally:
            self.verbs = None
            for call in list(self._calls):
                call.cancel()
        return "" if self.is_dead else "it ended in order"

    def kill(self) -> None:
        """Kill it now, as ``kill -9``: its files stay as they are at this moment, and nothing more leaves it."""
        if self.is_dead:
            return
        number = int(self.directory.name) + 1
        self.image = self.directory.with_name(str(number))
        shutil.copytree(self.directory, self.image)
        self._network.is_silenced = True
        self.verbs = None
        assert self._task is not None
        asyncio.get_running_loop().call_soon(self._task.cancel)

    async def call(self, verb: str, **arguments: Any) -> Any:
        """Serve a request of a client.

        Raises:
            ClusterError: it was refused. Killed: the outcome is unknown.
        """
        if self.verbs is None:
            raise Killed
        task = asyncio.create_task(self.verbs[verb](OPERATOR, **arguments))
        self._calls[task] = None
        try:
            return await task
        except ClusterError:
            if self.is_dead:
                raise Killed from None
            raise
        except (asyncio.CancelledError, ExceptionGroup):
            if self.is_dead:
                raise Killed from None
            raise
        finally:
            self._calls.pop(task, None)

    # --- what the daemon is made of instead -----------------------------------------------------------------------

    def journal(self, path: Path) -> Journal:
        """The journal over this life's disk."""
        return _Journal(path, self)

    def make_engine(self, journal: Journal, scheduler: Scheduler) -> Engine:
        """The engine, observed."""
        engine = Engine(journal, scheduler)
        engine.subscribe(lambda events, _: self._on_batch(engine, events))
        self.engine = engine
        return engine


class _Journal(Journal):
    def __init__(self, path: Path, life: Life) -> None:
        self._life = life
        super().__init__(path)

    def _in_transaction(self, work: Callable[[], object]) -> None:
        life, disk = self._life, self._life.disk
        at, disk.kill_at = disk.kill_at, None
        if at == "before":
            life.kill()
        if life.is_dead:
            raise Killed
        if disk.fails:
            disk.fails -= 1
            raise sqlite3.OperationalError("disk I/O error")
        self._db.execute(f"PRAGMA max_page_count={1 if disk.is_full else LIFTED_PAGES}")  # 1: no page more than now
        super()._in_transaction(work)
        if at == "after":
            life.kill()
            raise Killed


class _Server:
    """Stands in for the socket: clients of a simulation call the verbs."""

    def __init__(self, life: Life, verbs: dict[str, Any], before: Any) -> None:
        self._life, self._before = life, before
        self._verbs = {verb: self._served(method) for verb, method in verbs.items()}

    def _served(self, verb: Any) -> Any:
        @functools.wraps(verb)  # arguments are checked by the verb's signature
        async def call(peer: Peer, **arguments: Any) -> Any:
            await self._before(peer.user, arguments)
            return await verb(peer, **arguments)

        return call

    async def listen(self) -> None:
        pass

    async def serve(self, _listener: None) -> None:
        self._life.verbs = self._verbs
        await anyio.sleep_forever()

    def withdraw(self) -> None:
        pass


class Enrolment:
    """Stands in for the exchange of host keys."""

    def __init__(self, *_rest: Any) -> None:
        pass

    async def route(self, address: str) -> Route:
        return Route(name=address, host="10.0.0.1", port=22, user="operator")

    async def admit(self, address: str, _accept: list[str], state: Any) -> HostId:
        if address in state.hosts:
            raise ClusterError(f"{address} is in the cluster already")
        return HostId(address)


class NoRollOuts:
    """Stands in for the process that plays roll-outs, which would not run on the clock of the simulation."""

    @classmethod
    async def start(cls) -> Self:
        """Start nothing."""
        return cls()

    async def ask(self, _request: Request) -> Answer:
        """Know nothing of any job."""
        return Answer()

    async def end(self) -> None:
        """End nothing."""


async def _no_signals(*_: object) -> None:
    await anyio.sleep_forever()


@contextmanager
def simulated_surroundings(current: Callable[[], Life], network: Network, seed: int) -> Iterator[None]:
    """Put daemons that are started inside into the simulation: their network, disk, clients and random numbers."""
    numbers = itertools.count(1)
    jitter = random.Random(seed)

    def token(bytes_: int = 16) -> str:
        return hashlib.sha256(f"{seed} {next(numbers)}".encode()).hexdigest()[: 2 * bytes_]

    doubles = {
        "clusterd.daemon.main.Journal": lambda path: current().journal(path),
        "clusterd.daemon.main.Engine": lambda *rest: current().make_engine(*rest),
        "clusterd.daemon.main.Server": lambda _path, _group, _access, verbs, *rest: _Server(current(), verbs, rest[-1]),
        "clusterd.daemon.main.Dialer": lambda *_rest: network,
        "clusterd.daemon.main.HostKeyEnrolment": Enrolment,
        "clusterd.daemon.main._signals": _no_signals,
        "clusterd.daemon.journal.leadership.uuid": SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=token(16))),
        "clusterd.daemon.journal.leadership.secrets": SimpleNamespace(token_hex=token),
        "clusterd.daemon.main.secrets": SimpleNamespace(token_hex=token),
        "clusterd.daemon.execution.migration.secrets": SimpleNamespace(token_hex=token),
        "clusterd.daemon.journal.journal.ThreadPoolExecutor": InlineExecutor,
        # Small enough that snapshots are written and old events compressed within one simulation.
        "clusterd.daemon.journal.engine.SNAPSHOT_EVERY": 30,
        "clusterd.daemon.journal.blocks.BLOCK_EVENTS": 15,
        "clusterd.daemon.journal.blocks.UNCOMPRESSED_EVENTS": 30,
        "clusterd.daemon.storage.archived_jobs.EVERY_S": 5.0,
        "clusterd.daemon.storage.archived_jobs.ENDED_MAX": 3,
        "clusterd.daemon.storage.archived_jobs.LEAST_S": 20.0,
        "clusterd.daemon.storage.archived_jobs.RECALLED_S": 30.0,
        "clusterd.daemon.forecasts.forecaster._Process": NoRollOuts,
        "clusterd.ssh.host.attach": network.attach,
        "clusterd.ssh.host.bundle": lambda: SimpleNamespace(version=AGENT_VERSION),
        "clusterd.ssh.host.random": SimpleNamespace(Random=lambda: random.Random(jitter.random())),
    }
    with ExitStack() as stack:
        for name, double in doubles.items():
            stack.enter_context(mock.patch(name, double))
        yield


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
