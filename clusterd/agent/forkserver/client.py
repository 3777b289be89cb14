"""The agent's client of its fork servers: start them, adopt those of an earlier agent, request forks."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from clusterd import protocol
from clusterd.agent import CODE_ROOT
from clusterd.agent.host import processes, programs
from clusterd.agent.host.home import Home
from clusterd.process_attributes import inherited_umask
from clusterd.protocol import calls
from clusterd.protocol.forkserver import Exited, ProcessIdentity, RankRecord, ServerHello, Shutdown, Spawn
from clusterd.protocol.launch import FORK_SERVER_START_TIMEOUT_S
from clusterd.protocol.messages import Request, from_map, to_map

R = TypeVar("R")

_TRANSIENT = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""Errors that may be gone at the next try; all others are permanent."""

_READ_AT_START = (
    "LD_",
    "PYTHON",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "MALLOC_",
    "THP_",
    "GLIBC_",
    "TORCH",  # TORCHINDUCTOR_ and TORCHDYNAMO_ too
    "PYTORCH_",
    "TRITON_",
)
"""Variables that libraries read while they load: without effect in a fork, so part of a server's identity."""


def _read_at_start(name: str) -> bool:
    # The number of threads is set in the fork, or every device size would import torch anew.
    return name.startswith(_READ_AT_START) and name != "OMP_NUM_THREADS"


class SpawnFailed(Exception):
    """A rank could not be started; `kind` is ``no-torch``, ``environment`` or ``spawn``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class ForkServers:
    """All fork servers of this agent.

    `on_exited` is called with the path of a rank's record and the record, which is on disk unless the disk is full.
    """

    def __init__(self, home: Home, on_exited: Callable[[str, RankRecord], None], preload: str) -> None:
        self._home = home
        self._on_exited = on_exited
        self._preload = preload
        self._servers: dict[str, _Server] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._processes: list[subprocess.Popen[bytes]] = []  # those started here, until their exit was seen

    async def adopt(self) -> None:
        """Connect to the fork servers that an earlier agent left."""
        for path in sorted(self._home.sockets.glob("*.sock")):
            key = path.stem
            if len(key) != 16 or key in self._servers:
                continue
            try:
                self._servers[key] = await _Server.connect(path, self._on_exited)
            except (OSError, SpawnFailed):
                path.unlink(missing_ok=True)  # its server is gone

    def attached(self, pid: int) -> bool:
        """True if this agent is connected to the fork server with this pid."""
        return any(server.pid == pid and not server.lost for server in self._servers.values())

    async def ready(self, env: Mapping[str, str], python: str | None, preloaded: bool) -> _Server:
        """Return the fork server of an environment, starting it if needed, which may import torch.

        Args:
            env: of the rank to be started.
            python: interpreter of the environment; None: the agent's own.
            preloaded: with torch imported.
        Raises:
            SpawnFailed: the server cannot be started, or has no torch.
        """
        at_start = {k: v for k, v in env.items() if preloaded and _read_at_start(k)}
        identity = json.dumps([python, self._preload if preloaded else "", str(CODE_ROOT), at_start], sort_keys=True)
        key = hashlib.sha256(identity.encode()).hexdigest()[:16]
        return await self._server(key, python, at_start, preloaded)

    async def spawn(self, request: Spawn, python: str | None, preloaded: bool) -> ProcessIdentity:
        """Start one rank; return its pid and start time.

        Raises:
            SpawnFailed: as `ready`, or the server cannot fork.
        """
        for last_try in (False, True):
            server = await self.ready(request.env, python, preloaded)
            try:
                return await server.request(request)
            except ConnectionError as error:
                # The unused server has just exited by itself: start another.
                if last_try:
                    raise SpawnFailed("spawn", f"the fork server of {python or 'commands'} ended: {error}") from error
        raise AssertionError("unreachable")

    async def _server(self, key: str, python: str | None, at_start: Mapping[str, str], preloaded: bool) -> _Server:
        async with self._locks.setdefault(key, asyncio.Lock()):
            server = self._servers.get(key)
            if server is None or server.lost:
                server = await self._start(key, python, at_start, preloaded)
                self._servers[key] = server
            return server

    async def _start(self, key: str, python: str | None, at_start: Mapping[str, str], preloaded: bool) -> _Server:
        path = self._home.sockets / f"{key}.sock"
        log = self._home.root / f"spawner-{key}.log"
        arguments = ["spawner", "--socket", str(path), "--preload", self._preload if preloaded else ""]
        env = {
            **programs.own_environment(os.environ),
            "OMP_NUM_THREADS": "1",
            **at_start,
            processes.TAG: processes.PLACEHOLDER,
        }
        try:
            return await _Server.connect(path, self._on_exited)  # one that we lost sight of
        except OSError:
            path.unlink(missing_ok=True)
        process = self._run(programs.command(*arguments, python=python), env, log)
        now_s = asyncio.get_running_loop().time
        deadline = now_s() + FORK_SERVER_START_TIMEOUT_S
        pause_s = 0.005
        while True:
            if path.exists():
                try:
                    return await _Server.connect(path, self._on_exited, deadline - now_s())
                except ConnectionError:
                    pass  # between bind and listen
                except asyncio.TimeoutError:
                    pass  # it still imports
            if process.poll() is not None:
                text = log.read_text(errors="replace").strip().splitlines()
                last_line = text[-1] if text else "no output"
                passes = any(os.strerror(number) in last_line for number in _TRANSIENT)
                raise SpawnFailed(
                    "spawn" if passes else "environment", f"{python or 'the fork server'} ended at once: {last_line}"
                )
            if now_s() > deadline:
                process.kill()
                raise SpawnFailed("environment", f"{python} did not start within {FORK_SERVER_START_TIMEOUT_S:.0f} s")
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.1)

    def _run(self, command: list[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        with open(log, "wb") as output:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=env,
                    cwd="/",
                    start_new_session=True,
                    umask=inherited_umask(),
                )
            except OSError as error:
                kind = "spawn" if error.errno in _TRANSIENT else "environment"
                raise SpawnFailed(kind, f"cannot run {command[0]}: {error.strerror}") from error
        self._processes.append(process)
        return process

    async def shutdown(self) -> None:
        """Ask all fork servers to exit after their last child."""
        for server in self._servers.values():
            if not server.lost:
                try:
                    await server.request(Shutdown())
                except ConnectionError:
                    continue
        for server in self._servers.values():
            await server.close()

    def reap(self) -> None:
        """Reap fork servers that exited, and drop lost connections."""
        self._processes = [process for process in self._processes if process.poll() is None]
        self._servers = {key: server for key, server in self._servers.items() if not server.lost}


class _Server:
    """A connection to one fork server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = 0
        self.lost = False
        self._reader = reader
        self._writer = writer
        self._calls = calls.Calls()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls, path: Path, on_exited: Callable[[str, RankRecord], None], patience_s: float = FORK_SERVER_START_TIMEOUT_S
    ) -> _Server:
        reader, writer = await asyncio.open_unix_connection(os.fspath(path))
        server = cls(reader, writer)
        server._task = asyncio.create_task(server._listen(on_exited))
        try:
            answer = await asyncio.wait_for(server.request(ServerHello()), patience_s)
        except BaseException:
            await server.close()
            raise
        server.pid = answer.pid
        for state, record in answer.ended:
            on_exited(state, record)
        return server

    async def request(self, request: Request[R]) -> R:
        if self.lost:
            raise ConnectionResetError("the fork server is gone")
        replies: asyncio.Queue[calls.Reply] = asyncio.Queue()
        number = self._calls.open(replies.put_nowait)
        try:
            self._writer.write(protocol.encode(calls.request(number, request.verb, to_map(request))))
            await self._writer.drain()
            outcome = await replies.get()
        finally:
            self._calls.close(number)
        answer = calls.result(outcome, lambda failure: SpawnFailed(failure.kind, failure.message))
        try:
            reply: R = from_map(request.reply, answer, request.verb)
        except protocol.ProtocolError as error:
            raise SpawnFailed("spawn", f"the fork server's answer is malformed: {error}") from error
        return reply

    async def _listen(self, on_exited: Callable[[str, RankRecord], None]) -> None:
        why = "it closed the connection"
        try:
            while True:
                message = await protocol.read(self._reader)
                if message.get("event") == Exited.event:
                    exited = from_map(Exited, message, Exited.event)
                    on_exited(exited.state, exited.record)
                else:
                    self._calls.take(message)
        except (asyncio.IncompleteReadError, OSError):
            pass
        except protocol.ProtocolError as error:
            why = str(error)
        finally:
            self.lost = True
            self._writer.close()
            self._calls.end(ConnectionResetError(why))

    async def close(self) -> None:
        self.lost = True
        if self._task is not None:
            self._task.cancel()
            try:
                await self._task
            except asyncio.CancelledError:
                pass
